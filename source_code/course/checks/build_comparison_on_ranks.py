# SPDX-License-Identifier: Apache-2.0
"""Runs a reader's comparison of gradients on three ranks; build_comparison.py reads the report.

The ranks take one step with torch.distributed.pipelining, and each also computes the gradients of
one process. The reader's function then compares the two: once unchanged, and once for each fault of
WRONG on one rank.
"""

import math

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import extensions.torch_pipelining.library  # noqa: F401 - allows what its stages tell each other
from course.building.messages import tell
from small.pipeline import batch, build_stage, loss_of

RANKS, MICROBATCHES = 3, 4
WRONG = {  # {fault: (rank that has it, function that puts it into the gradients)}
    "nothing is wrong": (0, lambda found: found),
    "rank 2 divided its gradients by 8 once more": (2, lambda found: [one / 8 for one in found]),
    "rank 0 has one number that is too small": (0, lambda found: [one_lower(found[0]), *found[1:]]),
    "rank 1 added the batch before": (1, lambda found: [3 * one for one in found]),
    "rank 1 has None in the place of one gradient": (1, lambda found: [None, *found[1:]]),
    # Neither first nor last: Python's max() gives up a nan that follows or precedes a number.
    "rank 1 has a nan among its gradients": (
        1,
        lambda found: [found[0], found[1] * torch.nan, *found[2:]],
    ),
}


def main(_, difference):
    """Report, for each case, this rank's result together with the `facts`."""
    dist.init_process_group("gloo")
    found, right = gradients_of_both()
    told = []
    for case, (wrong_rank, change) in WRONG.items():
        given = change(found) if dist.get_rank() == wrong_rank else found
        # Copies, since the reader's function may compute in place.
        say = difference([g if g is None else g.clone() for g in given], [t.clone() for t in right])
        one = hasattr(say, "item") and math.prod(say.shape) == 1  # of numpy or torch
        say = say.item() if one else say
        told.append(
            [case, say if type(say) in (int, float) else repr(say)[:60], *facts(given, right)]
        )
    tell("report", value=told)


def gradients_of_both():
    """This rank's gradients after one step, and those of one process for the same weights."""
    rank = dist.get_rank()
    part = build_stage(rank, RANKS)
    stage = PipelineStage(part, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=loss_of)
    tokens, targets = batch(0)
    schedule.step(*([tokens] if stage.is_first else []), target=targets if stage.is_last else None)
    whole = torch.nn.Sequential(*(build_stage(index, RANKS) for index in range(RANKS)))
    loss_of(whole(tokens), targets).backward()
    return [[weight.grad for weight in one.parameters()] for one in (part, whole[rank])]


def one_lower(gradient):
    """A copy of the gradient whose largest number is halved."""
    changed = gradient.clone()
    at = changed.argmax()
    changed.view(-1)[at] /= 2
    return changed


def facts(found, right):
    """(largest difference, largest right gradient, sum of all differences) on this rank."""
    off = [(t if f is None else f - t).abs() for f, t in zip(found, right)]
    largest = max(t.abs().max().item() for t in right)
    most = torch.stack([one.max() for one in off]).max()  # which, unlike Python's, keeps a nan
    return most.item(), largest, sum(one.sum().item() for one in off)
