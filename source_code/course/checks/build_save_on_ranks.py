# SPDX-License-Identifier: Apache-2.0
"""Trains two ranks with a reader's save and restore, and kills one of them; see build_save.py.

The request has the folder to save into, the number of steps, and the moment of the SIGKILL: a rank,
a save counted from 0, and the operation before which it comes.
"""

import operator
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # noqa: F401 - the first optimizer would import it in the reader's own time
import torch.distributed as dist

from course.building.messages import tell
from small.pipeline import batch, build_stage, naive_step

LATER = 0.2  # seconds before the SIGKILL, in which the other rank continues as far as it can
SLOW = 0.05  # seconds, see `slowness`
REMOVALS = {"os.remove", "os.rmdir", "shutil.rmtree"}
CHANGES = {"open", "os.rename", "os.mkdir", "os.link", "os.symlink", *REMOVALS}


def main(request, save, restore):
    """Restore, train and save after each step; report the loss of each step."""
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), Path(request["folder"])
    model = build_stage(rank, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    moment = Moment(rank, folder, *request["kill"])
    first = whole_number(restore(folder, model, optimizer, rank))
    tell("report", value={"rank": rank, "starts": first})
    for step in range(first, request["steps"]):
        optimizer.zero_grad()
        loss = naive_step(model, *batch(step))
        optimizer.step()
        tell("report", value={"rank": rank, "step": step, "loss": loss})
        with moment:
            save(folder, step + 1, model, optimizer, rank, moment.wait_for_all)
            moment.passes("end")
        tell("report", value={"rank": rank, "saved": step + 1})


def whole_number(step):
    """`step` as an int, also from numpy or torch; a short text if it is not a whole number."""
    try:
        return operator.index(step)
    except TypeError:
        return repr(step)[:80]


class Moment:
    """Sends this rank SIGKILL in a save: `before` is one of "write", "half", "rename", "opened",
    "removed" and "end", or a number.

    A number from 0 to 1 is a share of the operations of the previous save, "rename" stands for the
    last rename of a save, and "removed" for the moment after its first removals. `did` lists the
    operations of the present save so far.
    """

    def __init__(self, rank, folder, killed, save, before):
        self.rank, self.wanted = rank, killed == rank
        self.folder, self.save, self.before = os.path.realpath(folder), save, before
        self.saves, self.did, self.last, self.inside = -1, [], [], False
        sys.addaudithook(self.audit)
        self.torch_save, torch.save = torch.save, self.save_with_torch

    def __enter__(self):
        self.saves, self.last, self.did, self.inside = self.saves + 1, self.did, [], True

    def __exit__(self, *error):
        self.inside = False

    def audit(self, event, arguments):
        """Python's audit hook: called before each operation on a file."""
        if not self.inside or event not in CHANGES or not arguments:
            return
        if event == "open" and not is_for_writing(arguments):
            return
        if self.is_own(arguments[0]):
            if event == "open" and empties(arguments):
                self.opened(arguments[0])
            self.passes({"os.rename": "rename", "open": "write"}.get(event, event))

    def opened(self, path):
        """Note, before it happens, that opening an existing file empties it."""
        if self.is_due("opened"):
            os.truncate(path, 0)
            self.kill("opened")
        self.did.append("opened")

    def save_with_torch(self, value, file, *arguments, **options):
        """Stands in for torch.save, whose file is written in C++ and raises no audit event."""
        named = isinstance(file, (str, os.PathLike))
        if self.inside and named and self.is_own(file):
            self.passes("write")
        self.inside, before = False, self.inside
        self.torch_save(value, file, *arguments, **options)
        self.inside = before
        if self.inside and self.is_due("half"):
            if named:
                os.truncate(file, os.path.getsize(file) // 2)
            self.kill("half" if named else "in the middle")
        self.did.append("half")

    def wait_for_all(self):
        """A barrier for the reader's functions: returns when both ranks have called it."""
        self.passes("wait")
        dist.barrier()

    def is_own(self, path):
        try:
            return os.path.realpath(os.fsdecode(path)).startswith(self.folder)
        except TypeError:
            return False

    def passes(self, what):
        """Note that operation `what` comes next, and kill this rank if this is the moment."""
        if self.is_due(what):
            self.kill("removed" if self.has_removed(what) else what)
        self.did.append(what)
        time.sleep(SLOW * self.slowness(what))

    def slowness(self, what):
        """How slow this rank is before an operation, so that races of the ranks always end alike.

        In the first save, no rank renames before the other has written what it writes without a
        wait, and rank 0 is first. In the third save, rank 1 is slow before every operation.
        """
        if self.saves == 0 and what == "rename":
            return 1 + self.rank
        return self.rank if self.saves == 2 else 0

    def is_due(self, what):
        """Whether this is the moment of the SIGKILL, if operation `what` comes next."""
        if not self.wanted or self.saves != self.save:
            return False
        before = self.before
        if isinstance(before, float):
            return len(self.did) == int(before * len(self.last))
        if before == "removed" and REMOVALS & {*self.last, *self.did}:
            return self.has_removed(what)
        if before == "rename" and self.did.count(before) < self.last.count(before) - 1:
            return False
        missing = before not in self.last  # the reader's save has no such operation
        return what == before or (missing and what == "end")

    def has_removed(self, what):
        """Whether operation `what` comes right after removals, and is none itself."""
        return bool(self.did) and self.did[-1] in REMOVALS and what not in REMOVALS

    def kill(self, what):
        """Report the operation before which this SIGKILL comes, and send it."""
        self.inside = False
        tell("report", value={"rank": self.rank, "killed": what})
        time.sleep(LATER)
        os.kill(os.getpid(), signal.SIGKILL)


def is_for_writing(arguments):
    """Whether the arguments of an audit event "open" name a file to be written."""
    _, mode, flags = arguments
    return bool(set(mode or "") & set("wax+")) or bool((flags or 0) & (os.O_WRONLY | os.O_RDWR))


def empties(arguments):
    """Whether the arguments of an audit event "open" name a file with content that is overwritten."""
    path, mode, flags = arguments
    truncates = "w" in (mode or "") or (flags or 0) & os.O_TRUNC
    return bool(truncates) and os.path.isfile(path) and os.path.getsize(path) > 0
