"""One rank of an examination: runs the reader's function and reports its events as they happen.

`examining.py` starts it on each rank with the path of a request. Every event is one line of JSON
after MARK on standard output; all other lines were printed by the reader's code.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

sys.path.append(str(Path(__file__).resolve().parents[2]))  # torchrun knows this folder only

from course.building import MARK, zb_h1  # noqa: E402
from course.building.versions import run_versions  # noqa: E402
from small import pipeline as my_pipeline  # noqa: E402
from small import split_backward  # noqa: E402

YOURS = "<your "  # starts the file names of the reader's functions
BUSY = 5  # seconds after which a rank that does not wait reports its place in the code
CLOSE = 1e-9


class Teller:
    """Sends events to the process that examines, with the reader's line at which they happen."""

    def __init__(self, rank):
        self.rank = rank

    def tell(self, event, **more):
        line = {"rank": self.rank, "event": event, **more}
        line.setdefault("at", place(sys._getframe(1)))
        os.write(1, f"{MARK}{json.dumps(line)}\n".encode())


def place(frame):
    """[function, line] of the innermost line of the reader's own code, or None."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(YOURS):
            return frame.f_code.co_filename[len(YOURS) : -1], frame.f_lineno
        frame = frame.f_back


class Watched:
    """torch's Work of one message; reports when its rank starts and stops waiting for it."""

    def __init__(self, teller, work, name):
        self.teller, self.work, self.name = teller, work, name

    def wait(self, *arguments):
        self.teller.tell("waits", message=self.name)
        self.work.wait(*arguments)
        self.teller.tell("goes on", message=self.name)
        return True

    def is_completed(self):
        return self.work.is_completed()


class OneQueue:
    """NCCL's rule in its strictest form: a rank has one operation under way, in order of issue.

    An operation is one message, or the messages of one batch. A thread starts the next operation
    when the one before has ended.
    """

    def __init__(self, teller):
        self.teller, self.waiting, self.issued, self.batch = teller, SimpleQueue(), [], None
        threading.Thread(target=self.work_off, daemon=True).start()

    def put(self, message):
        """Issue a QueuedMessage, alone or with the others of its batch, and return it."""
        self.issued.append(message)
        if self.batch is None:
            self.waiting.put([message])
        else:
            self.batch.append(message)
        return message

    def batch_isend_irecv(self, operations):
        """In place of torch's: all of `operations` are one operation."""
        self.batch = []
        for each in operations:
            each.op(each.tensor, each.peer, tag=each.tag)
        messages, self.batch = self.batch, None
        self.waiting.put(messages)
        return messages

    def work_off(self):
        """The thread: start what was issued, one operation at a time, until the process ends."""
        while True:
            messages = self.waiting.get()
            works = [message.start() for message in messages]
            for message in messages:
                message.begun.set()
            for message, work in zip(messages, works):
                try:
                    work.wait()
                except RuntimeError:
                    return  # the other rank is lost, which is reported there
                message.ended.set()


class QueuedMessage:
    """A message in a OneQueue. `begin()` returns torch's work, `about` describes its tensor."""

    def __init__(self, queue, begin, name, about):
        self.queue, self.begin, self.name, self.about = queue, begin, name, about
        self.begun, self.ended = threading.Event(), threading.Event()

    def start(self):
        self.queue.teller.tell("begins", message=self.name, **self.about)
        return self.begin()

    def wait(self, *_):
        """Wait for all that was issued up to this message; reports the one that is under way."""
        issued = self.queue.issued
        for message in issued[: issued.index(self) + 1]:
            message.begun.wait()  # it is the next one, so it begins; only then can it be stuck
            self.queue.teller.tell("waits", message=message.name)
            message.ended.wait()
            self.queue.teller.tell("goes on", message=message.name)
        del issued[: issued.index(self) + 1]
        return True

    def is_completed(self):
        return self.ended.is_set()


