"""Every training script and schedule passes under NCCL's rules of order, with the same losses.

All scripts of a test run one after the other in one job of 4 ranks, whose process groups keep the
rules (lab/rehearsal.py). What breaks a rule hangs, and the watch says where.
"""

import importlib
import io
import json
import re
import runpy
import sys
from contextlib import nullcontext, redirect_stdout
from types import SimpleNamespace
from unittest import mock

import finetune
import inference
import pytest
import rehearse
import torch
import torch.distributed as dist
from further import first_of, further
from ranks import run_on_ranks
from saved_models import write_model

from course.failed_run import RunFailed
from course.launch import SCRIPTS
from extensions.real_models.saved_folder import read_model
from extensions.tensor_parallel import mesh
from extensions.torch_pipelining import library
from guard.watch import attach_watch
from lab import rehearsal
from lab.slow_network import NodesError, check_transport
from pipeline import training
from pipeline.job import Job, join_job
from pipeline.message import Message
from pipeline.schedules import synchronous_schedules

# Of width 16: below it no digit is promised, and --verify rejects no loss.
SMALL = "--layers 8 --dim 16 --heads 2 --kv-heads 1 --seq-len 4 --steps 2 --device cpu --verify"
BY_HAND = [
    "naive_model_parallelism --microbatches 2",
    "gpipe",
    "one_f_one_b",
    "interleaved_1f1b",
    "zero_bubble",
    "zero_bubble --schedule zb-h2",
    "pipedream --steps 6",
    "pipedream --steps 8 --replicas 2-1-1",
    "pipedream --steps 3 --microbatches 4 --weights double-buffered",
]
BY_WORKER = [f"train --schedule {name}" for name in synchronous_schedules()]
EXTENDED = [
    "activation_checkpointing --recompute layer --schedule zb-h1",
    "pipeline_with_data_parallel --replicas 2 --schedule interleaved-1f1b",
    "pipeline_with_data_parallel --replicas 2 --reduce ddp",
    "pipeline_with_data_parallel --replicas 2 --reduce fsdp2 --schedule zb-h1",
    "pipeline_with_data_parallel --replicas 2 --sharding optimizer --optimizer adamw",
    "pipeline_with_data_parallel --replicas 2 --library",
    "vocabulary_parallel --tied",
    "vocabulary_parallel --tied --spread",
    "distributed_checkpointing --checkpoints {folder}",
    "pretrain_llama --replicas 2 --optimizer sgd --vocabulary 256 --clip 1",
    "pretrain_llama --replicas 2 --vocabulary 256 --evaluate-windows 16 --dtype float64",
    "pretrain_llama --checkpoints {folder}/saves --save-every 1 --asynchronous",
    "tensor_parallel --tensor 2 --kv-heads 2 --clip 0.1",
    "tensor_parallel --tensor 2 --kv-heads 2 --replicas 2 --sequence whole",
    "inference --requests 5 --groups 4 --tokens 4 --seq-len 32",
    "finetune --model {model} --data {folder}/prompts.jsonl --dtype float64",
]
FLAG_OF_SIZE = r"--(layers|dim|heads|kv-heads) \d+"
LIBRARY = [
    f"torch_pipelining --schedule {name} --chunks {1 if name in library.ONE_STAGE else 2}"
    for name in library.LIBRARY_SCHEDULES
]


class JoinOnce:
    """In place of join_job: the same job each time, as bare as the first time."""

    job = None

    def __call__(self, device, timeout, pairs=None, shape=None, dtype=None, *_, **__):
        if self.job is None:
            every = [(a, b) for a in range(4) for b in range(4) if a != b]
            self.job = join_job(device, timeout, every)
            self.bare = dict(vars(self.job))
        vars(self.job).clear()
        vars(self.job).update(self.bare)
        self.job.shape, self.job.dtype = shape, dtype
        return self.job


def flags_of(script):
    """Those of SMALL that it knows: a saved model has its sizes, and who writes takes no steps."""
    unknown = {"finetune": FLAG_OF_SIZE, "inference": r"--steps \d+"}
    return re.sub(unknown.get(script, "^$"), "", SMALL).split()


def whole_model(folder, dtype, device):
    """In place of that of transformers, which takes seconds to import."""
    return read_model(folder, 4).build_part(0, 4, dtype, device)


def run_scripts(rank, mode, calls, folder):
    """The exit status of each script, which is 0 where --verify has found no difference."""
    rehearsal.begin(mode)
    join_once, statuses = JoinOnce(), {}
    for call in calls:
        script, *flags = call.format(folder=folder, model=f"{folder}/model").split()
        program = importlib.import_module(script)
        argv = [script, *flags_of(script), "--timeout", "30", *flags]
        with (
            mock.patch.object(training, "join_job", join_once),
            mock.patch.object(library, "join_job", join_once),
            mock.patch.object(mesh, "join_job", join_once),
            mock.patch.object(inference, "join_job", join_once),
            mock.patch.object(finetune, "library_model", whole_model),
            mock.patch.object(finetune, "check_library", lambda arguments: None),
            mock.patch.object(Job, "leave", lambda job: None),
            mock.patch.object(sys, "argv", argv),
        ):
            statuses[call] = program.main()
    return statuses


