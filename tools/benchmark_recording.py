"""Runs steps with a flight log in every second one, for benchmark.py.

Four ranks of the course run paced steps of GPipe. Two ranks of a program that is not the course's
run steps at full speed.
"""

import shlex
import sys
import time
from unittest import mock

import gpipe
import plain_program
import torch
import torch.distributed as dist
from torch import nn

from lab import attach
from lab.flight_log_anywhere import record
from pipeline.one_process import build_optimizer
from pipeline.training import (
    build_stage,
    cut_layers,
    microbatches_of,
    parse_arguments,
    start_job,
    training_parser,
)


def steps_in_turns(rank, flags, folder):
    """Milliseconds of each step on this rank, without the first two: (not recorded, recorded).

    A step is the time between two updates, including the update and what the log writes at its end.
    """
    parser = training_parser(gpipe.__doc__)
    attach.add_flags(parser)
    with mock.patch.object(sys, "argv", ["gpipe.py", *shlex.split(flags), "--record", folder]):
        arguments = parse_arguments(parser)
    job = start_job(arguments)
    stage = build_stage(arguments, rank, cut_layers(arguments, job.num_ranks), job.device)
    optimizer = build_optimizer("sgd", stage.part.parameters(), arguments.learning_rate)
    lab = attach.observe(arguments, job, [stage], "gpipe")
    recorded = lab.observer.methods
    bare = {
        name: [method for method in methods if method.__self__ is not lab.log]
        for name, methods in recorded.items()
    }

    times = [], []
    for step in range(arguments.steps):
        records = step % 2 == 1
        lab.observer.methods = recorded if records else bare
        # Without a log only the first step counts its activation memory; with one, each does.
        lab.memory.active = lab.memory.every_pass = records
        inputs, targets = microbatches_of(arguments, job.device, step)
        start = time.perf_counter()
        optimizer.zero_grad()
        gpipe.run_step(job, stage, inputs, targets)
        optimizer.step()
        times[records].append((time.perf_counter() - start) * 1000)
    job.leave()
    return [each[1:] for each in times]


def program_steps_in_turns(rank, folder, steps):
    """The same for a program of two ranks, a transformer with 6 million weights, not paced."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo")
    sizes = {"d_model": 256, "nhead": 8, "dim_feedforward": 1024, "dropout": 0.0}
    layers = [nn.TransformerEncoderLayer(**sizes, batch_first=True) for _ in range(4)]
    part = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(part.parameters(), 0.01)
    log = record(folder, {rank: part})
    observed, times = part.forward, ([], [])
    run_step = plain_program.first_rank if rank == 0 else plain_program.last_rank
    for step in range(steps):
        records = step % 4 in (1, 2)  # a drift of the machine falls on both kinds alike
        if records:
            part.forward = observed
        else:
            part.__dict__.pop("forward", None)  # the class has its own
        rows = torch.randn(8, 8, 128, 256)  # 8,192 positions
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        run_step(part, rows, rows.roll(1, 2), None)
        if records:
            log.end_step()
        optimizer.step()
        dist.barrier()  # the slower of the two ranks ends the step
        times[records].append((time.perf_counter() - start) * 1000)
    plain_program.leave()
    return [each[1:] for each in times]
