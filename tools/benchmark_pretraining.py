"""Runs pretrain_llama.py, and a plain loop that trains the same model, for benchmark.py.

It measures the CPU seconds of all threads of all ranks, from the end of one step to the end of the
next. Other programs on the same cores change CPU seconds much less than elapsed time.
"""

import os
import shlex
import statistics
import sys
import time
from unittest import mock

import plain_loop
import pretrain_llama
from ranks import run_on_ranks

from extensions.pretraining.metrics import Metrics

SIZES = (
    "--layers 8 --dim 256 --heads 8 --kv-heads 4 --vocabulary 256 --seq-len 128 --batch-size 16 "
    "--microbatches 8 --dtype float32 --device cpu --evaluate-windows 8"
)
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
LIMIT = 240  # seconds that any one run may take
RUNS = {  # name: (what each rank runs, how many ranks)
    "a plain loop": (plain_loop, 1),
    "pretrain_llama.py, one rank": (pretrain_llama, 1),
    "pretrain_llama.py, two ranks": (pretrain_llama, 2),
    "two plain loops at once": (plain_loop, 2),
}


def seconds_after_steps(rank, name, flags):
    """The CPU seconds of this rank after each step of a script in RUNS."""
    script, _ = RUNS[name]
    seconds = []
    end_step = Metrics.end_step

    def end_step_and_note(*arguments):
        end_step(*arguments)
        seconds.append(time.process_time())

    environment = ALONE if script is plain_loop else {}
    with (
        mock.patch.object(Metrics, "end_step", end_step_and_note),
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", [script.__name__, *shlex.split(flags)]),
    ):
        script.main()
    return seconds


def microseconds_per_token(name, steps=5):
    """CPU microseconds per token, the median of all steps except the first; of one of two loops."""
    script, ranks = RUNS[name]
    rows = run_on_ranks(seconds_after_steps, ranks, name, f"{SIZES} --steps {steps}", timeout=LIMIT)
    if script is plain_loop:
        rows = rows[:1]
    totals = [sum(moments) for moments in zip(*rows)]
    gaps = [after - before for before, after in zip(totals, totals[1:])]
    return statistics.median(gaps) / (16 * 128) * 1e6
