"""Several pipelines share a batch, and the training is that of one process on the whole of it.

Whoever sums the gradients, whoever performs the schedule, whatever the mesh of replicas x stages,
also where rows have unequally many tokens. Losses agree to 1e-12 in float64.
"""

import functools
import json
import shlex
import sys
import time
from pathlib import Path
from unittest import mock

import pipeline_with_data_parallel as script
import pytest
import torch
from further import SINCE_2_13, first_of, further
from ranks import PRELOAD, run_on_ranks
from test_bad_input import Refusal

from course.failed_run import RunFailed
from course.launch import run
from extensions.data_parallel import reductions
from extensions.data_parallel.replicas import AllReduce
from extensions.optimization import clipping
from extensions.optimization.update import clip_whole_model
from extensions.pretraining.padding import PADDING, Sentences, ShareOfLoss, count_real_tokens
from pipeline.data import load_text
from pipeline.model import token_loss
from pipeline.one_process import build_model, train_one_process
from pipeline.training import LossLog

PRELOAD.extend(
    [
        "torch.distributed.pipelining",
        "extensions.torch_pipelining.library_worker",
        "extensions.data_parallel.wrappers",
    ]
)
SMALL = "--layers 8 --dim 16 --heads 4 --kv-heads 2 --seq-len 24 --batch-size 16 --microbatches 4"
FLAGS = f"{SMALL} --device cpu --steps 3 --padding --clip 0.5 --optimizer momentum"
# AdamW forgets how long a gradient is, so with it no test would see a wrong norm.
ADAMW = FLAGS.replace("momentum", "adamw")
SOAK = pytest.mark.soak


def arguments_of(flags):
    """What the script makes of its flags, as one process."""
    with mock.patch.object(sys, "argv", ["script", *shlex.split(flags)]):
        return script.read_flags()[0]


@functools.cache
def one_process(flags=FLAGS):
    arguments = arguments_of(flags)
    return train_one_process(arguments, before_update=clip_whole_model)


def train(folder, flags, ranks=4, common=FLAGS):
    """{step: loss} in full precision, and what was printed."""
    file = Path(folder) / "losses"
    command = f"pipeline_with_data_parallel.py {common} {flags} --losses {file}"
    done = run(command, ranks, warm=True, show=False, limit=90)
    rows = map(json.loads, file.read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows}, done.output


def largest_difference(losses, reference):
    assert losses
    return max(abs(loss - reference[step]) for step, loss in losses.items())


# The same losses


# 2 x 2 is the mesh of nearly all other tests here.
@pytest.mark.parametrize(("ranks", "count"), first_of([(4, 4), (8, 2), (4, 1)], 2))
def test_losses_are_those_of_one_process_on_the_whole_batch_for_every_mesh(tmp_path, ranks, count):
    flags = f"--replicas {count}" + (" --microbatches 2" if ranks == 8 else "")
    losses, output = train(tmp_path, flags, ranks)
    assert len(losses) == 3 and largest_difference(losses, one_process()) <= 1e-12
    assert f"replicas {count} x stages {ranks // count}" in output


@pytest.mark.further
@pytest.mark.parametrize(
    ("reduce", "schedule", "library"),
    first_of(
        [
            ("all-reduce", "zb-v", ""),
            ("ddp", "1f1b", ""),
            ("fsdp2", "zb-h1", ""),
            ("all-reduce", "1f1b", "--library"),
            ("fsdp2", "interleaved-1f1b", ""),
            ("ddp", "looped-bfs", ""),
            ("ddp", "gpipe", "--library"),
            ("ddp", "interleaved-1f1b", "--library"),
            pytest.param("fsdp2", "zb-v", "--library", marks=SINCE_2_13),
            pytest.param("all-reduce", "interleaved-1f1b", "", marks=SOAK),
            pytest.param("ddp", "gpipe", "", marks=SOAK),
            pytest.param("fsdp2", "1f1b", "", marks=SOAK),
            pytest.param("all-reduce", "zb-v", "--library", marks=SOAK),
            pytest.param("fsdp2", "gpipe", "--library", marks=SOAK),
        ],
        4,
    ),
)
def test_whoever_sums_and_whoever_performs_the_losses_are_the_same(
    tmp_path, reduce, schedule, library
):
    flags = f"--replicas 2 --reduce {reduce} --schedule {schedule} {library}"
    losses, _ = train(tmp_path, flags)
    assert largest_difference(losses, one_process()) <= 1e-12


