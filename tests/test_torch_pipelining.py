"""torch.distributed.pipelining trains the course's model, and Hugging Face's, as one process does."""

import functools
import math
import os
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch_pipelining
import torch_pipelining_gpt2
import torch_pipelining_mlp
from further import SINCE_2_13, first_of, further
from ranks import PRELOAD, run_on_ranks
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from course.launch import run
from extensions.torch_pipelining import cutting, evaluation, hugging_face, library
from extensions.torch_pipelining.hugging_face import LATE_IMPORTS, weights
from extensions.torch_pipelining.library import (
    LIBRARY_SCHEDULES,
    LOOPS,
    V_SHAPED,
    complaint_about,
    schedule_as_data,
    stages_of_rank,
    without_messages_to_itself,
)
from extensions.torch_pipelining.optimizer import build_optimizer_and_rates
from extensions.torch_pipelining.paragraphs import LINE_END, paragraph_mask
from lab.simulator import Costs, simulate
from pipeline import schedules
from pipeline.command_line import ranks_from_environment
from pipeline.job import join_job
from pipeline.model import token_loss
from pipeline.one_process import train_one_process
from pipeline.schedules.legal import check_legal
from pipeline.training import parse_arguments, training_parser

pytestmark = pytest.mark.further  # lesson 08 compares the same script with one process

PRELOAD.extend(["torch.distributed.pipelining", "extensions.torch_pipelining.library"])
PRELOAD.extend(LATE_IMPORTS)
SCRIPT = "torch_pipelining.py"
SMALL = "--layers 8 --dim 16 --heads 2 --kv-heads 2 --seq-len 8 --steps 4 --device cpu"
EVERYTHING = "--optimizer adamw --clip 0.5 --warm-up 2 --documents --batch-size 16"
KEPT = "as promised"


def arguments_of(flags, script=torch_pipelining):
    with mock.patch.object(sys, "argv", [script.__name__, *shlex.split(flags)]):
        return script.read_flags()


def performed(flags, ranks=4, script=SCRIPT):
    return run(f"{script} {SMALL} {flags}", ranks, warm=True, show=False, limit=60)


# All seven schedules


@functools.cache
def lesson_02():
    return run(f"gpipe.py {SMALL}", 4, warm=True, show=False)


AFTERWARDS = "--evaluate 2 --generate 12"


@functools.cache
def performed_by(name):
    """A training run by a schedule of the library, which is asked for what it has learnt, too."""
    return performed(f"--schedule {name} --verify --timeline build/torch.json {AFTERWARDS}")


@pytest.mark.parametrize("name", LIBRARY_SCHEDULES)
def test_each_of_seven_schedules_equals_one_process_to_1e_12_and_takes_the_listed_actions(name):
    one_run = performed_by(name)
    assert KEPT in one_run.output
    assert one_run.losses == lesson_02().losses and len(one_run.losses) == 4
    chunks = 2 if name in LOOPS + V_SHAPED else 1
    expected = schedule_as_data(name, 4, 8, chunks)
    actions = [tuple(event.action for event in events) for events in one_run.timeline.by_rank]
    assert actions == list(expected.orders)


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        # Tracing takes a third of a second per layer, on every rank.
        ("--split spec --layers 2", 2),
        ("--split calls --layers 4 --schedule DualPipeV", 2),
        pytest.param("--split spec --layers 4 --schedule ZBVZeroBubble", 1, marks=further),
        pytest.param("--split calls --layers 4 --schedule InterleavedZeroBubble", 2, marks=further),
        pytest.param("--split calls", 4, marks=pytest.mark.soak),
        pytest.param("--split spec --schedule Interleaved1F1B", 2, marks=pytest.mark.soak),
        pytest.param("--split spec --schedule ZBVZeroBubble", 2, marks=pytest.mark.soak),
        ("--cut 1,4,2,1 --schedule GPipe", 4),
        ("--schedule LoopedBFS --chunks 4", 2),
        pytest.param("--schedule ZBVZeroBubble", 1, marks=further),
        ("", 1),
    ],
)
def test_each_way_to_cut_the_model_equals_one_process_to_1e_12(flags, ranks):
    assert KEPT in performed(f"{flags} --verify", ranks).output


