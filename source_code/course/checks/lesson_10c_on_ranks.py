# SPDX-License-Identifier: Apache-2.0
"""Runs a reader's loss over a split vocabulary on this rank; lesson_10c.py reads the report.

A vocabulary of 50 tokens is cut over three ranks into 17, 17 and 16; each of 6 positions has its
target on one of the ranks. On two ranks both numbers are others.
"""

import math

import torch
import torch.distributed as dist

from course.building.messages import note_sizes_of_sums, tell
from pipeline.model import cut_evenly, token_loss

VOCABULARIES = {3: 50, 2: 37}  # by the number of ranks
TARGETS = [3, 20, 49, 17, 33, 16]
ON_TWO_RANKS = [3, 20, 16, 17, 33, 16]  # rank 2 has none of these targets
CASES = {  # by the number of ranks: by what the scores are multiplied, and the targets
    3: ((1, TARGETS), (1000, TARGETS), (1, ON_TWO_RANKS)),
    2: ((1, [3, 20, 36, 18, 30]),),
}
OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


def main(_, reader):
    """Give the reader's function this rank's scores, and report what it returns."""
    dist.init_process_group("gloo")
    sizes = []
    note_sizes_of_sums(sizes)
    cases = CASES[dist.get_world_size()]
    found = [examine(dist.get_rank(), reader, sizes, *case) for case in cases]
    tell("report", value=found)


def all_reduce(x, operation):
    """The sum or the maximum of x over all ranks, as a new tensor."""
    total = x.detach().clone()
    dist.all_reduce(total, OPERATIONS[operation])
    return total


def examine(rank, function, sizes, scale, targets):
    """Call the function with scores multiplied by `scale`, and compare loss and gradient."""
    ranks, targets = dist.get_world_size(), torch.tensor(targets)
    whole = scale * draw_scores(len(targets), ranks)
    cut = cut_evenly(VOCABULARIES[ranks], ranks)
    first, last = cut[rank]
    sizes.clear()
    result = function(whole[:, first:last].clone(), targets.clone(), first, all_reduce)
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        return None
    if any(part is None for part in result):
        return None
    # A loss that is a Python number has 64 bits, too.
    loss, gradient = (torch.as_tensor(part, dtype=torch.float64).detach() for part in result)
    right = gradient_of(whole, targets)[:, first:last]
    report = {"loss": loss.item() if loss.numel() == 1 else None, "sizes": sizes[:]}
    report["scores"] = whole[:, first:last].numel()
    report["losses"] = losses_that_might_be(whole, targets, cut, rank)
    report["slips"] = losses_of_slips(whole, targets, cut)
    report["gradient"] = compare(gradient, right, whole, targets, first, last)
    return report


def draw_scores(positions=6, ranks=3):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(positions, VOCABULARIES[ranks], dtype=torch.float64, generator=generator)


def gradient_of(scores, targets):
    scores = scores.clone().requires_grad_()
    token_loss(scores, targets).backward()
    return scores.grad


def losses_that_might_be(whole, targets, cut, rank):
    """{name of an omission: the loss that it gives}; the first entry is the right loss."""
    parts, (first, last) = [whole[:, a:b] for a, b in cut], cut[rank]
    scores, largest = whole[:, first:last], whole.max(-1).values
    of_target = whole.gather(-1, targets[:, None]).squeeze(-1)
    tops = [part.max(-1).values for part in parts]
    unequal = sum((part - top[:, None]).exp().sum(-1) for part, top in zip(parts, tops))
    own_top = scores.max(-1).values
    top_there = sum(
        torch.where((targets >= a) & (targets < b), top, 0.0) for (a, b), top in zip(cut, tops)
    )
    here = (targets >= first) & (targets < last)
    found = torch.where(here, of_target, 0.0)
    right = token_loss(whole, targets)
    logs = sum((part - largest[:, None]).logsumexp(-1) for part in parts)
    return {
        "right": right.item(),
        "sum": (scores.logsumexp(-1) - of_target).mean().item(),
        "target": (whole.logsumexp(-1) - found).mean().item(),
        "tops": (unequal.log() + largest - of_target).mean().item(),
        "own tops": (unequal.log() + own_top - of_target).mean().item(),
        "target's tops": (unequal.log() + top_there - of_target).mean().item(),
        "above": (whole.logsumexp(-1) - largest - of_target).mean().item(),
        "total": (whole.logsumexp(-1) - of_target).sum().item(),
        "ranks": right.item() / len(cut),
        "twice": right.item() + math.log(len(cut)),
        "logs": (logs + largest - of_target).mean().item(),
        "largest target": (whole.logsumexp(-1) - of_target.clamp(min=0)).mean().item(),
        "below": (whole.logsumexp(-1) + largest - of_target).mean().item(),
    }


