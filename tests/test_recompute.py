"""Recomputation changes what is held and how long a backward takes, and no digit of the training."""

import functools
import json
import re
import tempfile
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from further import first_of
from observed import attach_instruments
from test_equals_one_process import SMALL, one_process
from test_split_stage import CountProducts
from torch.utils.checkpoint import checkpoint

from course.failed_run import RunFailed
from course.launch import run
from extensions.recompute import MODES, recomputing
from lab.activation_memory import ActivationMemory
from lab.clock import Clock
from lab.figures import draw_timelines
from lab.report import in_lines, measured_costs
from lab.simulator import Costs, simulate
from lab.timeline import Timeline, from_chrome_trace, to_chrome_trace
from pipeline.model import ModelConfig, build_part, token_loss
from pipeline.schedules import gpipe, one_f_one_b, synchronous_schedules, zb_h1, zb_h2
from pipeline.split_stage import SplitStage
from pipeline.stage import Stage

SCRIPT = "activation_checkpointing.py"
SYNCHRONOUS = synchronous_schedules()
FLAGS = f"{SMALL} --layers 8 --steps 2 --learning-rate 0.2 --microbatches 8"
CONFIG = ModelConfig(layers=8, dim=16, heads=4, kv_heads=2, seq_len=8)
LAYERS = 4  # of the stages below
PARTS = {"first": (0, 4), "inner": (2, 6), "last": (4, 8)}
WAYS = [("stage", 1), ("stage", 2), ("stage", 3), ("layer", 1), ("selective", 1)]
INPUT = 2 * 8 * 16 * 8  # bytes of one micro-batch's activation between two layers


# Real ranks.


@functools.cache
def train(schedule, mode, more=""):
    """Losses in full precision, and the bytes each rank held."""
    with tempfile.TemporaryDirectory() as folder:
        done = run(
            f"{SCRIPT} {FLAGS} --schedule {schedule} --recompute {mode} {more} "
            f"--losses {folder}/losses --timeline {folder}/timeline",
            warm=True,
            show=False,
            limit=60,
        )
        rows = Path(f"{folder}/losses").read_text().splitlines()
    held = re.search(r"held for backwards ([\d. ]+) MiB", done.output)[1]
    orders = tuple(tuple(event.action for event in events) for events in done.timeline.by_rank)
    return [json.loads(row)["loss"] for row in rows], [float(n) for n in held.split()], orders


@pytest.mark.parametrize("ranks", [4, 32])
def test_a_terminal_gets_the_summary_in_lines_of_at_most_78_columns_and_a_file_gets_one(ranks):
    summary = (
        "step 1234.5 ms (predicted 1234.0 ms)  idle 27.3% (predicted 27.3%)  "
        f"peak memory {'12345 ' * ranks}MiB, of it held for backwards {'123.45 ' * ranks}MiB"
    )
    assert in_lines(summary) == summary, "a test has no terminal"
    with mock.patch("lab.report.sys.stdout.isatty", lambda: True):
        shown = in_lines(summary)
    assert max(map(len, shown.splitlines())) <= 78 and shown.split() == summary.split()


def schedules_and_modes():
    """Every schedule with two modes, of these four with all; `make soak` runs the others, too."""
    for number, schedule in enumerate(SYNCHRONOUS):
        for mode in MODES:
            twice = mode in ("none", ("stage", "layer", "selective")[number % 3])
            runs = twice or schedule in ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
            yield pytest.param(schedule, mode, marks=() if runs else pytest.mark.soak)


@pytest.mark.parametrize(("schedule", "mode"), first_of(schedules_and_modes(), 6))
def test_losses_keep_every_bit_and_are_those_of_one_process(schedule, mode):
    losses, held, orders = train(schedule, mode)
    plain_losses, plain_held, plain_orders = train(schedule, "none")
    assert losses == plain_losses
    assert orders == plain_orders  # recomputation is not an action of the schedule
    reference = one_process(FLAGS)["losses"]
    assert len(losses) == 2
    assert max(abs(ours - theirs) for ours, theirs in zip(losses, reference)) <= 1e-12
    assert all(ours <= theirs for ours, theirs in zip(held, plain_held))
    if mode != "none" and schedule != "naive":
        assert held[0] < plain_held[0]


