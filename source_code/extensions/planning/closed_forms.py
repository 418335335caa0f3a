"""The closed forms of Megatron-LM (Narayanan et al. 2021, arXiv 2104.04473, "Megatron" below).

They need no schedule and no machine. Times in seconds unless a name says days.
"""

SECONDS_PER_DAY = 86_400


def training_days(parameters, tokens, gpus, flops):
    """Megatron equation 4: 8 T P / (n X), for large models.

    `flops` is X, what one GPU reached from end to end in a run: bubble, messages and optimizer are
    in it already, and nothing may be added for them. The paper's rates count a second forward.
    """
    return 8 * tokens * parameters / (gpus * flops) / SECONDS_PER_DAY


def bubble_over_ideal(ranks, microbatches, chunks=1):
    """Megatron sections 2.2.1 and 2.2.2: (p - 1)/(v m)."""
    return (ranks - 1) / (chunks * microbatches)


def bubble_of_replicas(gpus, replicas, batch, microbatch=1):
    """Megatron section 3.3.1, without tensor parallelism: (n - d)/(B/b)."""
    return (gpus - replicas) / (batch / microbatch)


def batch_time(batch, replicas, microbatch, ranks, forward, backward):
    """Megatron equation 1: (B/(d b) + p - 1)(t_f + t_b)."""
    return (batch / (replicas * microbatch) + ranks - 1) * (forward + backward)
