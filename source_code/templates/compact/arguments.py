"""The flags of a training."""

import argparse
import sys

import torch

from pipeline.data import DEFAULT_TEXT, Text
from pipeline.distributed import ranks_from_environment
from pipeline.model import cut_evenly

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
LEARNING_RATES = {"sgd": 0.2, "momentum": 0.05, "adamw": 0.003}


def training_parser(description):
    """The parser with the flags that every training has."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.error = refuse
    add = parser.add_argument
    add("--steps", type=positive_integer, default=10, help="updates to train")
    add("--batch-size", type=positive_integer, default=16, help="sequences a step")
    add("--microbatches", type=positive_integer, default=8, help="parts of a batch")
    add("--layers", type=positive_integer, default=8, help="decoder layers")
    add("--dim", type=positive_integer, default=32, help="width of the model")
    add("--heads", type=positive_integer, default=4, help="query heads")
    add("--kv-heads", type=positive_integer, default=2, help="key and value heads")
    add("--seq-len", type=positive_integer, default=32, help="bytes a sequence")
    add("--learning-rate", type=float, help=f"step size, else {LEARNING_RATES}")
    add("--optimizer", choices=list(LEARNING_RATES), default="sgd", help="update rule")
    add("--seed", type=int, default=0, help="of the weights and the batches")
    add("--dtype", choices=list(DTYPES), default="float64", help="of weights and activations")
    add("--data", metavar="FILE", default=DEFAULT_TEXT, help="text to learn")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to compute")
    add("--losses", metavar="FILE", help="write the losses, one JSON object a line")
    add("--timeout", type=float, default=60.0, metavar="S", help="longest wait for a message")
    return parser


def positive_integer(text):
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not '{text}'")
    return int(text)


def parse_training_arguments(parser, num_stages=lambda arguments: arguments.num_ranks):
    """Parse, check what has to fit together, and add what follows from the flags."""
    arguments = parser.parse_args()
    arguments.num_ranks = ranks_from_environment()[1]
    arguments.learning_rate = arguments.learning_rate or LEARNING_RATES[arguments.optimizer]
    arguments.torch_dtype = DTYPES[arguments.dtype]
    arguments.microbatch_size, left_over = divmod(arguments.batch_size, arguments.microbatches)
    if left_over:
        refuse("--microbatches must divide --batch-size; change one of them")
    if arguments.dim % (2 * arguments.heads) or arguments.heads % arguments.kv_heads:
        refuse("--dim must be a multiple of twice --heads, and --heads of --kv-heads")
    if arguments.layers < num_stages(arguments):
        refuse(f"--layers {arguments.layers} is too few for {num_stages(arguments)} stages")
    arguments.stage_layers = cut_evenly(arguments.layers, num_stages(arguments))
    arguments.text = Text(arguments.data, arguments.seq_len)
    return arguments


def refuse(sentence):
    """Leave with one sentence and status 2. Every rank says it: the first to leave ends the others."""
    print(sentence, file=sys.stderr, flush=True)
    sys.exit(2)
