# SPDX-License-Identifier: Apache-2.0
"""Reports what a rank of an examination does: its messages, its waits, and its collectives.

Every event is one line of JSON after MARK on standard output, with the reader's line at which it
happened.
"""

import gc
import json
import os
import sys
import threading
import traceback
from functools import partial
from numbers import Integral
from queue import SimpleQueue

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from course.building import ANY_RANK, EVERY_RANK, MARK, YOURS, in_words

# The functions of torch.distributed that return only after every rank has called them.
COLLECTIVES = ["barrier", "broadcast", "reduce", "all_reduce", "gather", "all_gather", "scatter"]
COLLECTIVES += ["all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor", "all_to_all"]
COLLECTIVES += ["all_to_all_single"]


sent = []  # where each send of this rank was begun
received = []  # what each of its receives brings


def tell(event, **more):
    """Send an event of this rank to the process that examines it."""
    line = {"rank": int(os.environ["RANK"]), "event": event, **more}
    line.setdefault("at", place(sys._getframe(1)))
    if event == "waits" and sys.exc_info()[1]:  # the wait is in a `finally`
        line["behind"] = described(sys.exc_info()[1])
    os.write(1, f"{MARK}{json.dumps(line, default=repr)}\n".encode())


def place(frame):
    """[function, line] of the innermost line of the reader's own code, or None."""
    for own in own_frames(frame):
        return own.f_code.co_filename[len(YOURS) : -1], own.f_lineno


def described(error):
    """An error with the last line of the reader's own code that led to it, for an event."""
    kind, _, said = in_words(error).partition(": ")
    while error.__context__ and not error.__suppress_context__:
        error = error.__context__
    frames = traceback.walk_tb(error.__traceback__)
    places = [(frame.f_code.co_filename, line) for frame, line in frames]
    own = [(file[len(YOURS) : -1], line) for file, line in places if file.startswith(YOURS)]
    first_line = "".join(said.strip().splitlines()[:1])
    return {"kind": kind, "said": first_line[:300], "where": own[-1] if own else None}


def own_frames(frame):
    """The frames of the reader's own code, from `frame` outwards."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(YOURS):
            yield frame
        frame = frame.f_back


def tensors_like(one):
    """All tensors of this rank that have the shape and the type of `one`."""
    kinds = torch.Tensor, torch.nn.Parameter
    found = [each for each in gc.get_objects() if type(each) in kinds]
    return [each for each in found if (each.shape, each.dtype) == (one.shape, one.dtype)]


class Watched:
    """torch's Work of one message; reports when its rank starts and stops waiting for it.

    `at` is the line that began the message, for a wait that is not in the reader's own code.
    """

    def __init__(self, work, name, at, arrive=None):
        self.work, self.name, self.at, self.over = work, name, at, False
        self.arrive = arrive  # is called when the message has arrived

    def wait(self, *arguments, **more):
        if self.over and self.name[1] != EVERY_RANK:
            raise RuntimeError("with gloo, a second wait() for the same message never returns")
        self.over = True
        tell("waits", message=self.name, at=place(sys._getframe(1)) or self.at)
        self.work.wait(*arguments, **more)
        self.finish()
        tell("goes on", message=self.name)
        return True

    def is_completed(self):
        completed = self.work.is_completed()
        if completed:
            self.finish()
        return completed

    def finish(self):
        arrive, self.arrive = self.arrive, None
        if arrive:
            arrive()

    def __getattr__(self, name):
        return getattr(self.work, name)


class OneQueue:
    """NCCL's rule in its strictest form: a rank has one operation under way, in order of issue.

    An operation is one message, or the messages of one batch. A thread starts the next operation
    when the one before has ended.
    """

    def __init__(self):
        self.waiting, self.issued, self.batch = SimpleQueue(), [], None
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
        """Replaces torch's function: all of `operations` are one operation of the queue."""
        self.batch = []
        for each in operations:
            each.op(each.tensor, each.peer, tag=each.tag)
        messages, self.batch = self.batch, None
        self.waiting.put(messages)
        return messages[:]  # the reader may take them out of the list

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
    """A message in a OneQueue. `begin()` returns torch's work, `about` describes its tensor, and
    `arrive()` is called when its rank has waited for it."""

    def __init__(self, queue, begin, name, about, arrive):
        self.queue, self.begin, self.name, self.about = queue, begin, name, about
        self.arrive = arrive
        self.begun, self.ended = threading.Event(), threading.Event()

    def start(self):
        tell("begins", message=self.name, **self.about)
        return self.begin()

    def wait(self, *_, **more):
        """Wait for all that was issued up to this message; reports the one that is under way."""
        issued = self.queue.issued
        if self not in issued:  # it has ended: the rank has waited for it or for a later one
            tell("waited", message=self.name)
            return True
        for message in issued[: issued.index(self) + 1]:
            message.begun.wait()  # it is the next one, so it begins; only then can it be stuck
            tell("waits", message=message.name, own=message is self)
            message.ended.wait()
            message.arrive()
            tell("goes on", message=message.name)
        del issued[: issued.index(self) + 1]
        return True

    def is_completed(self):
        return self.ended.is_set()


