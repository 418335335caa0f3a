"""The training of custom_schedule.py, with torch's own runtime to perform the file.

Same flags, same stages (ModelPart), same batches, same update. torch reads the file itself, adds
the messages and runs forwards, backwards and their halves. Started by test_text_form.py.
"""

import sys
from pathlib import Path

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "source_code"))

from custom_schedule import parse_arguments

from lab.report import write_losses
from pipeline.job import join_job, leave_job
from pipeline.model import VOCABULARY, build_part, token_loss
from pipeline.training import build_optimizer


def main():
    arguments, schedule = parse_arguments()
    job = join_job(arguments.device, arguments.timeout)
    stages = [
        build_stage(arguments, job, schedule, index) for index in schedule.stages_of(job.rank)
    ]
    weights = [weight for stage in stages for weight in stage.submod.parameters()]
    optimizer = build_optimizer(arguments.optimizer, weights, arguments.learning_rate)
    # Divides the gradients by the number of micro-batches itself, each loss being a mean.
    runtime = _PipelineScheduleRuntime(stages, schedule.num_microbatches, loss_fn=token_loss)
    runtime._load_csv(arguments.file)

    losses = []
    for step in range(arguments.steps):
        batch = arguments.text.batch(step, arguments.batch_size, arguments.seq_len, arguments.seed)
        optimizer.zero_grad()
        loss = run_step(runtime, stages, *batch)
        optimizer.step()
        losses += [] if loss is None else [loss.item()]
    if losses:
        write_losses(arguments, losses)
    leave_job(job)
    return 0


def build_stage(arguments, job, schedule, index):
    """One of this rank's stages. Its shapes are given, so that no step is spent on finding them."""
    first, last = arguments.stage_layers[index]
    part = build_part(
        arguments.config, first, last, arguments.seed, arguments.torch_dtype, job.device
    )
    tokens = torch.empty((arguments.microbatch_size, arguments.seq_len), dtype=torch.int64)
    activation = torch.empty((*tokens.shape, arguments.dim), dtype=arguments.torch_dtype)
    scores = torch.empty((*tokens.shape, VOCABULARY), dtype=arguments.torch_dtype)
    return PipelineStage(
        part,
        index,
        schedule.num_stages,
        job.device,
        input_args=tokens if part.is_first else activation.requires_grad_(),
        output_args=scores.requires_grad_() if part.is_last else activation.requires_grad_(),
    )


def run_step(runtime, stages, inputs, targets):
    """One step. Returns the loss on the rank of the last stage, None elsewhere."""
    has_last = any(stage.is_last for stage in stages)
    losses = []
    runtime.step(
        *([inputs] if any(stage.is_first for stage in stages) else []),
        target=targets if has_last else None,
        losses=losses if has_last else None,
        return_outputs=False,
    )
    return torch.stack(losses).mean().detach() if has_last else None


if __name__ == "__main__":
    sys.exit(main())
