"""Follows one step of a run with torch.profiler and makes one trace of what all ranks recorded.

Each rank's profiler has the clock of its own machine. The recorder's clock is shared, and both see
the same actions: the traces are moved so that the ends of the actions agree.
"""

import json
import os
import statistics
import tempfile

from pipeline.distributed import gather, waiting_for_all

MICROSECONDS = 1000  # in a millisecond, which is what the recorder counts in


class StepProfiler:
    """Profiles one pass through the schedule on every rank; `--profile FILE` of the scripts.

    It is the one that follows the first `passes_before`. The recorder calls `pass_ended`.
    """

    def __init__(self, job, recorder, passes_before):
        self.job, self.recorder = job, recorder
        self.passes_left = passes_before
        self.rows = None
        if not passes_before:
            self.start()

    def pass_ended(self, events):
        """Begin or end if it is time; `events` are the recorder's of the pass that has ended."""
        if self.passes_left == 0:
            self.stop(events)
        elif self.passes_left == 1:
            self.start()
        self.passes_left -= 1

    def start(self):
        """Begin, on all ranks together: the first use of the profiler takes most of a second."""
        import torch  # only a profiled run pays for the profiler
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self.job.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.profile = profile(activities=activities)
        self.profile.start()
        self.recorder.annotate = True
        if self.job.num_ranks > 1:
            with waiting_for_all(self.job, "the start of the profiler"):
                torch.distributed.barrier()

    def stop(self, events):
        """End, and keep this rank's rows of the trace; `events` are the recorder's."""
        self.profile.stop()
        self.recorder.annotate = False
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "trace.json")
            self.profile.export_chrome_trace(file)
            with open(file) as text:
                rows = json.load(text)["traceEvents"]
        self.rows = rows_on_shared_clock(rows, events, self.job.rank)

    def trace(self):
        """All ranks' rows as one Chrome trace, on rank 0; None elsewhere.

        None too when the run ended before the pass that was to be profiled.
        """
        ranks = gather(self.job, self.rows)
        if ranks is None or self.rows is None:
            return None
        names = [
            {"ph": "M", "name": name, "pid": rank, "args": args}
            for rank, node in enumerate(self.job.nodes)
            for name, args in (
                ("process_name", {"name": f"rank {rank} on {node}"}),
                ("process_sort_index", {"sort_index": rank}),
            )
        ]
        rows = names + [row for rank in ranks for row in rank]
        return json.dumps({"displayTimeUnit": "ms", "traceEvents": rows}) + "\n"


def rows_on_shared_clock(rows, events, rank):
    """What lasted in a trace of torch.profiler, moved to the clock of the recorder's `events`.

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
    """Whether a row is one of the schedule's actions, which the recorder marks."""
    return row.get("cat") == "user_annotation" and row["name"][:1].isdigit()
