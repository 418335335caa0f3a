"""A backward in two halves does what a whole one does, once, and keeps less in between."""

import pytest
import torch
from observed import count_memory
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.model import ModelConfig, build_part, token_loss
from pipeline.split_stage import SplitStage
from pipeline.stage import Stage

CONFIG = ModelConfig(layers=4, dim=16, heads=4, kv_heads=2, seq_len=8)
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "matmul"}
PARTS = {"first": (0, 2), "inner": (1, 3), "last": (2, 4), "whole": (0, 4)}


class CountProducts(TorchDispatchMode):
    """Counts the matrix multiplications that reach the device, and their multiplications."""

    def __init__(self):
        super().__init__()
        self.products = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in PRODUCTS:
            left, right = args[-2], args[-1]
            self.products.append(left.numel() * right.shape[-1])
        return function(*args, **(kwargs or {}))


def build_stage(which, stage_class=SplitStage):
    first, last = PARTS[which]
    stage_index, num_stages = (1, 3) if which == "inner" else (0 if first == 0 else 1, 2)
    if which == "whole":
        num_stages = 1
    part = build_part(CONFIG, first, last)
    return stage_class(part, stage_index, num_stages, token_loss)


def whole_and_halves(which):
    """What `run` says of a Stage, and of a SplitStage whose backwards come in halves."""
    return run(build_stage(which, Stage), split=False), run(build_stage(which), split=True)


def run(stage, split, microbatches=2):
    """Forward and backward of some micro-batches; what came out, and the products of the backward."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 256, (microbatches, 2, 8), generator=generator)
    activations = torch.randn(microbatches, 2, 8, 16, generator=generator, dtype=torch.float64)
    gradients = torch.randn(microbatches, 2, 8, 16, generator=generator, dtype=torch.float64)
    memory = count_memory(stage)
    for k in range(microbatches):
        inputs = tokens[k] if stage.is_first else activations[k].clone()
        stage.forward(k, inputs, tokens[k])
    sent = []
    with CountProducts() as count:
        for k in range(microbatches):
            backward = stage.backward_input if split else stage.backward
            sent.append(backward(k, None if stage.is_last else gradients[k]))
        halfway = len(count.products)
        held_halfway = memory.held()
        if split:
            for k in reversed(range(microbatches)):
                stage.backward_weight(k)
    return {
        "sent": sent,
        "gradients": {name: p.grad for name, p in stage.part.named_parameters()},
        "products": sorted(count.products),
        "halfway": halfway,
        "held halfway": held_halfway,
        "held": memory.peak,
        "held at the end": memory.held(),
    }


@pytest.mark.parametrize("which", PARTS)
def test_both_halves_together_make_the_gradients_of_the_whole_backward(which):
    whole, halves = whole_and_halves(which)
    for ours, theirs in zip(halves["sent"], whole["sent"]):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert (ours - theirs).abs().max() <= 1e-12
    assert halves["gradients"].keys() == whole["gradients"].keys()
    for name, gradient in whole["gradients"].items():
        assert (halves["gradients"][name] - gradient).abs().max() <= 1e-12, name


@pytest.mark.parametrize("which", PARTS)
def test_both_halves_together_do_the_same_matrix_products_as_the_whole_backward(which):
    whole, halves = whole_and_halves(which)
    assert halves["products"] == whole["products"]
    # Seven matrices a layer, and the head: for each of them one product is deferred.
    first, last = PARTS[which]
    matrices = 7 * (last - first) + (last == CONFIG.layers)
    assert len(whole["products"]) - halves["halfway"] == 2 * matrices  # of two micro-batches


def test_a_whole_backward_of_a_stage_that_can_split_is_still_whole():
    theirs = run(build_stage("inner", Stage), split=False)
    able = build_stage("inner")
    ours = run(able, split=False)
    assert ours["products"] == theirs["products"]
    for name, gradient in theirs["gradients"].items():
        assert torch.equal(ours["gradients"][name], gradient), name
    assert able.deferred == {}


def test_between_the_halves_only_inputs_and_output_gradients_of_the_matrices_are_held():
    halves = run(build_stage("inner"), split=True)
    positions, number = 2 * 8, 8  # of a micro-batch; bytes
    dim, kv_dim, hidden = CONFIG.dim, CONFIG.kv_heads * CONFIG.head_dim, CONFIG.hidden_dim
    # Query, key and value share an input, gate and up another.
    inputs = dim + dim + dim + hidden
    outputs = dim + kv_dim + kv_dim + dim + hidden + hidden + dim
    a_layer = positions * (inputs + outputs) * number
    assert halves["held halfway"] <= 2 * 2 * a_layer  # two layers, two micro-batches
    assert halves["held halfway"] > 0
    assert halves["held halfway"] < halves["held"]
    assert halves["held at the end"] == 0


def test_what_is_held_between_the_halves_has_no_history_that_would_keep_the_rest_alive():
    stage = build_stage("inner")
    stage.forward(0, torch.randn(2, 8, 16, dtype=torch.float64))
    stage.backward_input(0, torch.randn(2, 8, 16, dtype=torch.float64))
    for layer in stage.deferred[0]:
        assert layer.inputs.grad_fn is None and layer.gradient.grad_fn is None
    stage.backward_weight(0)
    for parameter in stage.part.parameters():
        assert parameter.grad.grad_fn is None


def test_a_frozen_weight_stays_frozen():
    stage = build_stage("inner")
    frozen = stage.part.layers["1"].attention.query.weight
    frozen.requires_grad_(False)
    halves = run(stage, split=True)
    assert frozen.grad is None
    assert halves["gradients"]["layers.1.attention.key.weight"] is not None


def test_a_bias_gets_its_gradient_too():
    gradients = []
    for split in (False, True):
        stage = build_stage("inner", SplitStage if split else Stage)
        layer = stage.part.layers["1"].attention.query
        layer.bias = torch.nn.Parameter(torch.zeros(CONFIG.dim, dtype=torch.float64))
        gradients.append(run(stage, split)["gradients"]["layers.1.attention.query.bias"])
    assert (gradients[0] - gradients[1]).abs().max() <= 1e-12
