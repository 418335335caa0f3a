# SPDX-License-Identifier: Apache-2.0
"""The small pipeline that every trap of lesson 08 breaks, and the comparison with one process.

The model has two layers per rank, in float64. What is compared is the gradient of every parameter
after one step, or the output. A trap is a function of a Job and of `cured`, which selects the form
that works: every function with these two parameters is one.
"""

import warnings
from datetime import timedelta

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, build_stage, pipeline
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.functional import mse_loss

from extensions.torch_pipelining.library import ONE_STAGE, stages_of_rank
from pipeline.collectives import gather

WIDTH, BATCH = 8, 8


def build_layer(index):
    """Layer `index`, a matrix and a tanh, with the same weights on whichever rank it is built."""
    linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    generator = torch.Generator().manual_seed(index)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).double() / 3)
    return nn.Sequential(linear, nn.Tanh())


def build_model(layers=4):
    """The whole model in one process."""
    return nn.Sequential(*(build_layer(index) for index in range(layers)))


def draw_batch(rows=BATCH, seed=0):
    """Inputs and targets, both (rows, WIDTH)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, rows, WIDTH, generator=generator, dtype=torch.float64).unbind()


def build_own_stages(job, name="GPipe", indices=None):
    """{stage: its layers} on this rank: one stage of two layers, or two stages of one layer."""
    chunks = 1 if name in ONE_STAGE else 2
    indices = stages_of_rank(name, job.rank, job.num_ranks, chunks) if indices is None else indices
    size = 2 // chunks
    return {
        index: nn.Sequential(*(build_layer(i) for i in range(index * size, (index + 1) * size)))
        for index in indices
    }


def build_schedule(
    job, parts, name="GPipe", microbatches=4, rows=BATCH, shapes=True, group=None, **options
):
    """The library's schedule over the stages of `parts`, {stage: module}, and those stages.

    A batch has `rows`. Without `shapes` the library infers the shape of every message itself.
    """
    chunks = 1 if name in ONE_STAGE else 2
    rows = -(-rows // microbatches)
    example = torch.zeros(rows, WIDTH, dtype=torch.float64, requires_grad=True)
    given = {"input_args": example, "output_args": example} if shapes else {}
    stages = [
        PipelineStage(part, index, job.num_ranks * chunks, job.device, group=group, **given)
        for index, part in parts.items()
    ]
    of_this_rank = stages[0] if name in ONE_STAGE else stages
    options = {"loss_fn": mse_loss, **options}
    return get_schedule_class(name)(of_this_rank, microbatches, **options), stages


def run_step(schedule, stages, inputs, targets, **keywords):
    """One step; returns the list of losses on the rank of the last stage, elsewhere None."""
    losses = [] if any(stage.is_last for stage in stages) else None
    schedule.step(
        *([inputs] if any(stage.is_first for stage in stages) else []),
        target=targets if losses is not None else None,
        losses=losses,
        **keywords,
    )
    return losses


def compute_reference_gradients(model=None, rows=BATCH, batches=1):
    """The gradients of the whole model's parameters in one process, summed over `batches`."""
    model = model or build_model()
    for seed in range(batches):
        inputs, targets = draw_batch(rows, seed)
        mse_loss(model(inputs), targets).backward()
    return [parameter.grad for parameter in model.parameters()]


def compare_gradients(job, parts, wanted=None):
    """Print how far the gradients of all ranks are from `wanted`, those of one process."""
    own = {
        index: [parameter.grad for parameter in part.parameters()] for index, part in parts.items()
    }
    compare_gathered(job, own, wanted)


def compare_gathered(job, gradients, wanted=None):
    """Like compare_gradients, for {stage: the gradients of its parameters} of each rank."""
    ranks = gather(job, gradients)
    if ranks is not None:
        stages = {index: grads for some in ranks for index, grads in some.items()}
        ours = [gradient for index in sorted(stages) for gradient in stages[index]]
        print_distance("gradient", ours, wanted or compute_reference_gradients())


def say(job, text):
    """Print on rank 0."""
    if job.rank == 0:
        print(text, flush=True)


def print_distance(what, ours, wanted):
    """Print the largest difference of two lists of tensors, as a share of the largest value."""
    largest = max(tensor.abs().max().item() for tensor in wanted)
    distance = max((a - b).abs().max().item() for a, b in zip(ours, wanted, strict=True)) / largest
    verdict = "right" if distance < 1e-12 else "SILENTLY WRONG"
    print(f"{what}: {verdict}, {distance:.1e} of the largest off one process", flush=True)


def run_and_compare(job, name="GPipe", microbatches=4, parts=None, model=None, **options):
    """Run one step of schedule `name` over `parts`, and compare its gradients with `model`'s."""
    parts = build_own_stages(job, name) if parts is None else parts
    schedule, stages = build_schedule(job, parts, name, microbatches, **options)
    run_step(schedule, stages, *draw_batch())
    model = model or build_model(2 * job.num_ranks)
    compare_gradients(job, parts, compute_reference_gradients(model))


def run_traced(job, pipe, parts, name="GPipe", prepare=lambda stage: stage):
    """Run one step over the traced `parts` of this rank; `prepare` may change a stage."""
    stages = [
        prepare(build_stage(part, index, pipe.info(), job.device)) for index, part in parts.items()
    ]
    of_this_rank = stages[0] if name in ONE_STAGE else stages
    schedule = get_schedule_class(name)(of_this_rank, 4, loss_fn=mse_loss)
    run_step(schedule, stages, *draw_batch())


def evaluate(schedule, stages, with_targets=True):
    """Run eval() of the batch, and compare the output with that of one process."""
    inputs, targets = draw_batch()
    with torch.no_grad():
        scores = schedule.eval(
            *([inputs] if any(stage.is_first for stage in stages) else []),
            target=targets if with_targets else None,
        )
    if any(stage.is_last for stage in stages):
        print_distance("output", [scores], [build_model()(inputs)])


def trace_model(job, model, *cuts, example=None):
    """The library's pipeline of `model`, cut before the modules `cuts`, traced with `example`."""
    allow_slow_start(job)
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)  # torch's own
    example = torch.zeros(2, WIDTH, dtype=torch.float64) if example is None else example
    cuts = {name: SplitPoint.BEGINNING for name in cuts} or None
    pipe = pipeline(model, mb_args=(example,), split_spec=cuts)
    meet(job, "traced")  # tracing takes unequally long on the ranks
    return pipe


def allow_slow_start(job):
    """Turn off the time limit before the first message: tracing and imports exceed it."""
    job.watch.wait = None


def meet(job, what):
    """Wait until all ranks have done `what`, which takes longer than a message may take."""
    job.store.set(f"{what}/{job.rank}", "")
    job.store.wait([f"{what}/{rank}" for rank in range(job.num_ranks)], timedelta(seconds=50))
