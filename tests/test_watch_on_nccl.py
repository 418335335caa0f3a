"""A wait returns at once, as with NCCL, and the watch names rank and action all the same.

There is no GPU here. The process groups are those of a rehearsal; a work's `wait` returns at once,
and whatever the rank computes next blocks until all that it has waited for is there, as a device
does with what it has in its queue.
"""

import importlib
import json
import os
import re
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from further import first_of
from ranks import run_on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from course.failed_run import RunFailed
from guard.launcher import ranks_set
from guard.watch import FLIGHT_VARIABLE, Watch, flight_record
from lab import rehearsal
from lab.clock import Clock
from lab.simulator import Costs
from pipeline import job as jobs
from pipeline import training
from pipeline.stage import Stage

SMALL = "--layers 4 --dim 16 --heads 2 --kv-heads 1 --seq-len 4 --device cpu"
Operation = rehearsal.Operation
queue = []  # the works that the device waits for before it does anything else


class Work(Operation):
    """Of which `wait` returns at once; only a barrier blocks the host, as with NCCL."""

    def wait(self, timeout=None):
        if self.text.startswith("the barrier"):
            return super().wait()
        queue.append(self)
        return True


class Mark:
    """A CUDA event: reached once all is there that the device waits for before it."""

    def record(self):
        self.before = list(queue)

    def query(self):
        return all(work.is_completed() for work in self.before)