def watch_messages(teller, queue=None):
    """Replace the functions of torch.distributed by functions that also report each call.

    With a OneQueue, messages are started by its rule.
    """
    counts, works, begin = {}, [], {"send": c10d.isend, "receive": c10d.irecv}

    def start(what, tensor, peer, tag, **more):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a {what} needs a tensor, not {tensor!r}")
        if not isinstance(peer, int) or not 0 <= peer < dist.get_world_size():
            way = "to" if what == "send" else "from"
            raise ValueError(f"there is no rank {peer!r} to {what} {way}")
        key = what, peer, tag
        counts[key] = counts.get(key, 0) + 1
        name = [*key, counts[key]]
        about = {"shape": [*tensor.shape], "dtype": str(tensor.dtype)[6:]}
        begin_it = partial(begin[what], tensor.detach(), peer, tag=tag, **more)
        if queue:
            about["at"] = place(sys._getframe(1))
            return queue.put(QueuedMessage(queue, begin_it, name, about))
        work = begin_it()
        works.append(work)  # a Work that is freed would end while its message travels
        teller.tell("begins", message=name, **about)
        return Watched(teller, work, name)

    def isend(tensor, dst=None, group=None, tag=0, group_dst=None):
        peer = dst if group_dst is None else group_dst  # what batch_isend_irecv names
        return start("send", tensor, peer, tag, group=group)

    def irecv(tensor, src=None, group=None, tag=0, group_src=None):
        peer = src if group_src is None else group_src
        return start("receive", tensor, peer, tag, group=group)

    def join(*arguments, **more):
        teller.tell("waits", message=["join", -1, 0, 0])
        torch_join(*arguments, **more)
        teller.tell("goes on", message=["join", -1, 0, 0])

    torch_join = c10d.init_process_group
    instead = {
        "isend": isend,
        "irecv": irecv,
        "send": lambda *arguments, **more: isend(*arguments, **more).wait(),
        "recv": lambda *arguments, **more: irecv(*arguments, **more).wait(),
        "init_process_group": join,
    }
    if queue:
        instead["batch_isend_irecv"] = queue.batch_isend_irecv
    for module in (dist, c10d):
        for name, function in instead.items():
            setattr(module, name, function)


def watch_halves(teller):
    """Also report when the half of a backward for the weights runs."""
    begin = zb_h1.backward_input

    def backward_input(stage, k, held, sends):
        later = begin(stage, k, held, sends)

        def run():
            teller.tell("weights", kind="W", stage=stage.index, k=k)
            later()

        return run

    zb_h1.backward_input = backward_input


class Reference:
    """The results of one process with its own copy of the model, by stage s and micro-batch k.

    `inputs[s][k]` is the input of stage s, `gradients[s][k]` is the gradient of its output, and
    `weights[s]` has one column per micro-batch: the gradient of all weights of the stage.
    """

    def __init__(self, num_stages, inputs, targets):
        stages = [my_pipeline.build_stage(index, num_stages) for index in range(num_stages)]
        self.inputs, self.gradients = [[] for _ in stages], [[] for _ in stages]
        columns, self.loss = [[] for _ in stages], 0.0
        for tokens, wanted in zip(inputs, targets):
            made = []
            for number, stage in enumerate(stages):
                stage.zero_grad()
                self.inputs[number].append(tokens.detach())
                tokens = stage(tokens)
                tokens.retain_grad()
                made.append(tokens)
            loss = my_pipeline.loss_of(tokens, wanted) / len(inputs)
            loss.backward()
            self.loss += loss.item()
            for number, stage in enumerate(stages):
                self.gradients[number].append(made[number].grad)
                columns[number].append(flat_gradient(stage))
        self.weights = [torch.stack(column, 1) for column in columns]


def flat_gradient(stage):
    """The gradients of all weights as one vector; zeros for a weight without a gradient."""
    weights = stage.parameters()
    return torch.cat(
        [(w.grad if w.grad is not None else 0 * w.detach()).flatten() for w in weights]
    )


def observe(teller, stage, index, reference, halves):
    """Report every forward and backward of `stage` with its micro-batch."""
    stage.half, stage.index = "I" if halves else "B", index
    if halves:
        split_backward.split(stage)

    def before(_, arguments):
        k, factor = which(arguments[0].detach(), reference.inputs[index])
        stage.current = k
        asks = index == 0 or arguments[0].requires_grad
        teller.tell("forward", kind="F", stage=index, k=k if factor == 1 else None, asks=asks)

    def after(_, arguments, output):
        k = stage.current

        def on_gradient(gradient):
            j, factor = which(gradient, reference.gradients[index])
            teller.tell("backward", kind=stage.half, stage=index, k=k, of=j, factor=factor)

        output.register_hook(on_gradient)

    stage.register_forward_pre_hook(before)
    stage.register_forward_hook(after)


