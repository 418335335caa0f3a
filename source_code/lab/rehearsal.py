# SPDX-License-Identifier: Apache-2.0
"""Rehearses on a CPU what NCCL would do with the order of a program's messages.

Gloo hides what NCCL would not forgive, so a program that passes on gloo may hang on GPUs. Here a
process group over gloo keeps NCCL's rules; `--rehearse MODE` puts it in gloo's place:

    lazy     two ranks are connected by their first message, which blocks the host until both sides
             have called; a batch or a collective connects all ranks of its group (torch up to 2.14
             without device_id)
    warmed   the same, but all are connected from the start
    eager    all are connected from the start, and all operations of a group wait in one queue
             (torch with device_id, and since 2.15)
    strict   all operations of a rank wait in one queue, in the order in which they are issued: two
             communicators on one GPU need not make progress at once

A queue performs one operation at a time. In all modes a send ends only when its receive is under
way, too. A batch of sends and receives is one operation. `wait()` blocks the host, which on a CPU
is the device. NCCL's wait does not block the host, so with lazy connections a program may hang here
that would pass with NCCL. Not rehearsed are the early end of small sends, and the share of a GPU
that NCCL's kernels take. Sources: pytorch's ProcessGroupNCCL.cpp (pointToPoint), NCCL's user guide
("Using multiple NCCL communicators concurrently", "Group calls").
"""

import threading
import time
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from guard.watch import pending_texts
from pipeline import job as jobs

MODES = "lazy", "warmed", "eager", "strict"
COLLECTIVES = (
    "allreduce",
    "broadcast",
    "barrier",
    "reduce",
    "gather",
    "scatter",
    "allgather",
    "reduce_scatter",
    "_allgather_base",
    "_reduce_scatter_base",
    "alltoall_base",
)
NEWER_NAMES = {  # of torch's own calls, since 2.13 or 2.15; gloo has them since 2.15
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "gather_single": None,
}
pending = []  # all operations of this rank that have not ended, in the order of issue
queues = {}  # key of a queue, see Rehearsed.issue -> its operations
naming = threading.local()


def check_rehearsal(arguments):
    """Start the rehearsal of --rehearse, before the ranks meet."""
    if not arguments.rehearse:
        return
    if arguments.device == "cuda" or (arguments.device == "auto" and torch.cuda.is_available()):
        raise SystemExit("--rehearse plays NCCL's rules on a CPU; use --device cpu")
    begin(arguments.rehearse)


def begin(mode):
    """Let every process group that this process opens from now on keep NCCL's rules."""
    dist.Backend.register_backend(
        "rehearsal", lambda *arguments: Rehearsed(mode, *arguments), devices=["cpu"]
    )
    start, group, batch = dist.init_process_group, dist.new_group, dist.batch_isend_irecv
    dist.init_process_group = lambda backend=None, **more: start("rehearsal", **more)

    def new_group(*ranks, **more):
        if more.get("backend") != "cpu:gloo":  # such a group waits in no queue of a GPU
            more["backend"] = "rehearsal"
        return group(*ranks, **more)

    dist.new_group = new_group
    dist.batch_isend_irecv = lambda operations: as_one(operations, batch)
    begin_transfer = jobs.Transfer.__init__

    def named(transfer, job, operation, buffer, peer, message):
        naming.message = str(message)
        begin_transfer(transfer, job, operation, buffer, peer, message)
        del naming.message

    jobs.Transfer.__init__ = named
    pending_texts.append(pending_text)


def as_one(operations, batch):
    """Call `batch_isend_irecv` with its operations joined into one operation of the queue."""
    group = operations[0].group or dist.group.WORLD
    group.batch = []
    try:
        batch(operations)
        texts, parts = zip(*group.batch)
    finally:
        group.batch = None
    return [group.issue("all", f"the batch [{', '.join(texts)}]", parts, [])]


def pending_text():
    """The operations under way and queued on this rank, in words; "" without a rehearsal."""
    parts = []
    for state in "connecting", "under way", "queued":
        operations = [operation.text for operation in pending if operation.state == state]
        parts += [f"{state}: {', '.join(operations)}"] * bool(operations)
    return "; ".join(parts)


