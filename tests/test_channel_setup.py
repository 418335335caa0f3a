"""Every channel is connected before the first step, so no step waits for a channel to be set up.

That all scripts pass where the first message of a channel connects it: test_rehearsal.py.
"""

import re
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import train
from ranks import run_on_ranks

from course.failed_run import RunFailed
from guard.presence import guarded_meeting
from pipeline.collectives import open_groups
from pipeline.job import Job, join_job, joining

SMALL = "--layers 8 --dim 16 --heads 2 --kv-heads 2 --seq-len 8 --steps 2 --device cpu"


def train_cold(rank, schedule, at_once=None):
    """Train on channels that join_job has opened and not used, each connected by its first message."""
    nothing = lambda *_: SimpleNamespace(wait=lambda: None)  # noqa: E731

    def join_cold(*arguments):
        with mock.patch.multiple(Job, send=nothing, receive=nothing):
            return join_job(*arguments)

    def post_all(receives, action):
        while receives.expected:
            receives.post_next()

    argv = ["train", *SMALL.split(), "--schedule", schedule, "--rehearse", "lazy"]
    argv += ["--timeout", "8" if at_once else "30"]
    with (
        mock.patch("pipeline.training.join_job", join_cold),
        mock.patch.object(sys, "argv", argv),
        mock.patch(at_once, post_all) if at_once else nullcontext(),
    ):
        return train.main()


@pytest.mark.further
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-v"])
def test_in_the_one_order_even_channels_without_a_first_message_connect_without_a_deadlock(
    schedule,
):
    assert run_on_ranks(train_cold, 4, schedule) == [0] * 4


@pytest.mark.further
def test_receives_posted_at_the_start_would_let_them_hang():
    at_once = "pipeline.receives.OrderedReceives.post_before"
    with pytest.raises(RunFailed) as failed:
        run_on_ranks(train_cold, 4, "1f1b", at_once)
    assert "step 0" not in failed.value.output
    assert re.search(r"rank \d waited 8 s for .* from rank \d", str(failed.value))
    assert "a deadlock, each of these ranks waits for the next" in str(failed.value)


def join_while_rank_2_sleeps(rank):
    if rank == 2:
        Job.receive = lambda *_: time.sleep(60)
    joining.append(guarded_meeting)
    join_job("cpu", timeout=2)
    time.sleep(60)  # rank 0, which needs nothing from rank 2 and keeps the store


@pytest.mark.further
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


@pytest.mark.further
def test_each_channel_and_each_group_is_used_once_in_sorted_order():
    first, second, third, last = run_on_ranks(waits_while_joining, 4)
    text = "the first message of micro-batch 0 from stage {}".format
    assert first == [(3, f"the receipt of {text(0)}"), (3, text(3))]
    assert second == [(2, f"the receipt of {text(1)}"), (3, "its first sum")]
    assert third == [(1, text(1))]
    assert last == [(0, text(0)), (0, f"the receipt of {text(3)}"), (1, "its first sum")]
