"""Replicas x stages x tensor-parallel ranks train like one process, and send what the formulas say."""

import functools
import re
from unittest import mock

import pytest
import tensor_parallel
import torch
from further import first_of
from ranks import PRELOAD, run_on_ranks
from torch.distributed.device_mesh import init_device_mesh

from course.failed_run import RunFailed
from course.launch import run
from extensions.pretraining.padding import PADDING, ShareOfLoss
from extensions.tensor_parallel import mesh
from extensions.tensor_parallel.mesh import NAMES, spread
from extensions.tensor_parallel.sharded_part import (
    ShareOfSplitLoss,
    build_sharded_part,
    split_dimension,
)
from extensions.tensor_parallel.tensor_group import TensorGroup, tensor_group_of
from pipeline.job import join_job
from pipeline.model import ModelConfig, build_part
from pipeline.schedules import one_f_one_b

PRELOAD.append("torch.distributed.tensor")

SIZES = "--layers 4 --dim 16 --heads 8 --kv-heads 4 --seq-len 16 --batch-size 8 --device cpu"
SMALL = f"{SIZES} --microbatches 2"
CONFIG = ModelConfig(layers=4, dim=16, heads=4, kv_heads=4, seq_len=8)


def train(flags, ranks, limit=90):
    return run(f"tensor_parallel.py {SMALL} {flags}", ranks, warm=True, show=False, limit=limit)


# The losses of one process


@pytest.mark.parametrize(
    ("ranks", "flags"),
    first_of(
        [
            (8, "--replicas 2 --tensor 2"),
            (8, "--replicas 1 --tensor 2 --sequence whole"),
            (8, "--replicas 2 --tensor 4"),  # one stage
            (4, "--tensor 2 --schedule zb-v --optimizer adamw --learning-rate 0.005"),
            (4, "--tensor 2 --schedule interleaved-1f1b --sequence whole"),
        ],
        2,
    ),
    ids=["2x2x2", "1x4x2", "2x1x4", "1x2x2 zb-v", "1x2x2 interleaved"],
)
def test_ten_steps_with_clipping_and_padding_equal_one_process_to_1e_12(ranks, flags):
    output = train(f"{flags} --steps 10 --clip 0.5 --padding --verify", ranks).output
    difference = re.search(r"largest difference from one process: (\S+), as promised", output)[1]
    assert float(difference) < 1e-12
    assert output.count("  loss ") == 10


@pytest.mark.parametrize("forgotten", ["sum_whole_gradients", "named_for_norm"])
def test_a_forgotten_sum_over_the_tensor_group_is_found_by_verify(forgotten):
    with pytest.raises(AssertionError):
        [status, _] = run_on_ranks(train_without, 2, forgotten)
        assert status == 0


def train_without(rank, forgotten):
    """Train with a part left out: the norms' sum, or the parts' own names in the global norm."""
    instead = {
        "sum_whole_gradients": lambda job, group, parameters: None,
        "named_for_norm": lambda parameters, group: parameters.items(),
    }
    flags = f"tensor_parallel.py {SMALL} --steps 3 --clip 0.1 --verify --optimizer adamw"
    with (
        mock.patch.object(tensor_parallel, forgotten, instead[forgotten]),
        mock.patch("sys.argv", flags.split()),
    ):
        return tensor_parallel.main()


@pytest.mark.further
def test_a_checkpoint_of_2_x_2_x_2_continues_as_1_x_4_x_1(tmp_path):
    folder = f"--checkpoints {tmp_path}/saved --optimizer adamw --learning-rate 0.01"
    once = train("--steps 6 --optimizer adamw --learning-rate 0.01 --replicas 2", 8).losses
    first = train(f"{folder} --steps 3 --save-every 3 --replicas 2", 8).losses
    then = train(f"{folder} --steps 6 --tensor 1", 4).losses
    assert first + then == pytest.approx(once, abs=1e-12)
    assert len(then) == 3


# The pieces


def pieces(rank):
    """For each way to keep the sequence: loss, gradients, and the bytes that two layers send."""
    job = join_job("cpu", timeout=20)
    grid = init_device_mesh("cpu", (1, 1, job.num_ranks), mesh_dim_names=NAMES)
    found = {}
    for splits_sequence in (False, True):
        group = tensor_group_of(job, grid, splits_sequence)
        part = build_sharded_part(CONFIG, 0, 4, group, 0, torch.float64, "cpu")
        loss_function = ShareOfSplitLoss(group)
        loss_function.real_tokens = 13
        inputs, targets = tokens_and_targets()
        loss = loss_function(part(inputs), targets)
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in part.named_parameters()}

        group.sent.clear()
        inner = build_sharded_part(CONFIG, 1, 3, group, 0, torch.float64, "cpu")
        length = CONFIG.seq_len // (group.size if splits_sequence else 1)
        x = torch.randn(2, length, CONFIG.dim, dtype=torch.float64, requires_grad=True)
        inner(x).sum().backward()
        found[splits_sequence] = loss.item(), gradients, dict(group.sent)
    job.leave()
    return found


