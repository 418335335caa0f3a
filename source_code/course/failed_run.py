"""What a failed run said last: its ranks' own words, and which rank is to blame."""

import re
import signal


class RunFailed(RuntimeError):
    """A run that ended with an error; the text is what its ranks said last.

    `output` is what it had printed before.
    """

    output = ""

    def _render_traceback_(self):
        """The lines that a notebook shows: the words of the ranks, not the way to them."""
        return [f"{type(self).__name__}: {self}"]


def readable_errors(errors):
    """The ranks' own words, without torch's warnings and torchrun's report about them."""
    cut = [i for i, line in enumerate(errors) if re.match(r"[EW]\d{4} .*torch/distributed", line)]
    said = "".join(errors[: cut[0]] if cut else errors)
    said = re.sub(r"^\[rank\d+\]:\[W.*?(\n\n|\Z)", "", said, flags=re.MULTILINE | re.DOTALL)
    return said or "".join(errors[-30:])


def failed_rank(errors):
    """The rank that failed first, from torchrun's report, in a sentence; None without a report."""
    failed = re.findall(
        r"^ +rank +: (\d+) .*\n +exitcode +: (-?\d+)", "".join(errors), re.MULTILINE
    )
    codes = {int(rank): int(code) for rank, code in failed}  # the root cause comes last
    # What torchrun ends, it ends with SIGTERM. Another signal came from outside, and the exit
    # statuses of the other ranks are what it led to.
    killed = [rank for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM]
    rank = killed[0] if killed else next(reversed(codes), None)
    return None if rank is None else how_it_ended(rank, codes[rank])


def how_it_ended(rank, code):
    """A rank's exit status, or the signal that ended it, in a sentence."""
    if code < 0:
        return f"rank {rank} was ended by {signal.Signals(-code).name}"
    return f"rank {rank} ended with exit status {code}"
