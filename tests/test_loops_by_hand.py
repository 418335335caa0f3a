"""A lesson's loop takes exactly the actions of the schedule as data, on every rank, in every step.

The scripts run as they are, from their flags on: an instrument lists what each rank does.
"""

import importlib
import inspect
import sys
from unittest import mock

import pytest
from further import first_of
from observed import ListedActions, attach_instruments
from ranks import run_on_ranks

from lab import attach
from pipeline import training
from pipeline.job import Job, join_job
from pipeline.schedule import Schedule
from pipeline.schedules import SCHEDULES, build_schedule, pipedream, pipedream_round_robin

SMALL = "--layers 8 --dim 8 --heads 2 --kv-heads 1 --seq-len 4 --device cpu"
SCRIPTS = {  # schedule: script and flags
    "naive": "naive_model_parallelism",
    "gpipe": "gpipe",
    "1f1b": "one_f_one_b",
    "interleaved-1f1b": "interleaved_1f1b",
    "zb-h1": "zero_bubble --schedule zb-h1",
    "zb-h2": "zero_bubble --schedule zb-h2",
}
MICROBATCHES = [1, 2, 3, 4, 5, 8, 12]
INTERLEAVED = {  # ranks: (micro-batches, chunks), as many chunks as 8 layers are enough for
    1: [(1, 2), (5, 2), (4, 3)],
    2: [(1, 2), (2, 2), (8, 2), (3, 3), (6, 4)],
    3: [(2, 2), (3, 2), (6, 2)],
    4: [(1, 2), (4, 2), (8, 2), (12, 2)],
}
ROUND_ROBIN = ["2", "2-1", "1-2", "3", "1-1-2", "2-1-1", "1-2-1", "2-2", "3-1", "4"]


def observed(rank, calls):
    """For each of `calls`, the name of a script and flags: the actions of this rank in each step.

    All calls take the same ranks and channels, so that one job performs them all.
    """
    join_once = JoinOnce()
    script, _, _ = calls[0].partition(" ")
    program = importlib.import_module(script)
    return [actions_of(program, call.split()[1:], join_once) for call in calls]


class JoinOnce:
    """In place of join_job: the same job each time, as bare as the first time."""

    job = None

    def __call__(self, device, timeout, pairs, shape, dtype, *_):
        if self.job is None:
            self.job = join_job(device, timeout, pairs, shape, dtype)
            self.bare = dict(vars(self.job))
        vars(self.job).clear()
        vars(self.job).update(self.bare)
        self.job.shape = shape
        return self.job


def actions_of(program, flags, join):
    actions = ListedActions()

    def observe(arguments, job, stages, *_, **__):
        attach_instruments(job, stages, actions)

    with (
        mock.patch.object(training, "join_job", join),
        mock.patch.object(attach, "observe", observe),
        mock.patch.object(Job, "leave", lambda job: None),
        mock.patch.object(sys, "argv", [program.__name__, *flags]),
    ):
        assert program.main() == 0
    return actions.steps


def performed(num_ranks, calls):
    """For each of `calls`, a Schedule of what the ranks did in its first and its second step."""
    of_ranks = run_on_ranks(observed, num_ranks, calls, timeout=100)
    for of_calls in zip(*of_ranks):
        steps = [tuple(orders) for orders in zip(*of_calls)]
        yield [Schedule("performed", orders) for orders in steps]


def orders_of(schedules):
    return [schedule.orders for schedule in schedules]


@pytest.mark.parametrize("num_ranks", first_of([4, 3, 1, 2], 1))
@pytest.mark.parametrize("name", [name for name in SCRIPTS if not SCHEDULES[name].chunks])
def test_a_loop_takes_exactly_the_actions_of_its_schedule(name, num_ranks):
    flags = f"{SCRIPTS[name]} {SMALL} --steps 2"
    calls = [f"{flags} --microbatches {m} --batch-size {m}" for m in MICROBATCHES]
    for m, steps in zip(MICROBATCHES, performed(num_ranks, calls), strict=True):
        assert orders_of(steps) == [build_schedule(name, num_ranks, m).orders] * 2, m


@pytest.mark.parametrize("num_ranks", first_of(INTERLEAVED, 2))
def test_so_does_interleaved_1f1b_with_several_chunks(num_ranks):
    sizes = INTERLEAVED[num_ranks]
    flags = f"{SCRIPTS['interleaved-1f1b']} {SMALL} --steps 2"
    calls = [f"{flags} --microbatches {m} --batch-size {m} --chunks {v}" for m, v in sizes]
    for (m, v), steps in zip(sizes, performed(num_ranks, calls), strict=True):
        assert orders_of(steps) == [build_schedule("interleaved-1f1b", num_ranks, m, v).orders] * 2


# The whole run of pipedream.py is one pass, with an update after each backward that completes one.


@pytest.mark.parametrize("num_ranks", first_of([1, 2, 3, 4], 2))
def test_so_does_pipedream_with_its_updates(num_ranks):
    flags = f"pipedream {SMALL} --batch-size 2"
    steps = [num_ranks, num_ranks + 1, 9]
    calls = [f"{flags} --steps {n} --weights {w}" for n in steps for w in ("stashed", "latest")]
    expected = [pipedream(num_ranks, n) for n in steps for _ in range(2)]
    for whole_run, schedule in zip(performed(num_ranks, calls), expected, strict=True):
        assert orders_of(whole_run) == [schedule.orders]


@pytest.mark.parametrize("num_ranks", first_of([1, 2, 3, 4], 2))
def test_so_does_pipedream_with_one_update_for_several_microbatches(num_ranks):
    sizes = [(2, num_ranks), (3, num_ranks + 1), (2, 8)]  # mini-batches, micro-batches of each
    flags = f"pipedream {SMALL} --weights double-buffered"
    calls = [f"{flags} --steps {n} --microbatches {m} --batch-size {m}" for n, m in sizes]
    for (n, m), whole_run in zip(sizes, performed(num_ranks, calls), strict=True):
        assert orders_of(whole_run) == [pipedream(num_ranks, n * m, m).orders]


@pytest.mark.parametrize("replicas", first_of(ROUND_ROBIN, 3))
def test_so_does_pipedream_with_several_ranks_to_a_stage(replicas):
    counts = list(map(int, replicas.split("-")))
    steps = [sum(counts), sum(counts) + 1, 11]  # some leave a group of replicas incomplete
    calls = [f"pipedream {SMALL} --batch-size 2 --replicas {replicas} --steps {n}" for n in steps]
    for n, whole_run in zip(steps, performed(sum(counts), calls), strict=True):
        assert orders_of(whole_run) == [pipedream_round_robin(counts, n).orders]


def test_the_loops_are_written_by_hand_and_ask_no_schedule_what_to_do():
    for script in {words.split()[0] for words in SCRIPTS.values()}:
        program = importlib.import_module(script)
        assert not {"Worker", "build_schedule", "SCHEDULES"} & set(vars(program)), script
        assert "orders" not in inspect.getsource(program), script
        assert "job.send" in inspect.getsource(program.run_step), script
