"""Runs a test's function on several real ranks, so that `join_job()` works in it.

The ranks are those of course/launch.py: forked from a server that has imported torch,
with the environment variables that torchrun sets. Each of them runs this file as its script.
"""

import os
import pickle
import sys
import tempfile
import traceback
from pathlib import Path

from course.followed_run import follow
from course.launch import PRELOAD, WarmRanks

# The server starts with the first run, not while files are collected (as warm_up() at the top of a
# file would do), so it has what each file adds to PRELOAD. First come the imports of a rank: the
# files with its functions need pytest, the optimizers of torch.optim need the compiler, and lesson
# 07 saves.
PRELOAD.extend(["pytest", "torch._dynamo", "torch.distributed.checkpoint"])
# And what the scripts import of the course: a tenth of a second on every rank that they start.
PRELOAD.extend(["distributed_checkpointing", "finetune", "inference", "pipedream"])
PRELOAD.extend(["pretrain_llama", "tensor_parallel", "train", "vocabulary_parallel"])


def run_on_ranks(function, num_ranks, *args, timeout=60):
    """What `function(rank, *args)` returns on each of `num_ranks` processes, as a list.

    `function` stands at the top level of a module; arguments and results are pickled. Raises
    RunFailed (course/failed_run.py) with the traceback of a rank that failed, or when the
    ranks have not ended after `timeout` seconds. In every case it leaves no rank running.
    """
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "call").write_bytes(pickle.dumps((function, args)))
        ranks = WarmRanks(Path(__file__), [str(folder)], num_ranks)
        try:
            follow(ranks, show=False, limit=timeout)
        finally:
            ranks.end()
        return [pickle.loads((folder / f"result {rank}").read_bytes()) for rank in range(num_ranks)]


def be_a_rank(folder):
    """In a rank's process: make the call and leave what it returned, or print how it failed."""
    rank = int(os.environ["RANK"])
    try:
        function, args = pickle.loads((folder / "call").read_bytes())
        result = pickle.dumps(function(rank, *args))
    except Exception:
        # In one write, so that the words of several ranks do not mix.
        os.write(2, f"rank {rank}: {traceback.format_exc()}".encode())
        return 1
    (folder / f"result {rank}").write_bytes(result)
    return 0


if __name__ == "__main__":
    sys.exit(be_a_rank(Path(sys.argv[1])))
