"""What is in memory according to torch's allocator, to check what the course counts.

The course counts with hooks which tensors autograd keeps. torch's allocator knows nothing of
autograd; it sees each piece of memory come and go, whoever keeps it, and torch.profiler notes that.
"""

import json
import tempfile
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function


class Allocator:
    """A context around work on the CPU: the bytes that are allocated in it and not yet freed.

    `peak` is their maximum, and `at[name]` their number when `mark(name)` was called; both are set
    at the end of the context.
    """

    def __enter__(self):
        self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.profile.start()
        return self

    def mark(self, name):
        with record_function(f"mark {name}"):
            pass

    def __exit__(self, *_):
        self.profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            self.profile.export_chrome_trace(str(file))
            rows = json.loads(file.read_text())["traceEvents"]
        self.at, self.peak = {}, 0
        there, now = {}, 0  # address -> bytes, and their sum
        for row in sorted((row for row in rows if "ts" in row), key=lambda row: row["ts"]):
            if row["name"] == "[memory]":
                address, size = row["args"]["Addr"], row["args"]["Bytes"]
                # What was allocated before the context may be freed in it, and does not count.
                if size > 0:
                    there[address] = size
                    now += size
                else:
                    now -= there.pop(address, 0)
                self.peak = max(self.peak, now)
            elif row["name"].startswith("mark "):
                self.at[row["name"].removeprefix("mark ")] = now
