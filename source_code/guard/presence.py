# SPDX-License-Identifier: Apache-2.0
"""Guards the joining of a job: a missing, stopped or different rank ends the job and is named.

A thread of every rank writes signs of life into the store; a stopped process writes none. During
the whole run, the thread also ends its rank when the launcher is gone.
"""

import os
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial

import torch.distributed as dist

from guard.agreement import Disagreement, Missing, agree, ranks_text
from guard.ending import end_process, lack_of_memory, name_losses
from guard.meeting import find_store, launcher_keeps_the_store
from guard.siblings import end_siblings, launcher_lives, stopped_among
from guard.watch import attach_watch
from pipeline.job import GRACE, SLOW_START

SIGN_OF_LIFE = 0.25  # seconds between two signs
SILENCE = 2.0  # seconds without a sign, after which a rank counts as silent


@contextmanager
def guarded_meeting(job, settings=None):
    """A context that replaces job.py's `meet`: ranks agree on `settings` and open their channels.

    Sets `job.processes`, {rank: process id} of the ranks on this machine, and `job.watch`, which
    has been started when the context ends.
    """
    presence = Presence(job.rank, job.num_ranks, job.timeout)
    presence.start()
    name_losses(job)
    job.store, job.processes = find_store(job), {}
    limit = max(job.timeout, SLOW_START)
    try:
        if job.num_ranks > 1:
            presence.begin(job.store)
            job.processes = presence.processes = agree(
                job.store, job.rank, job.num_ranks, settings or {}, limit, presence.arrived
            )
        yield
        attach_watch(job)
    except Missing as error:
        end_process(
            f"rank {job.rank} waited {limit:g} s for {error} to start; look at what was printed there"
        )
    except RuntimeError as error:  # the only common base class of torch's and gloo's errors
        presence.explain_failure(error)
    except Disagreement as error:
        presence.store = None
        leave_together(job)
        raise SystemExit(str(error)) from None
    finally:
        presence.end_joining()


def leave_together(job):
    """Let rank 0, which may keep the store, leave last; it waits for the others at most GRACE."""
    with suppress(RuntimeError):
        job.store.add("leaving", 1)
        deadline = time.monotonic() + GRACE
        while (
            job.rank == 0
            and job.store.add("leaving", 0) < job.num_ranks
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)


class Presence(threading.Thread):
    """Ends this rank when its launcher is gone and, while it joins, when another rank is lost."""

    def __init__(self, rank, num_ranks, timeout):
        super().__init__(daemon=True, name="presence")
        self.rank, self.num_ranks, self.timeout = rank, num_ranks, timeout
        self.parent = os.getppid()
        self.store = None  # the store, while this rank joins
        self.signs = self.asked = self.joined = None  # connections to the store
        self.arrived = set()  # the ranks whose settings this rank has read
        self.processes = {}  # rank -> process id, of the ranks on this machine
        self.looking = threading.Lock()

    def begin(self, store):
        """Write signs of life into `store` from now on."""
        # Separate connections for writing and reading: one that waits cannot be used meanwhile.
        self.signs, self.asked, self.joined = (
            dist.PrefixStore("presence", store.clone()) for _ in range(3)
        )
        self.signs.set(str(self.rank), "0")
        self.began, self.store = time.monotonic(), store

    def end_joining(self):
        """Announce that this rank has joined, and write no more signs."""
        self.store = None
        with suppress(RuntimeError):  # a lost store is noticed at its next use
            if self.joined:
                self.joined.set(f"joined/{self.rank}", "")

    def waits_too_long(self):
        return self.store is not None and time.monotonic() - self.began > self.timeout

    def run(self):
        """The thread's loop: check a few times per second whether the others still exist."""
        count, gives_signs = 0, True
        while launcher_lives(self.parent):
            if self.store is not None and gives_signs:
                count += 1
                try:
                    self.signs.set(str(self.rank), str(count))
                except RuntimeError:
                    gives_signs = False  # the store is gone; this rank's next use of it fails
            if self.waits_too_long() and not self.looking.locked():
                threading.Thread(target=self.look_at_others, daemon=True).start()
            time.sleep(SIGN_OF_LIFE)
        os._exit(1)

    def look_at_others(self):
        """End this rank and silent ones. It runs in its own thread, so that the signs continue."""
        with self.looking:
            silent, waited = self.find_silent(), f"rank {self.rank} waited {self.timeout:g} s for"
            missing = sorted(set(range(self.num_ranks)) - self.arrived)
            stopped, processes = stopped_among(missing) if missing else ("", [])
            if not self.waits_too_long():
                return
            if silent:
                who = ranks_text(silent)
                self.end(f"{waited} {who} to join: {who} stopped answering", silent)
            elif stopped:
                who = ranks_text(missing)
                end_process(f"{waited} {who} to start: {stopped}", partial(end_siblings, processes))

    def explain_failure(self, error):
        """End this rank with the sentence for an error during joining."""
        if lack_of_memory(error):
            raise error
        reason = str(error).splitlines()[0].split("] ", 1)[-1]
        silent = self.find_silent()
        who = ranks_text(silent) if silent else "the other ranks"
        failed = f"join {who}" if self.num_ranks > 1 else "open a connection"
        advice = (
            "" if silent else "; look at the network, and at the variables GLOO_... and NCCL_..."
        )
        self.end(f"rank {self.rank} could not {failed} ({reason}){advice}", silent)

    def end(self, sentence, silent):
        """End this rank, and silent ranks of this machine, which ignore a launcher's request."""

        def leave():
            if 0 in (self.rank, *silent):  # others may still read from the store of rank 0
                time.sleep(SILENCE)
            end_siblings(self.processes[rank] for rank in silent if rank in self.processes)

        end_process(sentence, leave)

    def find_silent(self):
        """The ranks that have not joined and write no sign of life for SILENCE seconds."""
        before, after, answered = {}, {}, threading.Event()

        def ask():  # in a thread, since a store that does not answer blocks the caller
            with suppress(RuntimeError):
                before.update(self.signs_in(self.asked))
                time.sleep(SILENCE)
                after.update(self.signs_in(self.asked))
                answered.set()

        if self.asked:
            threading.Thread(target=ask, daemon=True).start()
        if self.asked and answered.wait(SILENCE + 1.0):
            return [rank for rank in after if rank != self.rank and after[rank] == before.get(rank)]
        return [] if launcher_keeps_the_store() or self.rank == 0 else [0]

    def signs_in(self, store):
        """{rank: its last sign} of the ranks that have begun to join and have not joined yet."""
        joining = [
            rank
            for rank in range(self.num_ranks)
            if store.check([str(rank)]) and not store.check([f"joined/{rank}"])
        ]
        return {rank: store.get(str(rank)) for rank in joining}
