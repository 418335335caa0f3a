import torch
import torch.distributed as dist

from pipeline.arguments import parse_training_arguments, positive_integer, refuse, training_parser
from pipeline.distributed import join_job, leave_job
from pipeline.model import build_part, token_loss
from pipeline.optimizer import build_optimizer
from pipeline.report import Report
from pipeline.schedules import one_f_one_b
from pipeline.stage import Stage
from pipeline.worker import Worker


def main():
    arguments = parse_arguments()
    job = join_job(arguments.device, arguments.timeout)
    peers = join_peers(arguments, job)
    stage = build_stage(arguments, job)
    optimizer = build_optimizer(
        arguments.optimizer, stage.part.parameters(), arguments.learning_rate
    )
    order = one_f_one_b(stage.index, len(arguments.stage_layers), arguments.microbatches)
    shape = (arguments.microbatch_size, arguments.seq_len, arguments.dim)
    worker = Worker(job, order, stage, shape, arguments.torch_dtype)
    report = Report(arguments, job)

    for step in report.steps():
        inputs, targets = microbatches_of(arguments, job, step)
        optimizer.zero_grad()
        loss = worker.run_step(inputs, targets)
        add_up(job, peers, [weight.grad for weight in stage.part.parameters()])
        if loss is not None:
            add_up(job, peers, [loss])
        optimizer.step()
        report.record_step(step, loss if stage.index == job.rank else None)  # in one replica

    report.finish()
    leave_job(job)


def parse_arguments():
    parser = training_parser(__doc__.splitlines()[0])
    parser.add_argument(
        "--replicas", type=positive_integer, default=1, metavar="R", help="equal pipelines"
    )
    parser.set_defaults(microbatches=4)
    arguments = parse_training_arguments(parser, lambda flags: flags.num_ranks // flags.replicas)
    if arguments.num_ranks % arguments.replicas or arguments.microbatch_size % arguments.replicas:
        refuse("--replicas must divide the ranks, and a micro-batch of all of them")
    arguments.microbatch_size //= arguments.replicas
    return arguments


def join_peers(arguments, job):
    """The group of the ranks that have this rank's stage; the others' are made here, too."""
    num_stages = len(arguments.stage_layers)
    groups = [
        dist.new_group(list(range(stage, job.num_ranks, num_stages))) for stage in range(num_stages)
    ]
    return groups[job.rank % num_stages]


def build_stage(arguments, job):
    """This rank's stage: a pipeline has consecutive ranks, and each replica the whole model."""

    def share_of_loss(scores, targets):
        # The mean over the batch, of which this micro-batch has a share.
        shares = arguments.batch_size * arguments.seq_len
        return token_loss(scores, targets, reduction="sum") / shares

    index = job.rank % len(arguments.stage_layers)
    part = build_part(arguments, *arguments.stage_layers[index], job.device)
    return Stage(part, index, len(arguments.stage_layers), share_of_loss)


def microbatches_of(arguments, job, step):
    """Inputs and targets of one step: this replica's rows, each a list of micro-batches."""
    batch = arguments.text.batch(step, arguments.batch_size, arguments.seq_len, arguments.seed)
    replica = job.rank // len(arguments.stage_layers)
    own = [tokens.chunk(arguments.replicas)[replica].to(job.device) for tokens in batch]
    return tuple(tokens.chunk(arguments.microbatches) for tokens in own)


def add_up(job, peers, tensors):
    """Replace tensors by their sums over the replicas, in one message."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=peers)
    for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(total.view_as(tensor))
