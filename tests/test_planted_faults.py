"""Faults planted in the worker: the checks that pass without them fail with them.

Each fault is a subclass of Worker that the ranks take in its place. The comparison is the one of
test_equals_one_process.py, so that what passes there is known to be able to fail.
"""

import functools
import multiprocessing
import re
import time
from unittest import mock

import pytest
from further import first_of
from ranks import run_on_ranks
from test_equals_one_process import NAIVE, SGD, differences, flags_of, one_process, train

from course.failed_run import RunFailed
from pipeline import schedules
from pipeline.collectives import gather
from pipeline.job import Transfer, join_job
from pipeline.model import token_loss
from pipeline.receives import OrderedReceives
from pipeline.worker import Worker

NUM_RANKS, NUM_MICROBATCHES = 3, 8
FLAGS = flags_of(SGD, None, NUM_MICROBATCHES)

GRADIENTS = {("gradient", rank) for rank in range(NUM_RANKS)}
FIRST_LOSS = {("loss", 0)}
LATER_LOSSES = {("loss", step) for step in (1, 2)}


# Wrong results


class LossNotDivided(Worker):
    """Every micro-batch counts as if it were the whole batch."""

    def __init__(self, job, schedule, stages):
        super().__init__(job, schedule, stages)
        for stage in stages.values():
            stage.loss_function = token_loss


class LossDividedForShow(LossNotDivided):
    """The same, but the loss that is shown is right: only the gradients are too large."""

    def run_step(self, inputs, targets):
        loss = super().run_step(inputs, targets)
        return None if loss is None else loss / len(inputs)


class MicrobatchSkipped(Worker):
    """All ranks agree to leave out the last micro-batch."""

    def __init__(self, job, schedule, stages):
        shorter = schedules.gpipe(schedule.num_ranks, schedule.num_microbatches - 1)
        super().__init__(job, shorter, stages)


class MicrobatchNotLearntByRank1(Worker):
    """Rank 1 passes the gradient of micro-batch 5 on and forgets what it says of its weights."""

    def backward(self, action):
        parameters = list(self.stages[action.stage].part.parameters())
        if (self.job.rank, action.microbatch) != (1, 5):
            super().backward(action)
            return
        before = [parameter.grad.clone() for parameter in parameters]
        super().backward(action)
        for parameter, gradient in zip(parameters, before):
            parameter.grad = gradient


class Swapped(Worker):
    """What `culprit` = (rank, kind) makes of micro-batches 0 and 1 goes out for one another."""

    def give(self, action, tensor):
        if (self.job.rank, action.kind) != self.culprit or action.microbatch > 1:
            super().give(action, tensor)
        elif action.microbatch == 0:
            self.kept = action, tensor
        else:
            first_action, first_tensor = self.kept
            super().give(first_action, tensor)
            super().give(action, first_tensor)


class ActivationsSwapped(Swapped):
    culprit = (0, "F")


class GradientsSwapped(Swapped):
    culprit = (1, "B")


class GradientsOffByABillionth(Worker):
    """Far less than six printed decimals of a loss can show."""

    def run_step(self, inputs, targets):
        loss = super().run_step(inputs, targets)
        for stage in self.stages.values():
            for parameter in stage.part.parameters():
                parameter.grad *= 1 + 1e-9
        return loss


def train_with(worker_class):
    return run_on_ranks(train, NUM_RANKS, "gpipe", FLAGS, False, worker_class)


def test_without_a_fault_there_is_no_difference():
    assert differences(train_with(Worker), one_process(SGD)) == set()


@pytest.mark.parametrize(
    "fault, found",
    first_of(
        [
            (LossNotDivided, GRADIENTS | FIRST_LOSS | LATER_LOSSES),
            (LossDividedForShow, GRADIENTS | LATER_LOSSES),
            (MicrobatchSkipped, GRADIENTS | FIRST_LOSS | LATER_LOSSES),
            (MicrobatchNotLearntByRank1, {("gradient", 1)} | LATER_LOSSES),
            (ActivationsSwapped, GRADIENTS | FIRST_LOSS | LATER_LOSSES),
            (GradientsSwapped, {("gradient", 0)} | LATER_LOSSES),
            (GradientsOffByABillionth, GRADIENTS | LATER_LOSSES),
        ],
        3,
    ),
)
def test_a_planted_fault_is_found_where_it_shows_first(fault, found):
    assert differences(train_with(fault), one_process(SGD)) == found


# Receives posted too early: every result is right, and memory is not bounded any more


class CountedReceiving(Transfer):
    """Notes how many receives a channel has posted that its rank does not wait for yet."""

    ahead = {}  # source -> receives posted and not asked for
    most_ahead = {}

    def __init__(self, job, operation, buffer, peer, message):
        super().__init__(job, operation, buffer, peer, message)
        # Not the first message, which opens a channel.
        self.counts = not self.sends and message.what != "first message"
        if not self.counts:
            return
        self.ahead[peer] = self.ahead.get(peer, 0) + 1
        self.most_ahead[peer] = max(self.most_ahead.get(peer, 0), self.ahead[peer])

    def wait(self):
        if self.counts:
            self.ahead[self.peer] -= 1
        return super().wait()