@pytest.mark.parametrize(
    "name",
    [
        "1F1B",  # one stage on every rank
        "ZBVZeroBubble",  # two, both ends on rank 0, and backwards in halves
        pytest.param("InterleavedZeroBubble", marks=pytest.mark.soak),
    ],
)
def test_clipping_cosine_rates_adamw_and_masks_equal_one_process_to_1e_12(name):
    with_mask = performed(f"--schedule {name} --verify --seq-len 64 {EVERYTHING}")
    assert KEPT in with_mask.output
    flags = f"{SMALL} --seq-len 64 {EVERYTHING}".replace("--documents ", "")
    without = torch_pipelining.train_in_one_process(arguments_of(flags))
    assert abs(without[0] - with_mask.losses[0]) > 1e-6, "the mask changes the first loss"


def test_the_reference_with_clipping_and_rates_left_out_is_that_of_lesson_02():
    flags = f"{SMALL} --steps 3"
    with mock.patch.object(sys, "argv", ["x", *shlex.split(flags)]):
        plain = train_one_process(parse_arguments(training_parser("x")))
    assert torch_pipelining.train_in_one_process(arguments_of(flags)) == plain


def test_the_rate_rises_for_the_warm_up_and_falls_as_a_cosine_to_almost_nothing():
    arguments = arguments_of("--steps 10 --warm-up 4 --learning-rate 1")
    optimizer, rates = build_optimizer_and_rates(arguments, [torch.zeros(1, requires_grad=True)])
    taken = []
    for _ in range(10):
        taken.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        rates.step()
    assert taken[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert taken[7] == pytest.approx(0.5) and 0 < taken[9] < 0.1


def test_a_mask_lets_a_position_see_its_own_paragraph_only():
    tokens = torch.tensor([[65, LINE_END, LINE_END, 66, LINE_END, 67]])
    mask = paragraph_mask(tokens)
    assert mask.shape == (1, 1, 6, 6)
    rows = ["".join("x" if seen else "." for seen in row) for row in mask[0, 0].tolist()]
    assert rows == ["x.....", "xx....", "xxx...", "...x..", "...xx.", "...xxx"]


@pytest.mark.parametrize("name", LIBRARY_SCHEDULES)
def test_evaluation_and_greedy_text_are_those_of_one_process(name):
    output, (loss, texts) = performed_by(name).output, told_by_one_process()
    assert re.search(r"^held out  loss (\S+)", output, re.M)[1] == f"{loss:.6f}"
    assert re.findall(r"^generated  (.*) -> (.*)$", output, re.M) == texts[:2]


def test_a_large_held_out_loss_is_told_and_not_an_error(capsys, monkeypatch):
    monkeypatch.setattr(evaluation, "ends_on_this_rank", lambda stages: (True, True))
    monkeypatch.setattr(evaluation, "mean_of", lambda losses: torch.tensor(losses).mean())
    schedule = mock.Mock(eval=lambda *_, losses, **__: losses.append(800.0))
    job = mock.MagicMock(device="cpu")
    evaluation.evaluate(arguments_of(f"{SMALL} --evaluate 1"), job, schedule, [])
    assert "held out  loss 800.000000" in capsys.readouterr().out


@functools.cache
def told_by_one_process():
    """The held-out loss and the texts of the model that one process has trained."""
    model, _ = torch_pipelining.one_process(arguments_of(f"{SMALL} {AFTERWARDS}"))
    return held_out(model, AFTERWARDS), greedy(model, AFTERWARDS)


@torch.no_grad()
def held_out(model, flags):
    arguments = arguments_of(f"{SMALL} {flags}")
    losses = []
    for number in range(arguments.evaluate):
        inputs, targets = evaluation.held_out_batch(arguments, number)
        losses.append(token_loss(model(inputs), targets).item())
    return sum(losses) / len(losses)


@torch.no_grad()
def greedy(model, flags):
    arguments = arguments_of(f"{SMALL} {flags}")
    texts = evaluation.prompts_of(arguments)
    start = texts.shape[1]
    for _ in range(arguments.generate):
        scores = model(texts[:, -arguments.seq_len :])
        texts = torch.cat([texts, scores[:, -1:].argmax(-1)], dim=1)
    as_text = lambda tokens: repr(bytes(tokens).decode(errors="replace"))  # noqa: E731
    return [(as_text(text[:start]), as_text(text[start:])) for text in texts.tolist()]


# Messages of a stage to its own rank


class StageOfTorch215(PipelineStage):
    """A stage that cannot exchange first messages, as all stages are in torch 2.15."""

    @property
    def _get_init_p2p_neighbors_ops(self):
        raise AttributeError("it is gone")


def train_without_first_messages(rank):
    """Train with `StageOfTorch215` in a V on 2 ranks; the exit status, 0 if the losses agree."""
    flags = f"{SMALL} --schedule ZBVZeroBubble --verify --timeout 20"
    cutting.PipelineStage = StageOfTorch215
    with mock.patch.object(sys, "argv", [SCRIPT, *shlex.split(flags)]):
        return torch_pipelining.main()


@SINCE_2_13
def test_stages_that_exchange_no_first_messages_train_as_they_are():
    assert run_on_ranks(train_without_first_messages, 2) == [0, 0]


def first_messages(rank):
    """To and from whom stage 1 of a V exchanges its first messages: as torch has it, and as left.

    The stage is on rank 1, as is stage 2; stage 0 is on rank 0.
    """
    job = join_job("cpu", timeout=20, pairs=[])
    tensor = torch.zeros(1)
    stage = PipelineStage(
        torch.nn.Identity(), 1, 4, job.device, input_args=tensor, output_args=tensor
    )
    stage.stage_index_to_group_rank = {0: 0, 1: 1, 2: 1, 3: 0}
    exchanges = getattr(stage, "_get_init_p2p_neighbors_ops", list)
    before = [message.peer for message in exchanges()]
    assert without_messages_to_itself(stage) is stage
    exchanges = getattr(stage, "_get_init_p2p_neighbors_ops", list)
    after = [message.peer for message in exchanges()]
    job.leave()
    return before, after


def test_first_messages_to_the_own_rank_are_left_out_and_since_torch_2_15_there_are_none():
    before, after = run_on_ranks(first_messages, 2)[1]
    if torch.__version__ >= (2, 15):
        assert before == after == []
    else:
        assert sorted(before) == [0, 0, 1, 1]
        assert after == [0, 0]


# The library's schedules as data


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 6), (4, 8), (4, 16)])
def test_interleaved_1f1b_zb_v_and_dualpipe_v_are_ours_action_by_action(ranks, microbatches):
    for name, ours in {
        "Interleaved1F1B": schedules.interleaved_1f1b(ranks, microbatches, 2),
        "ZBVZeroBubble": schedules.zb_v(ranks, microbatches),
        "DualPipeV": schedules.dualpipe_v(ranks, microbatches),
    }.items():
        theirs = schedule_as_data(name, ranks, microbatches, 2)
        assert theirs.orders == ours.orders, name


