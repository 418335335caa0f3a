"""Answers to the exercises of lessons 01 to 05 and 09, as readers write them: right and wrong ones.

Each is (the name of its exercise, its cells), a wrong one with a part of the sentence that it gets.
"""

THERE = """def there_and_back():
    dist.init_process_group("gloo")
    x = torch.empty(3)
    if dist.get_rank() == 0:
        dist.isend(torch.tensor([1.0, 2.0, 3.0]), 1).wait()
        dist.irecv(x, 1).wait()
    else:
        dist.irecv(x, 0).wait()
        dist.isend(2 * x, 0).wait()
    dist.destroy_process_group()
    return x
"""

NAIVE = """def naive_step(stage, tokens, targets):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x = tokens
    if rank > 0:
        x = torch.empty(*tokens.shape, DIM, dtype=torch.float64)
        dist.irecv(x, rank - 1).wait()
        x.requires_grad_()
    y = stage(x)
    if rank == last:
        loss = loss_of(y, targets)
        loss.backward()
    else:
        dist.isend(y.detach(), rank + 1).wait()
        gradient = torch.empty_like(y)
        dist.irecv(gradient, rank + 1).wait()
        y.backward(gradient)
    if rank > 0:
        dist.isend(x.grad, rank - 1).wait()
    return loss.item() if rank == last else None
"""

PIECES = """def forward(stage, k, inputs, targets, held, sends):
    x, share = inputs[k], None
    if stage.previous is not None:
        x = torch.empty(*inputs[k].shape, DIM, dtype=torch.float64)
        dist.irecv(x, stage.previous).wait()
        x.requires_grad_()
    y = stage(x)
    if stage.following is None:
        y = loss_of(y, targets[k]) / len(inputs)
        share = y.item()
    else:
        sends.append(dist.isend(y.detach(), stage.following))
    held[k] = x, y
    return share


def backward(stage, k, held, sends):
    x, y = held.pop(k)
    gradient = None
    if stage.following is not None:
        gradient = torch.empty_like(y)
        dist.irecv(gradient, stage.following).wait()
    y.backward(gradient)
    if stage.previous is not None:
        sends.append(dist.isend(x.grad, stage.previous))
"""

GPIPE = """def gpipe_step(stage, inputs, targets):
    held, sends, shares = {}, [], []
    for k in range(len(inputs)):
        shares.append(forward(stage, k, inputs, targets, held, sends))
    for k in range(len(inputs)):
        backward(stage, k, held, sends)
    for send in sends:
        send.wait()
    return sum(shares) if stage.following is None else None
"""

ONE_F_ONE_B = """def one_f_one_b_step(stage, inputs, targets):
    held, sends, shares = {}, [], []
    m = len(inputs)
    warm_up = min(m, dist.get_world_size() - 1 - dist.get_rank())
    for k in range(m + warm_up):
        if k < m:
            shares.append(forward(stage, k, inputs, targets, held, sends))
        if k >= warm_up:
            backward(stage, k - warm_up, held, sends)
    for send in sends:
        send.wait()
    return sum(shares) if stage.following is None else None
"""

STASH = """def pipedream_run(stage, inputs, targets, rate):
    p, r, m = dist.get_world_size(), dist.get_rank(), len(inputs)
    held, sends, losses, stash = {}, [], [], {}
    weights = first_weights(stage)
    warm_up = min(m, p - 1 - r)
    for k in range(m + warm_up):
        if k < m:
            stash[k] = weights
            losses.append(forward_with(stash[k], stage, k, inputs, targets, held))
        if k >= warm_up:
            gradients = backward_with(stash.pop(k - warm_up), stage, k - warm_up, held, sends)
            weights = {
                name: (weight - rate * gradients[name]).detach().requires_grad_()
                for name, weight in weights.items()
            }
    for send in sends:
        send.wait()
    return weights, losses
"""

HALVES = """def input_half(gradient, inputs, weight, deferred):
    deferred.append((weight, inputs, gradient))
    return gradient @ weight


def weight_half(deferred):
    weight, inputs, gradient = deferred.pop()
    weight.grad += torch.einsum("blo,bli->oi", gradient, inputs)
"""


def edited(text, *edits):
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


