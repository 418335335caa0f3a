"""Experts over the replicas of a pipeline train like one process, and send what the formula says."""

import re
from unittest import mock

import experts
import pytest
import torch
from further import first_of
from ranks import PRELOAD, run_on_ranks

from course.failed_run import RunFailed
from course.launch import run
from extensions.experts import expert_layer
from extensions.experts.expert_group import ExpertGroup, bytes_per_rank
from extensions.experts.expert_layer import (
    Experts,
    Routing,
    build_expert_part,
    imbalance,
    is_routed,
)
from extensions.experts.expert_stage import auxiliary_loss, mark_padding
from extensions.pretraining.padding import PADDING, Sentences, ShareOfLoss, count_real_tokens
from pipeline.data import load_text
from pipeline.model import ModelConfig, materialise

PRELOAD.append("experts")

SIZES = "--layers 4 --dim 16 --heads 4 --seq-len 16 --batch-size 8 --microbatches 2 --device cpu"
CONFIG = ModelConfig(layers=4, dim=16, heads=4, seq_len=16)


def train(flags, ranks, limit=90):
    return run(f"experts.py {SIZES} {flags}", ranks, warm=True, show=False, limit=limit)


# The losses of one process


LAYOUTS = [
    (4, "--replicas 2 --experts 4 --padding"),
    (4, "--replicas 4 --microbatches 1 --experts 2 --capacity 1"),
    (4, "--replicas 2 --experts 8 --top 3 --microbatches 4 --schedule dualpipe-v"),
    (4, "--replicas 2 --experts 2 --top 1 --capacity 0.5 --padding --optimizer adamw"),
    (4, "--replicas 1 --experts 4 --schedule zb-h1"),
    (4, "--replicas 4 --microbatches 1 --experts 8 --padding"),
    (4, "--replicas 4 --microbatches 1 --experts 4 --expert-ranks 2 --auxiliary 0.0"),
    (4, "--replicas 2 --experts 8 --schedule interleaved-1f1b --padding --rehearse strict"),
    (4, "--replicas 2 --experts 2 --rehearse eager"),
    (4, "--replicas 4 --microbatches 1 --experts 2 --padding --rehearse lazy"),
    (4, "--replicas 2 --experts 4 --microbatches 4 --schedule dualpipe-v --rehearse strict"),
]


@pytest.mark.parametrize(("ranks", "flags"), first_of(LAYOUTS, 2), ids=lambda value: str(value))
def test_losses_and_tokens_of_each_expert_equal_one_process_to_1e_12(ranks, flags):
    output = train(f"{flags} --steps 6 --verify", ranks).output
    difference = re.search(r"largest difference from one process: (\S+), as promised", output)[1]
    assert float(difference) < 1e-12
    assert "tokens of each expert: as in one process" in output
    assert output.count("  loss ") == 6


def gradients_of_rank(rank, flags, lean):
    """One step of experts.py: its exit status, and this rank's {name: gradient} after the sums."""
    found, sum_gradients = {}, experts.sum_gradients

    def kept(job, stages, *ranks):
        stages = list(stages)
        sum_gradients(job, stages, *ranks)
        for stage in stages:
            found.update({n: w.grad.clone() for n, w in stage.part.named_parameters()})

    with (
        mock.patch.object(experts, "sum_gradients", kept),
        mock.patch.object(expert_layer, "materialise", leaning if lean else materialise),
        mock.patch("sys.argv", f"experts.py {SIZES} {flags} --steps 1 --verify".split()),
    ):
        return experts.main(), found


def leaning(part, *arguments):
    """A part whose routers send every token to experts 0 and 1: they ignore the token."""
    part = materialise(part, *arguments)
    for name, weight in part.named_parameters():
        if "router" in name:
            weight.data[:] = 0
    return part