@pytest.mark.parametrize("schedule", first_of(["zb-h1", "1f1b"], 1))
def test_pieces_of_a_stage_keep_every_bit(schedule):
    losses, _, _ = train(schedule, "stage", "--pieces 2")
    assert losses == train(schedule, "none")[0]


def test_adamw_keeps_every_bit():
    more = "--optimizer adamw --learning-rate 0.01"
    plain, ours = (train("zb-h1", mode, more)[0] for mode in ("none", "layer"))
    assert ours == plain


def test_a_paced_backward_lasts_a_forward_longer(tmp_path):
    done = run(
        f"{SCRIPT} {SMALL} --steps 2 --pace 4 6 --schedule 1f1b --timeline {tmp_path}/timeline",
        ranks=2,
        warm=True,
        show=False,
    )
    backwards = [event for event in done.timeline.events if event.action.kind == "B"]
    assert len(backwards) == 2 * 8
    for event in done.timeline.events:
        if event.action.kind == "B":
            assert event.end - event.start >= 10 - 1e-3  # a trace is written in microseconds
            assert 4 - 1e-3 <= event.recompute < event.end - event.start
        else:
            assert event.recompute == 0
    # What the summary predicts counts it, too: 4 + 10 for each of 8 + 2 - 1 micro-batches.
    assert "(predicted 126.0 ms)" in done.output


@pytest.mark.parametrize(
    ("flags", "sentence"),
    first_of(
        [
            ("--recompute all", "--recompute: invalid choice: 'all'"),
            ("--pieces 0", "--pieces: must be a whole number of at least 1"),
            ("--pieces 5", "--pieces 5: a stage has 4 layers; use at most 4"),
            ("--pieces 2 --recompute layer", "--pieces are for --recompute stage, not layer"),
            ("--schedule pipedream", "--schedule: invalid choice: 'pipedream'"),
            ("--chunks 2", "gpipe has one stage per rank, not 2 chunks"),
            ("--schedule zb-v --chunks 3", "zb-v has 2 chunks per rank"),
            ("--schedule looped-bfs --chunks 5", "--layers 8 is too few for 10 stages"),
            ("--pace 600 600 --timeout 1", "a backward that recomputes takes 1200 ms and outlasts"),
        ],
        3,
    ),
)
def test_what_cannot_be_recomputed_is_refused(flags, sentence):
    with pytest.raises(RunFailed) as failure:
        run(f"{SCRIPT} {SMALL} {flags}", ranks=2, warm=True, show=False)
    assert sentence in str(failure.value)
    assert "Traceback" not in str(failure.value)


# One stage, in this process.


def build_stage(which, mode, pieces=1, split=False):
    stage_class = SplitStage if split else Stage
    stage = stage_class(build_part(CONFIG, *PARTS[which]), list(PARTS).index(which), 3, token_loss)
    return recomputing(stage, mode, pieces)


def work(stage, microbatches=3, looked_at=True):
    """GPipe's order: all forwards, all backwards. What comes out, and what is held meanwhile.

    Counting memory runs what is recomputed once more, so the matrix products of a stage are those
    of one that is not `looked_at`.
    """
    split = isinstance(stage, SplitStage)
    memory = ActivationMemory(every_pass=True)
    clock = Clock(0, torch.device("cpu"), time.perf_counter())
    attach_instruments(mock.Mock(), [stage], *([memory, clock] if looked_at else []))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 256, (microbatches, 2, 8), generator=generator)
    activations = torch.randn(microbatches, 2, 8, 16, generator=generator, dtype=torch.float64)
    gradients = torch.randn(microbatches, 2, 8, 16, generator=generator, dtype=torch.float64)
    with CountProducts() as count:
        given = [
            stage.forward(k, tokens[k] if stage.is_first else activations[k].clone(), tokens[k])
            for k in range(microbatches)
        ]
        held_before = memory.held()
        backward = stage.backward_input if split else stage.backward
        sent = [backward(k, None if stage.is_last else gradients[k]) for k in range(microbatches)]
        held_between = memory.held()
        for k in range(microbatches if split else 0):
            stage.backward_weight(k)
    clock.pass_ended()
    return {
        "out": given + [tensor for tensor in sent if tensor is not None],
        "gradients": [weight.grad for weight in stage.part.parameters()],
        "held before": held_before,
        "held between": held_between,
        "peak": memory.peak,
        "held after": memory.held(),
        "products": len(count.products),
        "again": [event.recompute for event in clock.passes[-1]],
    }


