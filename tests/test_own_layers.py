"""What a user's module says of its weights holds: frozen, made of others, or kept in buffers."""

import sys
from functools import partial
from unittest import mock

import activation_checkpointing
import pipedream
import pretrain_llama
import pytest
import torch
import train
from further import first_of
from ranks import run_on_ranks
from torch import nn
from torch.nn import functional as F

from extensions.data_parallel.wrappers import WithDDP
from extensions.pretraining.forward_only import nothing_kept
from extensions.recompute import recomputing
from pipeline import model
from pipeline.job import Job
from pipeline.message import Message
from pipeline.model import ModelConfig, ModelPart, build_part, token_loss
from pipeline.split_stage import SplitStage
from pipeline.stage import Stage

SMALL = "--steps 3 --batch-size 8 --dim 16 --layers 8 --seq-len 8"


class FrozenFirst(ModelPart):
    """The embedding and the first four layers frozen: all of the first rank, and of two of four."""

    def __init__(self, config, first, last):
        super().__init__(config, first, last)
        for name, weight in self.named_parameters():
            layer = name.split(".")[1]
            frozen = name.startswith("embedding") or (layer.isdecimal() and int(layer) < 4)
            weight.requires_grad_(not frozen)


class FrozenMiddle(ModelPart):
    """Layers 2 to 5 frozen: those of the middle ranks."""

    def __init__(self, config, first, last):
        super().__init__(config, first, last)
        for index, layer in self.layers.items():
            layer.requires_grad_(int(index) not in range(2, 6))


class FrozenLast(ModelPart):
    """Layers 6 and 7, the norm and the head frozen: all of the last of four ranks."""

    def __init__(self, config, first, last):
        super().__init__(config, first, last)
        for index, layer in self.layers.items():
            layer.requires_grad_(int(index) < 6)
        if self.is_last:
            self.norm.requires_grad_(False)
            self.head.requires_grad_(False)


class LoRALinear(nn.Linear):
    """A frozen linear layer, and a product of two small matrices beside it."""

    def __init__(self, inputs, outputs, rank=4):
        super().__init__(inputs, outputs, bias=False)
        self.lora_a = nn.Parameter(torch.empty(rank, inputs))
        self.lora_b = nn.Parameter(torch.empty(outputs, rank))

    def forward(self, x):
        return super().forward(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)


class WithLoRA(ModelPart):
    """Only the adapters of the last two layers are trained."""

    def __init__(self, config, first, last):
        super().__init__(config, first, last)
        for index, layer in self.layers.items():
            if int(index) >= config.layers - 2:
                layer.attention.query = LoRALinear(config.dim, config.dim)
        for name, weight in self.named_parameters():
            weight.requires_grad_("lora" in name)


class WithTable(ModelPart):
    """Each layer adds a table of positions, a buffer that __init__ fills."""

    def __init__(self, config, first, last):
        super().__init__(config, first, last)
        for layer in self.layers.values():
            layer.feed_forward = Shifted(layer.feed_forward, config)


class Shifted(nn.Module):
    def __init__(self, inner, config):
        super().__init__()
        self.inner = inner
        positions = torch.linspace(-1, 1, config.seq_len)[:, None].expand(-1, config.dim)
        self.register_buffer("table", positions.clone())

    def forward(self, x):
        return self.inner(x) + self.table


PARTS = {
    kind.__name__: kind for kind in (FrozenFirst, FrozenMiddle, FrozenLast, WithLoRA, WithTable)
}


def be_main(rank, part, script, flags):
    """The status of a script with --verify, whose model is of another kind."""
    program = {
        "train": train,
        "recompute": activation_checkpointing,
        "pipedream": pipedream,
        "pretrain": pretrain_llama,
    }[script]
    with (
        mock.patch.object(model, "ModelPart", PARTS[part]),
        mock.patch.object(sys, "argv", [f"{script}.py", *flags.split(), "--verify"]),
    ):
        return program.main()


OFTEN = ("FrozenFirst", "WithLoRA")
further = [pytest.param(part, marks=pytest.mark.further) for part in PARTS if part not in OFTEN]


