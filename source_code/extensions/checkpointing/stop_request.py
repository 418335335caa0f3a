# SPDX-License-Identifier: Apache-2.0
"""A signal that asks a job to stop while there is time to save.

SLURM sends SIGTERM before it ends a job at its time limit, and with `sbatch --signal=USR1@120`
SIGUSR1 two minutes before. A rank that receives either one finishes its current step. The signal
may reach one rank before another, or one rank only. So after each step all ranks exchange whether
any of them received one. If so, all stop after the same step, save the training, and exit with
status STOPPED, or with 0 under torchrun.
"""

import os
import signal

import torch
import torch.distributed as dist

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: not finished, start it again
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]


def status_when_stopped():
    """Return STOPPED, or 0 under torchrun, which reports any other status as 1, in 85 lines."""
    return 0 if "TORCHELASTIC_RUN_ID" in os.environ else STOPPED


class StopRequest:
    """Handles the signals once it is created, which must happen in the process's main thread."""

    def __init__(self):
        self.received = 0  # the number of the signal
        for number in SIGNALS:
            signal.signal(number, self.note)

    def note(self, number, frame):
        self.received = number

    def agreed(self, job):
        """The signal that any rank has received, or None. All ranks call it, after each step."""
        received = torch.tensor(self.received)
        if job.num_ranks > 1:
            with job.waiting_for_all("the end of the step"):
                dist.all_reduce(received, dist.ReduceOp.MAX)
        return signal.Signals(received.item()) if received else None