class AllPostedAtTheStart(OrderedReceives):
    def post_before(self, action):
        while self.expected:
            self.post_next()


def train_and_count_receives(rank, script, receives_class):
    """What `train` reports, and by source the most receives that were posted ahead of need."""
    with (
        mock.patch("pipeline.job.Transfer", CountedReceiving),
        mock.patch("pipeline.worker.OrderedReceives", receives_class),
    ):
        result = train(rank, script, FLAGS, False, Worker)
    assert not any(CountedReceiving.ahead.values())  # each was taken in the end
    return result | {"most_ahead": CountedReceiving.most_ahead}


def from_neighbours(activations, gradients):
    """For each rank the number from the rank before it, and from the rank behind it."""
    return [
        {source: number for source, number in pair if 0 <= source < NUM_RANKS}
        for rank in range(NUM_RANKS)
        for pair in [((rank - 1, activations), (rank + 1, gradients))]
    ]


# In GPipe an activation is made while the rank runs the forward of the one before.
@pytest.mark.parametrize("script, activations", [("gpipe", 2), (NAIVE, 1)])
def test_the_worker_posts_only_what_is_made_before_its_next_action_ends(script, activations):
    ranks = run_on_ranks(train_and_count_receives, NUM_RANKS, script, OrderedReceives)
    assert [rank["most_ahead"] for rank in ranks] == from_neighbours(activations, 1)


@pytest.mark.parametrize("script", ["gpipe", NAIVE])
def test_receives_posted_all_at_the_start_are_counted_and_no_loss_would_tell(script):
    ranks = run_on_ranks(train_and_count_receives, NUM_RANKS, script, AllPostedAtTheStart)
    assert [rank["most_ahead"] for rank in ranks] == from_neighbours(
        NUM_MICROBATCHES, NUM_MICROBATCHES
    )
    assert differences(ranks, one_process(SGD)) == set()


# Sent buffers: let go as soon as a message shows that the receiver has used them


class CountedSending(Transfer):
    """Notes the most messages of this rank that still own their buffer."""

    made = []
    most_owned = 0

    def __init__(self, job, operation, buffer, peer, message):
        super().__init__(job, operation, buffer, peer, message)
        if not self.sends or message.what == "first message":  # which opens a channel
            return
        self.made.append(self)
        owned = sum(sending.buffer is not None for sending in self.made)
        CountedSending.most_owned = max(CountedSending.most_owned, owned)


class NothingReleasedBeforeTheEnd(Worker):
    def release_sent(self, taken):
        pass


def train_and_count_sendings(rank, script, worker_class):
    """What `train` reports, the most buffers owned at once, and how many are left at the end."""
    with mock.patch("pipeline.job.Transfer", CountedSending):
        result = train(rank, script, FLAGS, False, worker_class)
    left = sum(sending.buffer is not None for sending in CountedSending.made)
    return result | {"most_owned": CountedSending.most_owned, "left": left}


@functools.cache
def counted_sendings(script, worker_class):
    ranks = run_on_ranks(train_and_count_sendings, NUM_RANKS, script, worker_class)
    assert [rank["left"] for rank in ranks] == [0] * NUM_RANKS
    return [rank["most_owned"] for rank in ranks]


def test_in_naive_a_rank_owns_one_sent_buffer_at_a_time_instead_of_all_of_the_step():
    # Every message is answered before the next one is sent, and the answer proves its use.
    assert counted_sendings(NAIVE, Worker) == [1, 1, 1]
    assert counted_sendings(NAIVE, NothingReleasedBeforeTheEnd) == [8, 16, 8]


def test_in_gpipe_a_middle_rank_owns_m_sent_buffers_instead_of_2m():
    # The first gradient that comes back proves that all activations have been used; only then
    # does the rank send gradients. The outer ranks send m messages of one kind.
    assert counted_sendings("gpipe", Worker) == [8, 8, 8]
    assert counted_sendings("gpipe", NothingReleasedBeforeTheEnd) == [8, 16, 8]


# Ranks that fail or hang: tests/ranks.py says so, and leaves no process behind


def fail_on_rank_1(rank):
    job = join_job("cpu", timeout=20)
    if rank == 1:
        raise ValueError("planted")
    gather(job, rank)
    job.leave()


def never_end(rank):
    time.sleep(600)


def test_a_rank_that_fails_is_reported_with_its_traceback():
    with pytest.raises(RunFailed) as failed:
        run_on_ranks(fail_on_rank_1, 3)
    assert re.search(
        r"rank 1: Traceback .*in fail_on_rank_1\n.*ValueError: planted",
        str(failed.value),
        re.DOTALL,
    )
    assert multiprocessing.active_children() == []


def test_ranks_that_do_not_end_are_ended():
    with pytest.raises(RunFailed, match="the run took longer than 1 s"):
        run_on_ranks(never_end, 2, timeout=1)
    assert multiprocessing.active_children() == []
