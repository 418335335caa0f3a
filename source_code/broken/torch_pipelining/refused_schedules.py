# SPDX-License-Identifier: Apache-2.0
"""Traps of lesson 08: the library rejects the schedule (section "The schedule is rejected")."""

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.functional import mse_loss

from broken.torch_pipelining import small_pipeline as small
from extensions.torch_pipelining.library import stages_of_rank
from pipeline.model import ModelConfig, build_part, token_loss


def few_microbatches(job, cured):
    """1F1B needs at least as many micro-batches as stages.

    Broken: one micro-batch for two stages. Cured: two.
    """
    small.run_and_compare(job, "1F1B", microbatches=2 if cured else 1)


def uneven_rounds(job, cured):
    """Interleaved 1F1B needs rounds of equal length.

    Broken: five micro-batches in two rounds. Cured: four.
    """
    small.run_and_compare(job, "Interleaved1F1B", microbatches=4 if cured else 5)


def one_stage_in_a_v(job, cured):
    """ZB-V needs exactly two stages per rank.

    Broken: one stage per rank. Cured: two, placed as a V.
    """
    parts = None if cured else {job.rank: small.build_layer(job.rank)}
    small.run_and_compare(job, "ZBVZeroBubble", parts=parts)


def few_microbatches_in_dualpipev(job, cured):
    """DualPipeV needs at least as many micro-batches as stages.

    Broken: three micro-batches for four stages. Cured: four.
    """
    small.run_and_compare(job, "DualPipeV", microbatches=4 if cured else 3)


def too_many_stages(job, cured):
    """A process group cannot have more ranks than the pipeline has stages.

    Broken: one stage on two ranks. Cured: two stages.
    """
    if cured:
        return small.run_and_compare(job)
    PipelineStage(small.build_layer(0), 0, 1, job.device)


def stages_in_blocks(job, cured):
    """Interleaved 1F1B needs rank r to have the stages r and r + p.

    Broken: the stages 0 and 1 on rank 0, and 2 and 3 on rank 1. Cured: 0 and 2, and 1 and 3.
    """
    indices = None if cured else [2 * job.rank, 2 * job.rank + 1]
    parts = small.build_own_stages(job, "Interleaved1F1B", indices)
    small.run_and_compare(job, "Interleaved1F1B", parts=parts)


def stage_in_place_of_a_list(job, cured):
    """A schedule for several stages per rank takes a list.

    Broken: a stage. Cured: a list of two stages.
    """
    if cured:
        return small.run_and_compare(job, "Interleaved1F1B")
    stage = PipelineStage(small.build_layer(job.rank), job.rank, 2, job.device)
    get_schedule_class("Interleaved1F1B")(stage, 4, loss_fn=mse_loss)


def list_in_place_of_a_stage(job, cured):
    """A schedule for one stage per rank takes a stage.

    Broken: a list with one stage. Cured: the stage.
    """
    stage = PipelineStage(small.build_layer(job.rank), job.rank, 2, job.device)
    get_schedule_class("1F1B")(stage if cured else [stage], 4, loss_fn=mse_loss)
    small.say(job, "the schedule is built")


def listed_order_of_1f1b(job, cured):
    """The library's list of 1F1B's actions leaves a forward out.

    Broken: its own check rejects the list of 1F1B. Cured: the list of GPipe is complete.
    """
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
    from torch.distributed.pipelining.schedules import _validate_schedule

    rows = get_schedule_ops("GPipe" if cured else "1F1B", 2, 4)
    _validate_schedule(dict(enumerate(rows)), 2, 2, 4)
    small.say(job, "the list is complete")


def compiled_stage(job, cured):
    """A schedule that splits the backward rejects stages from torch.compile.

    Broken: ZB-V over compiled stages. Cured: interleaved 1F1B over stages compiled in place.
    """
    small.allow_slow_start(job)
    name = "Interleaved1F1B" if cured else "ZBVZeroBubble"
    parts = small.build_own_stages(job, name)
    if cured:
        for part in parts.values():
            compile_in_place(part, torch.zeros(2, small.WIDTH, dtype=torch.float64))
    else:
        parts = {index: torch.compile(part) for index, part in parts.items()}
    small.meet(job, "compiled")
    small.run_and_compare(job, name, parts=parts)


def compiled_in_place(job, cured):
    """A compiled layer frees tensors that the second half of a backward needs.

    Broken: ZB-V over decoder layers, one compiled in place. Cured: the same without donated buffers.
    """
    from torch._functorch import config as compiler

    small.allow_slow_start(job)
    compiler.donated_buffer = not cured
    config = ModelConfig(layers=4, dim=16, heads=2, kv_heads=2, seq_len=8)
    tokens = torch.arange(64).view(8, 8)
    activation = torch.zeros(2, 8, 16, dtype=torch.float64)
    parts = {}
    for index in stages_of_rank("ZBVZeroBubble", job.rank, job.num_ranks, 2):
        parts[index] = build_part(config, index, index + 1)
        if index == 1:  # a single compiled stage is enough
            compile_in_place(parts[index], activation)
    small.meet(job, "compiled")
    stages = [PipelineStage(part, index, 4, job.device) for index, part in parts.items()]
    schedule = get_schedule_class("ZBVZeroBubble")(stages, 4, loss_fn=token_loss)
    small.run_step(schedule, stages, tokens, tokens)
    whole = build_part(config, 0, 4)
    token_loss(whole(tokens), tokens).backward()
    small.compare_gradients(job, parts, [parameter.grad for parameter in whole.parameters()])


def compile_in_place(part, example):
    """Compile the module `part` for micro-batches like `example`."""
    part.compile(backend="aot_eager")
    part(example.requires_grad_()).sum().backward()
    part.zero_grad()
