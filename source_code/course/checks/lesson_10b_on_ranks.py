# SPDX-License-Identifier: Apache-2.0
"""Runs a layer with a reader's collectives on this rank; lesson_10b.py reads the report.

The layer is a feed-forward network, x -> down(relu(up(x))), and each rank has its share of the hidden
units.
"""

from functools import partial

import torch
import torch.distributed as dist

from course.building.messages import note_sizes_of_sums, tell


def main(_, reader):
    """Put a layer between the reader's functions, and report what it computes on this rank."""
    dist.init_process_group("gloo")
    calls = []
    note_sizes_of_sums(calls)
    pair = reader(all_reduce)
    try:
        own = run_layer(dist.get_rank(), pair, calls) if is_pair(pair) else None
    except NotATensor as error:
        own = {"wrong": str(error)}
    tell("report", value=own)


def is_pair(pair):
    return isinstance(pair, (tuple, list)) and len(pair) == 2 and all(map(callable, pair))


def all_reduce(x):
    """The sum of x over all ranks, as a new tensor."""
    total = x.detach().clone()
    dist.all_reduce(total)
    return total


def run_layer(rank, pair, calls):
    """Compare the output and the gradients of this rank with those of the whole layer."""
    (enter, leave), ranks = pair, dist.get_world_size()
    draw = partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    length, dim = ranks + 1, 4 + 2 * ranks
    x, up, down = draw(2, length, dim), draw(16, dim), draw(dim, 16)
    slope = draw(2, length, dim)
    right = gradients_of(x, up, down, slope)
    up, down = up.chunk(ranks)[rank], down.chunk(ranks, 1)[rank]
    own = gradients_of(x, up, down, slope)
    ours = gradients_of(x, up, down, slope, enter, leave, calls)
    report = {"forward": ours["forward"], "backward": len(calls) - ours["forward"]}
    for name in ("output", "input"):
        report[name] = compare(ours[name], right[name], own[name])
    for name in ("up", "down"):  # these gradients are those of the rank's share of the matrices
        report[name] = compare(ours[name], own[name], None)
    report["beside"] = is_left_alone(enter, x, slope)
    return report


def is_left_alone(enter, x, slope):
    """Whether another use of the layer's input, such as a residual, keeps its own gradient."""
    leaf = x.clone().requires_grad_()
    x = leaf.view_as(leaf)  # as in a model, where an earlier layer has made the input
    entered = applied(enter, x, "enters")
    ((x * slope).sum() + 0 * entered.sum()).backward()
    return bool((leaf.grad - slope).abs().max() < 1e-9)


def gradients_of(x, up, down, slope, enter=None, leave=None, calls=()):
    """The output, the gradients of the input and of both matrices, and the calls until then."""
    leaves = x, up, down = [each.clone().requires_grad_() for each in (x, up, down)]
    hidden = torch.relu((applied(enter, x, "enters") if enter else x) @ up.T)
    output = hidden @ down.T
    output = applied(leave, output, "leaves") if leave else output
    found = {"output": output.detach(), "forward": len(calls)}
    (output * slope).sum().backward()
    return found | {name: one.grad for name, one in zip(("input", "up", "down"), leaves)}


def applied(end, x, way):
    """The tensor that a function at an end of the layer returns; NotATensor if nothing leads back."""
    made = end(x)
    if not isinstance(made, torch.Tensor):
        raise NotATensor(f"what {way} the layer is not a tensor, but {type(made).__name__}")
    if not made.requires_grad:  # as after all_reduce alone
        raise NotATensor(f"no gradient leads back from what {way} the layer")
    return made


class NotATensor(Exception):
    """The text says which end of the layer returned what."""


def compare(found, right, own):
    """[factor, name]: `found` as a multiple of the "right" tensor or of this rank's "own" share."""
    if found is None:
        return [0, "none"]
    for wanted, name in ((right, "right"), (own, "own")):
        if wanted is None or found.shape != wanted.shape:
            continue
        factor = ((found * wanted).sum() / (wanted * wanted).sum()).item()
        if (found - factor * wanted).abs().max() < 1e-9:
            return [round(factor, 6), name]
    return [0, "else"]
