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


def bubble_of_replicas(gpus, replicas, batch):
    """Idle time over ideal time of n GPUs with d replicas: (n - d)/B (Megatron section 3.3.1).

    `batch` is B, in micro-batches. GPUs of a tensor group count as one.
    """
    return (gpus - replicas) / batch
