import torch
from torch.distributed.pipelining import PipelineStage

from pipeline.arguments import parse_training_arguments, positive_integer, refuse, training_parser
from pipeline.distributed import join_job, leave_job, ranks_from_environment
from pipeline.model import VOCABULARY, build_part
from pipeline.optimization.clipping import clip_gradients
from pipeline.report import Report
from pipeline.torch_pipelining.library import (
    SCHEDULES,
    complaint_about,
    stages_of_rank,
    without_messages_to_itself,
)


def main():
    arguments = parse_arguments()
    job = join_job(arguments.device, arguments.timeout)
    stages = build_stages(arguments, job)
    schedule = build_schedule(arguments, stages)
    weights = [weight for stage in stages for weight in stage.submod.parameters()]
    optimizer, rates = build_optimizer(arguments, weights)
    report = Report(arguments, job)

    for step in report.steps():
        inputs, targets = batch_of(arguments, job.device, step)
        optimizer.zero_grad()
        loss = run_step(schedule, stages, inputs, targets, {})
        if arguments.clip:
            clip_gradients(job, weights, arguments.clip)
        optimizer.step()
        rates.step()
        report.record_step(step, loss)

    report.finish()
    leave_job(job)


def parse_arguments():
    parser = training_parser(__doc__.splitlines()[0])
    add = parser.add_argument
    add("--schedule", choices=SCHEDULES, default="1F1B", help="the library's name of it")
    add("--chunks", type=positive_integer, metavar="V", help="stages a rank, else 1 or 2")
    add("--clip", type=float, metavar="NORM", help="largest gradient norm of the model")
    add("--warm-up", type=positive_integer, metavar="N", help="steps to full rate, then a cosine")
    arguments = parse_training_arguments(parser, number_of_stages)
    if torch.cuda.device_count() < ranks_from_environment()[3]:
        arguments.device = "cpu"  # the library cannot send between ranks that share a GPU
    complaint = complaint_about(
        arguments.schedule, arguments.num_ranks, arguments.microbatches, arguments.chunks
    )
    if complaint:
        refuse(complaint)
    return arguments


def build_stages(arguments, job):
    """This rank's stages, as torch's own objects, in the order in which the model runs them."""
    indices = stages_of_rank(arguments.schedule, job.rank, job.num_ranks, arguments.chunks)
    return [without_messages_to_itself(build_stage(arguments, job, index)) for index in indices]


def build_stage(arguments, job, index):
    """Stage `index`. Given its shapes, the library need not run a micro-batch to find them out."""
    part = build_part(arguments, *arguments.stage_layers[index], job.device)
    tokens = torch.empty((arguments.microbatch_size, arguments.seq_len), dtype=torch.int64)
    activation = torch.empty((*tokens.shape, arguments.dim), dtype=arguments.torch_dtype)
    scores = torch.empty((*tokens.shape, VOCABULARY), dtype=arguments.torch_dtype)
    return PipelineStage(
        part,
        index,
        len(arguments.stage_layers),
        job.device,
        input_args=tokens if part.is_first else activation.requires_grad_(),
        output_args=scores.requires_grad_() if part.is_last else activation.requires_grad_(),
    )


def batch_of(arguments, device, step):
    """Inputs and targets of a step, for the whole batch, on every rank."""
    batch = arguments.text.batch(step, arguments.batch_size, arguments.seq_len, arguments.seed)
    return tuple(tokens.to(device) for tokens in batch)
