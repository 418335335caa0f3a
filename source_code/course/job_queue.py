# SPDX-License-Identifier: Apache-2.0
"""Measures how long a job of lesson 11 has waited in SLURM's queue, and how long it has run."""

import time

WAITING = ("PENDING", "CONFIGURING", "REQUEUED")  # SLURM's states of a job without its nodes
HINT_AFTER = 30.0  # seconds in the queue
HINT = (
    "the job still waits, for the reason in brackets. Wait with it, or interrupt this cell (the "
    "square): the lesson then goes on with recorded output."
)


class QueueWatch:
    """Prints the changes of a job's state, and raises an error when the job runs for too long.

    `ask` returns the answer of squeue: a state and a reason, "" for a job that is not listed.
    `limit` is in seconds and counts from the moment at which the job has its nodes. With `quiet`,
    only a waiting job is shown, and only after that many seconds.
    """

    def __init__(self, ask, limit, job="", quiet=None):
        self.ask, self.limit, self.job, self.quiet = ask, limit, job, quiet
        self.begun = time.monotonic()
        self.last = self.shown = ""  # the last answer of squeue
        self.runs_since = None
        self.next_look = 0.0
        self.hint_is_due = True

    @property
    def is_waiting(self):
        return self.last.startswith(WAITING)

    def look(self):
        """The answer of squeue, "" after the end. Raises TimeoutError if the job has run too long.

        SLURM is asked twice per second at first, then less and less often, since one controller
        may serve a whole classroom.
        """
        now = time.monotonic()
        if now < self.next_look:
            return self.last
        self.last = self.ask()
        waited = now - self.begun
        self.next_look = time.monotonic() + min(2.0, max(0.5, waited / 20))
        self._show(waited)
        if self.is_waiting:
            self.runs_since = None
        elif self.runs_since is None:
            self.runs_since = now
        elif self.last and now - self.runs_since > self.limit:
            raise TimeoutError(f"job {self.job} has not ended within {self.limit} s")
        return self.last

    def _show(self, waited):
        is_worth_it = self.quiet is None or (self.is_waiting and waited > self.quiet)
        if is_worth_it and self.last != self.shown:
            print(f"{waited:5.1f} s  job {self.job}  {self.last or 'has ended'}")
            self.shown = self.last
        if self.is_waiting and self.hint_is_due and waited > HINT_AFTER:
            print(f"{waited:5.1f} s  {HINT}")
            self.hint_is_due = False
