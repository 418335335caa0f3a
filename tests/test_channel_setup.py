"""Every channel is connected before the first step, so no step waits for a channel to be set up.

The ranks run under the set-up rule of NCCL, emulated over gloo (lazy_channels.py).
"""

import re
import time
from pathlib import Path

import pytest
from ranks import run_on_ranks

from course.failed_run import RunFailed
from course.launch import WarmRanks, _follow
from pipeline.collectives import open_groups
from pipeline.job import Job, join_job

PROGRAM = Path(__file__).with_name("lazy_channels.py")
SMALL = "--layers 8 --dim 16 --heads 2 --kv-heads 2 --seq-len 8 --steps 2 --device cpu --verify"
SCRIPTS = ["gpipe.py", "one_f_one_b.py", "interleaved_1f1b.py", "zero_bubble.py"]
SCHEDULES = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v"]
KEPT = "as promised"


def run_lazily(script, *flags, fault=()):
    """Standard output of `script` on 4 ranks whose channels are set up when they are first used."""
    timeout = "4" if fault else "30"  # the longest wait, in seconds
    words = [*fault, script, *SMALL.split(), "--timeout", timeout, *flags]
    started = WarmRanks(PROGRAM, words, 4)
    try:
        return _follow(started, show=False, limit=90)
    finally:
        started.end()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_training_whose_channels_are_set_up_at_their_first_use_equals_one_process(script):
    assert KEPT in run_lazily(script)


def test_groups_that_average_weights_are_connected_before_the_first_step_too():
    assert KEPT in run_lazily("pipedream.py", "--replicas", "2-1-1", "--steps", "4")


def test_replicas_of_a_pipeline_are_connected_before_the_first_step_too():
    assert KEPT in run_lazily("pipeline_with_data_parallel.py", "--replicas", "2")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_whose_channels_are_set_up_at_their_first_use_equals_one_process(schedule):
    assert KEPT in run_lazily("train.py", "--schedule", schedule)


# A loop by hand uses each channel only when its message is due. The worker posts receives ahead.
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_a_first_message_in_join_job_the_first_step_deadlocks_and_ranks_are_named(schedule):
    with pytest.raises(RunFailed) as failed:
        run_lazily("train.py", "--schedule", schedule, fault=["--cold"])
    assert "step 0" not in failed.value.output
    assert re.search(r"rank \d waited 4 s for .* from rank \d", str(failed.value))
    assert "a deadlock, each of these ranks waits for the next" in str(failed.value)


def join_while_rank_2_sleeps(rank):
    if rank == 2:
        Job.receive = lambda *_: time.sleep(60)
    join_job("cpu", timeout=2)
    time.sleep(60)  # rank 0, which needs nothing from rank 2 and keeps the store


def test_a_rank_that_is_lost_while_channels_are_connected_is_named():
    with pytest.raises(RunFailed) as failed:
        run_on_ranks(join_while_rank_2_sleeps, 4, timeout=40)
    assert re.search(
        r"rank [13] lost rank 2 while waiting for .*the first message .*Timed out",
        str(failed.value),
    )


def waits_while_joining(rank):
    """(peer, what) of each wait of this rank while it joins a job of 4 ranks, in order."""
    waits = []
    waiting = Job.waiting

    def noted(job, peer, what):
        waits.append((peer, str(what)))
        return waiting(job, peer, what)

    Job.waiting = noted
    job = join_job("cpu", timeout=20, pairs=[(3, 0), (0, 3), (1, 2), (3, 0)])
    open_groups(job, [(1, 3)])
    joined = list(waits)
    job.leave()
    return joined


def test_each_channel_and_each_group_is_used_once_in_sorted_order():
    first, second, third, last = run_on_ranks(waits_while_joining, 4)
    text = "the first message of micro-batch 0 from stage {}".format
    assert first == [(3, f"the receipt of {text(0)}"), (3, text(3))]
    assert second == [(2, f"the receipt of {text(1)}"), (3, "its first sum")]
    assert third == [(1, text(1))]
    assert last == [(0, text(0)), (0, f"the receipt of {text(3)}"), (1, "its first sum")]
