# SPDX-License-Identifier: Apache-2.0
"""Clipping by the norm of the whole model, with the piece of case 6."""

import torch

from extensions.optimization.clipping import norm_of, scale_gradients, squares_of

LARGEST_NORM = 0.4  # of the gradient


def clip_gradients(job, stage, pieces):
    """Scale the gradients to LARGEST_NORM by the norm that the piece computes."""
    squares = [None] * job.num_ranks
    named = list(stage.part.named_parameters())
    with job.waiting_for_all("its share of the gradient's norm"):
        torch.distributed.all_gather_object(squares, squares_of(named))
    scale_gradients(named, pieces.norm_to_clip_by(job.rank, squares), LARGEST_NORM)


def clip_gradients_in_one_process(arguments, model, optimizer, step):
    """Clip the gradients of the whole model in one process, between backward and update."""
    named = list(model.named_parameters())
    scale_gradients(named, norm_of(squares_of(named)), LARGEST_NORM)