RIGHT = {
    "below %%time": ("there_and_back", ["%%time\n" + THERE]),
    "below two magics": ("there_and_back", ["%%capture\n%%time\n" + THERE]),
    "a helper below %%time": (
        "there_and_back",
        [
            "%%time\ndef doubled(x):\n    return 2 * x",
            edited(THERE, ("2 * x, 0", "doubled(x), 0")),
        ],
    ),
    "magics and a shell command around it": (
        "there_and_back",
        ["%matplotlib inline\nfactor = torch.tensor(2.0)\n!true\n"
         + edited(THERE, ("2 * x", "factor * x"))],
    ),
    "a slow rank": (
        "there_and_back",
        ["import time", edited(THERE, ("    x = torch", "    time.sleep(5.5)\n    x = torch"))],
    ),
    "a counter of its calls": (
        "there_and_back",
        ["calls = 0", edited(THERE, ("    return x", "    global calls\n    calls += 1\n    return x"))],
    ),
    "a receive without a source": (
        "there_and_back",
        [edited(THERE, ("dist.irecv(x, 1).wait()", "assert dist.recv(x) == 1"),
                ("dist.irecv(x, 0).wait()", "dist.irecv(x).wait()"))],
    ),
    "values of many kinds": (
        "there_and_back",
        [
            "from functools import partial\nfrom collections import namedtuple\n"
            "from typing import Optional",
            "device, kind = torch.device('cpu'), torch.float32\nshape = torch.Size([3])\n"
            "Pair = namedtuple('Pair', 'low high')\npair = Pair(0, 1)\nempty = torch.empty\n"
            "twice = lambda x: 2 * x\nif torch.cuda.is_available():\n    peer = pair.low\n"
            "else:\n    peer = pair.high\nto_high = partial(dist.isend, dst=peer)\n"
            "one: Optional[torch.Tensor] = torch.tensor([1.0, 2.0, 3.0], device=device)",
            edited(THERE, ("torch.empty(3)", "empty(shape, dtype=kind, device=device)"),
                   ("2 * x, 0", "twice(x), pair.low"), ("dist.isend(torch.tensor([1.0, 2.0, 3.0]), 1)",
                   "to_high(one)")),
        ],
    ),
    "a class, an object and a function whose attributes are set later": (
        "there_and_back",
        [
            "from types import SimpleNamespace\nclass Peers:\n    pass\nPeers.asks = 0",
            "settings = SimpleNamespace()\nsettings.size = 3",
            edited(THERE, ("torch.empty(3)", "torch.empty(settings.size)"),
                   ("== 0", "== Peers.asks"), ("    return x", "    there_and_back.calls += 1\n"
                    "    return x\n\nthere_and_back.calls = 0")),
        ],
    ),
    "a helper made by a decorator and by a factory": (
        "there_and_back",
        [
            "def times(factor):\n    def made(x):\n        return factor * x\n    return made\n"
            "def plain(function):\n    def inner(x):\n        return function(x)\n    return inner\n",
            "double = times(2)\n@plain\ndef same(x):\n    return x",
            edited(THERE, ("2 * x, 0", "same(double(x)), 0")),
        ],
    ),
    "a limit for a wait, and peers from an array": (
        "there_and_back",
        [
            "from datetime import timedelta\nimport numpy as np\npeers = list(np.array([1, 0]))",
            edited(THERE, ("dist.irecv(x, 1).wait()", "dist.irecv(x, peers[0]).wait(timeout=timedelta("
                           "seconds=60))")),
        ],
    ),
    "two broadcasts": (
        "there_and_back",
        ["def there_and_back():\n    dist.init_process_group('gloo')\n    rank = dist.get_rank()\n"
         "    x = torch.tensor([1.0, 2.0, 3.0]) if rank == 0 else torch.empty(3)\n"
         "    dist.broadcast(x, 0)\n    y = 2 * x if rank == 1 else torch.empty(3)\n"
         "    dist.broadcast(y, 1)\n    dist.destroy_process_group()\n    return y if rank == 0 else x"],
    ),
    "a function that another one makes": (
        "there_and_back",
        ["def made(factor):\n" + "".join(f"    {line}\n" for line in edited(
            THERE, ("def there_and_back", "def inner"), ("2 * x", "factor * x")).splitlines())
         + "    return inner\n\nthere_and_back = made(2)"],
    ),
    "a decorator that forgets the name": (
        "there_and_back",
        ["def traced(function):\n    def wrapper(*arguments):\n        return function(*arguments)\n"
         "    return wrapper", "@traced\n" + THERE],
    ),
    "a table that decorators fill": (
        "there_and_back",
        [
            "PARTS = {}\ndef part(rank):\n    def add(function):\n        PARTS[rank] = function\n"
            "        return function\n    return add",
            "@part(0)\ndef asks(x):\n    dist.send(torch.tensor([1.0, 2.0, 3.0]), 1)\n"
            "    dist.recv(x, 1)\n@part(1)\ndef answers(x):\n    dist.recv(x, 0)\n"
            "    dist.send(2 * x, 0)",
            "def there_and_back():\n    dist.init_process_group('gloo')\n    x = torch.empty(3)\n"
            "    PARTS[dist.get_rank()](x)\n    dist.destroy_process_group()\n    return x",
        ],
    ),
    "a table and a queue that statements fill": (
        "there_and_back",
        [
            "from collections import deque\nnumbers, table = deque(), {}\n"
            "for number in (1.0, 2.0):\n    numbers.append(number)",
            "def asks(x):\n    dist.send(torch.tensor([*numbers]), 1)\n    dist.recv(x, 1)\n"
            "table[0] = asks\nnumbers.append(3.0)",
            "def answers(x):\n    dist.recv(x, 0)\n    dist.send(2 * x, 0)\ntable.update({1: answers})",
            "def there_and_back():\n    dist.init_process_group('gloo')\n    x = torch.empty(3)\n"
            "    table[dist.get_rank()](x)\n    dist.destroy_process_group()\n    return x",
        ],
    ),
    "an object and an array that statements change": (
        "there_and_back",
        [
            "from types import SimpleNamespace\nimport numpy as np\nkept = SimpleNamespace(of={})\n"
            "kept.factor, numbers = 3, np.zeros(3)",
            "kept.factor = 2\nkept.of[1] = [0]\nkept.of[1].append(3)\nnumbers[:] = 1, 2, 3",
            "def there_and_back():\n    dist.init_process_group('gloo')\n    x = torch.empty(kept.of[1][1])\n"
            "    if dist.get_rank() == 0:\n        dist.send(torch.tensor(numbers).float(), 1)\n"
            "        dist.recv(x, 1)\n    else:\n        dist.recv(x, 0)\n"
            "        dist.send(kept.factor * x, 0)\n    dist.destroy_process_group()\n    return x",
        ],
    ),
    "a flat room, seen in another shape": (
        "naive_step",
        [edited(NAIVE, ("torch.empty(*tokens.shape, DIM, dtype=torch.float64)\n"
                        "        dist.irecv(x, rank - 1).wait()",
                        "torch.empty(tokens.numel() * DIM, dtype=torch.float64)\n"
                        "        dist.irecv(x, rank - 1).wait()\n"
                        "        x = x.view(*tokens.shape, DIM)"))],
    ),
    "a step that another function makes": (
        "gpipe_step",
        [PIECES, "def step_of(order):\n" + "".join(f"    {line}\n" for line in edited(
            GPIPE, ("def gpipe_step", "def step"), ("in range(len(inputs)):\n        backward",
                                                   "in order(len(inputs)):\n        backward"))
            .splitlines()) + "    return step\n\ngpipe_step = step_of(range)"],
    ),
    "a partial": (
        "there_and_back",
        [
            "from functools import partial",
            edited(THERE, ("there_and_back()", "back_and_forth(factor)"), ("2 * x", "factor * x")),
            "there_and_back = partial(back_and_forth, factor=2)",
        ],
    ),
    "a partial of the function with its own name": (
        "there_and_back",
        [
            "from functools import partial",
            edited(THERE, ("there_and_back()", "there_and_back(factor)"), ("2 * x", "factor * x")),
            "there_and_back = partial(there_and_back, 2)",
        ],
    ),
    "an object that can be called": (
        "naive_step",
        [
            "class Step:\n    def __init__(self, factor):\n        self.factor = factor\n"
            + "".join(f"    {line}\n" for line in edited(
                NAIVE, ("naive_step(stage", "__call__(self, stage"), ("y = stage(x)",
                                                                   "y = self.factor * stage(x)"))
                      .splitlines()),
            "naive_step = Step(1)",
        ],
    ),
    "a method": (
        "gpipe_step",
        [
            PIECES,
            "class Steps:\n" + "".join(f"    {line}\n" for line in edited(
                GPIPE, ("gpipe_step(stage", "gpipe(self, stage")).splitlines()),
            "gpipe_step = Steps().gpipe",
        ],
    ),
    "a collective of all ranks": (
        "naive_step",
        [edited(NAIVE, ("    x = tokens", "    dist.barrier()\n    x = tokens"),
                ("    return", "    work = dist.all_reduce(torch.ones(1), async_op=True)\n"
                 "    work.wait()\n    return"))],
    ),
    "a class": (
        "naive_step",
        [
            "class End:\n    def __init__(self, rank):\n        self.rank = rank",
            "%%time\nclass Another(End):  # which sorts before its base\n"
            "    def get(self, shape):\n        x = torch.empty(shape, dtype=torch.float64)\n"
            "        dist.irecv(x, self.rank).wait()\n        return x",
            edited(
                NAIVE,
                ("torch.empty(*tokens.shape, DIM, dtype=torch.float64)\n"
                 "        dist.irecv(x, rank - 1).wait()",
                 "Another(rank - 1).get((*tokens.shape, DIM))\n        assert isinstance("
                 "Another(0), End)"),
            ),
        ],
    ),
    "a dataclass": (
        "naive_step",
        [
            "from dataclasses import dataclass, field",
            "@dataclass\nclass Kept:\n    x: torch.Tensor\n    sends: list = field("
            "default_factory=list)",
            edited(NAIVE, ("y = stage(x)", "kept = Kept(x)\n    y = stage(kept.x)")),
        ],
    ),
    "dots above the code, and the method forward": (
        "naive_step",
        [
            edited(
                NAIVE,
                ("        x = torch", "        ...  # make room\n        x = torch"),
                ("        dist.isend(x.grad", "        ...  # send\n        dist.isend(x.grad"),
                ("stage(x)", "stage.forward(x)"),
            )
        ],
    ),
    "a gradient that a hook sends": (
        "naive_step",
        [edited(NAIVE, ("requires_grad_()\n", "requires_grad_()\n"
                        "        x.register_hook(lambda gradient: dist.send(gradient, rank - 1))\n"),
                ("    if rank > 0:\n        dist.isend(x.grad, rank - 1).wait()\n", ""))],
    ),
    "the parts of the stage one by one": (
        "naive_step",
        [edited(NAIVE, ("y = stage(x)", "y = x\n    for part in stage:\n        y = part(y)"))],
    ),
    "GPipe's backwards from the last to the first": (
        "gpipe_step",
        [PIECES, edited(GPIPE, ("for k in range(len(inputs)):\n        backward",
                                "for k in reversed(range(len(inputs))):\n        backward"))],
    ),
    "a loss as a fraction": (
        "gpipe_step",
        ["from fractions import Fraction", PIECES,
         edited(GPIPE, ("sum(shares)", "sum(map(Fraction, shares))"))],
    ),
    "a loss as an array without dimensions": (
        "gpipe_step",
        ["import numpy", PIECES, edited(GPIPE, ("sum(shares)", "numpy.array(sum(shares))"))],
    ),
    "sends as pairs": (
        "gpipe_step",
        [
            edited(PIECES, ("sends.append(dist.isend(y.detach(), stage.following))",
                            "out = y.detach()\n        sends.append((dist.isend(out, "
                            "stage.following), out))"),
                   ("sends.append(dist.isend(x.grad, stage.previous))",
                    "sends.append((dist.isend(x.grad, stage.previous), x.grad))")),
            edited(GPIPE, ("for send in sends", "for send, _ in sends")),
        ],
    ),
    "one place for all receives, copied out of it": (
        "one_f_one_b_step",
        [
            "room = {}",
            edited(
                PIECES,
                ("x = torch.empty(*inputs[k].shape, DIM, dtype=torch.float64)",
                 "shape = (*inputs[k].shape, DIM)\n        place = room.setdefault(shape, "
                 "torch.empty(shape, dtype=torch.float64))"),
                ("dist.irecv(x, stage.previous).wait()",
                 "dist.irecv(place, stage.previous).wait()\n        x = place.clone()"),
            ),
            ONE_F_ONE_B,
        ],
    ),
    "all receives in advance, and the losses as tensors": (
        "one_f_one_b_step",
        [
            edited(PIECES, ("x = torch.empty(*inputs[k].shape, DIM, dtype=torch.float64)\n"
                            "        dist.irecv(x, stage.previous).wait()",
                            "x, arrives = held['rooms'][k]\n        arrives.wait()"),
                   ("y.item()", "y")),
            edited(ONE_F_ONE_B,
                   ("    m = len(inputs)\n",
                    "    m = len(inputs)\n    if stage.previous is not None:\n"
                    "        rooms = [torch.empty(*x.shape, DIM, dtype=torch.float64) for x in inputs]\n"
                    "        held['rooms'] = [(x, dist.irecv(x, stage.previous)) for x in rooms]\n"),
                   ("return sum(shares)", "return sum(shares).item()")),
        ],
    ),
    "a stash that copies only what is in use": (
        "pipedream_run",
        [
            edited(STASH, ("            weights = {\n                name: (weight - rate * "
                           "gradients[name]).detach().requires_grad_()\n                for name, "
                           "weight in weights.items()\n            }\n",
                           "            if any(each is weights for each in stash.values()):\n"
                           "                weights = {n: w.detach().clone().requires_grad_() "
                           "for n, w in weights.items()}\n"
                           "            with torch.no_grad():\n"
                           "                for name, weight in weights.items():\n"
                           "                    weight -= rate * gradients[name]\n"))
        ],
    ),
    "versions that the stage has, or that a variable names until the next backward": (
        "pipedream_run",
        [edited(STASH, ("first_weights(stage)", "dict(stage.named_parameters())"),
                ("gradients = backward_with(stash.pop(k - warm_up),",
                        "old = stash.pop(k - warm_up)\n            gradients = backward_with(old,"))],
    ),
    "a stash whose functions get names with what they are given": (
        "pipedream_run",
        [edited(STASH, ("k, inputs, targets, held))", "k, inputs=inputs, targets=targets, held=held))"),
                ("k - warm_up, held, sends)", "k - warm_up, held=held, sends=sends)"))],
    ),
    "a stash that returns a list and a tuple": (
        "pipedream_run",
        [edited(STASH, ("return weights, losses", "return [weights, tuple(losses)]"))],
    ),
    "a stash with the losses as a tensor": (
        "pipedream_run",
        [edited(STASH, ("return weights, losses", "return weights, torch.tensor("
                        "[loss or 0.0 for loss in losses], dtype=torch.float64)"))],
    ),
    "a stash with the losses as tensors": (
        "pipedream_run",
        [edited(STASH, ("return weights, losses", "return weights, [loss and torch.tensor("
                        "loss, dtype=torch.float64) for loss in losses]"))],
    ),
    "autograd for the input alone": (
        "weight_half",
        [edited(HALVES, ("return gradient @ weight",
                         "x = inputs.detach().requires_grad_()\n"
                         "    return torch.autograd.grad(x @ weight.detach().clone().T, x, gradient)[0]"))],
    ),
    "autograd of one number, which has g and x in it": (
        "weight_half",
        [edited(HALVES, ("return gradient @ weight",
                         "x = inputs.detach().requires_grad_()\n"
                         "    return torch.autograd.grad((x @ weight.T * gradient).sum(), x)[0]"))],
    ),
}  # fmt: skip