@pytest.mark.processes
@pytest.mark.parametrize("part", [*OFTEN, *further])
@pytest.mark.parametrize(
    "script, flags",
    first_of(
        [
            ("train", "--schedule 1f1b"),
            ("train", "--schedule interleaved-1f1b"),
            ("train", "--schedule zb-h1 --optimizer adamw"),
            ("train", "--schedule zb-v"),
            ("recompute", "--schedule zb-v --recompute layer"),
            ("recompute", "--schedule 1f1b --recompute stage"),
            ("pipedream", "--steps 6"),
        ],
        3,
    ),
    ids=lambda value: value.replace("--", "").replace(" ", "-"),
)
def test_frozen_and_adapted_stages_train_as_one_process_does(part, script, flags):
    assert run_on_ranks(be_main, 4, part, script, f"{SMALL} {flags}") == [0] * 4


@pytest.mark.further
@pytest.mark.processes
@pytest.mark.parametrize("part", first_of(["FrozenFirst", "WithLoRA", "FrozenLast"], 1))
def test_with_replicas_clipping_decay_and_16_bits_nothing_frozen_moves(part):
    flags = "--schedule zb-h1 --replicas 2 --clip 0.1 --recompute layer --batch-size 8"
    flags = f"{SMALL} {flags} --microbatches 4 --heads 4 --kv-heads 2 --vocabulary 256"
    for more in ("--dtype float64", "--dtype bfloat16"):
        assert run_on_ranks(be_main, 4, part, "pretrain", f"{flags} {more}") == [0] * 4


@pytest.mark.further
@pytest.mark.processes
@pytest.mark.parametrize("part", first_of(["FrozenFirst", "FrozenLast"], 1))
def test_a_run_with_a_frozen_rank_goes_on_from_its_checkpoint_on_other_ranks(part, tmp_path):
    flags = f"--batch-size 8 --dim 16 --layers 8 --seq-len 8 --checkpoints {tmp_path / 'saved'}"
    flags += " --heads 4 --kv-heads 2 --vocabulary 256 --dtype float64 --microbatches 4"
    flags += " --warm-up-steps 1 --decay-steps 9 --device cpu"
    assert run_on_ranks(be_main, 4, part, "pretrain", f"{flags} --steps 2") == [0] * 4
    assert run_on_ranks(be_main, 2, part, "pretrain", f"{flags} --steps 5") == [0] * 2


def test_a_message_has_the_shape_of_what_left_the_stage_before_it():
    job = Job(0, 1, torch.device("cpu"), "gloo", 1.0, shape=lambda stage: [2, 10 + stage])
    assert job.shape_of(Message("activation", 3, 0)) == (2, 13)
    assert job.shape_of(Message("gradient", 3, 0)) == (2, 12)
    job.shape = 4, 5
    assert job.shape_of(Message("gradient", 3, 0)) == (4, 5)


def test_what_is_frozen_stays_frozen_when_a_part_is_built():
    with mock.patch.object(model, "ModelPart", FrozenFirst):
        part = build_part(ModelConfig(), 2, 6)
    assert {
        name.split(".")[1] for name, weight in part.named_parameters() if weight.requires_grad
    } == {
        "4",
        "5",
    }


def test_a_buffer_keeps_what_init_gave_it_and_nothing_else_is_drawn_for_it():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with mock.patch.object(model, "ModelPart", WithTable):
        part = build_part(ModelConfig(seq_len=3), 0, 4)
    assert part.layers["0"].feed_forward.table[:, 0].tolist() == [-1, 0, 1]
    assert torch.equal(torch.get_rng_state(), before)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def with_hand_made_forward(inputs, outputs, **more):
    layer = nn.Linear(inputs, outputs, **more)
    layer.forward = lambda x: F.linear(x, layer.weight) - 1
    return layer


