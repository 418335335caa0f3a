"""What the course counts as held is what the allocator has, which knows nothing of autograd."""

import gc
import runpy
import sys

import pytest
import torch
from allocator import Allocator
from further import first_of
from observed import count_memory
from ranks import run_on_ranks
from test_equals_one_process import SMALL
from test_pipedream import arguments_of, pipedream
from test_recompute import PARTS, WAYS, build_stage

from course.launch import SCRIPTS
from extensions.pretraining import padding
from extensions.recompute import MODES, recomputing
from pipeline.job import join_job
from pipeline.model import ModelConfig, build_part, cut_evenly, token_loss
from pipeline.schedules import build_schedule
from pipeline.split_stage import stage_class_for
from pipeline.stage import Stage
from pipeline.training import LossLog, cut_layers, start_job
from pipeline.worker import Worker

CONFIG = ModelConfig(layers=8, dim=32, heads=4, kv_heads=2, seq_len=32)
FEW_STEPS = f"{SMALL} --steps 3 --microbatches 4"
ACTIVATION = 2 * 32 * 32 * 8  # bytes of a micro-batch's activation between two of its layers


def with_gradients(stage):
    """So that adding to the gradients takes no memory that was not there."""
    for weight in stage.part.parameters():
        weight.grad = torch.zeros_like(weight)
    return stage


def num_bytes(tensors):
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@pytest.mark.parametrize("split", first_of([False, True], 1))
@pytest.mark.parametrize(("mode", "pieces"), [("none", 1), *WAYS])
@pytest.mark.parametrize("which", PARTS)
def test_between_two_actions_the_allocator_has_what_is_counted_to_the_byte(
    which, mode, pieces, split
):
    stage = with_gradients(build_stage(which, mode, pieces, split))
    memory = count_memory(stage)
    tokens = torch.zeros(3, 2, 8, dtype=torch.int64)
    tensors = torch.randn(3, 2, 8, 16, dtype=torch.float64)
    backward = stage.backward_input if split else stage.backward
    counted, given = {}, {}

    with Allocator() as allocator:
        outputs = [
            stage.forward(k, tokens[k] if stage.is_first else tensors[k].clone(), tokens[k])
            for k in range(3)
        ]
        counted["forwards"], given["forwards"] = memory.held(), outputs
        allocator.mark("forwards")
        sent = [backward(k, None if stage.is_last else tensors[k].clone()) for k in range(3)]
        counted["backwards"], given["backwards"] = memory.held(), outputs + sent
        allocator.mark("backwards")
        for k in range(3 if split else 0):
            stage.backward_weight(k)
        counted["weights"], given["weights"] = memory.held(), outputs + sent
        allocator.mark("weights")

    keeps_tokens_only = (which, mode, pieces) == ("first", "stage", 1)
    assert (counted["forwards"] == 0) == keeps_tokens_only
    assert (counted["backwards"] == 0) == (not split)
    for moment, held in counted.items():
        assert allocator.at[moment] == held + num_bytes(given[moment]), moment


def peaks(rank, name):
    """{mode: (bytes that the allocator had at the peak, bytes that were counted)} of one rank."""
    schedule = build_schedule(name, 4, 8)
    job = join_job("cpu", 30, schedule.pairs, (2, 32, CONFIG.dim), torch.float64)
    found = {}
    for mode in MODES:
        stages = {}
        for index in schedule.stages_of(rank):
            first, last = cut_evenly(CONFIG.layers, schedule.num_stages)[index]
            part = build_part(CONFIG, first, last)
            stage = stage_class_for(schedule)(part, index, schedule.num_stages, token_loss)
            stage = recomputing(stage, mode)
            stages[index] = with_gradients(stage)
        memory = count_memory(*stages.values())
        worker = Worker(job, schedule, stages)
        tokens = list(torch.zeros(8, 2, 32, dtype=torch.int64))
        with Allocator() as allocator:
            worker.run_step(tokens, tokens)
        found[mode] = allocator.peak, memory.peak
        torch.distributed.barrier()
    job.leave()
    return found


@pytest.mark.further
@pytest.mark.parametrize(
    "name", first_of(["1f1b", "zb-v", "gpipe", "interleaved-1f1b", "zb-h1", "v-min"], 2)
)
def test_at_its_peak_the_allocator_has_little_more_than_what_is_counted(name):
    ranks = run_on_ranks(peaks, 4, name, timeout=120)
    for rank, found in enumerate(ranks):
        for mode, (allocated, counted) in found.items():
            more = (allocated - counted) / ACTIVATION
            # Messages on their way, and what one layer's backward makes for the moment.
            assert 0 < more < 28, f"{mode}, rank {rank}: {more:.1f} activations more"


