"""No order of messages in the course hangs under the strictest rule of NCCL: one operation per rank.

The worker and the loops by hand run with a job that moves nothing (message_queues.py).
"""

import itertools
from types import SimpleNamespace
from unittest import mock

import gpipe
import interleaved_1f1b
import naive_model_parallelism
import one_f_one_b
import pipedream
import pytest
import torch
import zero_bubble
from message_queues import EmptyStage, blocked, issued_by, most_posted_ahead
from test_planted_faults import AllPostedAtTheStart

from extensions.data_parallel.replicas import DataParallelWorker, last_backwards, replicate
from extensions.pretraining.forward_only import forwards_of
from pipeline.job import Job
from pipeline.message import Message
from pipeline.schedule import ScheduleError
from pipeline.schedules import SCHEDULES, build_schedule, pipedream_round_robin
from pipeline.worker import Worker

SIZES = list(itertools.product(range(1, 7), [1, 2, 3, 4, 5, 6, 8, 12, 16], [2, 3, 4]))
MOST_POSTED = {  # for a multiple of p micro-batches
    "naive": 1,
    "gpipe": 2,
    "1f1b": 2,
    "pipedream": 2,
    "interleaved-1f1b": 4,
    "zb-h1": 2,
    "zb-h2": 3,
    "zb-v": 3,
    "v-half": 3,
    "v-min": 3,
    "dualpipe-v": 3,
}


def issued_by_worker(schedule, build=Worker):
    rows = [0] * schedule.num_microbatches

    def run(job):
        stages = {i: EmptyStage(i, schedule.num_stages) for i in schedule.stages_of(job.rank)}
        for stage in stages.values():
            stage.update = lambda k, i=stage.index: sum_over_replicas(job, schedule, i, k)
        build(job, schedule, stages).run_step(rows, rows)

    return issued_by(schedule.num_ranks, run)


def sum_over_replicas(job, schedule, stage, microbatch):
    ranks = schedule.ranks_of_stage[stage]
    job.sum(ranks, f"update {microbatch // len(ranks)} of stage {stage}")


def schedules_of(name):
    """(p, m, schedule) of all SIZES that the generator takes."""
    chunked = SCHEDULES[name].chunks and not SCHEDULES[name].fixed_chunks
    for p, m, v in SIZES if chunked else {(p, m, None): 0 for p, m, _ in SIZES}:
        try:
            yield p, m, build_schedule(name, p, m, *([v] if v else []))
        except ScheduleError:
            continue


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_worker_never_stops_with_one_operation_per_rank_under_way(name):
    for p, m, schedule in schedules_of(name):
        issued = issued_by_worker(schedule)
        assert blocked(issued) == {}, (p, m, schedule.num_stages)
        assert blocked(issued_by_worker(forwards_of(schedule))) == {}, (p, m)
        if name in MOST_POSTED and m % p == 0:
            assert max(map(most_posted_ahead, issued)) <= MOST_POSTED[name], (p, m)


@pytest.mark.parametrize("name", SCHEDULES)
def test_neither_does_a_worker_whose_replicas_sum_before_or_after_they_send(name):
    for p, m, schedule in schedules_of(name):
        if p * m > 40 or SCHEDULES[name].synchronous is False:
            continue
        for early in False, True:
            both = replicate(schedule, 2)
            issued = issued_by_worker(both, lambda *a, e=early: worker_that_sums(*a, e))
            assert blocked(issued) == {}, (p, m, early)


def worker_that_sums(job, schedule, stages, early):
    """As AllReduce does it, or DDP, which sums within the last backward, before the gradient goes."""
    last, half = last_backwards(schedule, job.rank), schedule.num_ranks // 2
    ranks = job.rank % half, job.rank % half + half

    class Reduction:
        def around(self, action):
            return self

        def finish(self):
            pass

    class Summing(DataParallelWorker):
        def perform(self, action):
            if early and action in last:
                job.sum(ranks, f"stage {action.stage}", waits=False)
            Worker.perform(self, action)
            if not early and action in last:
                job.sum(ranks, f"stage {action.stage}", waits=False)

    return Summing(job, schedule, stages, Reduction())


