# SPDX-License-Identifier: Apache-2.0
"""Traps: what requires a gradient (section "Frozen stages and examples")."""

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.functional import mse_loss

from broken.torch_pipelining import small_pipeline as small


def example(requires_grad):
    return torch.zeros(2, small.WIDTH, dtype=torch.float64, requires_grad=requires_grad)


def run_with_examples(job, inputs, outputs):
    """A step of GPipe, whose example tensors require a gradient or do not."""
    part = small.build_own_stages(job)[job.rank]
    given = {"input_args": example(inputs), "output_args": example(outputs)}
    stage = PipelineStage(part, job.rank, 2, job.device, **given)
    schedule = get_schedule_class("GPipe")(stage, 4, loss_fn=mse_loss)
    small.run_step(schedule, [stage], *small.draw_batch())
    small.compare_gradients(job, {job.rank: part})


def examples_without_gradient(job, cured):
    """Example tensors have to require a gradient where the activations do.

    Broken: neither example does. Cured: both do.
    """
    run_with_examples(job, cured, cured)


def input_example_without_gradient(job, cured):
    """A stage whose example input requires no gradient sends none back.

    Broken: the example output does, and the example input does not. Cured: both do.
    """
    run_with_examples(job, cured, True)


def frozen_first_stage(job, cured):
    """A split backward begins at a stage's input, which needs no gradient after a frozen one.

    Broken: the library infers that stage 1 gets an input without a gradient. Cured: the examples
    say that every activation requires one, and the frozen stage's output does.
    """
    parts = small.build_own_stages(job, "InterleavedZeroBubble")
    whole = small.build_model()
    for part in (whole[0], *(part for index, part in parts.items() if index == 0)):
        part.requires_grad_(False)
    if cured and 0 in parts:
        parts[0] = nn.Sequential(parts[0], OutputWithGradient())
    schedule, stages = small.build_schedule(job, parts, "InterleavedZeroBubble", shapes=cured)
    small.run_step(schedule, stages, *small.draw_batch())
    small.compute_reference_gradients(whole)
    wanted = [parameter.grad for parameter in whole[1:].parameters()]
    own = {
        index: [nothing_as_zero(parameter) for parameter in part.parameters()]
        for index, part in parts.items()
        if index > 0
    }
    small.compare_gathered(job, own, wanted)


class OutputWithGradient(nn.Module):
    """Makes the output of a frozen stage require a gradient, which nothing then uses."""

    def forward(self, x):
        return x if x.requires_grad else x.detach().requires_grad_()


def nothing_as_zero(parameter):
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
