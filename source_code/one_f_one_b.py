"""1F1B: one forward, one backward, so that little is held (lesson 03).

    torchrun --standalone --nproc-per-node 4 source_code/one_f_one_b.py --verify

The step runs through the worker, or with --by-hand through the loop written out below; both take
the same actions in the same order.
"""

import sys

from pipeline.arguments import parse_training_arguments, training_parser
from pipeline.distributed import Receiving, Sending, join_job, leave_job
from pipeline.model import build_part, token_loss
from pipeline.optimizer import build_optimizer
from pipeline.recorder import Recorder
from pipeline.report import Report
from pipeline.schedules import one_f_one_b
from pipeline.stage import Stage
from pipeline.worker import Worker


def main():
    arguments = parse_arguments()
    job = join_job(arguments.device, arguments.timeout)
    recorder = Recorder(job, arguments.paced)
    stage = build_stage(arguments, job, recorder)
    optimizer = build_optimizer(
        arguments.optimizer, stage.part.parameters(), arguments.learning_rate
    )
    schedule = one_f_one_b(job.num_ranks, arguments.microbatches)
    shape = (arguments.microbatch_size, arguments.seq_len, arguments.dim)
    worker = Worker(job, schedule, {stage.index: stage}, shape, arguments.torch_dtype)
    report = Report(arguments, job, schedule, recorder)

    for step in report.steps():
        inputs, targets = microbatches_of(arguments, job, step)
        optimizer.zero_grad()
        if arguments.by_hand:
            loss = run_step_by_hand(job, stage, inputs, targets, shape, arguments.torch_dtype)
        else:
            loss = worker.run_step(inputs, targets)
        optimizer.step()
        report.record_step(step, loss)

    report.finish()
    leave_job(job)
    return 0 if report.verify() else 1


def parse_arguments():
    parser = training_parser(__doc__.splitlines()[0])
    parser.add_argument("--by-hand", action="store_true", help="run the loop written out here")
    return parse_training_arguments(parser)


def build_stage(arguments, job, recorder):
    """This rank's stage: its layers and, on the last rank, the loss."""
    first, last = arguments.stage_layers[job.rank]
    part = build_part(
        arguments.config, first, last, arguments.seed, arguments.torch_dtype, job.device
    )

    def share_of_loss(scores, targets):
        # The mean over the batch is the mean of the micro-batches' means: they are equally large.
        return token_loss(scores, targets) / arguments.microbatches

    return Stage(part, job.rank, job.num_ranks, recorder, share_of_loss)


def microbatches_of(arguments, job, step):
    """Inputs and targets of one step, each a list of (micro-batch size, length) tokens."""
    batch = arguments.text.batch(step, arguments.batch_size, arguments.seq_len, arguments.seed)
    return tuple(tokens.to(job.device).chunk(arguments.microbatches) for tokens in batch)


def run_step_by_hand(job, stage, inputs, targets, shape, dtype):
    """One 1F1B step with its three phases in plain sight. Returns the loss, or None."""
    previous, following = job.rank - 1, job.rank + 1
    warm_up = min(len(inputs), job.num_ranks - 1 - job.rank)
    sent = []
    losses = []

    def forward(k):
        activation = inputs[k]
        if not stage.is_first:
            activation = Receiving(job, shape, dtype, previous, f"activation {k}").wait()
        output = stage.forward(k, activation, targets[k])
        if stage.is_last:
            losses.append(output)
        else:
            sent.append(Sending(job, output, following, f"activation {k}"))

    def backward(k):
        gradient = None
        if not stage.is_last:
            gradient = Receiving(job, shape, dtype, following, f"gradient {k}").wait()
        gradient = stage.backward(k, gradient)
        if not stage.is_first:
            sent.append(Sending(job, gradient, previous, f"gradient {k}"))

    # Warm-up: one forward for each stage behind this one.
    for k in range(warm_up):
        forward(k)

    # Steady: one forward, one backward.
    for k in range(len(inputs) - warm_up):
        forward(warm_up + k)
        backward(k)

    # Cool-down: the backwards that are left.
    for k in range(len(inputs) - warm_up, len(inputs)):
        backward(k)

    for sending in sent:
        sending.wait()
    return sum(losses) if losses else None


if __name__ == "__main__":
    sys.exit(main())