def with_32000_tokens(rank, dtype):
    """What a last stage has after its forward, and at most, in multiples of its float32 scores."""
    torch.set_num_threads(1)
    padding.MOST_NUMBERS = 2**20
    config = ModelConfig(layers=1, dim=16, heads=2, kv_heads=1, seq_len=512, vocabulary=32_000)
    share = padding.ShareOfLoss()
    share.real_tokens = 512
    stage = with_gradients(Stage(build_part(config, 0, 1, dtype=dtype), 0, 1, share))
    tokens = torch.randint(config.vocabulary, (1, 512))
    with Allocator() as allocator:
        stage.forward(0, tokens, tokens)
        allocator.mark("forward")
        stage.backward(0)
    whole = 512 * config.vocabulary * 4
    return allocator.at["forward"] / whole, allocator.peak / whole


@pytest.mark.further
def test_the_float32_copy_of_the_scores_of_32000_tokens_never_exists():
    ((held, peak),) = run_on_ranks(with_32000_tokens, 1, torch.bfloat16)
    # The scores in 16 bits are half of it, and their gradient is another half in the backward. A
    # processor without products in 16 bits copies one of them. Without pieces, the peak is 3.
    assert 0.5 <= held < 0.6
    assert 1.0 <= peak < 1.6
    ((held, peak),) = run_on_ranks(with_32000_tokens, 1, torch.float32)
    assert 1.0 <= held < 1.1  # the scores themselves
    assert 2.0 <= peak < 2.3  # without pieces there are three


def peak_and_weights(rank, flags):
    """What pipedream.py on this rank takes at most, beside the weights that were there, in bytes.

    And the bytes of these weights.
    """
    arguments = arguments_of(flags, 4)
    schedule = pipedream.build_whole_schedule(arguments)
    job = start_job(arguments, schedule.pairs)
    cut = cut_layers(arguments, schedule.num_stages)
    stage = pipedream.build_stashing_stage(arguments, job, schedule, cut)
    with Allocator() as allocator:
        pipedream.run_training(arguments, job, stage, schedule)
    job.leave()
    return allocator.peak, num_bytes(stage.part.parameters())


@pytest.mark.further
@pytest.mark.parametrize(
    ("mode", "versions"), [("stashed", [4, 3, 2, 0]), ("vertical-sync", [4, 4, 4, 4])]
)
def test_a_stash_takes_the_memory_of_its_live_versions_pipedream_section_3_3(mode, versions):
    flags = f"{SMALL.replace('48', '4')} --steps 8 --weights"
    with_stash = run_on_ranks(peak_and_weights, 4, f"{flags} {mode}")
    without = run_on_ranks(peak_and_weights, 4, f"{flags} latest")
    # The weights themselves were there before; a version in use is left, and they move on to
    # memory of their own. The last rank of `stashed` never has one in use, so it never moves.
    for (peak, weights), (plain, _), live in zip(with_stash, without, versions):
        assert peak - plain == pytest.approx(live * weights, abs=weights / 10), live


def bytes_after_each_step(rank, script, flags):
    """What `script` on this rank has left in memory, once it has noted each of its steps."""
    sys.argv = [script, *flags.split()]
    add = LossLog.add

    def add_and_look(self, step, loss):
        add(self, step, loss)
        gc.collect()
        allocator.mark(step)

    LossLog.add = add_and_look
    with Allocator() as allocator:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPTS / script), run_name="__main__")
    assert not ended.value.code
    return list(allocator.at.values())


@pytest.mark.further
@pytest.mark.parametrize(
    "script",
    first_of(
        [
            "one_f_one_b.py",
            "activation_checkpointing.py --schedule zb-v --recompute stage",
            "zero_bubble.py --schedule zb-h1",
            "torch_pipelining.py",
            "distributed_checkpointing.py",
            "pretrain_llama.py",
        ],
        2,
    ),
)
def test_from_step_to_step_the_allocator_has_not_even_one_activation_more(script):
    script, _, flags = script.partition(" ")
    for after in run_on_ranks(bytes_after_each_step, 4, script, f"{FEW_STEPS} {flags}"):
        # gloo may still have a number that all ranks have summed up; this is an activation's half.
        assert len(after) == 3 and max(after) - min(after) < 12 * 8 * 16 * 4, after
