# SPDX-License-Identifier: Apache-2.0
"""Runs a reader's comparison of gradients on this rank; build_comparison.py reads the report.

For each case of WRONG, the ranks take a step with torch.distributed.pipelining on another batch, and
each also computes the gradients of one process. The reader's function then compares the two, with
the fault of the case on one rank or on all.
"""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import extensions.torch_pipelining.library  # noqa: F401 - allows what its stages tell each other
from course.building.messages import tell
from course.checks.answer import number_in
from small.pipeline import batch, build_stage, loss_of

MICROBATCHES = 4
WRONG = {  # {fault: (ranks that have it, function that puts it into the gradients)}
    "nothing is wrong": ([], lambda found: found),
    "rank 0 has one number with the wrong sign": (
        [0],
        lambda found: [one_turned(found[0]), *found[1:]],
    ),
    "each rank divided its gradients by 8 once more": (
        range(3),
        lambda found: [one / 8 for one in found],
    ),
    "rank 1 added the batch before": ([1], lambda found: [3 * one for one in found]),
    "rank 1 has None in the place of one gradient": ([1], lambda found: [None, *found[1:]]),
    # Neither first nor last: whether Python's max() keeps a nan depends on its place.
    "rank 1 has a nan among its gradients": (
        [1],
        lambda found: [found[0], found[1] * torch.nan, *found[2:]],
    ),
}


def main(_, difference):
    """Report, for each case, this rank's result together with the `facts`."""
    dist.init_process_group("gloo")
    told = []
    gradients = gradients_of_both()  # first, since the reader's function may leave a rank waiting
    for number, (case, (wrong_ranks, change)) in enumerate(WRONG.items()):
        found, right = gradients[number]
        # Each rank has the model's largest in some case.
        if dist.get_rank() == number % dist.get_world_size():
            found, right = [10 * t for t in found], [10 * t for t in right]
        # The other ranks differ by exactly zero: the reader's function must not return early there.
        given = change(found) if dist.get_rank() in wrong_ranks else right
        # Copies, since the reader's function may compute in place.
        say = difference([g if g is None else g.clone() for g in given], [t.clone() for t in right])
        say = number_in(say)
        told.append(
            [case, say if type(say) in (int, float) else repr(say)[:60], *facts(given, right)]
        )
    tell("report", value=told)


def gradients_of_both():
    """For each case, this rank's gradients after a step on a batch, and those of one process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = build_stage(rank, ranks)
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=loss_of)
    whole = torch.nn.Sequential(*(build_stage(index, ranks) for index in range(ranks)))
    gradients = []
    for number in range(len(WRONG)):
        part.zero_grad()
        whole.zero_grad()
        tokens, targets = batch(number)
        inputs = [tokens] if stage.is_first else []
        schedule.step(*inputs, target=targets if stage.is_last else None)
        loss_of(whole(tokens), targets).backward()
        gradients.append([in_order(part), in_order(whole[rank])])
    return gradients


def in_order(part):
    """The gradients of a stage, the first one moved to the end: no list then begins or ends with
    the model's largest number, so a function that looks only there is found wrong."""
    first, *others = [weight.grad for weight in part.parameters()]
    return [*others, first]


def one_turned(gradient):
    """A copy of the gradient whose largest number has the other sign."""
    changed = gradient.clone()
    changed.view(-1)[changed.argmax()] *= -1
    return changed


def facts(found, right):
    """(largest difference, largest right gradient, sum of all differences) on this rank."""
    off = [(t if f is None else f - t).abs() for f, t in zip(found, right)]
    largest = max(t.abs().max().item() for t in right)
    most = torch.stack([one.max() for one in off]).max()  # unlike Python's max(), this keeps a nan
    return most.item(), largest, sum(one.sum().item() for one in off)