def assert_all_pass(mode, calls, folder):
    if calls is EXTENDED:
        write_model(folder / "model")
        rows = [{"prompt": "one ", "completion": "two" * (1 + n % 9)} for n in range(40)]
        (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for statuses in run_on_ranks(run_scripts, 4, mode, calls, str(folder), timeout=280):
        assert statuses == dict.fromkeys(calls, 0)


@pytest.mark.parametrize(
    "calls", first_of([(BY_HAND,), (BY_WORKER,), (EXTENDED,)], 1), ids=["hand", "worker", "more"]
)
def test_all_scripts_pass_with_one_operation_per_rank(calls, tmp_path):
    assert_all_pass("strict", calls, tmp_path)


@further
@pytest.mark.parametrize(
    "mode", ["lazy", *(pytest.param(mode, marks=pytest.mark.soak) for mode in ("warmed", "eager"))]
)
def test_all_loops_and_schedules_pass_in_the_other_modes(mode, tmp_path):
    assert_all_pass(mode, BY_HAND + BY_WORKER, tmp_path)


@further
@pytest.mark.parametrize("mode", ["eager", pytest.param("warmed", marks=pytest.mark.soak)])
def test_so_do_replicas_checkpoints_and_the_llama(mode, tmp_path):
    assert_all_pass(mode, EXTENDED, tmp_path)


@pytest.mark.further
def test_torch_s_own_library_passes_with_one_operation_per_rank(tmp_path):
    assert_all_pass("strict", LIBRARY, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("mode", first_of(["lazy", "warmed", "eager"], 1))
def test_so_it_does_in_the_other_modes(mode, tmp_path):
    assert_all_pass(mode, [*LIBRARY, "torch_pipelining_gpt2 --model llama"], tmp_path)


def run_bare_program(rank, mode):
    """What a program prints that meets the others by itself and uses nothing of the course."""
    if mode:
        rehearsal.begin(mode)
    printed = io.StringIO()
    with redirect_stdout(printed):
        runpy.run_path(str(SCRIPTS / "small" / "library.py"))
    return printed.getvalue()


@pytest.fixture(scope="module")
def printed_without_rehearsal():
    return run_on_ranks(run_bare_program, 4, None)


@pytest.mark.parametrize("mode", first_of(["warmed", "eager", "strict"], 1))
def test_a_bare_program_with_the_library_prints_the_same(mode, printed_without_rehearsal):
    assert printed_without_rehearsal[3].count("loss") == 5
    assert run_on_ranks(run_bare_program, 4, mode) == printed_without_rehearsal


def run_without_batches(rank, call):
    with mock.patch.object(rehearsal, "as_one", lambda operations, batch: batch(operations)):
        return run_scripts(rank, "strict", [f"{call} --timeout 8"], None)


@pytest.mark.further
def test_its_1f1b_relies_on_batches_and_its_interleaved_schedule_does_not():
    one_f_one_b, interleaved = LIBRARY[1:3]
    with pytest.raises(RunFailed) as failed:
        run_on_ranks(run_without_batches, 4, one_f_one_b)
    assert "rank 0, under way: a message to rank 1; queued: a message from" in str(failed.value)
    for statuses in run_on_ranks(run_without_batches, 4, interleaved):
        assert list(statuses.values()) == [0]


def operations_of_each_collective(rank):
    """{function of torch.distributed: how many operations have gone into a queue}."""
    rehearsal.begin("strict")
    dist.init_process_group("gloo")
    x, both = torch.ones(2), [torch.ones(2), torch.ones(2)]
    calls = {
        "all_reduce": lambda: dist.all_reduce(x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "reduce": lambda: dist.reduce(x, 0),
        "barrier": lambda: dist.barrier(),
        "all_gather": lambda: dist.all_gather(both, x),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.ones(4), x),
        "reduce_scatter": lambda: dist.reduce_scatter(x, both),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(x, torch.ones(4)),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.ones(2), x),
        "gather": lambda: dist.gather(x, both if rank == 0 else None),
        "scatter": lambda: dist.scatter(x, both if rank == 0 else None),
    }
    counts, issue = {}, rehearsal.Rehearsed.issue
    for name, call in calls.items():
        with mock.patch.object(
            rehearsal.Rehearsed, "issue", autospec=True, side_effect=issue
        ) as at:
            call()
        counts[name] = at.call_count
    return counts


def test_no_collective_of_torch_goes_past_the_queue():
    for counts in run_on_ranks(operations_of_each_collective, 2):
        assert counts == dict.fromkeys(counts, 1)


# Faults: `sends` and `receives` on 2 to 4 ranks that NCCL would not forgive

TENSOR = torch.ones(2, 2, dtype=torch.float64)


def join_rehearsed(mode, pairs, cold=False):
    rehearsal.begin(mode)
    nothing = lambda *_: SimpleNamespace(wait=lambda: None)  # noqa: E731
    with mock.patch.multiple(Job, send=nothing, receive=nothing) if cold else nullcontext():
        job = join_job("cpu", 3.0, pairs, (2, 2), torch.float64)
    attach_watch(job)
    return job


def end(job, receives):
    for receiving in receives:
        receiving.wait()
    job.complete_sends()
    job.leave()
    return "passed"


def activation(rank, k=0):
    return Message("activation", rank, k)


def both_receive_first(rank, mode):
    """On channels that no message has connected yet."""
    job = join_rehearsed(mode, [(0, 1), (1, 0)], cold=True)
    receiving = job.receive(1 - rank, activation(1 - rank))
    job.send(TENSOR, 1 - rank, activation(rank))
    return end(job, [receiving])


def all_send_first(rank, mode):
    """Round a ring."""
    job = join_rehearsed(mode, [(0, 1), (1, 2), (2, 0)])
    job.send(TENSOR, (rank + 1) % 3, activation(rank))
    return end(job, [job.receive((rank - 1) % 3, activation((rank - 1) % 3))])


def pairs_in_different_orders(rank, mode):
    """Ranks 0 and 1 each send to 2 and 3, and nobody sends and receives."""
    job = join_rehearsed(mode, [(0, 2), (0, 3), (1, 2), (1, 3)])
    if rank < 2:
        for k, destination in enumerate([2 + rank, 3 - rank]):
            job.send(TENSOR, destination, activation(rank, k))
        return end(job, [])
    sources = [3 - rank, rank - 2]
    return end(
        job, [job.receive(source, activation(source, k)) for source, k in zip(sources, [1, 0])]
    )


FAULTS = [  # function, ranks, the modes in which it hangs, and what is pending where it does
    (both_receive_first, 2, {"lazy": "connecting", "strict": "under way"}, "from rank {before}"),
    (all_send_first, 3, {"strict": "under way"}, "to rank {behind}"),
    (pairs_in_different_orders, 4, {"strict": "under way"}, ""),
]


@pytest.mark.parametrize("mode", first_of(rehearsal.MODES, 4))
@pytest.mark.parametrize("fault, ranks, hanging, pending", FAULTS)
def test_a_fault_hangs_where_nccl_may_hang_and_ranks_and_operations_are_named(
    fault, ranks, hanging, pending, mode
):
    if mode not in hanging:
        assert run_on_ranks(fault, ranks, mode, timeout=40) == ["passed"] * ranks
        return
    with pytest.raises(RunFailed) as failed:
        run_on_ranks(fault, ranks, mode, timeout=40)
    report = str(failed.value)
    assert "a deadlock, each of these ranks waits for the next" in report
    for rank in range(ranks):
        where = pending.format(before=(rank - 1) % ranks, behind=(rank + 1) % ranks)
        assert re.search(
            rf"rank {rank}, {hanging[mode]}: the activation of micro-batch \d .*{where}", report
        )


def exchange_at_once(rank, mode):
    """Neighbours send and receive in one batch, as torch's library does in 1F1B."""
    rehearsal.begin(mode)
    job = join_job("cpu", 3.0, [])
    theirs, operations = torch.empty(2), []
    for what, tensor in (dist.isend, torch.full((2,), float(rank))), (dist.irecv, theirs):
        operations.append(dist.P2POp(what, tensor, 1 - rank))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    job.leave()
    return theirs.tolist()


@pytest.mark.parametrize("mode", first_of(rehearsal.MODES[::-1], 1))
def test_a_batch_is_one_operation_in_which_two_sends_cross(mode):
    assert run_on_ranks(exchange_at_once, 2, mode) == [[1.0, 1.0], [0.0, 0.0]]


def test_rehearse_is_rejected_for_a_gpu():
    said = "--rehearse plays NCCL's rules on a CPU; use --device cpu"
    with mock.patch("torch.cuda.is_available", lambda: True):
        with pytest.raises(SystemExit, match=said):
            rehearsal.check_rehearsal(SimpleNamespace(rehearse="strict", device="auto"))


def test_slow_links_which_send_from_a_second_thread_are_rejected_with_nccl():
    for backend, mode in ("nccl", None), ("gloo", "strict"):
        world = SimpleNamespace(WORLD=SimpleNamespace(mode=mode))
        with mock.patch.object(dist, "group", world):
            check_transport(backend, slow=0.0)
            with pytest.raises(NodesError, match="PIPELINE_NODE_DELAY .* use --device cpu"):
                check_transport(backend, slow=0.03)
    check_transport("gloo", slow=0.03)


def test_a_program_may_lie_in_a_folder_that_may_not_be_listed(tmp_path, monkeypatch):
    def forbidden(folder):
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr(rehearse.os, "listdir", forbidden)  # root may list any folder
    monkeypatch.setattr(sys, "path", [*sys.path])
    rehearse.import_from_folder_of(tmp_path / "program.py")
    assert sys.path[0] == str(tmp_path)
