# SPDX-License-Identifier: Apache-2.0
"""Shared by all training scripts: their flags, their batches, and the loop over steps."""

import argparse
import json
import math
import sys
from pathlib import Path

import torch

from pipeline.command_line import (
    Parser,
    positive_integer,
    positive_number,
    ranks_from_environment,
    whole_number,
)
from pipeline.data import DataError, load_text
from pipeline.job import join_job
from pipeline.model import ModelConfig, build_part, cut_as, cut_evenly, token_loss
from pipeline.one_process import (
    LEARNING_RATES,
    build_optimizer,
    is_promised,
    losses_agree,
    train_one_process,
)
from pipeline.stage import Stage

checks = []  # functions that reject arguments of any program, besides those of its parser
writing = [lambda path, text: Path(path).write_text(text, encoding="utf-8")]  # the last one counts
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def training_parser(description):
    """Return the parser with the flags that every training script has."""
    parser = model_parser(description)
    rates = ", ".join(f"{rate} for {name}" for name, rate in LEARNING_RATES.items())
    add, count = parser.add_argument, {"type": positive_integer, "metavar": "N"}
    add("--steps", default=10, help="updates to train", **count)
    add("--batch-size", default=16, help="sequences per step", **count)
    add("--microbatches", default=8, help="parts of a batch", **count)
    add("--learning-rate", type=positive_number, metavar="X", help=f"step size, by default {rates}")
    add("--optimizer", choices=list(LEARNING_RATES), default="sgd", help="update rule")
    add("--losses", metavar="FILE", help="write the losses since this start, as JSON lines")
    parser.writes.append("--losses")
    return parser


def model_parser(description):
    """Return the parser with the flags of every script that runs the model."""
    parser = Parser(description)
    parser.set_defaults(describe=say_where_it_runs)
    add, count = parser.add_argument, {"type": positive_integer, "metavar": "N"}
    add("--layers", default=8, help="decoder layers", **count)
    add("--dim", default=32, help="width of the model", **count)
    add("--heads", default=4, help="query heads", **count)
    add("--kv-heads", default=2, help="key and value heads", **count)
    add("--seq-len", default=32, help="tokens per sequence", **count)
    add("--seed", type=whole_number, default=0, metavar="N", help="of all that is drawn at random")
    add("--dtype", choices=list(DTYPES), default="float64", help="of weights and activations")
    add("--data", metavar="FILE", help="text to learn instead of the course's own")
    parser.reads.append("--data")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to compute")
    add("--cut", type=layer_counts, metavar="A,B,...", help="layers of each stage, e.g. 3,3,2")
    add("--verify", action="store_true", help="compare with one process that has the whole model")
    add("--timeout", type=seconds, default=60.0, metavar="S", help="longest wait for another rank")
    return parser


def layer_counts(text):
    return [positive_integer(count) for count in text.split(",")]


def seconds(text):
    if not 1 <= positive_number(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"must be 1 to 1000000 seconds, not '{text}'")
    return float(text)


def parse_arguments(parser):
    """Parse the flags, check them and add what follows: see `complete_arguments`."""
    return complete_arguments(parser, parser.parse_args())


def complete_arguments(parser, arguments, read_data=lambda a: load_text(a.data, a.seq_len)):
    """Check the flags, and add `num_ranks`, `config`, `text`, `torch_dtype`, `microbatch_size`."""
    a = arguments
    a.learning_rate = a.learning_rate or LEARNING_RATES[a.optimizer]
    if a.batch_size % a.microbatches:
        raise SystemExit(
            f"--microbatches {a.microbatches} does not divide --batch-size {a.batch_size}; use a "
            f"--batch-size that is a multiple of {a.microbatches}"
        )
    a.microbatch_size = a.batch_size // a.microbatches
    return complete_model(parser, a, read_data)


def complete_model(parser, arguments, read_data):
    """Check the flags of `model_parser`, and add `num_ranks`, `config`, `text`, `torch_dtype`."""
    a = arguments
    a.num_ranks = getattr(a, "num_ranks", None) or ranks_from_environment()[1]
    a.vocabulary = getattr(a, "vocabulary", ModelConfig.vocabulary)
    if a.dim % (2 * a.heads):
        raise SystemExit(
            f"--heads {a.heads} does not cut --dim {a.dim} into parts of even width; use a --dim "
            f"that is a multiple of {2 * a.heads}"
        )
    if a.heads % a.kv_heads:
        raise SystemExit(
            f"--kv-heads {a.kv_heads} does not divide --heads {a.heads}; use a divisor of it"
        )
    if a.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: this machine has no usable GPU; use --device cpu or auto")
    a.config = ModelConfig(a.layers, a.dim, a.heads, a.kv_heads, a.seq_len, a.vocabulary)
    a.torch_dtype = DTYPES[a.dtype]
    for check in [*parser.checks, *checks]:
        check(a)
    try:
        a.text = read_data(a)
    except DataError as error:
        raise SystemExit(str(error)) from None
    return a