def test_without_clipping_plain_descent_on_full_rows_agrees_too(tmp_path):
    common = FLAGS.replace("--padding --clip 0.5 --optimizer momentum", "")
    losses, output = train(tmp_path, "--replicas 2 --verify", common=common)
    assert largest_difference(losses, one_process(common)) <= 1e-12
    assert "as promised" in output


@pytest.mark.parametrize(
    ("ranks", "flags"),
    first_of(
        [
            (4, "--replicas 2 --schedule interleaved-1f1b --chunks 2"),
            (3, "--replicas 3 --batch-size 48 --reduce ddp"),  # no width is a multiple of three
            (4, "--replicas 2 --library"),
        ],
        2,
    ),
)
def test_an_optimizer_in_shards_has_the_losses_of_one_process(tmp_path, ranks, flags):
    common = ADAMW.replace("--batch-size 16", "--batch-size 48") if ranks == 3 else ADAMW
    losses, _ = train(tmp_path, f"{flags} --sharding optimizer", ranks, common)
    assert largest_difference(losses, one_process(common)) <= 1e-12


def test_fsdp2_sums_float32_over_gloo_which_refuses_its_scaled_sums(tmp_path):
    losses, _ = train(tmp_path, "--replicas 2 --reduce fsdp2 --dtype float32")
    assert 1e-12 < largest_difference(losses, one_process()) <= 1e-4


# What would be wrong


def train_here(rank, flags, broken):
    """The script on this rank, with one thing broken. Returns its losses."""
    losses = []
    patches = {
        "the norm of a shard": lambda: mock.patch.object(clipping, "whole_sum", local_part),
        "every replica for itself": lambda: mock.patch.object(AllReduce, "start", do_not_start),
        "mean of means": lambda: mock.patch.object(script, "ShareOfLoss", MeanOfMeans),
    }

    def add(log, step, loss):
        if log.has_loss:
            losses.append(loss.item())

    note = mock.patch.object(LossLog, "add", add)
    with patches[broken](), note, mock.patch.object(sys, "argv", ["x", *shlex.split(flags)]):
        script.main()
    return losses


def allow_every_schedule():
    return mock.patch.object(script, "check_reduction", lambda arguments, schedule: schedule)


def local_part(total):
    return total.to_local() if hasattr(total, "to_local") else total


def do_not_start(self, index):
    self.sums[index] = mock.Mock()


class MeanOfMeans(ShareOfLoss):
    """The mean over each micro-batch, and of those the mean: what equal rows would allow."""

    def __call__(self, scores, targets):
        mean = token_loss(scores, targets)  # which leaves padding out, in the count as well
        return mean / 8  # micro-batches in all replicas


@pytest.mark.parametrize(
    ("broken", "flags"),
    [
        ("the norm of a shard", "--reduce fsdp2"),
        ("every replica for itself", ""),
        ("mean of means", ""),
    ],
)
def test_a_planted_fault_leaves_no_error_and_other_losses(broken, flags):
    rows = run_on_ranks(train_here, 4, f"{FLAGS} --replicas 2 {flags}", broken)
    [losses] = [row for row in rows if row]
    assert max(abs(a - b) for a, b in zip(losses, one_process())) > 1e-4


def gradients_after_one_step(rank, flags):
    """By name, of this rank's parameters, with DDP around stages whose backward comes in halves."""
    gathered = {}

    def keep(job, named_parameters, largest_norm):
        gathered.update({name: p.grad.clone() for name, p in named_parameters})

    with allow_every_schedule(), mock.patch.object(script, "clip_gradients", keep):
        with mock.patch.object(sys, "argv", ["x", *shlex.split(flags)]):
            script.main()
    return gathered


def test_ddp_sums_the_gradients_of_whole_backwards_and_none_of_the_matrices_of_split_ones():
    flags = f"{FLAGS} --steps 1 --replicas 2 --reduce ddp --schedule"
    for schedule, equal in [("1f1b", True), ("zb-h1", False)]:
        first, _, second, _ = run_on_ranks(gradients_after_one_step, 4, f"{flags} {schedule}")
        matrices = [name for name in first if first[name].dim() == 2 and "embedding" not in name]
        assert matrices and first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) == equal for name in matrices)


# Padding


def loss_and_gradient(share, pieces):
    """Sums over the pieces of a batch, by one process."""
    arguments = arguments_of(FLAGS)
    model = build_model(arguments)
    total = 0.0
    for inputs, targets in pieces:
        loss = share(model(inputs), targets)
        loss.backward()
        total += loss.item()
    return total, torch.cat([p.grad.flatten() for p in model.parameters()])