def same_bits(ours, theirs):
    assert len(ours) == len(theirs)
    return all(torch.equal(one, other) for one, other in zip(ours, theirs))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("mode", "pieces"), WAYS)
@pytest.mark.parametrize("which", PARTS)
def test_outputs_and_gradients_keep_every_bit(which, mode, pieces, split):
    plain = work(build_stage(which, "none", split=split))
    ours = work(build_stage(which, mode, pieces, split=split))
    assert same_bits(ours["out"], plain["out"])
    assert same_bits(ours["gradients"], plain["gradients"])
    assert ours["held after"] == 0
    # Each backward notes the time of its forward run again, and nothing else does.
    assert [again > 0 for again in ours["again"]] == [False] * 3 + [True] * 3 + [False] * 3 * split
    assert not any(plain["again"])


@pytest.mark.parametrize("pieces", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_held_are_the_inputs_of_all_and_the_inside_of_one_piece_of_one_gpipe_section_2_3(
    microbatches, pieces
):
    inside_of_stage = work(build_stage("inner", "none"), 1)["peak"]
    ours = work(build_stage("inner", "stage", pieces), microbatches)
    assert ours["held before"] == microbatches * pieces * INPUT
    # Every layer keeps its own input, and the layers are alike.
    inside = inside_of_stage / pieces
    # The piece's own input is one of those that are kept.
    assert ours["peak"] == (microbatches * pieces - 1) * INPUT + inside


def test_a_checkpoint_a_layer_is_the_mode_layer():
    for key, looked_at in [("peak", True), ("products", False)]:
        pieces = work(build_stage("inner", "stage", LAYERS), looked_at=looked_at)
        layers = work(build_stage("inner", "layer"), looked_at=looked_at)
        assert layers[key] == pieces[key] > 0


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("mode", ["stage", "layer"])
def test_the_work_added_is_one_forward(mode, split):
    plain = work(build_stage("inner", "none", split=split), looked_at=False)["products"]
    ours = work(build_stage("inner", mode, split=split), looked_at=False)["products"]
    # Of three products a matrix, one is the forward's: 3 becomes 4.
    assert plain == 3 * 3 * 7 * LAYERS
    assert ours == plain * 4 / 3


def test_selective_keeps_no_result_of_attention_but_the_one_at_work():
    plain = work(build_stage("inner", "none"))
    ours = work(build_stage("inner", "selective"))
    query = torch.zeros(2, 4, 8, 4, dtype=torch.float64, requires_grad=True)
    key = torch.zeros(2, 2, 8, 4, dtype=torch.float64)
    saved = []
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with keep:
        build_part(CONFIG, 0, 1).layers["0"].attention.mix(query, key, key)
    given = {tensor.data_ptr() for tensor in (query, key)}
    inside = sum(t.nbytes for t in saved if t.data_ptr() not in given)
    assert inside > 0
    assert plain["held before"] - ours["held before"] == 3 * LAYERS * inside
    assert plain["peak"] - ours["peak"] == (3 * LAYERS - 1) * inside


def test_zero_bubble_what_was_recomputed_for_i_stays_until_w():
    plain = work(build_stage("inner", "none", split=True))
    for mode, pieces in WAYS:
        ours = work(build_stage("inner", mode, pieces, split=True))
        # From F to I little is held, from I to W exactly what is held without recomputation.
        assert ours["held before"] < plain["held before"], mode
        assert ours["held between"] == plain["held between"] > 0, mode


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_within_an_i_the_pieces_that_are_done_have_left_their_share_for_w(pieces):
    plain = work(build_stage("inner", "none", split=True), 1)
    ours = work(build_stage("inner", "stage", pieces, split=True), 1)
    inside, for_weights = plain["held before"] / pieces, plain["held between"] / pieces
    assert ours["peak"] == max(
        (pieces - 1 - done) * INPUT + inside + done * for_weights for done in range(pieces)
    )


def test_torch_s_own_checkpoint_of_every_layer_makes_the_same_bits_in_both_kinds_of_backward():
    for split in (False, True):
        ours = work(build_stage("inner", "layer", split=split))
        stage = build_stage("inner", "none", split=split)
        for layer in stage.part.layers.values():
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        theirs = work(stage)
        assert same_bits(ours["out"], theirs["out"])
        assert same_bits(ours["gradients"], theirs["gradients"])
        assert ours["held before"] == theirs["held before"]
        assert ours["held between"] == theirs["held between"]


# Predictions.


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_time_times_4_thirds_is_throughput_times_3_quarters(make):
    plain, again = (simulate(make(4, 8), Costs(10, 20, recompute=r)) for r in (0, 10))
    assert plain.makespan == 330 and again.makespan == 440
    assert again.makespan / plain.makespan == 4 / 3
    assert (1 / again.makespan) / (1 / plain.makespan) == pytest.approx(3 / 4, abs=1e-15)
    assert again.bubble_over_total == pytest.approx(plain.bubble_over_total, abs=1e-15)
    assert again.peak_held_per_rank == plain.peak_held_per_rank
    assert again.busy_per_rank == [8 * 40] * 4


def test_recomputation_goes_into_i_and_not_into_w():
    timeline = simulate(zb_h1(4, 8), Costs(1, 2, recompute=1))
    lasted = {event.action.kind: event.end - event.start for event in timeline.events}
    assert lasted == {"F": 1, "I": 2, "W": 1}
    # Three equal parts leave ZB-H2 no bubble; an I twice as long brings one back.
    with_bubble = simulate(zb_h2(4, 8), Costs(1, 2, recompute=1))
    assert simulate(zb_h2(4, 8), Costs(1, 2)).bubble_by_span == 0
    assert with_bubble.bubble_by_span > 0


def test_a_stage_may_recompute_longer_than_another():
    timeline = simulate(gpipe(2, 1), Costs(1, 2, recompute=[0.5, 0.25]))
    assert [event.recompute for event in timeline.events if event.action.kind == "B"] == [0.25, 0.5]
    assert timeline.makespan == 1 + 1 + 2.25 + 2.5


def test_a_timeline_with_recomputation_survives_the_chrome_trace():
    timeline = simulate(one_f_one_b(4, 8), Costs(10, 20, recompute=10))
    again = from_chrome_trace(to_chrome_trace(timeline))
    assert again == Timeline(timeline.name, timeline.events)
    slices = json.loads(to_chrome_trace(timeline))["traceEvents"]
    nested = [s for s in slices if s.get("cat") == "recomputed forward"]
    assert len(nested) == 4 * 8
    assert nested[0]["name"] == "3F0 again" and nested[0]["dur"] == 10_000


def test_costs_measured_from_a_timeline_predict_it():
    costs = Costs(10, 20, recompute=7)
    timeline = simulate(zb_h1(4, 8), costs)
    assert simulate(zb_h1(4, 8), measured_costs([timeline])) == timeline


def test_a_recomputed_forward_is_drawn_in_the_backward_s_place_with_a_dashed_outline():
    plain, again = (
        draw_timelines({"": simulate(gpipe(2, 2), Costs(10, 20, recompute=r))}).svg for r in (0, 10)
    )
    assert "dasharray" not in plain and "recomputed" not in plain
    overlay = re.search(r'<g class="recomputed".*?</g>', again)[0]
    assert overlay.count("<rect") == 4 and "stroke-dasharray" in overlay
    assert again.count("stroke-dasharray") == 1 + 1  # and in the legend
    assert again.count("recomputed forward") == 1
    assert again.count("its first 10 ms the forward again") == 4
    # The number stands in both parts of a backward: 4 forwards, 4 backwards.
    numbers = re.search(r'<g class="numbers".*?</g>', again)[0]
    assert numbers.count("<text") == 4 + 2 * 4
