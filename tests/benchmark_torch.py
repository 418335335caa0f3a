"""The training of gpipe.py with torch.distributed.pipelining's ScheduleGPipe in place of ours.

Same flags, same stages (ModelPart), same batches, update, pacing and report, so that what is left
to compare is who performs the schedule. Started by benchmark.py.
"""

import sys
from pathlib import Path

import torch
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "source_code"))

from pipeline.arguments import parse_training_arguments, training_parser
from pipeline.distributed import join_job, leave_job
from pipeline.model import VOCABULARY, build_part, token_loss
from pipeline.optimizer import build_optimizer
from pipeline.recorder import Recorder
from pipeline.report import Report
from pipeline.schedule import Action
from pipeline.schedules import gpipe


def main():
    arguments = parse_training_arguments(training_parser(__doc__.splitlines()[0]))
    job = join_job(arguments.device, arguments.timeout)
    recorder = Recorder(job, arguments.paced)
    stage = build_stage(arguments, job, recorder)
    optimizer = build_optimizer(
        arguments.optimizer, stage.submod.parameters(), arguments.learning_rate
    )
    # Divides the gradients by the number of micro-batches itself, each loss being a mean.
    schedule = ScheduleGPipe(stage, arguments.microbatches, loss_fn=token_loss)
    report = Report(arguments, job, gpipe(job.num_ranks, arguments.microbatches), recorder)

    for step in report.steps():
        batch = arguments.text.batch(step, arguments.batch_size, arguments.seq_len, arguments.seed)
        optimizer.zero_grad()
        loss = run_step(schedule, stage, *(tokens.to(job.device) for tokens in batch))
        optimizer.step()
        report.record_step(step, loss)

    report.finish()
    leave_job(job)
    return 0 if report.verify() else 1


class RecordedStage(PipelineStage):
    """torch's stage, recorded and paced by the recorder that records and paces ours.

    Both methods are called as soon as the message that they need has arrived, as ours are.
    """

    def __init__(self, part, job, recorder, **shapes):
        super().__init__(part, job.rank, job.num_ranks, job.device, **shapes)
        self.job = job
        self.recorder = recorder

    def forward_one_chunk(self, microbatch, *arguments, **keywords):
        if not self.is_first:
            self.job.message_has_arrived()
        with self.recorder.record(Action(self.stage_index, "F", microbatch)):
            return super().forward_one_chunk(microbatch, *arguments, **keywords)

    def backward_one_chunk(self, microbatch, *arguments, **keywords):
        if not self.is_last:
            self.job.message_has_arrived()
        with self.recorder.record(Action(self.stage_index, "B", microbatch)):
            return super().backward_one_chunk(microbatch, *arguments, **keywords)


def build_stage(arguments, job, recorder):
    """This rank's stage. Its shapes are given, so that no step is spent on finding them out."""
    first, last = arguments.stage_layers[job.rank]
    part = build_part(
        arguments.config, first, last, arguments.seed, arguments.torch_dtype, job.device
    )
    tokens = torch.empty((arguments.microbatch_size, arguments.seq_len), dtype=torch.int64)
    activation = torch.empty((*tokens.shape, arguments.dim), dtype=arguments.torch_dtype)
    scores = torch.empty((*tokens.shape, VOCABULARY), dtype=arguments.torch_dtype)
    return RecordedStage(
        part,
        job,
        recorder,
        input_args=tokens if part.is_first else activation.requires_grad_(),
        output_args=scores.requires_grad_() if part.is_last else activation.requires_grad_(),
    )


def run_step(schedule, stage, inputs, targets):
    """One step of torch's schedule. Returns the loss on the last rank, None elsewhere."""
    losses = []
    schedule.step(
        *([inputs] if stage.is_first else []),
        target=targets if stage.is_last else None,
        losses=losses if stage.is_last else None,
        return_outputs=False,
    )
    return torch.stack(losses).mean().detach() if stage.is_last else None


if __name__ == "__main__":
    sys.exit(main())