LOOPS = {
    "naive": naive_model_parallelism.run_step,
    "gpipe": gpipe.run_step,
    "1f1b": one_f_one_b.run_step,
    "zb-h1": lambda job, stage, *rows: zero_bubble.run_step(job, stage, 1, *rows),
    "zb-h2": lambda job, stage, *rows: zero_bubble.run_step(job, stage, 2, *rows),
}


@pytest.mark.parametrize("name", LOOPS)
def test_neither_does_a_loop_by_hand(name):
    for p, m in itertools.product(range(1, 9), range(1, 21)):
        issued = issued_by(
            p, lambda job, p=p, m=m: LOOPS[name](job, EmptyStage(job.rank, p), [0] * m, [0] * m)
        )
        assert blocked(issued) == {}, (p, m)
        assert max(map(most_posted_ahead, issued)) <= MOST_POSTED.get(name, 2)


def test_neither_does_interleaved_1f1b_round_its_ring():
    for p, m, schedule in schedules_of("interleaved-1f1b"):
        v = schedule.num_stages // p

        def run(job, p=p, m=m, v=v, schedule=schedule):
            stages = [EmptyStage(job.rank + c * p, p * v) for c in range(v)]
            group = interleaved_1f1b.group_size(m, p, v)
            interleaved_1f1b.run_step(job, stages, group, schedule, [0] * m, [0] * m)

        assert blocked(issued_by(p, run)) == {}, (p, m, v)


def round_robins():
    for count in range(1, 5):
        for replicas in itertools.product([1, 2, 3, 4], repeat=count):
            if sum(replicas) <= 6:
                for steps in range(max(replicas), 16):
                    yield list(replicas), pipedream_round_robin(replicas, steps)


def test_neither_does_pipedream_with_the_updates_of_its_replicas():
    for replicas, schedule in round_robins():
        assert blocked(issued_by_worker(schedule)) == {}, replicas
        arguments = SimpleNamespace(
            steps=schedule.num_microbatches, microbatches=1, replicas=replicas
        )

        def run(job, schedule=schedule, arguments=arguments):
            [index] = schedule.stages_of(job.rank)
            stage = EmptyStage(index, schedule.num_stages)
            stage.ranks, job.device = schedule.ranks_of_stage[index], None
            stage.update = lambda k: sum_over_replicas(job, schedule, index, k)
            pipedream.run_training(arguments, job, stage, schedule)

        with mock.patch.object(pipedream, "microbatches_of", lambda *_: ([0], [0])):
            assert blocked(issued_by(schedule.num_ranks, run)) == {}, replicas


# What the check finds


def send_before_posting(job, stage, inputs, targets):
    """1F1B as it is often written: each receive is posted when its message is needed."""

    class PostedLate:
        def __init__(self, job):
            self.__dict__.update(vars(job))
            self.send, self.complete_sends = job.send, job.complete_sends
            self.release_sent = job.release_sent

        def receive(self, source, message):
            return SimpleNamespace(wait=lambda: job.receive(source, message).wait())

    one_f_one_b.run_step(PostedLate(job), stage, inputs, targets)


def test_1f1b_hangs_where_neighbours_both_send_first():
    issued = issued_by(
        4, lambda job: send_before_posting(job, EmptyStage(job.rank, 4), [0] * 8, [0] * 8)
    )
    assert blocked(issued) == {
        0: ("send", 1, Message("activation", 0, 3)),
        1: ("send", 2, Message("activation", 1, 2)),
        2: ("send", 3, Message("activation", 2, 1)),
        3: ("send", 2, Message("gradient", 3, 0)),
    }


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1"])
def test_receives_posted_all_at_the_start_hang(name):
    with mock.patch("pipeline.worker.OrderedReceives", AllPostedAtTheStart):
        assert len(blocked(issued_by_worker(build_schedule(name, 4, 8)))) == 4


@pytest.mark.parametrize("shape, dtype", [((2, 4, 4), torch.float64), ((2, 3, 4), torch.float32)])
def test_an_activation_of_another_length_or_type_is_not_sent(shape, dtype):
    job = Job(0, 2, torch.device("cpu"), "gloo", 20.0, shape=(2, 3, 4), dtype=torch.float64)
    with pytest.raises(ValueError, match=r"but has to be \(2, 3, 4\) in torch.float64"):
        job.send(torch.zeros(shape, dtype=dtype), 1, Message("activation", 0, 0))
    assert not job.sent
