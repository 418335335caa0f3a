"""Replicas are one schedule, sums start as early as they can, and ranks know their peers."""

from unittest import mock

import pytest
import torch
from ranks import run_on_ranks

from extensions.data_parallel import replicas
from extensions.data_parallel.replicas import (
    AllReduce,
    Replicas,
    last_backwards,
    replicate,
)
from lab.simulator import Costs, simulate, sums_done
from pipeline.job import Job, join_job
from pipeline.schedule import message_of
from pipeline.schedules import build_schedule, gpipe, interleaved_1f1b, one_f_one_b, zb_h1


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v"])
def test_replicas_are_one_schedule_in_which_nothing_crosses_from_pipeline_to_pipeline(name):
    one = build_schedule(name, 4, 8)
    three = replicate(one, 3)
    assert three.num_ranks == 12 and three.num_microbatches == 24
    for source, destination in three.pairs:
        assert source // 4 == destination // 4
    for rank, order in enumerate(three.orders):
        back = [action._replace(microbatch=action.microbatch % 8) for action in order]
        assert tuple(back) == one.orders[rank % 4]
        assert {action.microbatch // 8 for action in order} == {rank // 4}
    costs = Costs(10, 20)
    assert simulate(three, costs).makespan == simulate(one, costs).makespan


def test_every_row_of_the_batch_goes_to_exactly_one_replica():
    batch = torch.arange(24).view(12, 2), torch.arange(24, 48).view(12, 2)
    rows = {}
    for replica in range(3):
        view = Replicas(mock.Mock(), None, 3, replica, ())
        inputs, targets = replicas.own_microbatches(batch, view, 2, "cpu")
        assert list(inputs) == list(targets) == [2 * replica, 2 * replica + 1]
        rows |= inputs
        assert all(torch.equal(targets[m], inputs[m] + 24) for m in inputs)
    assert torch.equal(torch.cat([rows[m] for m in range(6)]), batch[0])


@pytest.mark.parametrize("schedule", [gpipe(4, 8), interleaved_1f1b(2, 4, 3), zb_h1(3, 6)])
def test_a_stage_has_its_gradients_after_its_last_backward_of_weights(schedule):
    for rank, order in enumerate(schedule.orders):
        for action, stage in last_backwards(schedule, rank).items():
            later = order[order.index(action) + 1 :]
            assert action.stage == stage and action.kind in "BW"
            assert not [a for a in later if a.stage == stage and a.kind in "BIW"]


def test_a_chunk_s_sum_starts_while_its_rank_still_has_backwards_ahead(monkeypatch):
    schedule = replicate(interleaved_1f1b(2, 4, 2), 2)
    started = []
    monkeypatch.setattr(replicas, "Summing", lambda job, tensors, ranks, what: mock.Mock())
    job = mock.Mock(spec=Job, rank=0)
    reduction = AllReduce(Replicas(job, None, 2, 0, (0, 2)), schedule)
    for stage in schedule.stages_of(0):
        reduction.wrap(torch.nn.Linear(1, 1), stage)
    for step, action in enumerate(schedule.orders[0]):
        with reduction.around(action):
            pass
        started += [(stage, step) for stage in reduction.sums if stage not in dict(started)]
    order = schedule.orders[0]
    last = {stage: max(i for i, a in enumerate(order) if a.stage == stage) for stage in (0, 2)}
    assert dict(started) == last
    assert last[2] < last[0] == len(order) - 1  # the later stage is done first


def test_in_1f1b_only_the_first_ranks_are_late_with_their_sums():
    # Rank r ends r backwards before rank 0, and a sum takes a backward and a half.
    assert sums_done(simulate(one_f_one_b(4, 8), Costs(10, 20)), 30) == [30, 10, -10, -30]


def test_a_sum_in_buckets_hides_in_the_last_backward_too_but_for_about_one_bucket():
    """ "Nothing of the first stage's sum is hidden" holds for one sum per stage, not for DDP."""
    played = simulate(one_f_one_b(4, 8), Costs(20, 40))
    assert sums_done(played, 30) == [30, -10, -50, -90]
    assert sums_done(played, 30, buckets=4)[0] == pytest.approx(30 / 4)
    # A sum that takes longer than the backward cannot be hidden whole.
    assert sums_done(played, 60, buckets=4)[0] == pytest.approx(30)


def test_two_chunks_hide_one_of_two_sums():
    # A chunk's sum takes half as long; in one piece it would be 20 on rank 0.
    assert sums_done(simulate(interleaved_1f1b(4, 8, 2), Costs(5, 10)), 10)[0] == 10


def test_messages_of_one_replica_use_what_its_own_ranks_made():
    schedule = replicate(gpipe(2, 2), 2)
    assert schedule.rank_of(1, 1) == 1 and schedule.rank_of(1, 2) == 3
    makers = {message_of(a): rank for rank, order in enumerate(schedule.orders) for a in order}
    assert all(makers[m.message] == m.source for m in schedule.messages)


# Ranks that form replicas


def sums(rank):
    job = join_job("cpu", timeout=20)
    group = replicas.form_replicas(job, 2)
    loss = torch.tensor(float(rank), dtype=torch.float64) if rank % 2 else None
    result = group.replica, group.peers, group.sum_number(10 + rank), group.sum_loss(loss)
    job.leave()
    return result


def test_a_rank_knows_its_replica_and_sums_with_the_ranks_of_the_same_stages():
    assert run_on_ranks(sums, 4) == [
        (0, (0, 2), 22, None),
        (0, (1, 3), 24, torch.tensor(4.0)),
        (1, (0, 2), 22, None),
        (1, (1, 3), 24, torch.tensor(4.0)),
    ]