def test_with_unequal_padding_a_mean_of_means_is_wrong_and_a_share_of_all_real_tokens_right():
    text = load_text(seq_len=24)
    inputs, targets = Sentences(text.training, text.held_out).batch(0, 16, 24)
    pieces = list(zip(inputs.chunk(8), targets.chunk(8)))
    counts = [count_real_tokens([piece]) for _, piece in pieces]
    assert len(set(counts)) > 2 and sum(counts) < targets.numel()
    whole = loss_and_gradient(token_loss, [(inputs, targets)])
    share = ShareOfLoss()
    share.real_tokens = sum(counts)
    ours = loss_and_gradient(share, pieces)
    means = loss_and_gradient(MeanOfMeans(), pieces)
    assert abs(ours[0] - whole[0]) <= 1e-12 and (ours[1] - whole[1]).abs().max() <= 1e-12
    assert abs(means[0] - whole[0]) > 1e-3 and (means[1] - whole[1]).abs().max() > 1e-3


def test_a_microbatch_of_nothing_but_padding_adds_zero_where_a_mean_is_no_number():
    scores = torch.randn(2, 3, 256, dtype=torch.float64, requires_grad=True)
    targets = torch.full((2, 3), PADDING)
    share = ShareOfLoss()
    share.real_tokens = 5
    loss = share(scores, targets)
    loss.backward()
    assert loss.item() == 0.0 and not scores.grad.any()
    assert token_loss(scores, targets).isnan()


def test_a_row_ends_with_its_first_full_stop():
    text = load_text(seq_len=24)
    inputs, targets = Sentences(text.training, text.held_out).batch(3, 64, 24)
    full_inputs, full_targets = text.batch(3, 64, 24)
    assert torch.equal(inputs, full_inputs)
    for row, full in zip(targets.tolist(), full_targets.tolist()):
        real = full.index(ord(".")) + 1 if ord(".") in full else 24
        assert row == full[:real] + [PADDING] * (24 - real)


# Checkpoints


def saved_tensors(folder):
    """{name: how many tensors were written for it} of the newest checkpoint, and its metadata."""
    import torch.distributed.checkpoint as dcp

    newest = Path(folder) / (Path(folder) / "latest").read_text().strip()
    metadata = dcp.FileSystemReader(newest).read_metadata()
    counts = {}
    for index in metadata.storage_data:
        counts[index.fqn] = counts.get(index.fqn, 0) + 1
    return counts, metadata.state_dict_metadata


def assert_saved_once(folder, reduce):
    """The newest checkpoint has each tensor once, under its name in the whole model."""
    copies = 2 if reduce == "fsdp2" else 1  # two shards, one from each replica, or one copy
    counts, metadata = saved_tensors(folder)
    for name, parameter in build_model(arguments_of(FLAGS)).named_parameters():
        for key in (f"model.{name}", f"optimizer.{name}.exp_avg"):
            assert metadata[key].size == parameter.shape
            assert counts[key] == copies
    assert not [key for key in counts if "module." in key]


@pytest.mark.further
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fsdp2", "ddp"),
        pytest.param("ddp", "fsdp2", marks=further),
        pytest.param("all-reduce", "all-reduce", marks=SOAK),
    ],
)
def test_a_checkpoint_of_2_x_2_goes_on_as_1_x_4_and_as_4_x_1(tmp_path, before, after):
    common = ADAMW.replace("--steps 3", "--steps 6")
    where = f"--checkpoints {tmp_path / 'saved'} --save-every 2"
    losses = {}
    for flags in (
        f"--replicas 2 --steps 2 --reduce {before}",
        "--replicas 1 --steps 4",
        f"--replicas 4 --steps 6 --microbatches 2 --reduce {after}",
    ):
        some, output = train(tmp_path, f"{flags} {where}", common=common)
        assert ("continues after" in output) == bool(losses)
        if not losses:
            assert_saved_once(tmp_path / "saved", before)
        losses.update(some)
    assert sorted(losses) == list(range(6))
    assert largest_difference(losses, one_process(common)) <= 1e-12