def scores_at(part, columns, where):
    """The scores in these columns of a rank, twice: a column that is not there is the nearest one,
    or as in Python one from the other end."""
    near, around = columns.clamp(0, part.shape[1] - 1), columns % part.shape[1]
    return [part.gather(1, each[:, None])[:, 0] * where for each in (near, around)]


def losses_of_slips(whole, targets, cut):
    """{name of a slip in looking up the target's score: the losses that it may give}."""
    found = {}
    for first, last in cut:
        part, own, width = whole[:, first:last], targets - first, last - first
        here = (own >= 0) & (own < width)

        for name, scores in {
            "unshifted": [
                *scores_at(part, targets, targets < width),
                *scores_at(part, targets, here),
            ],
            "everywhere": [*scores_at(part, own, 1), *scores_at(part, own.where(here, 0), 1)],
            "before": scores_at(part, own - 1, here),
            "after": scores_at(part, own + 1, here),
            "without first": scores_at(part, own, here & (own > 0)),
            "without last": scores_at(part, own, here & (own < width - 1)),
            "one above": scores_at(part, own, (own >= 0) & (own <= width)),
            "one below": scores_at(part, own, (own >= -1) & (own < width)),
        }.items():
            found[name] = [a + b for a, b in zip(found.get(name, [0] * len(scores)), scores)]
    total = whole.logsumexp(-1)
    return {name: [(total - t).mean().item() for t in found[name]] for name in found}


def compare(gradient, right, whole, targets, first, last):
    """Classify the gradient: [a word, then what its sentence needs]; "else" if nothing fits."""
    if gradient.shape != right.shape:
        return ["shape", list(gradient.shape), list(right.shape)]
    count = len(targets)
    softmax = whole.softmax(-1)[:, first:last]
    own = whole[:, first:last].softmax(-1)
    hit = softmax - count * right  # 1 at the target, 0 elsewhere
    if is_close(gradient, right):
        return ["right"]
    if is_close(gradient, right, 1e-6):
        return ["rounded"]
    factor = ((gradient * right).sum() / (right * right).sum()).item()
    if is_close(gradient, factor * right):
        return ["times", factor, count]
    for share in (1, count):
        if is_close(gradient * share, softmax):
            return ["softmax"]
        if is_close(gradient * share, own - hit):
            return ["own"]
        if is_close(
            gradient * share,
            (whole - whole.max(-1, keepdim=True).values).exp()[:, first:last] - hit,
        ):
            return ["undivided"]
    wrong = (gradient - right).abs().amax(-1) > 1e-9
    elsewhere = (targets < first) | (targets >= last)
    if bool((wrong <= elsewhere).all()):
        return ["elsewhere", wrong.nonzero().flatten().tolist()]
    for share in (1, count):
        less = softmax - share * gradient
        if is_close(less, less.round()) and is_close(less.sum(-1), (~elsewhere).double()):
            position = int((less - hit).abs().amax(-1).argmax())
            return ["column", position, int(less[position].argmax()), int(hit[position].argmax())]
    return ["else"]


def is_close(a, b, most=1e-9):
    return bool((a - b).abs().max() < most)