class Device(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        while queue:
            Operation.wait(queue[0])
            queue.pop(0)
        return function(*arguments, **(keywords or {}))


def run_as_with_nccl(call):
    """The exit status of a script on this rank, in a process that does nothing else."""
    rehearsal.begin("warmed")
    join_job, (script, *flags) = training.join_job, call.split()

    def join(*arguments):
        job = join_job(*arguments)
        job.backend, job.watch.device_waits = "nccl", True
        return job

    with (
        mock.patch.object(rehearsal, "Operation", Work),
        mock.patch.object(torch.cuda, "Event", Mark),
        mock.patch.object(training, "join_job", join),
        mock.patch.object(sys, "argv", [script, *SMALL.split(), *flags]),
        Device(),
    ):
        return importlib.import_module(script).main()


def train(rank, call):
    return run_as_with_nccl(call)


@pytest.mark.parametrize(
    "call",
    first_of(
        [
            "train --schedule zb-h1 --steps 3 --verify",
            "pretrain_llama --replicas 2 --steps 3 --dtype float64 --verify --evaluate-windows 8",
        ],
        1,
    ),
)
def test_a_training_passes_whose_waits_return_at_once(call):
    assert run_on_ranks(train, 4, call) == [0] * 4


def train_until_rank_2_stops(rank, call):
    """Rank 2 sleeps in its second forward of micro-batch 3."""
    forward, count = Stage.forward, []

    def stops(stage, microbatch, *arguments):
        count.append(microbatch)
        if rank == 2 and count.count(3) == 2:
            time.sleep(60)
        return forward(stage, microbatch, *arguments)

    Stage.forward = stops
    return run_as_with_nccl(call)


@pytest.mark.further
def test_a_rank_that_stops_is_named_with_the_message_that_others_wait_for():
    with pytest.raises(RunFailed) as failed:
        run_on_ranks(train_until_rank_2_stops, 4, "one_f_one_b --timeout 8", timeout=40)
    # Of its neighbours, or whoever waits for these, the first to lose patience ends the job.
    named = r"the (activation|gradient) of micro-batch \d from stage 2 from rank 2"
    assert re.search(f"waited 8 s for .*{named}: rank 2 has stopped answering", str(failed.value))


RECORDERS = "torch._C._distributed_c10d"


def leave_a_sum_out(rank, folder):
    """Rank 3, one of the two replicas of the last stage, adds its gradients to nobody's."""
    os.environ[FLIGHT_VARIABLE] = folder
    text = json.dumps({"entries": [f"NCCL's of rank{rank}"]}).encode()
    nothing = lambda *_: SimpleNamespace(wait=lambda: None)  # noqa: E731
    with (
        mock.patch(f"{RECORDERS}._dump_nccl_trace_json", lambda: text, create=True),
        mock.patch("extensions.data_parallel.replicas.Summing", nothing)
        if rank == 3
        else nullcontext(),
    ):
        return run_as_with_nccl("pipeline_with_data_parallel --replicas 2 --timeout 8")


@pytest.mark.further
def test_a_sum_that_a_rank_leaves_out_is_named_and_nccl_s_own_record_is_written(tmp_path):
    with pytest.raises(RunFailed) as failed:
        run_on_ranks(leave_a_sum_out, 4, str(tmp_path), timeout=40)
    assert re.search(
        r"(waited 8|which waits).* its number of tokens from rank 3", str(failed.value)
    )
    for file in tmp_path.glob("rank*.json"):
        assert json.loads(file.read_text()) == {"entries": [f"NCCL's of {file.stem}"]}
    assert list(tmp_path.glob("rank*.json"))


# Without processes


class Moment:
    """A mark of which the test says whether the device has reached it."""

    def __init__(self, reached=False):
        self.reached = reached

    def query(self):
        return self.reached


@pytest.fixture
def watch(monkeypatch):
    marks = []

    def device_mark():
        marks.append(Moment())
        return marks[-1]

    monkeypatch.setattr("guard.watch.device_mark", device_mark)
    watch = Watch(0, 60)
    watch.device_waits, watch.marks = True, marks
    for what in "first", "second":
        with watch.waiting(1, what):
            pass
    return watch


def test_the_host_waits_for_nothing_and_the_device_for_what_it_has_come_to(watch):
    assert watch.wait is None and watch.longest_wait() is None  # it computes what comes before
    watch.marks[0].reached = True
    assert watch.longest_wait()[:2] == (1, "first")
    watch.marks[1].reached = True
    assert watch.longest_wait() is None  # it computes between the two
    watch.marks[2].reached = True
    assert watch.longest_wait()[:2] == (1, "second")
    watch.marks[3].reached = True
    assert watch.longest_wait() is None and not watch.left


def test_a_wait_of_the_device_counts_from_when_it_stands_there(watch):
    watch.marks[0].reached = True
    first = watch.longest_wait()
    assert watch.longest_wait() == first
    for mark in watch.marks[1:3]:
        mark.reached = True
    assert watch.longest_wait().since > first.since
    with watch.host_waiting(2, "its results"):  # began later: what the device lacks comes first
        assert watch.longest_wait().what == "second"


def test_the_start_of_a_transfer_leaves_nothing_to_the_device(watch):
    before = len(watch.marks)
    with watch.around_starts(jobs.Job(0, 2, None, "nccl", 60.0).starting)(1, "a message"):
        assert watch.wait.what == "a message"
    assert len(watch.marks) == before


def test_each_backend_s_own_record_is_asked_for():
    calls = []

    def dump(record, **options):
        calls.append(options)
        return record

    full, empty = b'{"entries": []}', b"{}"
    with mock.patch(f"{RECORDERS}._dump_fr_trace_json", lambda **more: dump(b"fr", **more)):
        with mock.patch(f"{RECORDERS}._dump_nccl_trace_json", lambda: full, create=True):
            assert flight_record("gloo") == b"fr" and flight_record("nccl") == full
        with mock.patch(f"{RECORDERS}._dump_nccl_trace_json", lambda: empty, create=True):
            assert flight_record("nccl") == b"fr"
    assert calls == [{}, {"backend": "nccl2"}]


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_the_device_is_bound_to_its_rank_however_it_was_started(launcher, monkeypatch):
    variables = {
        "torchrun": {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
        "srun": {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
                 "SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
    }[launcher]  # fmt: skip
    for name in ("RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    opened = mock.Mock()
    monkeypatch.setattr(dist, "init_process_group", opened)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with ranks_set():  # as the guard does before main()
        rank, num_ranks, local_rank, _ = jobs.ranks_from_environment()
        job = jobs.Job(rank, num_ranks, jobs.choose_device("cuda", local_rank), "gloo", 60.0)
        job.store = store_with_gpus(monkeypatch, range(8), own=5)
        jobs.open_channels(job, [])
    assert opened.call_args.args == ("cpu:gloo,cuda:nccl",)
    assert opened.call_args.kwargs["device_id"] == torch.device("cuda", 1)
    assert opened.call_args.kwargs["rank"] == 5


def store_with_gpus(monkeypatch, gpus, own):
    """The store of a job whose rank r has GPU gpus[r], None for none; this rank has `own`."""
    store = dist.HashStore()
    for rank, gpu in enumerate(gpus):
        store.set(f"gpu/{rank}", "" if gpu is None else str(gpu))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: mock.Mock(uuid=own))
    return store


@pytest.mark.parametrize(
    "gpus, backend",
    [
        ([7, 8, 9], "nccl"),  # as with --gpus-per-task=1, where each rank calls its own cuda:0
        ([7, 8, 7], "gloo"),
        ([7, None, 9], "gloo"),  # a node without a GPU: NCCL there would leave all others waiting
    ],
)
def test_all_ranks_take_nccl_only_where_each_has_a_gpu_that_no_other_has(
    monkeypatch, gpus, backend
):
    job = jobs.Job(2, 3, torch.device("cuda", 0), "gloo", 60.0)
    job.store = store_with_gpus(monkeypatch, gpus, own=gpus[2])
    assert jobs.common_backend(job) == backend


def test_a_paced_clock_waits_for_the_device_where_a_message_has_to_be_there():
    with (
        mock.patch("torch.cuda.synchronize") as synchronize,
        mock.patch("torch.cuda.Event", mock.MagicMock()),
    ):
        for pace, expected in (None, 0), (Costs(1, 2), 1):
            clock = Clock(0, SimpleNamespace(type="cuda"), 0.0, pace)
            synchronize.reset_mock()
            with clock.waiting(1, "a message"):
                pass
            assert synchronize.call_count == expected
