"""What benchmark.py lets four ranks do: paced steps of GPipe, every second one with a flight log."""

import shlex
import sys
import time
from unittest import mock

import gpipe

from lab import attach
from pipeline.training import (
    build_optimizer,
    build_stage,
    cut_layers,
    microbatches_of,
    parse_arguments,
    start_job,
    training_parser,
)


def steps_in_turns(rank, flags, folder):
    """Milliseconds of each step on this rank, the first two left out: (not recorded, recorded).

    A step is all between two updates, the update and what the log writes at its end included.
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
