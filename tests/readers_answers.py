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
    "a helper made by a decorator and by a factory": (
        "there_and_back",
        [
            "def times(factor):\n    def made(x):\n        return factor * x\n    return made\n"
            "def plain(function):\n    def inner(x):\n        return function(x)\n    return inner\n",
            "double = times(2)\n@plain\ndef same(x):\n    return x",
            edited(THERE, ("2 * x, 0", "same(double(x)), 0")),
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
    "the parts of the stage one by one": (
        "naive_step",
        [edited(NAIVE, ("y = stage(x)", "y = x\n    for part in stage:\n        y = part(y)"))],
    ),
    "GPipe's backwards from the last to the first": (
        "gpipe_step",
        [PIECES, edited(GPIPE, ("for k in range(len(inputs)):\n        backward",
                                "for k in reversed(range(len(inputs))):\n        backward"))],
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
    "a stash that returns a list and a tuple": (
        "pipedream_run",
        [edited(STASH, ("return weights, losses", "return [weights, tuple(losses)]"))],
    ),
    "autograd for the input alone": (
        "weight_half",
        [edited(HALVES, ("return gradient @ weight",
                         "x = inputs.detach().requires_grad_()\n"
                         "    return torch.autograd.grad(x @ weight.detach().clone().T, x, gradient)[0]"))],
    ),
}  # fmt: skip


WRONG = {
    "four ranks": ("naive_step", [edited(NAIVE, ("dist.get_world_size() - 1", "3"))], "on 2 ranks: "),
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
    "four ranks of a stash": (
        "pipedream_run",
        [edited(STASH, ("dist.get_world_size()", "4"))],
        "on 2 ranks: ",
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