def gradients_of_one_process(experts_of_layer, padding, lean):
    text = load_text(None, CONFIG.seq_len)
    text = Sentences(text.training, text.held_out) if padding else text
    inputs, targets = text.batch(0, 8, CONFIG.seq_len, 0)
    routing = Routing(experts_of_layer)
    with mock.patch.object(expert_layer, "materialise", leaning if lean else materialise):
        model = build_expert_part(CONFIG, 0, 4, routing, ExpertGroup(), 0, torch.float64, "cpu")
    mark_padding(model, targets)
    loss_function = ShareOfLoss()
    loss_function.real_tokens = count_real_tokens([targets])
    loss = loss_function(model(inputs), targets)
    (loss + routing.auxiliary / 8 * auxiliary_loss(model)).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize(
    ("flags", "number", "padding", "lean"),
    first_of(
        [
            ("--replicas 2 --padding", 4, True, False),
            ("--replicas 4 --microbatches 1", 2, False, True),
            ("--replicas 2", 8, False, True),
            ("--replicas 4 --microbatches 1 --padding", 8, True, True),
        ],
        2,
    ),
)
def test_every_gradient_equals_one_process_to_1e_12(flags, number, padding, lean):
    expected = gradients_of_one_process(number, padding, lean)
    seen = set()
    for status, gradients in run_on_ranks(
        gradients_of_rank, 4, f"{flags} --experts {number}", lean, timeout=90
    ):
        assert status == 0
        for name, gradient in gradients.items():
            assert (gradient - expected[name]).abs().max() < 1e-12, name
        seen |= set(gradients)
    assert seen == set(expected)


def without_a_part(rank, forgotten):
    instead = {
        "sum_gradients": lambda job, stages, peers, copies: None,
        "is_routed": lambda name: False,
        "mark_padding": lambda part, targets: mark_padding(part, torch.zeros_like(targets)),
    }
    where = experts if forgotten != "mark_padding" else experts.sys.modules[MODULE_OF_STAGE]
    flags = f"experts.py {SIZES} --replicas 2 --padding --steps 3 --verify"
    with (
        mock.patch.object(where, forgotten, instead[forgotten]),
        mock.patch("sys.argv", flags.split()),
    ):
        return experts.main()


MODULE_OF_STAGE = "extensions.experts.expert_stage"


@pytest.mark.parametrize("forgotten", first_of(["is_routed", "sum_gradients", "mark_padding"], 1))
def test_experts_summed_as_if_they_were_copies_are_found_by_verify(forgotten):
    assert any(run_on_ranks(without_a_part, 4, forgotten, timeout=90))


# The bytes


def layer_between_ranks(rank, number, top):
    """Bytes that a layer sends forward and backward with a balanced router, by kind."""
    from extensions.data_parallel.replicas import form_replicas
    from extensions.experts.expert_group import form_expert_groups
    from pipeline.job import join_job

    job = join_job("cpu", timeout=30)
    group, _ = form_expert_groups(job, form_replicas(job, job.num_ranks), job.num_ranks)
    layer = materialise(Experts(CONFIG, Routing(number, top), group), CONFIG)
    layer.real = torch.ones(1, number, dtype=torch.bool)
    chances = 0.1 + torch.zeros(1, number, number, dtype=torch.float64)
    for token in range(number):
        for choice in range(top):
            chances[0, token, (token + choice) % number] = 1
    x = torch.randn(1, number, CONFIG.dim, dtype=torch.float64, requires_grad=True)
    with mock.patch.object(layer.router, "forward", lambda x: chances.log()):
        layer(x).sum().backward()
    job.leave()
    return dict(group.sent)


@pytest.mark.parametrize(("number", "top"), [(4, 1), (8, 2)])
def test_a_balanced_layer_sends_4_k_tokens_dim_bytes_times_g_minus_1_over_g(number, top):
    for sent in run_on_ranks(layer_between_ranks, 2, number, top):
        assert sent["rows"] == bytes_per_rank(number * top, 2, CONFIG.dim)
        assert sent["rows"] == 4 * number * top * CONFIG.dim * 8 // 2
        assert sent["counts"] == number // 2 * 8  # the counts for one other rank, forward only


# The pieces


