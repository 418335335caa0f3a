"""Knows when to give up: a rank that waits too long ends the job and says for whom it waited.

A watch is a thread of every rank. Before a rank blocks on a message it tells the watch what it
waits for. After half of the timeout the watch writes that into the store that all ranks share;
after the whole timeout it follows who waits for whom to the rank that waits for nobody, names it,
and ends the process. It also ends the process when whoever started it is gone, so that no rank
outlives its launcher.
"""

import os
import sys
import threading
import time
from contextlib import contextmanager
from typing import NamedTuple

LAUNCHER_VARIABLE = "PIPELINE_LAUNCHER"  # process id of a launcher on this machine


class Wait(NamedTuple):
    peer: int
    what: str
    since: float


class Watch(threading.Thread):
    """Watches one rank. `store` is a key-value store shared by all ranks, or None."""

    def __init__(self, rank, timeout, store=None):
        super().__init__(daemon=True, name="watch")
        self.rank = rank
        self.timeout = timeout
        self.store = store
        self.wait = None
        self.announced = None
        self.parent = os.getppid()
        self.launcher = int(os.environ.get(LAUNCHER_VARIABLE, "0"))
        self.stopped = threading.Event()

    @contextmanager
    def waiting_for(self, peer, what):
        """Around every call that blocks until rank `peer` does something."""
        self.wait = Wait(peer, what, time.monotonic())
        try:
            yield
        except RuntimeError as error:  # the transport lost the other side
            end_process(self.explain_loss(peer, what, error))
        finally:
            self.wait = None

    def run(self):
        while not self.stopped.wait(min(0.25, self.timeout / 20)):
            if not self._launcher_lives():
                os._exit(1)
            wait = self.wait
            if wait is None:
                continue
            waited = time.monotonic() - wait.since
            if waited > self.timeout:
                end_process(self.explain_silence(wait))
            if waited > self.timeout / 2 and self.announced != wait:
                self.announce(wait.peer, wait.what)
                self.announced = wait

    def stop(self):
        self.stopped.set()

    def _launcher_lives(self):
        if os.getppid() != self.parent:
            return False
        if not self.launcher:
            return True
        try:
            os.kill(self.launcher, 0)
        except ProcessLookupError:
            return False
        return True

    def announce(self, peer, what):
        """Tell the other ranks for whom this one waits."""
        if self.store is not None:
            self.store.set(f"waits/{self.rank}", f"{peer} {what}")

    def announced_by(self, rank):
        """What rank `rank` has announced, as (peer, what), or None."""
        if self.store is None or not self.store.check([f"waits/{rank}"]):
            return None
        peer, what = self.store.get(f"waits/{rank}").decode().split(" ", 1)
        return int(peer), what

    def explain_silence(self, wait):
        """The sentence for a wait that took longer than the timeout."""
        text = f"rank {self.rank} waited {self.timeout:g} s for {wait.what} from rank {wait.peer}"
        # The store may live in the very process that does not answer: give it two seconds.
        chain = []
        reader = threading.Thread(target=self._follow_waits, args=(wait.peer, chain), daemon=True)
        reader.start()
        reader.join(2)
        text += "".join(f", which waits for {what} from rank {peer}" for peer, what in chain)
        last = chain[-1][0] if chain else wait.peer
        if last in [self.rank, wait.peer, *(peer for peer, _ in chain[:-1])] and chain:
            return f"{text}: a deadlock, each of these ranks waits for the next"
        return f"{text}: rank {last} has stopped answering"

    def _follow_waits(self, rank, chain):
        seen = [self.rank]
        try:
            while rank not in seen and (further := self.announced_by(rank)):
                seen.append(rank)
                chain.append(further)
                rank = further[0]
        except RuntimeError:
            pass  # the store is gone, too: what is known so far has to do

    def explain_loss(self, peer, what, error):
        """The sentence for a connection that broke during a wait."""
        text = f"rank {self.rank} lost rank {peer} while waiting for {what}"
        try:
            before = self.announced_by(peer)
            self.announce(peer, what)
        except RuntimeError:
            before = None
        if before:
            return f"{text} (rank {peer} itself had been waiting for rank {before[0]})"
        return f"{text} ({str(error).splitlines()[0]})"


def end_process(sentence):
    """Print one sentence and leave at once, without waiting for any other rank."""
    print(sentence, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)