def test_looped_bfs_takes_another_order_than_ours_and_as_long():
    ours, theirs = schedules.looped_bfs(4, 8, 2), schedule_as_data("LoopedBFS", 4, 8, 2)
    assert theirs.orders != ours.orders
    assert simulate(theirs, Costs(10, 20)).makespan == simulate(ours, Costs(10, 20)).makespan


@pytest.mark.parametrize("name", LIBRARY_SCHEDULES)
def test_each_listed_schedule_is_legal_on_the_ranks_that_its_placement_says(name):
    chunks = 2 if name in LOOPS + V_SHAPED else 1
    schedule = check_legal(schedule_as_data(name, 4, 8, chunks))
    for rank in range(4):
        stages = {stage for stage, owners in schedule.ranks_of_stage.items() if rank in owners}
        assert stages == set(stages_of_rank(name, rank, 4, chunks))


# What is refused


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--schedule GPipe --chunks 2", "use --chunks 1"),
        ("--schedule LoopedBFS --chunks 1", "use --chunks 2 or more"),
        ("--schedule DualPipeV --chunks 3 --layers 12", "use --chunks 2"),
        ("--microbatches 2 --batch-size 2", "less than the 4 stages; use 4 or more"),
        ("--schedule DualPipeV --microbatches 4", "less than the 8 stages; use 8 or more"),
        (
            "--schedule Interleaved1F1B --microbatches 9 --batch-size 9",
            "not a multiple of its 2 rounds on 4 ranks; use a multiple of 4",
        ),
        ("--documents --split calls", "use --split manual"),
        ("--steps 3 --warm-up 3", "use fewer, or more steps"),
        ("--evaluate 1000000000", "--evaluate 1000000000: 10,000 are the most"),
        ("--generate 1000000000", "--generate 1000000000: 10,000 are the most"),
        ("--schedule GPipe1", "--schedule"),
    ],
)
def test_what_the_library_would_refuse_later_is_refused_before_the_start(
    flags, sentence, monkeypatch
):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        arguments_of(flags)
    assert sentence in end.value.code
    assert ranks_from_environment()[1] == 4


