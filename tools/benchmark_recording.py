"""What benchmark.py lets four ranks do: paced steps of GPipe, every second one recorded."""

import shlex
import sys
import time
from unittest import mock

import gpipe

from pipeline.job import join_job, leave_job
from pipeline.schedules import gpipe as gpipe_schedule
from pipeline.training import build_optimizer
from pipeline.worker import Worker


def steps_in_turns(rank, flags, folder):
    """Milliseconds of each step on this rank, the first two left out: (not recorded, recorded).

    A step is all between two updates, the update and what the recording writes at its end included.
    """
    with mock.patch.object(sys, "argv", ["gpipe.py", *shlex.split(flags)]):
        arguments = gpipe.parse_arguments()
    job = join_job("cpu", timeout=30)
    recorder = Recorder(job, arguments.paced)
    stage = gpipe.build_stage(arguments, job, recorder)
    optimizer = build_optimizer("sgd", stage.part.parameters(), arguments.learning_rate)
    schedule = gpipe_schedule(job.num_ranks, arguments.microbatches)
    shape = (arguments.microbatch_size, arguments.seq_len, arguments.dim)
    worker = Worker(job, schedule, {stage.index: stage}, shape, arguments.torch_dtype)
    writer = RecordingWriter(folder, job, schedule, recorder)

    times = [], []
    for step in range(arguments.steps):
        records = step % 2 == 1
        job.recording = writer if records else None
        recorder.meter.active = recorder.meter.keep_counting = records
        batch = gpipe.microbatches_of(arguments, job, step)
        start = time.perf_counter()
        optimizer.zero_grad()
        worker.run_step(*batch)
        optimizer.step()
        recorder.take_events()
        times[records].append((time.perf_counter() - start) * 1000)
    writer.close()
    leave_job(job)
    return [each[1:] for each in times]