@pytest.mark.further
def test_an_optimizer_in_shards_is_saved_whole_and_goes_on_in_other_shards_and_in_none(tmp_path):
    common, losses = ADAMW.replace("--steps 3", "--steps 8"), {}
    where = f"--checkpoints {tmp_path / 'saved'} --save-every 2"
    for flags in (
        "--replicas 2 --steps 2 --sharding optimizer",
        "--replicas 4 --steps 4 --microbatches 2 --sharding optimizer",
        "--replicas 1 --steps 6",
        "--replicas 2 --steps 8 --sharding optimizer",
    ):
        some, output = train(tmp_path, f"{flags} {where}", common=common)
        assert ("continues after" in output) == bool(losses)
        losses.update(some)
    assert sorted(losses) == list(range(8))
    assert largest_difference(losses, one_process(common)) <= 1e-12


def test_replicas_that_sum_by_themselves_save_every_tensor_once_too(tmp_path):
    train(tmp_path, f"--steps 1 --replicas 2 --checkpoints {tmp_path / 'saved'}", common=ADAMW)
    assert_saved_once(tmp_path / "saved", "all-reduce")


# What is refused, and what ends a job


@pytest.mark.parametrize(
    ("ranks", "flags", "names"),
    [
        (4, "--replicas 3", "--replicas 3 does not divide the 4 ranks"),
        (4, "--replicas 8", "use one of 1, 2, 4"),
        (4, "--replicas 2 --batch-size 12", "--batch-size 12 cannot be cut into --replicas 2"),
        (4, "--replicas 0", "--replicas"),
        (4, "--replicas 2-1-1", "--replicas"),
        (4, "--replicas 2 --reduce ddp --schedule zb-h1", "--reduce ddp with --schedule zb-h1"),
        (4, "--replicas 2 --reduce nobody", "--reduce"),
        (4, "--replicas 2 --reduce fsdp2 --record x", "--record with --reduce fsdp2"),
        (4, "--replicas 2 --library --schedule zb-h1", "--library has no --schedule zb-h1"),
        (4, "--library --microbatches 2", "--microbatches 2 is less than the 4 stages"),
        (4, "--library --option depth=1", "leave out --option"),
        (12, "--replicas 1", "--layers 8 is too few"),
        (4, "--sharding optimizer", "use --replicas 2 or more"),
        (4, "--replicas 2 --sharding optimizer", "use momentum or adamw"),
        (4, "--replicas 2 --sharding optimizer --reduce fsdp2", "shards of its own"),
        (4, "--replicas 2 --schedule zb-v --chunks 3", "--schedule zb-v"),
    ],
)
def test_a_bad_mesh_is_refused_in_one_sentence(monkeypatch, capsys, ranks, flags, names):
    refusal = Refusal(monkeypatch, capsys)
    refusal.check("pipeline_with_data_parallel", *flags.split(), names=names, ranks=ranks)


@pytest.mark.parametrize(
    ("signal", "reduce"),
    [
        ("SIGKILL", "ddp"),
        pytest.param("SIGKILL", "all-reduce", marks=further),
        pytest.param("SIGSTOP", "fsdp2", marks=further),
        pytest.param("SIGKILL", "fsdp2", marks=SOAK),
        pytest.param("SIGSTOP", "all-reduce", marks=SOAK),
        pytest.param("SIGSTOP", "ddp", marks=SOAK),
    ],
)
def test_a_lost_rank_of_one_replica_ends_all_of_them_and_is_named(signal, reduce):
    began = time.monotonic()
    with pytest.raises(RunFailed) as failed:
        run(
            f"pipeline_with_data_parallel.py {FLAGS} --steps 1000 --pace 10 20 --replicas 2 "
            f"--reduce {reduce} --timeout 8",
            warm=True,
            show=False,
            limit=60,
            send=(signal, 3, "step 1"),
        )
    message = str(failed.value)
    assert "rank 3" in message and "Traceback" not in message, message
    assert time.monotonic() - began < 50


@pytest.mark.parametrize("other_machine", ["here", "there"])
def test_when_the_sums_end_is_told_only_where_all_ranks_have_one_clock(
    capsys, monkeypatch, other_machine
):
    gathered = iter([[([1.0], [1.5]), ([2.0], [2.25])], ["here", other_machine]])
    monkeypatch.setattr(reductions, "gather", lambda job, own: next(gathered))
    arguments = mock.Mock(replicas=2, reduce="all-reduce", steps=1)
    job = mock.Mock(rank=0, device=torch.device("cpu"))
    reductions.describe_sums(arguments, job, mock.Mock(num_stages=1), mock.Mock(done_at=[1.5]))
    told = ", there -500.0 +250.0 ms after the last action of all"
    assert (told in capsys.readouterr().out) == (other_machine == "here")
