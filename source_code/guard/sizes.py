# SPDX-License-Identifier: Apache-2.0
"""Rejects models, batches and rates that no machine could hold, or compute within an hour."""

import torch

from files.inputs import memory_of_machine

OBJECTS_OF_A_LAYER, OBJECTS_OF_A_ROW = 50_000, 500  # bytes, measured
LEAST_PER_LAYER = 2e-4  # seconds of a forward and a backward of the narrowest layer
FASTEST_CPU, FASTEST_GPU = 2e11, 2.5e15  # operations per second of a thread, of a device


def check_rate(arguments):
    """Reject a learning rate that the weights' type cannot compute with; AdamW multiplies it by 10."""
    rate = getattr(arguments, "learning_rate", None) or 0.0
    most = torch.finfo(arguments.torch_dtype).max / 11
    if rate > most:
        raise SystemExit(
            f"--learning-rate {rate:g} is too large for --dtype {arguments.dtype}; use a smaller one"
        )


def check_memory(arguments):
    """Reject sizes for which this machine has too little memory even to start.

    The estimate has the weights of an even share of the layers, the tokens of a batch, the
    activations of one layer, and the Python objects of layers and rows. Training takes far more.
    """
    memory = memory_of_machine()
    config = arguments.config
    layers = -(-config.layers // arguments.num_ranks)
    kv_dim = config.kv_heads * config.head_dim
    weights = layers * config.dim * (2 * config.dim + 2 * kv_dim + 3 * config.hidden_dim)
    weights += config.vocabulary * config.dim
    tokens = arguments.batch_size * config.seq_len
    activations = arguments.microbatch_size * config.seq_len * config.dim
    objects = OBJECTS_OF_A_LAYER * layers + OBJECTS_OF_A_ROW * arguments.batch_size
    needed = arguments.torch_dtype.itemsize * (weights + activations) + 8 * tokens + objects
    if needed > memory:
        raise SystemExit(
            f"--dim, --layers and --batch-size need more than {int(needed / 2**30)} GiB per rank, and "
            f"this machine has {memory / 2**30:.0f} GiB; use smaller ones, or more ranks"
        )


def check_duration(arguments):
    """Reject sizes for which one step would take more than an hour on any machine.

    Each layer of this rank's share takes at least LEAST_PER_LAYER per micro-batch. In addition, it
    takes 6 operations per weight and token, and 12 per unit of width for half of all pairs of
    tokens.
    """
    config, batch = arguments.config, arguments.batch_size
    layers = -(-config.layers // arguments.num_ranks)
    per_token = 12 * config.dim**2 + config.seq_len * config.dim
    operations = 6 * layers * per_token * batch * config.seq_len
    fastest = (
        FASTEST_CPU if arguments.device == "cpu" or not torch.cuda.is_available() else FASTEST_GPU
    )
    microbatches = batch // arguments.microbatch_size
    seconds = layers * microbatches * LEAST_PER_LAYER + operations / fastest
    if seconds > 3600:
        raise SystemExit(
            f"--layers {config.layers} with {microbatches:,} micro-batches of {batch:,} sequences of "
            f"--seq-len {config.seq_len:,}: a step takes more than {int(seconds / 360) / 10:,} hours; use "
            "smaller ones, or more ranks"
        )