class Operation(dist.Work):
    """One operation of a communicator. `parts` are functions that start it; each returns a Work."""

    def __init__(self, text, parts, results):
        super().__init__()
        self.text, self.parts, self.results = text, parts, results
        self.state, self.error = "queued", None
        self.ended = threading.Event()
        self.future = torch.futures.Future()
        pending.append(self)

    def run(self):
        """Perform the operation, in its queue's thread. Returns the event that marks its end."""
        self.state = "under way"
        try:
            for work in [part() for part in self.parts]:
                work.wait()
        except RuntimeError as error:
            self.error = error
        pending.remove(self)
        self.parts = None
        if self.error:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.results)
        return self.ended

    def wait(self, timeout=None):
        self.ended.wait()
        if self.error:
            raise self.error
        return True

    def is_completed(self):
        return self.ended.is_set()

    def get_future(self):
        return self.future


class Rehearsed(ProcessGroup):
    """A process group over gloo whose operations wait for one another as `mode` says."""

    # Empty until the first operation: torch 2.15 attaches its flight recorder to a new group with
    # device types, and the recorder asks C++ for a name that this group has only in Python.
    _device_types = ()

    def __init__(self, mode, store, rank, size, timeout):
        super().__init__(rank, size)
        self.mode, self.own_rank, self.num_ranks = mode, rank, size
        self.store = dist.PrefixStore("rehearsal", store)
        gloo = dist.distributed_c10d.ProcessGroupGloo  # not in every build of torch
        self.inner = gloo(dist.PrefixStore("gloo", store), rank, size, timeout)
        self._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, self.inner)
        self.connected, self.batch, self.name = set(), None, ""

    def issue(self, peers, text, parts, results):
        """Put an operation into its queue; `peers` is the pair of ranks that it connects, or "all"."""
        self._device_types = (torch.device("cpu"),)
        operation = Operation(text, parts, results)
        if self.mode == "lazy":
            self.connect(peers, operation)
        keys = {"strict": "rank", "eager": id(self)}
        queue_of(keys.get(self.mode, (id(self), peers))).put(operation)
        return operation

    def connect(self, peers, operation):
        """At the first call for these `peers`, block until all of them have called it."""
        if peers in self.connected:
            return
        operation.state = "connecting"
        ranks = range(self.num_ranks) if peers == "all" else peers
        store = self.store.clone()  # the job's own client may be busy elsewhere
        store.set(f"{peers} {self.own_rank}", "")
        while not store.check([f"{peers} {rank}" for rank in ranks]):
            time.sleep(0.002)
        self.connected.add(peers)
        operation.state = "queued"

    def point_to_point(self, direction, begin, peer, tensors):
        message = getattr(naming, "message", "a message")
        text = f"{message} {direction} rank {dist.get_global_rank(self, peer)}"
        if self.batch is not None:
            self.batch.append((text, begin))
            return None
        pair = tuple(sorted((self.own_rank, peer)))
        return self.issue(pair, text, [begin], tensors)

    def send(self, tensors, peer, tag):
        begin = lambda: self.inner.send(tensors, peer, tag)  # noqa: E731
        return self.point_to_point("to", begin, peer, tensors)

    def recv(self, tensors, peer, tag):
        begin = lambda: self.inner.recv(tensors, peer, tag)  # noqa: E731
        return self.point_to_point("from", begin, peer, tensors)

    def collective(self, name, arguments, options):
        text = f"the {name.strip('_')} of ranks {dist.get_process_group_ranks(self)}"
        own = name if hasattr(self.inner, name) else NEWER_NAMES[name]
        begin = lambda: getattr(self.inner, own)(*arguments, **options)  # noqa: E731
        return self.issue("all", text, [begin], arguments[0] if arguments else [])

    # Other methods that torch calls on a process group.

    def rank(self):
        return self.own_rank

    def size(self):
        return self.num_ranks

    def getBackendName(self):  # noqa: N802
        return "rehearsal"

    def _set_group_name(self, name):
        self.name = name

    def _set_group_desc(self, description):
        pass

    @property
    def group_name(self):
        return self.name

    def shutdown(self):
        pass


def collective_named(name):
    return lambda group, *arguments, **options: group.collective(name, arguments, options)


# An operation outside a queue could wait for gloo's lock while it holds Python's, and another
# thread in the opposite order; then the rank would hang.
for each in (*COLLECTIVES, *NEWER_NAMES):
    setattr(Rehearsed, each, collective_named(each))


def queue_of(key):
    """The queue of that key; its own thread performs the operations."""
    if key not in queues:
        queues[key] = SimpleQueue()
        threading.Thread(target=work_off, args=(queues[key],), daemon=True).start()
    return queues[key]


def work_off(queue):
    # The event is set last, after torch's objects are freed: freeing one takes Python's lock again,
    # which aborts the process if the program has ended meanwhile.
    while True:
        queue.get().run().set()
