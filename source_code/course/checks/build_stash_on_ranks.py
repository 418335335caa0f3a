# SPDX-License-Identifier: Apache-2.0
"""Runs a reader's PipeDream on this rank; build_stash.py reads the versions of the weights.

Version t of a stage's weights is its first weights after t updates. In PipeDream's rule,
the gradient of mini-batch k is taken at version max(0, k - (p - 1 - s)) of stage s of p.
"""

import sys
import weakref

import torch
import torch.distributed as dist
from torch.func import functional_call

from course.building.messages import own_frames, tell, tensors_like
from course.checks.answer import number_in
from small import weight_stash as stash

EXACT = 1e-12


def main(request, function):
    """Run the reader's function on this rank, and compare what it returns with the rule."""
    dist.init_process_group("gloo")
    rank, p, (m,) = dist.get_rank(), dist.get_world_size(), request["microbatches"]
    parts = tuple(zip(*map(stash.batch, range(m))))
    rule = Rule(p, *parts, request["rate"])
    versions.known = rule.versions[rank]
    tell("begins step", m=m)
    returned = function(stash.build_stage(rank, p), *parts, request["rate"])
    newest, losses = (
        returned if isinstance(returned, (tuple, list)) and len(returned) == 2 else (None, None)
    )
    losses = losses.tolist() if hasattr(losses, "tolist") else losses  # of numpy or torch
    whole = isinstance(newest, dict) and newest.keys() == rule.versions[rank][0].keys()
    found = {
        "version": versions.number_of(newest)[0] if whole else None,
        "losses": None,
        "wanted": rule.losses,
        "whole": whole,
    }
    if rank == p - 1 and isinstance(losses, (list, tuple)):
        found["losses"] = list(map(number_in, losses))
    tell("report", value=found)


class Rule:
    """PipeDream's rule in one process: its `losses`, and in `versions[s][t]` weights by name."""

    def __init__(self, num_stages, inputs, targets, rate):
        stages = [stash.build_stage(index, num_stages) for index in range(num_stages)]
        self.versions = [[stash.first_weights(stage)] for stage in stages]
        self.losses = []
        for k, (tokens, wanted) in enumerate(zip(inputs, targets)):
            seen = [
                versions[max(0, k - (num_stages - 1 - s))]
                for s, versions in enumerate(self.versions)
            ]
            for stage, weights in zip(stages, seen):
                tokens = functional_call(stage, weights, (tokens,))
            loss = stash.loss_of(tokens, wanted)
            self.losses.append(loss.item())
            for versions, weights in zip(self.versions, seen):
                found = torch.autograd.grad(loss, list(weights.values()), retain_graph=True)
                versions.append(
                    {
                        name: (newest - rate * gradient).detach().requires_grad_()
                        for (name, newest), gradient in zip(versions[-1].items(), found)
                    }
                )


class Versions:
    """Reports the version of the weights for every forward and backward of this rank."""

    def __init__(self):
        self.known = []  # the versions of the rule
        self.used = {}  # mini-batch -> the weights of its forward, and a copy
        self.places = {}  # mini-batch -> the version of its forward, and the memory of that
        self.seen = []  # weak references to one tensor of each version
        self.last = 0

    def number_of(self, weights):
        """(version, None), or (None, factor of the update after the last known version)."""
        for number, known in enumerate(self.known):
            if all((weights[name] - known[name]).abs().max() <= EXACT for name in known):
                self.last = number
                return number, None
        at = min(self.last, len(self.known) - 2)
        before, after = self.known[at], self.known[at + 1]
        made = torch.cat([(weights[name] - before[name]).flatten() for name in before]).detach()
        wanted = torch.cat([(after[name] - before[name]).flatten() for name in before]).detach()
        factor = (made @ wanted / (wanted @ wanted)).item()
        close = (made - factor * wanted).abs().max() <= 1e-9
        return None, round(factor, 6) if close else None

    def forward_with(self, weights, stage, k, *more, **named):
        """Replaces stash.forward_with, and reports the forward."""
        version, factor = self.number_of(weights)
        # Mini-batches under way whose forward had the same version, in other memory.
        copies = [
            j
            for j, (number, place) in self.places.items()
            if j in self.used and number == version is not None and place != places_of(weights)
        ]
        self.places[k] = version, places_of(weights)
        self.used[k] = weights, {name: weight.detach().clone() for name, weight in weights.items()}
        tensor = next(iter(weights.values()))
        if not any(reference() is tensor for reference in self.seen):
            self.seen.append(weakref.ref(tensor))
        found = {"version": version, "factor": factor, "copies": copies}
        found |= self.memory(weights, stage)
        tell("forward", kind="F", **found, stage=dist.get_rank(), k=k)
        return self.forward(weights, stage, k, *more, **named)

    def backward_with(self, weights, stage, k, *more, **named):
        """Replaces stash.backward_with, and reports the backward."""
        found = self.memory(weights, stage)
        if k == len(self.known) - 2:  # only in the last one: a search of all objects takes long
            found["alive"] += self.copies(stage)
        used, copy = self.used.pop(k, (weights, weights))
        same = all(weights[name] is used[name] for name in used)
        kept = all(torch.equal(weight, copy[name]) for name, weight in used.items())
        del used, copy
        found |= {"same": same, "kept": kept}
        tell("backward", kind="B", **found, stage=dist.get_rank(), k=k, of=k)
        return self.backward(weights, stage, k, *more, **named)

    def memory(self, weights, stage):
        """How many versions are alive, and whether `weights` have a history that keeps others alive.

        A version that only a variable of the reader refers to, as in `old = stash.pop(k)`, does not
        count: after the next backward the variable refers to another one. The stage's own weights
        do not count either.
        """
        name = next(iter(self.known[0]))
        named = set(map(id, [*self.in_variables(sys._getframe(2)), *stage.parameters()]))
        in_use = {id(used[name]) for used, _ in self.used.values()}
        alive = [id(tensor) for reference in self.seen if (tensor := reference()) is not None]
        counted = [each for each in alive if each in in_use or each not in named]
        history = any(weight.grad_fn is not None for weight in weights.values())
        return {"alive": len(counted), "history": history}

    def in_variables(self, frame):
        """The first weight of each version that one of the reader's variables refers to."""
        name = next(iter(self.known[0]))
        variables = [v for f in own_frames(frame) for v in f.f_locals.values()]
        return [v[name] for v in variables if isinstance(v, dict) and name in v]

    def copies(self, stage):
        """The number of further versions in memory: copies that no forward has used."""
        name, first = next(iter(self.known[0].items()))
        seen = [tensor for reference in self.seen if (tensor := reference()) is not None]
        own = [version[name] for version in self.known] + [
            copy[name] for _, copy in self.used.values()
        ]
        counted = [*seen, *own, *self.in_variables(sys._getframe(2)), *stage.parameters()]
        places = {tensor.data_ptr() for tensor in counted}
        found = {
            each.data_ptr()
            for each in tensors_like(first)
            if any((each - version[name]).abs().max() <= EXACT for version in self.known)
        }
        return len(found - places)

    def watch(self):
        self.forward, self.backward = stash.forward_with, stash.backward_with
        stash.forward_with, stash.backward_with = self.forward_with, self.backward_with


def places_of(weights):
    return [weight.data_ptr() for weight in weights.values()]


versions = Versions()
versions.watch()  # before the reader's imports, which then get the replacements
