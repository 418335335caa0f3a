# SPDX-License-Identifier: Apache-2.0
"""The course's model through torch.distributed.pipelining, as a full training program.

    torchrun --standalone --nproc-per-node 4 torch_pipelining.py --verify

The stages are cut by hand (--split manual) or by torch's tracer (--split spec, --split calls); each
of the library's seven schedules performs them. The rest is what a training run needs around it.
"""

import sys

from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.utils import clip_grad_norm_

from extensions.optimization.clipping import clip_gradients
from extensions.torch_pipelining.cutting import build_stages, named_parameters
from extensions.torch_pipelining.evaluation import evaluate, generate
from extensions.torch_pipelining.flags import add_library_flags
from extensions.torch_pipelining.library import (
    ONE_STAGE,
    join_library_job,
    mean_of,
    schedule_as_data,
)
from extensions.torch_pipelining.optimizer import build_optimizer_and_rates
from extensions.torch_pipelining.paragraphs import keywords_of
from guard.around_main import guarded
from lab import attach
from pipeline.model import token_loss
from pipeline.one_process import build_model
from pipeline.training import (
    LossLog,
    cut_layers,
    parse_arguments,
    training_parser,
)


@guarded
def main():
    arguments = read_flags()
    cut = cut_layers(arguments, arguments.num_ranks * arguments.chunks)
    job = join_library_job(arguments)
    stages = build_stages(arguments, job, cut)
    schedule = build_library_schedule(arguments, stages)
    parameters = [parameter for _, parameter in named_parameters(stages)]
    optimizer, rates = build_optimizer_and_rates(arguments, parameters)
    expected = schedule_as_data(
        arguments.schedule, job.num_ranks, arguments.microbatches, arguments.chunks
    )
    attach.observe(arguments, job, stages, expected)
    log = LossLog(arguments, any(stage.is_last for stage in stages))

    for step in range(arguments.steps):
        inputs, targets, keywords = batch_of(arguments, job.device, step)
        optimizer.zero_grad()
        loss = run_step(arguments, job, schedule, stages, inputs, targets, keywords)
        clip_gradients(job, named_parameters(stages), arguments.clip)
        optimizer.step()
        rates.step()
        log.add(step, loss)

    if arguments.evaluate:
        evaluate(arguments, job, schedule, stages)
    if arguments.generate:
        generate(arguments, job, schedule, stages, expected.rank_of(len(cut) - 1, 0))
    job.leave()
    return log.finish(job.device, train_in_one_process)


def run_step(arguments, job, schedule, stages, inputs, targets, keywords):
    """Run forward and backward of a batch. Returns the loss on the last stage's rank, else None."""
    has_first = any(stage.is_first for stage in stages)
    losses = [] if any(stage.is_last for stage in stages) else None
    with job.waiting_for_all(f"a step of {arguments.schedule}"):
        schedule.step(
            *([inputs] if has_first else []),
            target=targets if losses is not None else None,
            losses=losses,
            return_outputs=False,  # otherwise the last stage keeps all scores
            **keywords,
        )
    job.complete_sends()
    return mean_of(losses)


def build_library_schedule(arguments, stages):
    """The library's schedule over this rank's stages.

    It divides the gradients by the number of micro-batches after each step (scale_grads), which is
    right because each micro-batch's loss is a mean.
    """
    schedule_class = get_schedule_class(arguments.schedule)
    of_this_rank = stages[0] if arguments.schedule in ONE_STAGE else stages
    return schedule_class(of_this_rank, arguments.microbatches, loss_fn=token_loss)


def batch_of(arguments, device, step):
    """Inputs, targets and keyword arguments of a step, for the whole batch, on every rank."""
    batch = arguments.text.batch(step, arguments.batch_size, arguments.seq_len, arguments.seed)
    inputs, targets = (tokens.to(device) for tokens in batch)
    return inputs, targets, keywords_of(arguments, inputs)


def read_flags():
    parser = training_parser(__doc__)
    add_library_flags(parser)
    attach.add_flags(parser)
    return parse_arguments(parser)


def train_in_one_process(arguments, device="cpu"):
    """Return the loss of every step without a pipeline, with which --verify compares."""
    return one_process(arguments, device)[1]


def one_process(arguments, device="cpu"):
    """Train the whole model on whole batches; return it and the loss of every step."""
    model = build_model(arguments, device)
    optimizer, rates = build_optimizer_and_rates(arguments, model.parameters())
    losses = []
    for step in range(arguments.steps):
        inputs, targets, keywords = batch_of(arguments, device, step)
        loss = token_loss(model(inputs, **keywords), targets)
        optimizer.zero_grad()
        loss.backward()
        if arguments.clip:
            clip_grad_norm_(model.parameters(), arguments.clip)
        optimizer.step()
        rates.step()
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    sys.exit(main())
