# SPDX-License-Identifier: Apache-2.0
"""Profiles one step of a run with torch.profiler and joins the traces of all ranks.

Each rank's profiler uses the clock of its machine, and the lab's clock is shared. Both record the
same actions, so the traces are shifted until the ends of the actions agree.
"""

import errno
import json
import os
import statistics
import tempfile
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from files.outputs import say_not_written, to_json
from pipeline.collectives import gather

MICROSECONDS = 1000  # in a millisecond, which is what the lab's clock counts in


class Profile:
    """Profiles one pass through the schedule on every rank; `--profile FILE` of the scripts.

    It is the pass after the first `passes_before` passes. `clock` is this rank's Clock.
    """

    def __init__(self, job, clock, passes_before):
        self.job, self.clock, self.passes_left = job, clock, passes_before
        self.profile, self.rows = None, None

    @contextmanager
    def acting(self, work):
        """Name the action in the profiled trace."""
        if self.profile is None:
            yield
            return
        with record_function(str(work.action)):
            yield

    def begin(self):
        """Start if the first pass is to be profiled; every rank calls it before that pass."""
        if self.passes_left == 0:
            self.start()

    def pass_ended(self):
        """Start or stop the profiler if the next or the ended pass is the one to profile."""
        if self.passes_left == 0:
            self.stop()
        elif self.passes_left == 1:
            self.start()
        self.passes_left -= 1

    def start(self):
        """Start, then wait for all ranks: the first use of the profiler takes most of a second."""
        activities = [ProfilerActivity.CPU]
        if self.job.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.profile = profile(activities=activities)
        self.profile.start()
        if self.job.num_ranks > 1:
            with self.job.waiting_for_all("the start of the profiler"):
                torch.distributed.barrier()

    def stop(self):
        """Stop, and keep this rank's rows of the trace, if there is room for its temporary file."""
        profile, self.profile = self.profile, None
        profile.stop()
        try:
            with tempfile.TemporaryDirectory() as folder:
                file = os.path.join(folder, "trace.json")
                profile.export_chrome_trace(file)
                with open(file, encoding="utf-8") as text:
                    rows = json.load(text)["traceEvents"]
        except (OSError, ValueError):  # torch does not report that its file is missing or cut off
            reason = OSError(errno.ENOSPC, "its temporary file had no room; set TMPDIR")
            say_not_written("--profile", f"of rank {self.job.rank}", reason)
            return
        self.rows = rows_on_shared_clock(rows, self.clock.passes[-1], self.job.rank)

    def trace(self, nodes):
        """All ranks' rows as one Chrome trace, on rank 0; None elsewhere.

        `nodes` has the name of each rank's node. Also None if the run ended before the pass to
        profile.
        """
        ranks = gather(self.job, self.rows)
        if ranks is None or self.rows is None:
            return None
        names = [
            {"ph": "M", "name": name, "pid": rank, "args": args}
            for rank, node in enumerate(nodes)
            for name, args in (
                ("process_name", {"name": f"rank {rank} on {node}"}),
                ("process_sort_index", {"sort_index": rank}),
            )
        ]
        rows = names + [row for rank in ranks for row in rank or ()]
        return to_json({"displayTimeUnit": "ms", "traceEvents": rows}) + "\n"


def rows_on_shared_clock(rows, events, rank):
    """The rows with a duration in a trace of torch.profiler, shifted to the clock of `events`.

    Times in a trace are in microseconds, those of events in milliseconds. A row's process becomes
    its rank, so that the rows of all ranks can lie in one file.
    """
    lasted = [row for row in rows if row.get("ph") == "X" and "dur" in row]
    ended = {row["name"]: row["ts"] + row["dur"] for row in lasted if is_action(row)}
    shift = statistics.median(
        event.end * MICROSECONDS - ended[str(event.action)]
        for event in events
        if str(event.action) in ended
    )
    return [{**row, "pid": rank, "ts": row["ts"] + shift} for row in lasted]


def is_action(row):
    """Whether a row is one of the schedule's actions, which Profile names."""
    return row.get("cat") == "user_annotation" and row["name"][:1].isdigit()
