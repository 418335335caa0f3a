"""Trains as train.py FILE.csv does, but torch's own runtime performs the schedule in the file.

Same flags, same stages (ModelPart), same batches, same update. torch reads the file itself, adds
the messages and runs forwards, backwards and their halves. Started by test_text_form.py.
"""

import sys
from pathlib import Path

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "source_code"))

from extensions.torch_pipelining.library import join_library_job, mean_of
from pipeline.command_line import ranks_from_environment
from pipeline.model import build_part, token_loss
from pipeline.one_process import build_optimizer
from pipeline.schedules.text_form import read_schedule
from pipeline.training import (
    LossLog,
    complete_arguments,
    cut_layers,
    training_parser,
)


def main():
    parser = training_parser(__doc__)
    parser.add_argument("file", metavar="FILE.csv")
    arguments = parser.parse_args()
    schedule = read_schedule(arguments.file, ranks_from_environment()[1])
    arguments.microbatches = schedule.num_microbatches
    complete_arguments(parser, arguments)
    cut = cut_layers(arguments, schedule.num_stages)
    job = join_library_job(arguments)
    stages = [build_stage(arguments, job, cut, index) for index in schedule.stages_of(job.rank)]
    weights = [weight for stage in stages for weight in stage.submod.parameters()]
    optimizer = build_optimizer(arguments.optimizer, weights, arguments.learning_rate)
    # It divides the gradients by the number of micro-batches itself, because each loss is a mean.
    runtime = _PipelineScheduleRuntime(stages, schedule.num_microbatches, loss_fn=token_loss)
    runtime._load_csv(arguments.file)

    log = LossLog(arguments, any(stage.is_last for stage in stages))
    for step in range(arguments.steps):
        batch = arguments.text.batch(step, arguments.batch_size, arguments.seq_len, arguments.seed)
        optimizer.zero_grad()
        loss = run_step(runtime, stages, *batch)
        optimizer.step()
        log.add(step, loss)
    job.leave()
    return log.finish(job.device)


def build_stage(arguments, job, cut, index):
    """One of this rank's stages. Its shapes are given, so that no step is spent on finding them."""
    first, last = cut[index]
    part = build_part(
        arguments.config, first, last, arguments.seed, arguments.torch_dtype, job.device
    )
    tokens = torch.empty((arguments.microbatch_size, arguments.seq_len), dtype=torch.int64)
    activation = torch.empty((*tokens.shape, arguments.dim), dtype=arguments.torch_dtype)
    scores = torch.empty((*tokens.shape, arguments.vocabulary), dtype=arguments.torch_dtype)
    return PipelineStage(
        part,
        index,
        len(cut),
        job.device,
        input_args=tokens if part.is_first else activation.requires_grad_(),
        output_args=scores.requires_grad_() if part.is_last else activation.requires_grad_(),
    )


def run_step(runtime, stages, inputs, targets):
    """One step. Returns the loss on the rank of the last stage, None elsewhere."""
    losses = [] if any(stage.is_last for stage in stages) else None
    runtime.step(
        *([inputs] if any(stage.is_first for stage in stages) else []),
        target=None if losses is None else targets,
        losses=losses,
        return_outputs=False,
    )
    return mean_of(losses)


if __name__ == "__main__":
    sys.exit(main())