def start_job(arguments, pairs=None, shape=None):
    """Meet the other ranks, see `join_job`.

    An activation is (micro-batch size, length, dim), or has the `shape` given: a tuple, or a
    function of the stage that makes it.
    """
    a = arguments
    shape = shape or (a.microbatch_size, a.seq_len, a.dim)
    job = join_job(a.device, a.timeout, pairs, shape, a.torch_dtype)
    if job.rank == 0:
        a.describe(job)
    return job


def say_where_it_runs(job):
    """Say where a job runs, so that nobody takes gloo on a CPU for a run on GPUs."""
    many = "ranks" if job.num_ranks > 1 else "rank"
    kind = str(job.dtype).removeprefix("torch.")
    print(
        f"{job.num_ranks} {many} on {job.device.type}, {job.backend} messages, {kind}", flush=True
    )


def cut_layers(arguments, num_stages):
    """Return each stage's (first, last) layer, `last` excluded: --cut, or as even as possible."""
    layers, cut = arguments.layers, arguments.cut
    if cut is None and layers < num_stages:
        raise SystemExit(
            f"--layers {layers} is too few for {num_stages} stages; use at least one layer per "
            "stage, or fewer stages"
        )
    if cut and (len(cut) != num_stages or sum(cut) != layers):
        wanted = f"{num_stages} stages with {layers} layers in all"
        raise SystemExit(f"--cut {','.join(map(str, cut))} must name {wanted}")
    return cut_as(cut) if cut else cut_evenly(layers, num_stages)


def build_stage(arguments, index, cut, device, stage_class=Stage):
    """Build stage `index`, with its layers of the `cut` and, on the last stage, the loss."""
    a, (first, last) = arguments, cut[index]
    part = build_part(a.config, first, last, a.seed, a.torch_dtype, device)
    return stage_class(part, index, len(cut), share_of_loss(a.microbatches))


def share_of_loss(microbatches):
    """A micro-batch's share of the batch's mean loss: all micro-batches are equally large."""
    return lambda scores, targets: token_loss(scores, targets) / microbatches


def microbatches_of(arguments, device, step):
    """Return inputs and targets of one step, each a tuple of (micro-batch size, length)."""
    a = arguments
    batch = a.text.batch(step, a.batch_size, a.seq_len, a.seed)
    return tuple(tokens.to(device).chunk(a.microbatches) for tokens in batch)


def train(arguments, job, stages, run_step, reference=None):
    """Train; `run_step(inputs, targets)` returns the loss or None. Returns the exit status.

    `reference(arguments, device)` is what --verify compares with, if not `train_one_process`.
    """
    weights = dict.fromkeys(weight for stage in stages for weight in stage.part.parameters())
    optimizer = build_optimizer(arguments.optimizer, weights, arguments.learning_rate)
    log = LossLog(arguments, any(stage.is_last for stage in stages))
    for step in range(arguments.steps):
        inputs, targets = microbatches_of(arguments, job.device, step)
        optimizer.zero_grad()
        loss = run_step(inputs, targets)
        optimizer.step()
        log.add(step, loss)
    job.leave()
    return log.finish(job.device, reference)


class LossLog:
    """The losses of a run, on the rank that has them; `first_step` > 0 if the run is continued."""

    def __init__(self, arguments, has_loss, first_step=0):
        self.arguments, self.has_loss, self.first_step = arguments, has_loss, first_step
        self.losses = []

    def add(self, step, loss):
        if self.has_loss:
            self.losses.append(loss.item())
            print(f"step {step}  loss {self.losses[-1]:.6f}", flush=True)

    def finish(self, device, reference=None, verify=True):
        """Write --losses, and compare with one process if asked to. Returns the exit status.

        Without `verify` it judges no loss: the caller has said why the run has ended early.
        """
        a, losses = self.arguments, dict(enumerate(self.losses, self.first_step))
        written = not (a.losses and losses) or write_losses(a.losses, losses)
        diverged = [step for step, loss in losses.items() if verify and not math.isfinite(loss)]
        for step in diverged[:1]:
            sentence = "the training diverged; use a smaller --learning-rate"
            print(f"the loss of step {step} is {losses[step]}: {sentence}", file=sys.stderr)
        if diverged or not (a.verify and verify and self.has_loss):
            return int(bool(diverged) or not written)
        expected = (reference or train_one_process)(a, device)
        agree = losses_agree(a.dtype, self.losses, expected, self.first_step, is_promised(a))
        return int(not (agree and written))


def write_losses(path, losses):
    """Write {step: loss} as JSON lines; null for what is not finite. Returns whether it could."""
    finite = {step: loss if math.isfinite(loss) else None for step, loss in losses.items()}
    rows = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in finite.items()]
    try:
        writing[-1](path, "".join(rows))
    except OSError as error:
        reason = f"({error.strerror}); nothing else is lost"
        print(f"--losses {path} was not written {reason}", file=sys.stderr, flush=True)
        return False
    return True
