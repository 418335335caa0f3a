# SPDX-License-Identifier: Apache-2.0
"""Naive model parallelism: a model cut in stages, one rank works at a time.

    torchrun --standalone --nproc-per-node 4 naive_model_parallelism.py --verify
    python naive_model_parallelism.py --single-process 4

Activations travel forward and gradients backward, sent and received by hand. With
--single-process N one process moves each activation with .to(device) from stage to stage.
"""

import sys
from functools import partial

import torch

from guard.around_main import guarded
from lab import attach
from pipeline.command_line import positive_integer
from pipeline.message import Message
from pipeline.model import build_part, token_loss
from pipeline.one_process import build_optimizer
from pipeline.training import (
    LossLog,
    build_stage,
    cut_layers,
    parse_arguments,
    start_job,
    train,
    training_parser,
)


@guarded
def main():
    parser = training_parser(__doc__)
    more = {"type": positive_integer, "metavar": "N"}
    helped = "N stages on N devices of one process, started with python"
    parser.add_argument("--single-process", help=helped, **more)
    parser.set_defaults(microbatches=1)
    attach.add_flags(parser)
    arguments = parse_arguments(parser)
    cut = cut_layers(arguments, arguments.single_process or arguments.num_ranks)
    if arguments.single_process:
        return train_in_one_process(arguments, cut)
    job = start_job(arguments)
    stage = build_stage(arguments, job.rank, cut, job.device)
    attach.observe(arguments, job, [stage], "naive")
    return train(arguments, job, [stage], partial(run_step, job, stage))


def run_step(job, stage, inputs, targets):
    """Each micro-batch through all stages and back before the next. Returns the loss, or None."""
    previous, following = job.rank - 1, job.rank + 1
    losses = []
    for k in range(len(inputs)):
        activation = inputs[k]
        if not stage.is_first:
            activation = job.receive(previous, Message("activation", previous, k)).wait()
        output = stage.forward(k, activation, targets[k])
        gradient = None
        if stage.is_last:
            losses.append(output)
        else:
            job.send(output, following, Message("activation", job.rank, k)).wait()
            gradient = job.receive(following, Message("gradient", following, k)).wait()
        gradient = stage.backward(k, gradient)
        if not stage.is_first:
            job.send(gradient, previous, Message("gradient", job.rank, k)).wait()
    job.complete_sends()
    return sum(losses) if losses else None


def train_in_one_process(arguments, cut):
    """The same stages on several devices of one process; autograd finds its own way back."""
    if arguments.num_ranks > 1:
        raise SystemExit(
            "--single-process is for one process; start it with python instead of torchrun"
        )
    torch.set_num_threads(1)
    devices = devices_of_one_process(arguments)
    parts = [
        build_part(arguments.config, first, last, arguments.seed, arguments.torch_dtype, device)
        for (first, last), device in zip(cut, devices)
    ]
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = build_optimizer(arguments.optimizer, parameters, arguments.learning_rate)
    print(f"one process, {len(parts)} stages on {' '.join(map(str, devices))}")

    log = LossLog(arguments, has_loss=True)
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
        log.add(step, loss)
    return log.finish(devices[0])


def devices_of_one_process(arguments):
    """One device per stage: the GPUs in turn, or the CPU standing in for all of them."""
    if arguments.device == "cpu" or not torch.cuda.is_available():
        return [torch.device("cpu")] * arguments.single_process
    gpus = torch.cuda.device_count()
    return [torch.device("cuda", stage % gpus) for stage in range(arguments.single_process)]


if __name__ == "__main__":
    sys.exit(main())