def which(tensor, candidates):
    """(k, factor) with `tensor` = factor x `candidates[k]`, or (None, None)."""
    for k, candidate in enumerate(candidates):
        if tensor.shape != candidate.shape:
            continue
        if torch.equal(tensor, candidate):
            return k, 1
        if not candidate.is_floating_point():
            continue
        factor = ((tensor * candidate).sum() / (candidate * candidate).sum()).item()
        if (tensor - factor * candidate).abs().max() <= CLOSE * candidate.abs().max():
            return k, rounded(factor)
    return None, None


def rounded(number):
    return round(number, 9) + 0.0 if number == number else None


def run_steps(request, define, teller):
    """Run the reader's step once for each number of micro-batches, on fresh gradients."""
    function = define(request)
    rank, p, chunks = dist.get_rank(), dist.get_world_size(), request["chunks"]
    for number, m in enumerate(request["microbatches"]):
        tokens, targets = my_pipeline.batch(number, 2 * m)
        parts = tokens.chunk(m), targets.chunk(m)
        reference = Reference(p * chunks, *parts)
        stages = [my_pipeline.build_stage(rank + c * p, p * chunks) for c in range(chunks)]
        for c, stage in enumerate(stages):
            observe(teller, stage, rank + c * p, reference, request.get("halves"))
        given = stages if chunks > 1 else stages[0]
        teller.tell("begins step", m=m)
        returned = function(given, *((tokens, targets) if request.get("whole_batch") else parts))
        teller.tell("ends step", **result_of(returned, stages, rank, p, reference))
        dist.barrier()


def result_of(returned, stages, rank, p, reference):
    """The loss and the gradients of each stage, as compared with one process."""
    gradients = []
    for c, stage in enumerate(stages):
        wanted = reference.weights[rank + c * p]
        found = flat_gradient(stage)
        known = found.nan_to_num(1e30, 1e30, -1e30)  # memory that nothing was received into
        parts = torch.linalg.lstsq(wanted, known[:, None]).solution
        rest = (wanted @ parts - found[:, None]).abs().max() / wanted.abs().max()
        gradients.append(
            {
                "stage": rank + c * p,
                "difference": (found - wanted.sum(1)).abs().max().item(),
                "parts": [rounded(part) for part in parts[:, 0].tolist()],
                "rest": rest.item(),
                "none": all(weight.grad is None for weight in stage.parameters()),
            }
        )
    loss, kind = returned, type(returned).__name__
    if isinstance(returned, torch.Tensor) and returned.numel() == 1:
        loss, kind = returned.item(), "graph" if returned.requires_grad else "float"
    elif not isinstance(returned, (int, float)) or isinstance(returned, bool):
        loss = None
    return {"loss": loss, "kind": kind, "wanted": reference.loss, "gradients": gradients}


def run_words(request, define, teller):
    """Run the reader's function of lesson 01, which itself joins the group and sends messages."""
    returned = define(request)()
    value = returned.tolist() if isinstance(returned, torch.Tensor) else repr(returned)
    teller.tell("ends step", value=value, left=not dist.is_initialized())


def define(request):
    """The reader's function, defined in a namespace with the names of small/pipeline.py."""
    names = dict(vars(my_pipeline), __name__="yours")
    exec("\n".join(request["imports"]), names)
    for name, text in request["sources"]:
        exec(compile(text, f"{YOURS}{name}>", "exec"), names)
    return names[request["function"]]


RUNS = {"words": run_words, "steps": run_steps, "versions": run_versions}


def main():
    """Run the request as one rank, then stay: other ranks may still need its messages."""
    request = json.loads(Path(sys.argv[1]).read_text())
    teller = Teller(int(os.environ["RANK"]))
    if hasattr(signal, "SIGALRM"):  # not on Windows
        signal.signal(signal.SIGALRM, lambda _, frame: teller.tell("busy", where=place(frame)))
    torch.set_num_threads(1)
    try:
        if request["run"] != "words":
            dist.init_process_group("gloo")
        watch_messages(teller, OneQueue(teller) if request.get("strict") else None)
        watch_halves(teller)
        if hasattr(signal, "SIGALRM"):
            signal.setitimer(signal.ITIMER_REAL, BUSY)
        RUNS[request["run"]](request, define, teller)
        teller.tell("done")
    except Exception as error:
        own = [
            (frame.f_code.co_filename[len(YOURS) : -1], line)
            for frame, line in traceback.walk_tb(error.__traceback__)
            if frame.f_code.co_filename.startswith(YOURS)
        ]
        said = str(error).splitlines()[0][:300] if str(error) else ""
        teller.tell("raised", kind=type(error).__name__, said=said, where=own[-1] if own else None)
    time.sleep(60)


if __name__ == "__main__":
    main()