def watch_messages(strict=False):
    """Replace the functions of torch.distributed by functions that also report each call.

    With `strict`, messages are started by the rule of a OneQueue.
    """
    messages, counted, left = Messages(OneQueue() if strict else None), [], []
    torch_join, torch_leave = c10d.init_process_group, c10d.destroy_process_group

    def isend(tensor, dst=None, group=None, tag=0, group_dst=None):
        return messages.start("send", tensor, dst, group_dst, group, tag)

    def irecv(tensor, src=None, group=None, tag=0, group_src=None):
        return messages.start("receive", tensor, src, group_src, group, tag)

    def send(*arguments, **more):
        isend(*arguments, **more).wait()

    def recv(*arguments, **more):
        message = irecv(*arguments, **more)
        message.wait()
        source = message.name[1]
        return message.work._source_rank() if source == ANY_RANK else source

    def join(*arguments, **more):
        counted.append("join")
        name = ["join", EVERY_RANK, 0, len(counted)]
        tell("joins in", name="join")
        tell("waits", message=name)
        torch_join(*arguments, **more)
        tell("goes on", message=name)

    def leave(*arguments, **more):
        # A group that is kept closes no connection, so a rank that waits for this one still waits.
        left.append(dist.group.WORLD)
        torch_leave(*arguments, **more)

    instead = {
        "isend": isend,
        "irecv": irecv,
        "send": send,
        "recv": recv,
        "init_process_group": join,
        "destroy_process_group": leave,
    }
    if messages.queue:
        instead["batch_isend_irecv"] = messages.queue.batch_isend_irecv
    for name in COLLECTIVES:
        instead[name] = watched_collective(name, counted)
    for module in (dist, c10d):
        for name, function in instead.items():
            setattr(module, name, function)


def note_sizes_of_sums(sizes):
    """Append the size of each tensor that this rank gives to all_reduce from now on to `sizes`."""
    begin = dist.all_reduce

    def all_reduce(tensor, *arguments, **more):
        sizes.append(tensor.numel())
        return begin(tensor, *arguments, **more)

    dist.all_reduce = all_reduce


class Messages:
    """Starts the messages of this rank, and numbers those of each peer, group and tag."""

    def __init__(self, queue):
        self.queue, self.counts, self.works = queue, {}, []
        self.begin = {"send": c10d.isend, "receive": c10d.irecv}

    def start(self, what, tensor, peer, peer_in_group, group, tag):
        """Start and report a message, or put it into the queue; the result can be waited for."""
        if peer_in_group is not None:  # what batch_isend_irecv names
            peer = dist.get_global_rank(group or dist.group.WORLD, peer_in_group)
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a {what} needs a tensor, not {tensor!r}")
        # The messages of two groups are two sequences, like those of two tags.
        sequence = f"{tag} {(group or c10d._get_default_group()).group_name}"
        key = what, self.name_of(peer, what), sequence
        self.counts[key] = self.counts.get(key, 0) + 1
        name, at = [*key, self.counts[key]], place(sys._getframe(1))
        told = {**about(tensor), "at": at}
        peer = peer if peer is None else int(peer)
        if what == "send":
            sent.append(at)
            travels = tensor.detach()
            arrive = partial(tell_change, tensor, travels.clone(), at)
        else:  # what arrives is in the reader's tensor after wait(), never before
            travels = torch.empty_like(tensor.detach())
            received.append(travels)
            if tensor.is_floating_point():
                tensor.data.fill_(float("nan"))
            arrive = partial(tensor.data.copy_, travels)
        begin = partial(self.begin[what], travels, peer, group=group, tag=tag)
        if self.queue:
            return self.queue.put(QueuedMessage(self.queue, begin, name, told, arrive))
        # Reported before it begins, since gloo aborts a process whose buffer is too small.
        tell("begins", message=name, **told)
        work = begin()
        self.works.append(work)  # a Work that is freed would end while its message travels
        return Watched(work, name, at, arrive)

    def name_of(self, peer, what):
        """The number of a rank that exists, or ANY_RANK."""
        if what == "receive" and peer is None and not self.queue:  # gloo takes what comes
            return ANY_RANK
        if isinstance(peer, Integral) and 0 <= peer < dist.get_world_size():
            if peer == dist.get_rank():
                raise ValueError(f"rank {peer} is this rank itself: a message goes to another one")
            return int(peer)
        way = "to" if what == "send" else "from"
        raise ValueError(f"there is no rank {peer!r} to {what} {way}")


def about(tensor):
    """The shape and the type of a tensor, for an event."""
    return {"shape": [*tensor.shape], "dtype": str(tensor.dtype)[6:]}


def tell_change(tensor, copy, at):
    """Report a tensor that was changed after its send had begun at the line `at`."""
    if not torch.equal(tensor.detach().nan_to_num(), copy.nan_to_num()):
        tell("changed", at=at)


def watched_collective(name, counted):
    """The collective of that name, which also reports its call. `counted` has the earlier ones.

    Calls with a group that the reader has made are not followed: not every rank belongs to it.
    """
    begin = getattr(c10d, name)

    def collective(*arguments, async_op=False, **more):
        groups = [each for each in arguments if isinstance(each, dist.ProcessGroup)]
        if any(each not in (None, dist.group.WORLD) for each in [*groups, more.get("group")]):
            return begin(*arguments, async_op=async_op, **more)
        counted.append(name)
        given = [*arguments, *more.values()]
        tensor = next((each for each in given if isinstance(each, torch.Tensor)), None)
        # In all_to_all_single each rank has sizes of its own, so they are not compared.
        compared = tensor is not None and name != "all_to_all_single"
        # Reported before it begins, since gloo aborts a process whose size differs.
        tell("joins in", name=name, **(about(tensor) if compared else {}))
        work = begin(*arguments, async_op=True, **more)
        at = place(sys._getframe(1))
        watched = Watched(work, [name, EVERY_RANK, 0, len(counted)], at)
        return watched if async_op else watched.wait() and None

    return collective
