# SPDX-License-Identifier: Apache-2.0
"""Ends a job in which a rank waits too long, and names the rank that it waits for.

A watch is a thread of every rank, and an instrument: it is called at every wait. After half of the
timeout it writes the wait into the store that all ranks share. After the whole timeout it follows
the chain of waits to the rank that does not wait, names it, and ends that rank and its own.

With NCCL a wait returns at once: the device waits, and the host continues until it needs a result.
So the watch puts a mark into the device's queue before and after each wait, and checks which marks
the device has reached. (is_completed() of torch's Works would also do, but each Work keeps its
tensor: a rank would hold every received message until the watch looks.)
"""

import os
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from files.outputs import replace_file
from guard.ending import end_process, is_loss, text_of_loss
from guard.meeting import launcher_keeps_the_store
from guard.siblings import end_siblings

FLIGHT_VARIABLE = "PIPELINE_FLIGHT_RECORDER"  # a folder for records of the last messages
STORE_TIMEOUT = 2  # seconds that a store may take for an answer
pending_texts = []  # functions that return text about the operations of this rank, or ""


class Wait(NamedTuple):
    """A wait: the rank `peer`, what it has to send, and the start (time.monotonic seconds)."""

    peer: int
    what: str
    since: float


class LeftToDevice(NamedTuple):
    """A wait that returned at once, with marks before and after it in the device's queue."""

    peer: int
    what: str
    begin: object
    end: object


def attach_watch(job):
    """Watch every wait of this rank from now on, until the job is left. All ranks call it."""
    job.watch = watch = watch_of(job)
    waiting, leave = job.waiting, job.leave

    @contextmanager
    def watched(peer, what):
        with waiting(peer, what), watch.waiting(peer, what):
            yield

    def left():
        leave()
        watch.stop()

    job.waiting, job.leave = watched, left
    watch.start()


def watch_of(job):
    """The Watch of this rank, whose state the other ranks can read. All ranks call it."""
    watch = Watch(job.rank, job.timeout)
    watch.device_waits = job.backend == "nccl"
    if job.num_ranks > 1:
        watch.store = dist.PrefixStore("watch", job.store.clone())
        watch.store.set_timeout(timedelta(seconds=STORE_TIMEOUT))
        watch.processes = getattr(job, "processes", {})  # set for a guarded job
    job.explain_loss = watch.explain_loss
    job.starting = watch.around_starts(job.starting)
    return watch


