# SPDX-License-Identifier: Apache-2.0
"""Runs a reader's recomputing backward on this rank; build_recompute.py reads the report.

The ranks share the model of small/pipeline.py. A rank's forwards keep only the input of a
micro-batch, and its backwards are the reader's. The same rank also computes the gradients of a
stage that keeps everything.
"""

import gc
from weakref import finalize

import torch
import torch.distributed as dist

from course.building.messages import received, tell, tensors_like
from small.pipeline import DIM, LENGTH, batch, build_stage, loss_of

# By the number of ranks: sequences of a micro-batch, and the orders of the backwards in each step.
CASES = {3: (2, [[0, 1, 2, 3], [2, 0, 3, 1]]), 2: (3, [[1, 4, 0, 2, 3]])}


def main(_, backward):
    """Run both steps, and report what was seen in each backward of this rank."""
    dist.init_process_group("gloo")
    stage, seen = build_stage(dist.get_rank(), dist.get_world_size()), []
    size, orders = CASES[dist.get_world_size()]
    for step, order in enumerate(orders):
        stage.zero_grad()
        seen += run_step(StageOfMicrobatch(stage, step, len(order), size), order, backward)
    tell("report", value=seen)


def run_step(whole, order, backward):
    """Run all forwards, then the reader's backwards in `order`; return a dictionary for each."""
    rank, inside = dist.get_rank(), Inside(whole.stage)
    inputs, held, given = whole.inputs, {}, {}
    for k in sorted(order):
        inputs.append(whole.tokens[k] if whole.is_first else whole.receive(rank - 1))
        held[k] = inputs[k].clone()
        with inside, torch.no_grad():
            output = whole(k, held[k])
        if not whole.is_last:
            dist.send(output, rank + 1)
    seen = []
    for k in order:
        given[k] = None if whole.is_last else whole.receive(rank + 1)
        right = gradients_of(whole, k, inputs[k].clone(), given[k])
        before = [weight.grad.clone() if weight.grad is not None else 0 for weight in right[1]]
        inside.begin()
        whole.calls, whole.asked = [], []
        with inside:
            found = backward(whole, k, given[k], held)
        gc.collect()
        added = [w.grad - b if w.grad is not None else None for w, b in zip(right[1], before)]
        seen.append(
            {
                "k": k,
                "calls": list(whole.calls),
                "asked": list(whole.asked),
                "held": sorted(str(j) for j, kept in held.items() if kept is not None),
                "inputs": [j for j in in_memory(inputs) if j not in held],
                "bytes": [inside.peak, right[2]],
                "left": inside.now(),
                "input": None if whole.is_first else factor_of([found], [right[0]], inputs[k]),
                "weights": factor_of(added, list(right[1].values())),
                "emptied": k != order[0] and all(map(same, right[1], right[1].values())),
            }
        )
        if not whole.is_first:  # the right gradient, so that the previous rank is judged alone
            dist.send(right[0], rank - 1)
    return seen


def in_memory(inputs):
    """The micro-batches whose input, or a copy of it, is in a tensor other than these `inputs`."""
    own = set(map(id, [*inputs, *received]))
    others = [each for each in tensors_like(inputs[0]) if id(each) not in own]
    return [k for k, x in enumerate(inputs) if any(torch.equal(x, other) for other in others)]


class StageOfMicrobatch:
    """`stage(k, x)` returns micro-batch k's output, or its share of the loss on the last stage.

    `calls` has the micro-batch of each input with which the reader's backward has called it,
    `asked` each k.
    """

    def __init__(self, stage, step, count, size):
        self.stage, self.calls, self.asked, self.inputs = stage, [], [], []
        self.is_first, self.is_last = stage.previous is None, stage.following is None
        self.tokens, self.targets = (x.chunk(count) for x in batch(step, count * size))

    def __getattr__(self, name):
        """What the stage itself has, such as `parameters` and `previous`."""
        return getattr(self.stage, name)

    def __call__(self, k, x):
        # Before x is compared: if x is not a tensor, the reader sees the error of the layers.
        output = self.stage(x)
        same = [j for j, other in enumerate(self.inputs) if torch.equal(x, other)]
        self.calls.append(same[0] if same else None)
        self.asked.append(k if isinstance(k, int) else None)
        return loss_of(output, self.targets[k]) / len(self.tokens) if self.is_last else output

    def receive(self, source):
        """An activation or a gradient from another rank."""
        tensor = torch.empty(len(self.tokens[0]), LENGTH, DIM, dtype=torch.float64)
        dist.recv(tensor, source)
        return tensor


class Inside:
    """Counts the bytes that autograd has saved for backwards of `stage`, now and at the peak."""

    def __init__(self, stage):
        self.weights = {weight.untyped_storage().data_ptr() for weight in stage.parameters()}
        self.sizes, self.peak, self.hooks = {}, 0, []

    def begin(self):
        self.peak = self.now()

    def now(self):
        return sum(size for size, _ in self.sizes.values())

    def __enter__(self):
        def pack(tensor):
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            kept = Kept(tensor.detach())
            if tensor.is_floating_point() and address not in self.weights:
                size, count = self.sizes.get(address, (storage.nbytes(), 0))
                self.sizes[address] = size, count + 1
                self.peak = max(self.peak, self.now())
                finalize(kept, self.gone, address)
            return kept

        self.hooks.append(torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor))
        self.hooks[-1].__enter__()

    def __exit__(self, *error):
        self.hooks.pop().__exit__(*error)

    def gone(self, address):
        size, count = self.sizes.pop(address)
        if count > 1:
            self.sizes[address] = size, count - 1


class Kept:
    """A tensor that autograd has saved; Python frees this object when autograd frees the tensor."""

    def __init__(self, tensor):
        self.tensor = tensor


def same(weight, gradient):
    """Whether the weight's .grad is this gradient alone, with nothing of earlier micro-batches."""
    return weight.grad is not None and torch.allclose(weight.grad, gradient)


def gradients_of(whole, k, x, gradient):
    """(gradient of x, {weight: its gradient}, saved bytes of a forward) without recomputation."""
    inside = Inside(whole.stage)
    weights = list(whole.stage.parameters())
    asked = weights if whole.is_first else [*weights, x.requires_grad_()]
    with inside:
        found = torch.autograd.grad(whole(k, x), asked, gradient)
    return found[-1], dict(zip(weights, found)), inside.peak


def factor_of(found, right, x=None):
    """[factor, "right"] if `found` is a multiple of `right`, otherwise [None, a word for `found`].

    `x` is the input of the stage, which is not its gradient.
    """
    if not all(isinstance(one, torch.Tensor) for one in found):
        return [None, "missing"]
    if any(one.shape != other.shape for one, other in zip(found, right)):
        return [None, f"of shape {tuple(found[0].shape)}"]
    if x is not None and torch.equal(found[0], x):
        return [None, "the input"]
    found, right = (torch.cat([one.flatten() for one in some]) for some in (found, right))
    factor = ((found @ right) / (right @ right)).item()
    if (found - factor * right).abs().max() <= 1e-12 * max(1.0, right.abs().max().item()):
        return [round(factor, 9), "right"]
    if torch.allclose(found, right):
        return [None, "rounded"]
    return [None, "else"]
