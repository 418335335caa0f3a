# SPDX-License-Identifier: Apache-2.0
"""The closed forms of Megatron-LM (Narayanan et al. 2021, arXiv 2104.04473, "Megatron" below).

They need neither a schedule nor a machine. Times are in seconds unless a name says days.
"""

SECONDS_PER_DAY = 86_400


def training_days(parameters, tokens, gpus, flops):
    """Days of a training run: 8 T P / (n X), for large models (Megatron equation 4).

    `parameters` is P, `tokens` T and `gpus` n. `flops` is X, the operations per second that one GPU
    reached from end to end in a run. X already includes the bubble, the messages and the optimizer,
    so nothing is added for them. The paper's rates count a second forward.
    """
    return 8 * tokens * parameters / (gpus * flops) / SECONDS_PER_DAY


def bubble_over_ideal(ranks, microbatches, chunks=1):
    """Idle time over ideal time: (p - 1)/(v m) (Megatron sections 2.2.1 and 2.2.2)."""
    return (ranks - 1) / (chunks * microbatches)


def bubble_of_replicas(gpus, replicas, batch, microbatch=1):
    """The same for n GPUs with d replicas: (n - d)/(B/b) (Megatron section 3.3.1, tensor 1)."""
    return (gpus - replicas) / (batch / microbatch)


def batch_time(batch, replicas, microbatch, ranks, forward, backward):
    """Seconds of a batch: (B/(d b) + p - 1)(t_f + t_b) (Megatron equation 1)."""
    return (batch / (replicas * microbatch) + ranks - 1) * (forward + backward)