@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "DualPipeV", "1F1B"])
def test_what_is_refused_and_what_is_not_is_what_the_library_refuses(name):
    chunks = 1 if name == "1F1B" else 2
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    for ranks in (2, 3, 4):
        for microbatches in range(1, 18):
            try:
                get_schedule_ops(name, ranks, microbatches, chunks)
                refused = False
            except ValueError:
                refused = True
            if name == "1F1B":  # the list needs no stage objects, and checks their number only
                refused = microbatches < ranks
            assert bool(complaint_about(name, ranks, microbatches, chunks)) == refused, (
                ranks,
                microbatches,
            )


@pytest.mark.parametrize("script", [torch_pipelining, torch_pipelining_gpt2])
def test_ranks_that_would_share_a_gpu_take_the_cpu_or_are_refused(script, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(library, "connect_group", lambda job, group, ranks: None)

    def join(device):
        with mock.patch.object(library, "join_job") as joined:
            joined.return_value.num_ranks = 4
            script.join_library_job(arguments_of(f"--device {device}", script))
        return joined.call_args.args[0]

    assert join("auto") == "cpu"
    with pytest.raises(SystemExit, match="4 ranks would share 2 GPUs"):
        join("cuda")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert join("auto") == "auto"


def factor_of_an_evaluation(rank, scale):
    """In a rank: by what the library's eval() multiplies the gradients of the step before it."""
    job, module = join_job("cpu", 60, pairs=[]), torch.nn.Linear(4, 4)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    loss = torch.nn.functional.mse_loss
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss, scale_grads=scale)
    batch, ends = torch.rand(8, 4), [{}, {"losses": []}]
    ends[1]["target"] = batch
    schedule.step(*[batch] * (rank == 0), **ends[rank])
    before = module.weight.grad.clone()
    with torch.no_grad():
        schedule.eval(*[batch] * (rank == 0), **ends[rank])
    job.leave()
    return torch.equal(module.weight.grad, before / 4), torch.equal(module.weight.grad, before)


