"""What benchmark.py lets ranks do: pretrain_llama.py, and a plain loop that trains the same model.

Counted are the processor's seconds, of all threads of all ranks, from the end of one step to that of
the next. Other programs on the same cores change them much less than the time on the clock.
"""

import shlex
import statistics
import sys
import time
from unittest import mock

import pretrain_llama
import torch
from ranks import run_on_ranks
from torch.nn.utils import clip_grad_norm_

from pipeline.model import token_loss
from pipeline.one_process import build_model, build_optimizer
from pipeline.training import LossLog

SIZES = (
    "--layers 8 --dim 256 --heads 8 --kv-heads 4 --vocabulary 256 --seq-len 128 --batch-size 16 "
    "--microbatches 8 --dtype float32 --device cpu --evaluate-windows 8"
)
LIMIT = 240


def pretrain(rank, flags):
    """The processor's seconds on this rank after each step of pretrain_llama.py."""
    seconds = []
    add = LossLog.add

    def add_and_note(log, step, loss):
        add(log, step, loss)
        seconds.append(time.process_time())

    with mock.patch.object(LossLog, "add", add_and_note):
        with mock.patch.object(sys, "argv", ["pretrain_llama.py", *shlex.split(flags)]):
            pretrain_llama.main()
    return seconds


def plain_loop(rank, flags):
    """The same of a loop with nothing but torch: same model, micro-batches, clipping, update."""
    torch.set_num_threads(1)
    alone = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    with mock.patch.dict("os.environ", alone):
        with mock.patch.object(sys, "argv", ["pretrain_llama.py", *shlex.split(flags)]):
            a, _ = pretrain_llama.read_flags()
    model = build_model(a)
    options = pretrain_llama.ADAMW
    optimizer = build_optimizer("adamw", model.parameters(), a.learning_rate, **options)
    seconds = []
    for step in range(a.steps):
        batch = a.text.batch(step, a.batch_size, a.seq_len, a.seed)
        optimizer.zero_grad()
        total = 0.0
        for inputs, targets in zip(*(tokens.chunk(a.microbatches) for tokens in batch)):
            loss = token_loss(model(inputs), targets) / a.microbatches
            loss.backward()
            total += loss.item()
        clip_grad_norm_(model.parameters(), a.clip)
        optimizer.step()
        print(f"step {step}  loss {total:.6f}", flush=True)
        seconds.append(time.process_time())
    return seconds


RUNS = {  # name: (what a rank does, how many ranks)
    "a plain loop": (plain_loop, 1),
    "pretrain_llama.py, one rank": (pretrain, 1),
    "pretrain_llama.py, two ranks": (pretrain, 2),
    "two plain loops at once": (plain_loop, 2),
}


def microseconds_per_token(name, steps=5):
    """Of the processor, the median over the steps but the first; of two loops, of one of them."""
    what, ranks = RUNS[name]
    rows = run_on_ranks(what, ranks, f"{SIZES} --steps {steps}", timeout=LIMIT)
    if what is plain_loop:
        rows = rows[:1]
    totals = [sum(moments) for moments in zip(*rows)]
    gaps = [after - before for before, after in zip(totals, totals[1:])]
    return statistics.median(gaps) / (16 * 128) * 1e6
