import torch
import torch.distributed as dist

from pipeline.arguments import parse_training_arguments, positive_integer, refuse, training_parser
from pipeline.checkpointing.checkpoint import Checkpoints
from pipeline.distributed import join_job
from pipeline.model import build_part, token_loss
from pipeline.optimization.clipping import clip_gradients
from pipeline.optimization.learning_rate import set_rate
from pipeline.report import Report
from pipeline.schedules import one_f_one_b
from pipeline.stage import Stage
from pipeline.worker import Worker

MODELS = {  # layers, dim, heads, kv_heads
    "1m": (8, 104, 4, 2),
    "125m": (12, 768, 12, 4),
    "1b": (20, 2048, 32, 4),
}


def main():
    arguments = parse_arguments()
    job = join_job(arguments.device, arguments.timeout)
    stage = build_stage(arguments, job)
    weights = list(stage.part.parameters())
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.95), weight_decay=0.1)  # as Llama 2
    checkpoints = Checkpoints(job, arguments.checkpoints, stage.part, optimizer)
    order = one_f_one_b(job.rank, job.num_ranks, arguments.microbatches)
    shape = (arguments.microbatch_size, arguments.seq_len, arguments.dim)
    worker = Worker(job, order, stage, shape, arguments.torch_dtype)
    report = Report(arguments, job, first_step=checkpoints.restore())

    for step in report.steps():
        inputs, targets = microbatches_of(arguments, job, step)
        set_rate(optimizer, arguments.learning_rate, step, 10, max(arguments.steps, 11))
        optimizer.zero_grad()
        loss = worker.run_step(inputs, targets)
        clip_gradients(job, weights, arguments.clip)
        optimizer.step()
        report.record_step(step, loss)
        if (step + 1) % arguments.save_every == 0 or step + 1 == arguments.steps:
            checkpoints.save(step + 1)

    report.finish()
    dist.destroy_process_group()


def parse_arguments():
    parser = training_parser(__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=list(MODELS), default="1m", help="sizes by name; flags override them")
    add("--clip", type=float, default=1.0, metavar="X", help="largest norm of the gradient")
    add("--checkpoints", default="checkpoints", metavar="FOLDER", help="save and continue there")
    add("--save-every", type=positive_integer, default=50, metavar="N", help="steps")
    parser.set_defaults(steps=100, optimizer="adamw", seq_len=128, batch_size=32, dtype="float32")
    sizes = zip(("layers", "dim", "heads", "kv_heads"), MODELS[parser.parse_args().model])
    parser.set_defaults(**dict(sizes))
    arguments = parse_training_arguments(parser)
    if arguments.optimizer != "adamw":
        refuse("--optimizer: here it is adamw, with the numbers of Llama 2; leave the flag out")
    return arguments


def build_stage(arguments, job):
    """This rank's stage: its layers and, on the last rank, the loss."""

    def share_of_loss(scores, targets):
        shares = arguments.batch_size * arguments.seq_len  # of the batch, one a token
        return token_loss(scores, targets, reduction="sum") / shares

    part = build_part(arguments, *arguments.stage_layers[job.rank], job.device)
    return Stage(part, job.rank, job.num_ranks, share_of_loss)


def microbatches_of(arguments, job, step):
    """Inputs and targets of one step, each a list of (micro-batch size, length) tokens."""
    batch = arguments.text.batch(step, arguments.batch_size, arguments.seq_len, arguments.seed)
    return tuple(tokens.to(job.device).chunk(arguments.microbatches) for tokens in batch)