class Watch(threading.Thread):
    """Watches one rank. `store` is a key-value store shared by all ranks, or None."""

    def __init__(self, rank, timeout, store=None):
        super().__init__(daemon=True, name="watch")
        self.rank = rank
        self.timeout = timeout
        self.store = store
        self.wait = None
        self.device_waits = False  # True with NCCL: the device waits, the host does not
        self.left = deque()  # waits left to the device, in the device's order
        self.stands_since = None  # when the device was first seen in the first of these waits
        self.announced = None
        self.pending = {}  # rank -> its pending operations, in a rehearsal
        self.processes = {}  # rank -> process id, of the ranks on this machine
        self.stopped = threading.Event()

    @contextmanager
    def waiting(self, peer, what):
        """A context for every call that blocks the host or the device until rank `peer` acts."""
        begin = device_mark() if self.device_waits else None
        with self.host_waiting(peer, what):
            yield
        if self.device_waits:
            self.left.append(LeftToDevice(peer, str(what), begin, device_mark()))

    @contextmanager
    def host_waiting(self, peer, what):
        outer, lost = self.wait, False
        self.wait = Wait(peer, str(what), time.monotonic())
        try:
            yield
        except RuntimeError as error:
            lost = is_loss(error)
            raise
        finally:
            if not lost:  # a lost wait stays announced: others follow it to the rank that is gone
                self.wait = outer and outer._replace(since=time.monotonic())

    def around_starts(self, starting):
        """`starting` of a job, watched: with NCCL the start of a transfer can block, too."""

        @contextmanager
        def watched(peer, what):
            with self.host_waiting(peer, what), starting(peer, what):
                yield

        return watched

    @contextmanager
    def acting(self, work):
        """A context for an action, during which a rank does not wait for another rank.

        After an action inside a longer wait, such as a library's step, a new wait starts for what
        follows the action.
        """
        outer, self.wait = self.wait, None
        yield
        if outer:
            self.wait = Wait(outer.peer, f"what it needs after {work.action}", time.monotonic())

    def run(self):
        """The thread's loop: check several times per second how long this rank has waited."""
        while not self.stopped.wait(min(0.25, self.timeout / 20)):
            wait = self.longest_wait()
            waited = time.monotonic() - wait.since if wait else 0.0
            if waited > self.timeout:
                self.end_job(wait)
            self.tell_others(wait if waited > self.timeout / 2 else None)

    def longest_wait(self):
        """The present Wait of the host or the device, whichever started first, or None."""
        waits = [wait for wait in (self.wait, self.device_wait()) if wait]
        return min(waits, key=lambda wait: wait.since, default=None)

    def device_wait(self):
        """The present Wait of the device; None while it computes."""
        with suppress(RuntimeError):  # a device that has failed raises an error on the host, too
            while self.left and self.left[0].end.query():
                self.left.popleft()
                self.stands_since = None
            if self.left and self.left[0].begin.query():
                self.stands_since = self.stands_since or time.monotonic()
                return Wait(*self.left[0][:2], self.stands_since)
        return None

    def stop(self):
        self.stopped.set()

    def end_job(self, wait):
        self.write_flight_recorder()
        sentence, silent = self.explain_silence(wait)
        self.pending[self.rank] = text_of_pending()
        for rank, text in sorted(self.pending.items()):
            sentence += f"\n  rank {rank}, {text}" if text else ""
        end_process(sentence, before_leaving=lambda: self.end_rank(silent))

    def write_flight_recorder(self):
        """If requested, write torch's record of this rank's last messages as rankN.json.

        torch keeps 2,000 entries, or TORCH_FR_BUFFER_SIZE: all messages of NCCL and, since torch
        2.13, the collectives of gloo.
        """
        folder = os.environ.get(FLIGHT_VARIABLE)
        if folder:
            with suppress(AttributeError, OSError, RuntimeError):
                record = flight_record("nccl" if self.device_waits else "gloo")
                os.makedirs(folder, exist_ok=True)
                path = os.path.join(folder, f"rank{self.rank}.json")
                replace_file(path, lambda partial: partial.write_bytes(record))

    def tell_others(self, wait):
        """Announce a long wait in the store, and withdraw it once it is over."""
        if wait != self.announced:
            with suppress(RuntimeError):  # the watch goes on without a store, and tries again
                self.announce(wait)
                self.announced = wait

    def announce(self, wait):
        if self.store is not None:
            self.store.set(f"waits/{self.rank}", f"{wait.peer} {wait.what}" if wait else "")
            self.store.set(f"pending/{self.rank}", text_of_pending())

    def announced_by(self, rank):
        """What rank `rank` has announced, as (peer, what), or None."""
        if self.store is None or not self.store.check([f"waits/{rank}"]):
            return None
        entry = self.store.get(f"waits/{rank}").decode()
        if not entry:
            return None
        peer, what = entry.split(" ", 1)
        return int(peer), what

    def explain_silence(self, wait):
        """The sentence for a wait that took longer than the timeout, and the rank that caused it.

        In a deadlock there is no such rank; it is then None.
        """
        text = f"rank {self.rank} waited {self.timeout:g} s for {wait.what} from rank {wait.peer}"
        # The process that does not answer may keep the store: do not wait for the store, too.
        chain, complete = [], threading.Event()
        threading.Thread(
            target=self._follow_waits, args=(wait.peer, chain, complete), daemon=True
        ).start()
        complete.wait(STORE_TIMEOUT)
        text += "".join(f", which waits for {what} from rank {peer}" for peer, what in chain)
        last = chain[-1][0] if chain else wait.peer
        if last in [self.rank, wait.peer, *(peer for peer, _ in chain[:-1])] and chain:
            return f"{text}: a deadlock, each of these ranks waits for the next", None
        if not complete.is_set() and last != 0 and not launcher_keeps_the_store():
            return f"{text}: rank 0, which keeps the common store, has stopped answering", 0
        return f"{text}: rank {last} has stopped answering", last

    def _follow_waits(self, rank, chain, complete):
        seen = [self.rank]
        with suppress(RuntimeError):  # without the store, the chain known so far is used
            while rank not in seen and (further := self.announced_by(rank)):
                seen.append(rank)
                chain.append(further)
                self.pending[rank] = self.store.get(f"pending/{rank}").decode()
                rank = further[0]
            complete.set()

    def end_rank(self, rank):
        """End a silent rank if it is on this machine."""
        end_siblings([self.processes[rank]] if rank in self.processes else [])

    def explain_loss(self, peer, what, error):
        """The sentence for a connection that broke during a wait, in place of the job's own."""
        try:
            before = self.announced_by(peer)
            self.announce(Wait(peer, what, 0.0))
        except RuntimeError:
            before = None
        reason = f"rank {peer} itself had been waiting for rank {before[0]}" if before else error
        return text_of_loss(self.rank, peer, what, reason)


def text_of_pending():
    """The texts of this rank's pending operations at this moment, or ""."""
    return "; ".join(filter(None, (text() for text in pending_texts)))


def device_mark():
    """An event in the device's queue, behind all work that this rank has issued so far."""
    mark = torch.cuda.Event()
    mark.record()
    return mark


def flight_record(backend):
    """torch's record of a backend's last operations, as JSON; each backend has its own record."""
    from torch._C import _distributed_c10d as recorders

    if backend == "gloo":
        return recorders._dump_fr_trace_json()
    record = recorders._dump_nccl_trace_json()
    if b'"entries"' not in record:
        with suppress(TypeError):  # torch 2.15 has another NCCL backend under the same name
            return recorders._dump_fr_trace_json(backend="nccl2")
    return record
