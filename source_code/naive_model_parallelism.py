"""Naive model parallelism: a model cut in stages, one rank works at a time (lesson 01).

    torchrun --standalone --nproc-per-node 4 source_code/naive_model_parallelism.py --verify
    python source_code/naive_model_parallelism.py --single-process 4

Activations travel forward and gradients backward, sent and received by hand. With
--single-process N one process moves each activation with .to(device) from stage to stage.
"""

import sys

import torch
import torch.distributed as dist

from pipeline.arguments import (
    parse_training_arguments,
    positive_integer,
    refuse,
    training_parser,
)
from pipeline.distributed import join_job, leave_job
from pipeline.model import build_part, token_loss
from pipeline.optimizer import build_optimizer
from pipeline.recorder import Recorder
from pipeline.report import Report, are_finite, keeps_promise, write_losses
from pipeline.schedules import naive
from pipeline.stage import Stage


def main():
    arguments = parse_arguments()
    if arguments.single_process:
        return train_in_one_process(arguments)
    job = join_job(arguments.device, arguments.timeout)
    recorder = Recorder(job, arguments.paced)
    stage = build_stage(arguments, job, recorder)
    optimizer = build_optimizer(
        arguments.optimizer, stage.part.parameters(), arguments.learning_rate
    )
    schedule = naive(job.num_ranks, arguments.microbatches)
    report = Report(arguments, job, schedule, recorder)

    for step in report.steps():
        inputs, targets = microbatches_of(arguments, job, step)
        optimizer.zero_grad()
        loss = run_step(arguments, job, stage, inputs, targets)
        optimizer.step()
        report.record_step(step, loss)

    report.finish()
    leave_job(job)
    return 0 if report.verify() else 1


def parse_arguments():
    parser = training_parser(__doc__.splitlines()[0])
    parser.add_argument(
        "--single-process",
        type=positive_integer,
        metavar="N",
        help="N stages on N devices of one process, started with python",
    )
    parser.set_defaults(microbatches=1)
    arguments = parse_training_arguments(
        parser, num_stages=lambda a: a.single_process or a.num_ranks
    )
    if arguments.single_process and arguments.num_ranks > 1:
        refuse("--single-process is for one process; start it with python instead of torchrun")
    drawn = (arguments.pace, arguments.timeline, arguments.profile, arguments.record)
    if arguments.single_process and any(drawn):
        refuse(
            "--single-process has no ranks to pace or draw; leave out --pace, "
            "--timeline, --profile and --record"
        )
    return arguments


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


def run_step(arguments, job, stage, inputs, targets):
    """Each micro-batch through all stages and back before the next. Returns the loss, or None."""
    shape = (arguments.microbatch_size, arguments.seq_len, arguments.dim)
    previous, following = job.rank - 1, job.rank + 1
    loss = None
    for k in range(arguments.microbatches):
        activation = inputs[k]
        if not stage.is_first:
            activation = receive(job, shape, arguments.torch_dtype, previous, f"activation {k}")
        output = stage.forward(k, activation, targets[k])
        gradient = None
        if stage.is_last:
            loss = output if loss is None else loss + output
        else:
            send(job, output, following, f"activation {k}")
            gradient = receive(job, shape, arguments.torch_dtype, following, f"gradient {k}")
        gradient = stage.backward(k, gradient)
        if not stage.is_first:
            send(job, gradient, previous, f"gradient {k}")
    return loss


def send(job, tensor, destination, what):
    """Send and wait until the message is taken."""
    tensor = tensor.contiguous().to("cpu" if job.through_host else job.device)
    with job.watch.waiting_for(destination, f"the receipt of {what}"):
        dist.send(tensor, destination, group=job.channels[job.rank, destination])


def receive(job, shape, dtype, source, what):
    """Wait for a message of known shape and return it."""
    buffer = torch.empty(shape, dtype=dtype, device="cpu" if job.through_host else job.device)
    with job.watch.waiting_for(source, what):
        dist.recv(buffer, source, group=job.channels[source, job.rank])
    job.message_has_arrived()
    return buffer.to(job.device)


def train_in_one_process(arguments):
    """The same stages on several devices of one process; autograd finds its own way back."""
    torch.set_num_threads(1)
    devices = devices_of_one_process(arguments)
    parts = [
        build_part(arguments.config, first, last, arguments.seed, arguments.torch_dtype, device)
        for (first, last), device in zip(arguments.stage_layers, devices)
    ]
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = build_optimizer(arguments.optimizer, parameters, arguments.learning_rate)
    print(f"one process, {len(parts)} stages on {' '.join(map(str, devices))}")

    losses = []
    for step in range(arguments.steps):
        activation, targets = arguments.text.batch(
            step, arguments.batch_size, arguments.seq_len, arguments.seed
        )
        for part, device in zip(parts, devices):
            activation = part(activation.to(device))
        loss = token_loss(activation, targets.to(devices[-1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step}  loss {losses[-1]:.6f}")

    write_losses(arguments, losses)
    finite = are_finite(losses)
    return 0 if keeps_promise(arguments, losses, devices[0]) and finite else 1


def devices_of_one_process(arguments):
    """One device a stage: the GPUs in turn, or the CPU standing in for all of them."""
    if arguments.device == "cpu" or not torch.cuda.is_available():
        return [torch.device("cpu")] * arguments.single_process
    gpus = torch.cuda.device_count()
    return [torch.device("cuda", stage % gpus) for stage in range(arguments.single_process)]


if __name__ == "__main__":
    sys.exit(main())