@pytest.mark.processes
@pytest.mark.parametrize("scale", [True, False])
def test_eval_divides_the_gradients_by_the_number_of_microbatches_unless_told_otherwise(scale):
    assert run_on_ranks(factor_of_an_evaluation, 2, scale) == [(scale, not scale)] * 2


# The free-form network, and Hugging Face


def test_the_free_form_network_cut_at_the_ends_of_submodules_equals_one_process_to_1e_12():
    assert KEPT in run("torch_pipelining_mlp.py --verify", 3, warm=True, show=False).output


def test_the_free_form_network_s_losses_do_not_pass_if_they_are_no_numbers(capsys):
    flags = SimpleNamespace(batch_size=8)
    assert not torch_pipelining_mlp.verify(flags, [math.nan] * 3)
    assert "MORE THAN PROMISED" in capsys.readouterr().out


def test_the_free_form_network_rejects_a_batch_of_gigabytes_before_it_is_made(monkeypatch):
    words = ["--batch-size", "2000000000", "--microbatches", "4"]
    monkeypatch.setattr(sys, "argv", ["torch_pipelining_mlp.py", *words])
    with pytest.raises(SystemExit, match="--batch-size 2000000000: 1,000,000 rows are the most"):
        torch_pipelining_mlp.read_flags()


GPT2 = "torch_pipelining_gpt2.py"
TINY = "--layers 4 --dim 16 --heads 2 --kv-heads 2 --seq-len 16 --steps 3 --device cpu --verify"


@pytest.mark.parametrize(
    "flags",  # lesson 08 runs them with 1F1B
    first_of(["--tied", "--model llama --schedule GPipe", "--model gpt2-classifier"], 1),
)
def test_a_hugging_face_model_on_4_ranks_equals_the_unchanged_model_to_1e_12(flags):
    output = run(f"{GPT2} {TINY} {flags}", 4, warm=True, show=False).output
    assert KEPT in output
    assert len(re.findall(r"^stage \d  +[\d,]+ parameters, \S+ to \S+$", output, re.M)) == 4


def train_traced(rank, model):
    """Trace a Hugging Face model, take one step on 3 ranks; the error, or None."""
    from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, build_stage, pipeline

    job = join_job("cpu", timeout=20, pairs=[])
    arguments = arguments_of(f"{TINY} --layers 3 --model {model}", torch_pipelining_gpt2)
    whole = weights.build_layout(arguments).to_empty(device="cpu")
    layers = "model.layers" if model == "llama" else "transformer.h"
    tokens = torch.ones((2, 16), dtype=torch.int64)
    try:
        split = {f"{layers}.{i}": SplitPoint.BEGINNING for i in (1, 2)}
        pipe = pipeline(whole, mb_args=(tokens,), split_spec=split)
        stage = build_stage(pipe.get_stage_module(rank), rank, pipe.info(), job.device)
        schedule = ScheduleGPipe(stage, 8, loss_fn=lambda scores, targets: scores.mean())
        batch = tokens.repeat(8, 1)
        schedule.step(*[batch] * stage.is_first, target=batch, losses=[] if stage.is_last else None)
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        return str(error)


@SINCE_2_13
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("gpt2-classifier", "expected non-root _RecvInfo but got root arg at index"),
        ("llama", "Backward of skip connections not supported yet"),
    ],
)
def test_a_traced_classifier_and_a_traced_llama_do_not_train(model, message):
    errors = run_on_ranks(train_traced, 3, model)
    assert any(message in (error or "") for error in errors), errors


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--model llama --tied", "only --model gpt2 ties"),
        ("--microbatches 2 --batch-size 2 --layers 4", "use 4 or more"),
    ],
)
def test_the_hugging_face_script_refuses_in_one_sentence(flags, sentence, monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=sentence):
        arguments_of(flags, torch_pipelining_gpt2)


def test_nothing_is_asked_of_the_network():
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    for path in Path(hugging_face.__file__).parent.glob("*.py"):
        assert "from_pretrained" not in path.read_text(), path
