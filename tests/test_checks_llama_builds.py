"""What is said of plans for four machines and of a reader's layer (lesson 12c)."""

import pytest
import torch
import torch.nn.functional as F
from further import first_of

from course.checks import build_llama as build
from course.checks.answer import NOT_ATTEMPTED

RIGHT = {
    "A": "--schedule zb-h1 --microbatches 32",
    "B": "--schedule 1f1b \\\n  --microbatches 32 \\\n",
    "C": "--schedule zb-h1 --microbatches 32",
    "D": "--schedule 1f1b --microbatches 32 --recompute layer",
}


def answer_to(capsys, ask, *answers):
    ask(*answers)
    return capsys.readouterr().out.strip()


@pytest.mark.processes
def test_plans_that_fit_and_are_fast(capsys):
    assert answer_to(capsys, build.plans, RIGHT).startswith("Right: each plan fits")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("machine", "flags", "sentence"),
    [
        ("A", "--schedule 1f1b --microbatches 8", "plan.py says 22.4 GiB on rank 2, which has 16"),
        (
            "D",
            "--schedule 1f1b --microbatches 8 --recompute layer",
            "rows are in a micro-batch: 8",
        ),
        ("A", "--schedule 1f1b --microbatches 32 --recompute layer", "room for what you recompute"),
        ("A", "--schedule 1f1b --microbatches 64", "rows are in a micro-batch: 1"),
        ("A", "--schedule 1f1b --microbatches 32", "another schedule has less of a bubble"),
        ("B", "--schedule=zb-h1 --microbatches=32", "which has 8"),
    ],
)
def test_plans_that_do_not(capsys, machine, flags, sentence):
    answer = answer_to(capsys, build.plans, RIGHT | {machine: flags})
    assert answer.startswith("Not yet: ") and sentence in answer, answer


@pytest.mark.parametrize(
    ("flags", "sentence"),
    first_of(
        [
            ("--schedule gpipe --dim 64", "use --schedule, --chunks, --microbatches, --recompute"),
            ("--schedule", "each with its value; not '--schedule'"),
            (3, "each with its value; not 3"),
            ("--microbatches many", "--microbatches takes a whole number above 0"),
            ("--microbatches 7", "64 rows cannot be cut into that many"),
            ("--schedule 2f2b", "there is no schedule '2f2b'"),
            ("--recompute some", "--recompute takes one of none, selective, layer, stage"),
        ],
        3,
    ),
)
def test_flags_that_are_none(capsys, flags, sentence):
    answer = answer_to(capsys, build.plans, RIGHT | {"A": flags})
    assert answer.startswith("Not yet: machine A") and sentence in answer, answer


def test_a_machine_that_is_missing_and_a_stub(capsys):
    assert "give a text for each machine" in answer_to(capsys, build.plans, {"A": "x"})
    assert answer_to(capsys, build.plans, ...) == NOT_ATTEMPTED
    assert answer_to(capsys, build.plans, dict.fromkeys(RIGHT, ...)) == NOT_ATTEMPTED


@pytest.mark.processes
def test_a_plan_that_is_still_open_is_named_after_those_before_it(capsys):
    flags = RIGHT | {"B": ..., "C": ...}
    assert answer_to(capsys, build.plans, flags) == "Not yet: machine B still has its ..."


# Layers: the functions below are those of a learner.


def squared_relu(x, gate, up, down):
    return (F.relu(x @ gate.T).square() * (x @ up.T)) @ down.T


def over_the_rows(x, gate, up, down):
    return squared_relu(x - x.mean(dim=0, keepdim=True), gate, up, down)


def position_by_position(x, gate, up, down):
    """Slow, and right."""
    rows = []
    for row in x:
        out = []
        for p in row:
            pairs = [torch.relu(torch.dot(g, p)) * torch.dot(u, p) for g, u in zip(gate, up)]
            out.append(down @ torch.stack(pairs))
        rows.append(torch.stack(out))
    return torch.stack(rows)


def of_two_rows(x, gate, up, down):
    return squared_relu(x.reshape(2, -1, x.shape[-1]), gate, up, down)


def too_wide(x, gate, up, down):
    return F.relu(x @ gate.T) * (x @ up.T)


def without_gate(x, gate, up, down):
    return F.relu(x @ up.T) @ down.T


def with_rounded_up(x, gate, up, down):
    return (F.relu(x @ gate.T) * (1 + (x @ up.T).round())) @ down.T


def with_a_root(x, gate, up, down):
    return ((x @ gate.T).sqrt() * (x @ up.T)) @ down.T


def without_gradient(x, gate, up, down):
    return squared_relu(x, gate, up, down).detach()


def narrow(x, gate, up, down):
    return squared_relu(x.float(), gate.float(), up.float(), down.float())


def narrow_inside(x, gate, up, down):
    return narrow(x, gate, up, down).double()


def transposed(x, gate, up, down):
    return (x @ gate) * (x @ up.T) @ down.T


def unchanged(x, gate, up, down):
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


SCALES = []


def scaled_by_its_first_call(x, gate, up, down):
    made = squared_relu(x, gate, up, down)
    if not SCALES:
        SCALES.append(made.detach().abs().max())
    return made / SCALES[0]


DRAWN = []  # weights of its own, drawn without a seed


def drawn_in_its_first_call(x, gate, up, down):
    if not DRAWN:
        DRAWN.append(torch.randn(x.shape[-1], dtype=x.dtype))
    return squared_relu(x * DRAWN[0], gate, up, down)


def smaller_in_each_call(x, gate, up, down):
    with torch.no_grad():
        gate.mul_(0.99)
    return squared_relu(x, gate, up, down)


def stub(x, gate, up, down):
    return ...


@pytest.mark.processes
@pytest.mark.parametrize(
    ("layer", "sentence"),
    first_of(
        [
            (squared_relu, "Right: four ranks and one process agree"),
            (over_the_rows, "Not yet: the losses differ from those of one process by "),
            (scaled_by_its_first_call, "Not yet: the losses differ from those of one process by "),
            (
                too_wide,
                "Not yet: your layer returns (5, 3, 6) for x of (5, 3, 4); return the shape of x",
            ),
            (of_two_rows, "RuntimeError: shape '[2, -1, 4]' is invalid"),
            (without_gate, "no gradient comes back to gate: your layer leaves it out"),
            (
                with_rounded_up,
                "no gradient comes back to up: your layer leaves it out, or its deriv",
            ),
            (with_a_root, "Not yet: your layer returns a nan or an infinite number"),
            (without_gradient, "nothing leads from your layer's result to x"),
            (narrow, "your layer returns torch.float32 for x of torch.float64"),
            (narrow_inside, "or your layer rounds to fewer digits than x has"),
            (transposed, "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
            (unchanged, "Not yet: that is the feed-forward network that the model has already"),
            (stub, NOT_ATTEMPTED),
            (position_by_position, "Right: four ranks and one process agree"),
            (smaller_in_each_call, ", which is ..."),  # a long error, cut where a word ends
            (drawn_in_its_first_call, "or random numbers, which differ between ranks"),
        ],
        4,
    ),
)
def test_a_layer_is_trained_on_four_ranks_and_compared_with_one_process(capsys, layer, sentence):
    answer = answer_to(capsys, build.feed_forward, layer)
    assert answer.count(sentence) == 1, answer
