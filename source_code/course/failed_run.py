# SPDX-License-Identifier: Apache-2.0
"""Describes a failed run: the error messages of its ranks, and the rank that failed first."""

import re
import signal


class RunFailed(RuntimeError):
    """A run ended with an error; the text has the error messages of its ranks.

    `output` is what the run had printed before.
    """

    output = ""

    def _render_traceback_(self):
        """The lines that a notebook shows: the error messages of the ranks, without a traceback."""
        return [f"{type(self).__name__}: {self}"]


def readable_errors(errors):
    """The error messages of the ranks, without torch's warnings and torchrun's report."""
    errors = list(errors)
    cut = [i for i, line in enumerate(errors) if re.match(r"[EW]\d{4} .*torch/distributed", line)]
    said = "".join(errors[: cut[0]] if cut else errors)
    said = re.sub(r"^\[rank\d+\]:\[W.*?(\n\n|\Z)", "", said, flags=re.MULTILINE | re.DOTALL)
    return said or "".join(errors[-30:])


def failed_rank(errors):
    """A sentence that names the rank that failed first in torchrun's report; None without one."""
    failed = re.findall(
        r"^ +rank +: (\d+) .*\n +exitcode +: (-?\d+)", "".join(errors), re.MULTILINE
    )
    codes = {int(rank): int(code) for rank, code in failed}  # the root cause comes last
    # torchrun ends ranks with SIGTERM. Any other signal came from outside, and it is the cause of
    # the exit statuses of the other ranks.
    killed = [rank for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM]
    rank = killed[0] if killed else next(reversed(codes), None)
    return None if rank is None else how_it_ended(rank, codes[rank])


def how_it_ended(rank, code):
    """A rank's exit status, or the signal that ended it, in a sentence."""
    if code < 0:
        return f"rank {rank} was ended by {signal.Signals(-code).name}"
    return f"rank {rank} ended with exit status {code}"
