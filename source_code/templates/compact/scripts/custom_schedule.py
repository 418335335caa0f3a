import re
from pathlib import Path

from pipeline.arguments import parse_training_arguments, refuse, training_parser
from pipeline.distributed import join_job, leave_job
from pipeline.model import build_part, token_loss
from pipeline.optimizer import build_optimizer
from pipeline.report import Report
from pipeline.stage import Stage
from pipeline.worker import Worker


def main():
    arguments = parse_arguments()
    job = join_job(arguments.device, arguments.timeout)
    stages = build_stages(arguments, job)
    weights = [weight for stage in stages.values() for weight in stage.part.parameters()]
    optimizer = build_optimizer(arguments.optimizer, weights, arguments.learning_rate)
    shape = (arguments.microbatch_size, arguments.seq_len, arguments.dim)
    worker = Worker(job, arguments.orders, stages, shape, arguments.torch_dtype)
    report = Report(arguments, job)

    for step in report.steps():
        inputs, targets = microbatches_of(arguments, job, step)
        optimizer.zero_grad()
        loss = worker.run_step(inputs, targets)
        optimizer.step()
        report.record_step(step, loss)

    report.finish()
    leave_job(job)


def parse_arguments():
    parser = training_parser(__doc__.splitlines()[0])
    parser.add_argument("file", metavar="FILE.csv", help="the schedule, a row a rank")
    orders = read_schedule(parser.parse_args().file)
    num_stages, num_microbatches = (
        1 + max(action[i] for order in orders for action in order) for i in (0, 2)
    )
    check_schedule(orders, num_stages, num_microbatches)
    parser.set_defaults(microbatches=num_microbatches)
    arguments = parse_training_arguments(parser, lambda flags: num_stages)
    if len(orders) != arguments.num_ranks or arguments.microbatches != num_microbatches:
        refuse(f"the file is for {len(orders)} ranks and {num_microbatches} micro-batches")
    arguments.orders = orders
    return arguments


def read_schedule(path):
    """The orders of all ranks: cells such as 0F3, a row a rank, kinds F and B."""
    try:
        rows = Path(path).read_text().split()
    except (OSError, UnicodeDecodeError):
        refuse(f"{path} is no CSV file that can be read; name one")
    cells = [[re.fullmatch(r"(\d+)([FB])(\d+)", cell) for cell in row.split(",")] for row in rows]
    if not rows or not all(map(all, cells)):
        refuse(f"{path}: write stage, kind (F or B) and micro-batch in each cell, as in 0F3")
    return [[(int(cell[1]), cell[2], int(cell[3])) for cell in row] for row in cells]


def check_schedule(orders, num_stages, num_microbatches):
    """Refuse a schedule that is not complete, or that comes to a stop before its end."""
    if len({action for order in orders for action in order}) != 2 * num_stages * num_microbatches:
        refuse("the schedule needs each micro-batch once forward and once backward on each stage")
    done, left, moved = set(), [list(order) for order in orders], True
    while moved:
        moved = False
        for order in left:
            while order and all(need in done for need in needs_of(*order[0], num_stages)):
                done.add(order.pop(0))
                moved = True
    for rank, order in enumerate(left):
        if order:
            refuse(f"rank {rank} waits for ever before {order[0]}: something it needs comes later")


def needs_of(stage, kind, k, num_stages):
    """What must have been done before an action can start."""
    if kind == "F":
        return [(stage - 1, "F", k)] if stage else []
    return [(stage, "F", k)] + ([(stage + 1, "B", k)] if stage + 1 < num_stages else [])


def build_stages(arguments, job):
    """This rank's stages by index; whichever has the last one has the loss."""

    def share_of_loss(scores, targets):
        # The mean over the batch is the mean of the micro-batches' means: they are equally large.
        return token_loss(scores, targets) / arguments.microbatches

    stages, num_stages = {}, len(arguments.stage_layers)
    for index in {action[0] for action in arguments.orders[job.rank]}:
        part = build_part(arguments, *arguments.stage_layers[index], job.device)
        stages[index] = Stage(part, index, num_stages, share_of_loss)
    return stages
