"""The flags that all training scripts share, and the refusal of bad ones.

Bad input is refused on every rank before the first message: one sentence that names the flag and
the fix, printed once, and exit status 2.
"""

import argparse
import math
import os
import sys

import torch

from pipeline.data import DataError, load_text
from pipeline.distributed import ranks_from_environment
from pipeline.model import ModelConfig, cut_as, cut_evenly
from pipeline.simulator import Costs

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
REFUSED = 2


def refuse(sentence):
    """Leave with one sentence, printed by rank 0 only, and a non-zero exit on every rank."""
    if ranks_from_environment()[0] == 0:
        print(sentence, file=sys.stderr, flush=True)
    sys.exit(REFUSED)


class Parser(argparse.ArgumentParser):
    """An argument parser that refuses in one sentence, without the usage text."""

    def __init__(self, **options):
        super().__init__(
            allow_abbrev=False,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            **options,
        )

    def error(self, message):
        refuse(message.removeprefix("argument ") + "; --help lists the flags")


def positive_integer(text):
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not '{text}'")
    return value


def positive_number(text):
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, not '{text}'")
    return value


def layer_counts(text):
    return [positive_integer(count) for count in text.split(",")]


def training_parser(description):
    """The parser with the flags that every training script has."""
    parser = Parser(description=description)
    add = parser.add_argument
    add("--steps", type=positive_integer, default=10, metavar="N", help="updates to train")
    add("--batch-size", type=positive_integer, default=16, metavar="N", help="sequences a step")
    add("--microbatches", type=positive_integer, default=8, metavar="M", help="parts of a batch")
    add("--layers", type=positive_integer, default=8, metavar="N", help="decoder layers")
    add("--dim", type=positive_integer, default=32, metavar="N", help="width of the model")
    add("--heads", type=positive_integer, default=4, metavar="N", help="query heads")
    add("--kv-heads", type=positive_integer, default=2, metavar="N", help="key and value heads")
    add("--seq-len", type=positive_integer, default=32, metavar="N", help="bytes a sequence")
    add("--learning-rate", type=positive_number, default=0.2, metavar="X", help="step size")
    add("--optimizer", choices=["sgd", "adamw"], default="sgd", help="update rule")
    add("--seed", type=int, default=0, metavar="N", help="of the weights and the batches")
    add("--dtype", choices=list(DTYPES), default="float64", help="of weights and activations")
    add("--data", metavar="FILE", help="text to learn instead of the course's own")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to compute")
    add("--cut", type=layer_counts, metavar="A,B,...", help="layers of each stage, e.g. 3,3,2")
    add("--verify", action="store_true", help="compare with one process training the whole model")
    add(
        "--pace",
        type=positive_number,
        nargs="+",
        metavar="MS",
        help="least time of a stage's forward and backward, and of the weights' part of it",
    )
    add("--timeline", metavar="FILE", help="write the performed timeline of the last step")
    add("--losses", metavar="FILE", help="write the losses, one JSON object a line")
    add("--timeout", type=positive_number, default=60.0, metavar="S", help="longest wait")
    return parser


def parse_training_arguments(parser, num_stages=lambda arguments: arguments.num_ranks):
    """Parse and check. `num_stages` says how many stages the flags ask for, by default one a rank.

    Adds what follows from the flags: `num_ranks`, `config` (a ModelConfig), `text` (a
    Text), `torch_dtype`, `stage_layers` (first and last layer of each stage), `microbatch_size`
    and `paced` (a Costs in milliseconds, or None).
    """
    arguments = parser.parse_args()
    arguments.num_ranks = ranks_from_environment()[1]
    check_sizes(arguments)
    check_outputs(arguments)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        refuse("--device cuda: this machine has no usable GPU; use --device cpu or auto")
    arguments.config = ModelConfig(
        arguments.layers, arguments.dim, arguments.heads, arguments.kv_heads, arguments.seq_len
    )
    try:
        arguments.text = load_text(arguments.data, arguments.seq_len)
    except DataError as error:
        refuse(str(error))
    arguments.torch_dtype = DTYPES[arguments.dtype]
    arguments.microbatch_size = arguments.batch_size // arguments.microbatches
    arguments.stage_layers = stage_layers(arguments, num_stages(arguments))
    arguments.paced = pace_costs(arguments.pace)
    return arguments


def check_sizes(arguments):
    batch, microbatches = arguments.batch_size, arguments.microbatches
    if batch % microbatches:
        refuse(
            f"--microbatches {microbatches} does not divide --batch-size {batch}; "
            f"use a --batch-size that is a multiple of {microbatches}"
        )
    if arguments.dim % arguments.heads or arguments.dim // arguments.heads % 2:
        refuse(
            f"--heads {arguments.heads} does not cut --dim {arguments.dim} into parts of even "
            f"width; use a --dim that is a multiple of {2 * arguments.heads}"
        )
    if arguments.heads % arguments.kv_heads:
        refuse(
            f"--kv-heads {arguments.kv_heads} does not divide --heads {arguments.heads}; "
            "use a divisor of --heads"
        )
    if not 0 <= arguments.seed < 2**31:
        refuse(f"--seed {arguments.seed} is out of range; use a number from 0 to {2**31 - 1}")


def check_outputs(arguments):
    """Refuse an output that could not be written when the training is over."""
    for flag in ("timeline", "losses"):
        path = getattr(arguments, flag)
        if path is None:
            continue
        folder = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(folder):
            refuse(f"--{flag} {path}: the folder {folder} does not exist; make it first")
        if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
            refuse(f"--{flag} {path} cannot be written; name a file in a folder of yours")


def stage_layers(arguments, num_stages):
    """(first, last) layer of each stage, from --cut or as even as it goes."""
    if arguments.cut is None:
        if arguments.layers < num_stages:
            refuse(
                f"--layers {arguments.layers} is too few for {num_stages} stages, one a rank; use "
                "at least one layer a stage, or fewer ranks"
            )
        return cut_evenly(arguments.layers, num_stages)
    if len(arguments.cut) != num_stages or sum(arguments.cut) != arguments.layers:
        refuse(
            f"--cut {','.join(map(str, arguments.cut))} must name {num_stages} stages, one a rank, "
            f"with {arguments.layers} layers in all"
        )
    return cut_as(arguments.cut)


def pace_costs(pace):
    """--pace as Costs in milliseconds, or None."""
    if pace is None:
        return None
    if len(pace) not in (2, 3):
        refuse("--pace takes two or three times in milliseconds: forward, backward, and the "
               "weights' part of the backward")  # fmt: skip
    if len(pace) == 3 and pace[2] >= pace[1]:
        refuse(
            "--pace: the weights' part must be less than the full backward; lower the third time"
        )
    return Costs(*pace)