OTHERS = {
    "another forward": Doubled,
    "a forward of the instance": with_hand_made_forward,
    "a weight norm": lambda *sizes, **more: nn.utils.parametrizations.weight_norm(
        nn.Linear(*sizes, **more)
    ),
    "an older weight norm": lambda *sizes, **more: nn.utils.weight_norm(nn.Linear(*sizes, **more)),
    "a spectral norm": lambda *sizes, **more: nn.utils.spectral_norm(
        nn.Linear(*sizes, **more)
    ).eval(),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("mode", ["none", "layer"])
@pytest.mark.parametrize("kind", list(OTHERS))
def test_a_split_backward_leaves_what_is_no_plain_linear_layer_to_autograd(kind, mode):
    config = ModelConfig(layers=2, dim=16, seq_len=8)
    tokens = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(1))
    gradients = []
    for stage_class in (Stage, SplitStage):
        part = build_part(config, 0, 2)
        torch.manual_seed(0)
        part.layers["1"].feed_forward.up = OTHERS[kind](16, 48, bias=False, dtype=torch.float64)
        stage = recomputing(stage_class(part, 0, 1, token_loss), mode)
        stage.forward(0, tokens, tokens)
        if stage_class is Stage:
            stage.backward(0)
        else:
            stage.backward_input(0)
            stage.backward_weight(0)
        gradients.append({name: weight.grad for name, weight in part.named_parameters()})
    assert all(gradient is not None for gradient in gradients[0].values())
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], rtol=0, atol=1e-12), name


class Dropped(ModelPart):
    """A dropout behind every feed-forward network and within attention."""

    def __init__(self, config, first, last):
        super().__init__(config, first, last)
        for layer in self.layers.values():
            layer.feed_forward = nn.Sequential(layer.feed_forward, nn.Dropout(0.3))
            layer.attention.mix = partial(drop_after, layer.attention.mix)


def drop_after(mix, *inputs):
    return F.dropout(mix(*inputs), 0.3)


@pytest.mark.parametrize("stage_class", [Stage, SplitStage])
@pytest.mark.parametrize("mode", ["layer", "stage", "selective"])
def test_a_forward_that_runs_again_drops_what_the_first_one_dropped(mode, stage_class):
    config = ModelConfig(layers=4, dim=16, seq_len=8)
    tokens = torch.randint(0, 256, (3, 2, 8), generator=torch.Generator().manual_seed(1))
    gradients, after = [], []
    for how in ("none", mode):
        with mock.patch.object(model, "ModelPart", Dropped):
            stage = recomputing(stage_class(build_part(config, 0, 4), 0, 1, token_loss), how, 2)
        torch.manual_seed(0)
        for microbatch in range(3):
            stage.forward(microbatch, tokens[microbatch], tokens[microbatch])
        for microbatch in range(3):
            stage.backward(microbatch)
        after.append(torch.rand(3))
        gradients.append([weight.grad for weight in stage.part.parameters()])
    for kept, recomputed in zip(*gradients, strict=True):
        assert torch.allclose(kept, recomputed, rtol=0, atol=1e-12)
    assert torch.equal(*after), "the second forward takes no new numbers"


def test_a_forward_without_a_backward_drops_nothing_and_training_goes_on_dropping():
    config = ModelConfig(layers=2, dim=16, seq_len=8)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    part = build_part(config, 0, 2)
    part.layers["1"].feed_forward = nn.Sequential(part.layers["1"].feed_forward, nn.Dropout(0.5))
    stage = Stage(part, 0, 1, token_loss)
    with nothing_kept({0: stage}):
        losses = {stage.forward(0, tokens, tokens).item() for _ in range(3)}
    assert len(losses) == 1
    assert len({stage.forward(k, tokens, tokens).item() for k in range(3)}) == 3


def test_ddp_leaves_a_stage_without_trained_weights_as_it_is():
    part = nn.Linear(2, 2).requires_grad_(False)
    reduction = WithDDP.__new__(WithDDP)
    reduction.replicas, reduction.parts, reduction.last = mock.Mock(), {}, {}
    assert reduction.wrap(part, 0) is part
    with reduction.around(mock.Mock(stage=0)):
        assert part(torch.ones(1, 2)).requires_grad is False


def test_a_part_without_the_course_s_tables_keeps_its_buffers_too():
    class Own(nn.Module):
        def __init__(self, config, first, last):
            super().__init__()
            self.layer = nn.BatchNorm1d(config.dim)
            self.register_buffer("places", torch.arange(first, last))

    with mock.patch.object(model, "ModelPart", Own):
        part = build_part(ModelConfig(), 2, 5)
    assert part.places.tolist() == [2, 3, 4]
    assert part.layer.running_var.tolist() == [1.0] * 32