@functools.cache
def pieces_of(ranks):
    return run_on_ranks(pieces, ranks)


def tokens_and_targets():
    draw = torch.Generator().manual_seed(3)
    inputs, targets = torch.randint(256, (2, 2, 8), generator=draw)
    targets[1, 5:] = PADDING
    return inputs, targets


@pytest.mark.parametrize("splits_sequence", [False, True])
def test_the_parts_of_loss_and_gradients_are_those_of_the_whole_model_1e_12(splits_sequence):
    ranks = [found[splits_sequence] for found in pieces_of(2)]
    model, loss_function = build_part(CONFIG, 0, 4), ShareOfLoss()
    loss_function.real_tokens = 13
    inputs, targets = tokens_and_targets()
    loss = loss_function(model(inputs), targets)
    loss.backward()
    for rank_loss, _, _ in ranks:
        assert abs(rank_loss - loss.item()) < 1e-12
    for name, parameter in model.named_parameters():
        found = [gradients[name] for _, gradients, _ in ranks]
        dimension = split_dimension(name)
        if dimension is not None:
            whole = torch.cat(found, dimension)
        else:  # with the sequence split each rank has its part of the sum
            whole = sum(found) if splits_sequence else found[0]
        assert (whole - parameter.grad).abs().max() < 1e-12, name


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_layer_sends_4_bsh_x_2_t_minus_1_over_t_bytes_whether_the_sequence_is_split_or_not(ranks):
    # Shoeybi et al. 2019, section 3: two all-reduces forward, two backward. Korthikanti et al.
    # 2022, section 4.2.2: as many bytes in eight halves. b s h numbers of 8 bytes per activation.
    activation = 2 * 8 * CONFIG.dim * 8
    two_layers = 2 * 4 * activation * 2 * (ranks - 1) // ranks
    whole, split = (pieces_of(ranks)[0][splits][2] for splits in (False, True))
    assert whole == {"all-reduce": two_layers}
    assert split == {"all-gather": two_layers // 2, "reduce-scatter": two_layers // 2}


def test_a_score_whose_exponential_is_no_number_has_its_loss():
    loss = ShareOfSplitLoss(TensorGroup(mock.Mock(rank=0, wire="cpu"), (0,), None, False))
    loss.real_tokens = 1
    scores = torch.tensor([[1000.0, 998.0, -1000.0]], dtype=torch.float64)
    expected = torch.nn.functional.cross_entropy(scores, torch.tensor([1]))
    assert abs(loss(scores, torch.tensor([1])) - expected) < 1e-12


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_collective_starts_by_the_job_whose_network_may_be_slow(name):
    job = mock.MagicMock(rank=1, wire=torch.device("cpu"))
    getattr(TensorGroup(job, (0, 1), None, splits_sequence=True), name)(torch.ones(1, 2, 1))
    ranks, begin = job.start.call_args.args
    assert ranks == (0, 1)
    assert begin.keywords["async_op"]  # so that a slow link can begin it, and the job wait for it


def test_the_lanes_of_a_mesh_are_one_schedule_that_plays_to_its_end():
    schedule = spread(one_f_one_b(2, 4), replicas=2, tensor=2)
    assert len(schedule.playable_order) == 8 * 2 * 4
    assert schedule.num_ranks == 8
    assert schedule.num_microbatches == 2 * 2 * 4
    # A message stays in its lane: from the rank of one stage to that of the next, t ranks on.
    assert {abs(route.source - route.destination) for route in schedule.messages} == {2}


@pytest.mark.parametrize(("sequence", "length"), [("split", 8), ("whole", 16)])
def test_with_the_sequence_split_a_message_between_stages_is_cut_into_t_parts(sequence, length):
    flags = f"tensor_parallel.py {SMALL} --sequence {sequence}"
    ranks = {"RANK": "0", "WORLD_SIZE": "4"}
    with (
        mock.patch("sys.argv", flags.split()),
        mock.patch.dict("os.environ", ranks),
        mock.patch.object(mesh, "join_job") as join,
    ):
        arguments, schedule = tensor_parallel.read_flags()
        tensor_parallel.start_sharded_job(arguments, schedule)
    assert join.call_args.args[3] == (4, length, 16)  # which a job demands of every activation


# What is rejected


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--tensor 3", ["--tensor 3", "does not divide"]),
        ("--tensor 8 --kv-heads 4", ["--tensor 8", "2 ranks"]),
        ("--heads 2 --kv-heads 1 --tensor 2", ["--tensor 2", "--kv-heads"]),
        ("--seq-len 15 --tensor 2", ["--tensor 2", "--seq-len"]),
    ],
)
def test_a_mesh_that_does_not_fit_is_rejected_in_one_sentence(flags, words):
    with pytest.raises(RunFailed) as failed:
        train(flags, 2)
    assert "Traceback" not in str(failed.value)
    for word in words:
        assert word in str(failed.value)