WRONG = {
    "four ranks": ("naive_step", [edited(NAIVE, ("dist.get_world_size() - 1", "3"))], "on 2 ranks: "),
    "a list in place of the tensor": (
        "there_and_back",
        [edited(THERE, ("return x", "return x.tolist()"))],
        "rank 0 returns something of type list: return the tensor",
    ),
    "a double of numbers that have not arrived": (
        "there_and_back",
        [edited(THERE, ("        dist.irecv(x, 0).wait()\n        dist.isend(2 * x, 0).wait()",
                        "        arrives = dist.irecv(x, 0)\n        double = torch.tensor([2.0, 4.0, 6.0])"
                        "\n        dist.isend(double, 0).wait()\n        arrives.wait()"))],
        "rank 1 sends at line 10 of there_and_back .* before anything has arrived there",
    ),
    "a list that is sent": (
        "there_and_back",
        [edited(THERE, ("torch.tensor([1.0, 2.0, 3.0])", "[1.0, 2.0, 3.0]"))],
        "a send needs a tensor; a list is not one",
    ),
    "twice what irecv() returns": (
        "there_and_back",
        [edited(THERE, ("        dist.irecv(x, 0).wait()", "        x = dist.irecv(x, 0)\n        x.wait()"))],
        "'int' and 'Watched'; recv.., irecv.. and wait.. do not return the tensor",
    ),
    "what wait() returns": (
        "naive_step",
        [edited(NAIVE, ("        dist.irecv(gradient,", "        gradient = dist.irecv(gradient,"))],
        "'bool' object is not iterable; recv.., irecv.. and wait.. do not return the tensor",
    ),
    "room of another size": (
        "naive_step",
        [edited(NAIVE, ("shape, DIM, dtype", "shape, 2 * DIM, dtype"))],
        r"rank 0 sends \(4, 8, 16\) in float64 .* rank 1 has made room for \(4, 8, 32\)",
    ),
    "the numbers before the wait": (
        "there_and_back",
        [edited(THERE, ("        dist.irecv(x, 0).wait()\n        dist.isend(2 * x, 0).wait()",
                        "        work = dist.irecv(x, 0)\n        y = 2 * x\n        work.wait()\n"
                        "        dist.isend(y, 0).wait()"))],
        "returns .nan, nan, nan., .* has each receive been waited for before its numbers are used",
    ),
    "an update in the step": (
        "naive_step",
        [edited(NAIVE, ("    return", "    with torch.no_grad():\n        for w in stage.parameters():\n"
                        "            w -= 0.5 * w.grad\n    return"))],
        "the step changes the weights on rank 0: .* optimizer's step comes after it, once",
    ),
    "no gradients at the end": (
        "naive_step",
        [edited(NAIVE, ("    return", "    stage.zero_grad()\n    return"))],
        "a backward ran on rank 3,? but its weights have no gradient at the end: has zero_grad",
    ),
    "room for the four sequences of the check on four ranks": (
        "naive_step",
        [edited(NAIVE, ("*tokens.shape, DIM", "4, 8, DIM"))],
        r"on 2 ranks: rank 0 sends \(2, 8, 16\) in float64 .* rank 1 has made room for \(4, 8, 16\)",
    ),
    "another shape": (
        "naive_step",
        [edited(NAIVE, ("*tokens.shape", "*tokens.T.shape"))],
        r"rank 0 sends \(4, 8, 16\) in float64 .* rank 1 has made room for \(8, 4, 16\)",
    ),
    "a variable of a neighbour that is 0": (
        "naive_step",
        [edited(NAIVE, ("    x = tokens", "    previous, following = stage.previous, stage.following\n"
                        "    x = tokens"), ("    if rank > 0:\n        x =", "    if previous:\n        x ="))],
        "Rank 0 counts as false, as None does, for `previous` in line 5 of naive_step",
    ),
    "a misspelt name": (
        "naive_step",
        [edited(NAIVE, ("        x.requires_grad_()\n", ""), ("        loss.backward()",
                "        loss.backward(gradent)"))],
        "NameError: name 'gradent' is not defined",
    ),
    "a division by zero": (
        "naive_step",
        [edited(NAIVE, ("loss = loss_of(y, targets)", "loss = loss_of(y, targets) / (last - rank)"))],
        "rank 3 runs the backward .* with a gradient that is nan: is something divided by zero",
    ),
    "a loop that prints without end": (
        "naive_step",
        [edited(NAIVE, ("    y = stage(x)", "    while True:\n        print('step')\n    y = stage(x)"))],
        "more than 100,000 characters are printed; does a loop print without end",
    ),
    "a gradient before its wait": (
        "gpipe_step",
        [edited(PIECES, ("irecv(gradient, stage.following).wait()\n    y.backward(gradient)",
                         "irecv(gradient, stage.following)\n    y.backward(gradient)"),
                ("        dist.irecv(gradient", "        sends.append(dist.irecv(gradient"),
                ("sends.append(dist.irecv(gradient, stage.following)", "sends.append(dist.irecv("
                 "gradient, stage.following))")), GPIPE],
        "rank 2 runs the backward of micro-batch 0 .* with a gradient that has not arrived",
    ),
    "one place for all sends": (
        "gpipe_step",
        [
            "places = {}",
            edited(PIECES, ("dist.isend(y.detach(), stage.following)",
                            "dist.isend(places.setdefault(y.shape, torch.empty_like(y).detach()).copy_("
                            "y.detach()), stage.following)")),
            GPIPE,
        ],
        "rank [012] changes the tensor that it sends at line 12 of forward",
    ),
    "a gradient cleared while it is sent": (
        "one_f_one_b_step",
        [edited(PIECES, ("sends.append(dist.isend(x.grad, stage.previous))",
                         "sends.append(dist.isend(x.grad, stage.previous))\n        x.grad.zero_()")),
         ONE_F_ONE_B],
        "changes the tensor that it sends at line 9 of backward",
    ),
    "sends of the warm-up that leave together": (
        "one_f_one_b_step",
        [
            edited(PIECES, ("sends.append(dist.isend(y.detach(), stage.following))",
                            "sends.append(lambda: dist.isend(y.detach(), stage.following))")),
            edited(ONE_F_ONE_B, ("        if k >= warm_up:\n", "        if k >= warm_up - 1:\n"
                                 "            sends = [s() if callable(s) else s for s in sends]\n"
                                 "        if k >= warm_up:\n")),
        ],
        "when rank 0 takes 0F1, it has not yet sent what 0F0 has made",
    ),
    "a last backward forgotten": (
        "pipedream_run",
        [edited(STASH, ("range(m + warm_up)", "range(m + warm_up - 1)"))],
        "rank 0 never takes 0B7",
    ),
    "an update too many": (
        "pipedream_run",
        [edited(STASH, ("    for send in sends", "    weights = {name: (weight - rate * gradients[name])"
                        ".detach().requires_grad_() for name, weight in weights.items()}\n"
                        "    for send in sends"))],
        "ends with weights that no sequence of updates makes: is there one update for each",
    ),
    "a loss with six decimals": (
        "gpipe_step",
        [PIECES, edited(GPIPE, ("sum(shares)", "round(sum(shares), 6)"))],
        r"is off by \de-07: was it rounded\?",
    ),
    "a loss that is not a number": (
        "gpipe_step",
        [PIECES, edited(GPIPE, ("sum(shares)", "float('nan')"))],
        "is nan, not that of the batch, 5.",
    ),
    "a loss that is written down": (
        "naive_step",
        [edited(NAIVE, ("return loss.item()", "return 5.218989"))],
        "the loss that rank 3 returns is 5.218989, not that of the batch, 5.219024",
    ),
    "the whole model on each rank": (
        "naive_step",
        [
            "from small.pipeline import build_stage",
            "def naive_step(stage, tokens, targets):\n"
            "    rank, ranks = dist.get_rank(), dist.get_world_size()\n"
            "    stages = [build_stage(k, ranks) for k in range(ranks)]\n"
            "    stages[rank], x = stage, tokens\n"
            "    for each in stages:\n        x = each(x)\n"
            "    loss = loss_of(x, targets)\n    loss.backward()\n"
            "    return loss.item() if rank == ranks - 1 else None",
        ],
        "the numbers are right, but they did not travel: rank 0 neither sends nor receives",
    ),
    "a gradient rounded for its way": (
        "naive_step",
        [edited(NAIVE, ("isend(x.grad,", "isend(x.grad.float().double(),"))],
        "the gradient on rank 2 is that of one process in its first digits only",
    ),
    "a barrier of one rank": (
        "naive_step",
        [edited(NAIVE, ("        loss = ", "        dist.barrier()\n        loss = "))],
        r"line 10 of naive_step \(`dist.barrier\(\)`\) until every rank calls barrier",
    ),
    "a reduction of one rank": (
        "gpipe_step",
        [
            PIECES,
            edited(GPIPE, ("    return sum", "    if stage.previous is None:\n"
                           "        dist.all_reduce(torch.ones(1))\n    return sum")),
        ],
        r"rank 0 waits at line 10 of gpipe_step .* until every rank calls all_reduce, and rank \d has "
        "returned without it",
    ),
    "two collectives at once": (
        "there_and_back",
        [
            edited(THERE, ("    x = torch", "    if dist.get_rank():\n        dist.barrier()\n"
                           "    else:\n        dist.broadcast(torch.ones(3), 0)\n    x = torch")),
        ],
        "line [46] of there_and_back",
    ),
    "a receive without a source from nobody": (
        "there_and_back",
        [edited(THERE, ("dist.isend(2 * x, 0).wait()", "pass"), ("dist.irecv(x, 1)", "dist.irecv(x)"))],
        r"line 6 of there_and_back .* for a message from any rank",
    ),
    "one place for all receives": (
        "gpipe_step",
        [
            "room = {}",
            edited(PIECES, ("x = torch.empty(*inputs[k].shape, DIM, dtype=torch.float64)",
                            "shape = (*inputs[k].shape, DIM)\n        x = room.setdefault(shape, "
                            "torch.empty(shape, dtype=torch.float64)).detach()")),
            GPIPE,
        ],
        "receives the activation of micro-batch 1 into the memory of that of micro-batch 0",
    ),
    "every graph": (
        "gpipe_step",
        [edited(PIECES, ("y.backward(gradient)", "y.backward(gradient, retain_graph=True)"),
                ("held.pop(k)", "held[k]")), GPIPE],
        "the whole graph of micro-batch 0 is still in memory",
    ),
    "what was held": (
        "one_f_one_b_step",
        [edited(PIECES, ("held.pop(k)", "held[k]")), ONE_F_ONE_B],
        "still holds the outputs of micro-batches 0 to 2",
    ),
    "a copy for each mini-batch": (
        "pipedream_run",
        [edited(STASH, ("stash[k] = weights",
                        "stash[k] = {n: w.detach().clone().requires_grad_() "
                        "for n, w in weights.items()}"))],
        "with a copy of version 0, which mini-batch 0 uses, too",
    ),
    "a copy of each version in a history": (
        "pipedream_run",
        ["history = []",
         edited(STASH, ("            weights = {",
                        "            history.append({n: w.detach().clone() for n, w in weights.items()})"
                        "\n            weights = {"))],
        "rank 3 runs the backward of mini-batch 7 with 8 versions in memory, and 1 is in use there",
    ),
    "four ranks of a stash": (
        "pipedream_run",
        [edited(STASH, ("dist.get_world_size()", "4"))],
        "on 2 ranks, 10 mini-batches, a rate of 0.3: ",
    ),
    "an update of the matrices alone": (
        "pipedream_run",
        [edited(STASH, ("rate * gradients[name])",
                        "(rate if weight.dim() > 1 else 0) * gradients[name])"))],
        "weights that no sequence of updates makes: .* for every weight",
    ),
    "eight mini-batches at most": (
        "pipedream_run",
        [edited(STASH, ("len(inputs)", "min(8, len(inputs))"))],
        "on 2 ranks, 10 mini-batches, a rate of 0.3: ",
    ),
    "the sizes of one micro-batch": (
        "weight_half",
        [edited(HALVES, ('torch.einsum("blo,bli->oi", gradient, inputs)',
                         "gradient.reshape(10, -1).T @ inputs.reshape(10, -1)"))],
        "weight_half raised RuntimeError: shape ",
    ),
    "the whole backward in I": (
        "weight_half",
        [
            edited(HALVES, ("(weight, inputs, gradient))", "(weight, torch.einsum('blo,bli->io', "
                            "gradient, inputs)))"),
                   ("weight, inputs, gradient = ", "weight, more = "),
                   ('torch.einsum("blo,bli->oi", gradient, inputs)', "more.T")),
        ],
        "the first half computes the product gᵀ x, too",
    ),
    "an outer product for each position in I": (
        "weight_half",
        [
            edited(HALVES, ("(weight, inputs, gradient))",
                            "(weight, gradient[..., None] * inputs[..., None, :]))"),
                   ("weight, inputs, gradient = ", "weight, more = "),
                   ('torch.einsum("blo,bli->oi", gradient, inputs)', "more.sum((0, 1))")),
        ],
        "the first half computes the product gᵀ x, too",
    ),
    "a class that is still open": (
        "naive_step",
        ["class Link:\n    def get(self):\n        ...",
         edited(NAIVE, ("    y = stage(x)", "    Link().get()\n    y = stage(x)"))],
        "line 3 of Link still has its ...",
    ),
}  # fmt: skip