def one_layer(**settings):
    layer = Experts(CONFIG, Routing(**settings), ExpertGroup())
    return materialise(layer, CONFIG)


def test_a_token_gets_its_experts_results_times_their_probabilities_and_the_shared_experts():
    layer, x = one_layer(experts=4, top=2), torch.randn(2, 5, 16, dtype=torch.float64)
    layer.real = torch.ones(2, 5, dtype=torch.bool)
    layer.real[1, 3:] = False
    output = layer(x)
    for row, place in [(0, 0), (0, 4), (1, 2)]:
        token = x[row, place]
        chances = layer.router(token).softmax(-1)
        best = chances.argsort(descending=True)[:2]
        wanted = layer.shared(token) + sum(
            chances[e] * layer.experts[str(int(e))](token) for e in best
        )
        assert (output[row, place] - wanted).abs().max() < 1e-12
    assert (output[1, 3:] - layer.shared(x[1, 3:])).abs().max() < 1e-12  # padding
    assert int(layer.counts.sum()) == 2 * 8


def test_an_expert_takes_the_first_tokens_of_each_sequence_up_to_its_capacity():
    layer = leaning(Experts(CONFIG, Routing(4, 1, capacity=1.5), ExpertGroup()), CONFIG)
    layer.real = torch.ones(2, 8, dtype=torch.bool)
    x = torch.randn(2, 8, 16, dtype=torch.float64)
    output = layer(x)  # 1.5 x 1 x 8 / 4 = 3 tokens of each sequence, all for one expert
    assert sorted(layer.counts.tolist()) == [0, 0, 0, 6]
    alone = layer.shared(x)
    assert (output - alone).abs().amax((0, 2)).gt(1e-9).tolist() == [True] * 3 + [False] * 5


def test_the_auxiliary_loss_is_1_for_a_balanced_router_and_e_over_k_for_a_single_choice():
    real = torch.ones(1, 4, dtype=torch.bool)
    even = torch.full((1, 4, 4), 0.25, dtype=torch.float64)
    each = torch.eye(4, dtype=torch.float64)[None]
    assert abs(imbalance(even, each, real, 1).item() - 1) < 1e-12
    one = torch.zeros(1, 4, 4, dtype=torch.float64)
    one[..., 2] = 1
    assert abs(imbalance(one, one, real, 1).item() - 4) < 1e-12
    padded = torch.tensor([[True, True, False, False]])
    assert abs(imbalance(one, one * padded[..., None], padded, 1).item() - 4) < 1e-12


def test_the_auxiliary_loss_of_a_middle_stage_has_a_gradient_without_any_other_loss():
    layer = one_layer(experts=4, top=1)
    layer.real = torch.ones(1, 6, dtype=torch.bool)
    layer(torch.randn(1, 6, 16, dtype=torch.float64))
    layer.auxiliary.backward()
    assert layer.router.weight.grad.abs().max() > 1e-6
    assert layer.shared.up.weight.grad is None


def test_only_routed_experts_differ_between_the_ranks_of_a_group():
    assert is_routed("layers.0.feed_forward.experts.3.up.weight")
    assert not is_routed("layers.0.feed_forward.shared.up.weight")
    assert not is_routed("layers.0.feed_forward.router.weight")
    assert PADDING == -100


# What is rejected


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--top 5", ["--top 5", "--experts 4"]),
        ("--replicas 2 --expert-ranks 3", ["--expert-ranks 3", "--replicas 2"]),
        ("--replicas 2 --experts 5 --expert-ranks 2", ["--expert-ranks 2", "--experts 5"]),
        ("--capacity 0", ["--capacity", "positive"]),
        ("--auxiliary -1", ["--auxiliary", "at least 0"]),
        ("--auxiliary 1e308", ["--auxiliary", "at most"]),  # not: a smaller --learning-rate
    ],
)
def test_numbers_that_do_not_fit_are_rejected_in_one_sentence(flags, words):
    with pytest.raises(RunFailed) as failed:
        train(flags, 2)
    assert "Traceback" not in str(failed.value)
    for word in words:
        assert word in str(failed.value)
