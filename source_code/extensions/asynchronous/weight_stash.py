# SPDX-License-Identifier: Apache-2.0
"""The versions of the weights that an asynchronous pipeline keeps, and a stage that uses them.

Without a flush, a stage updates its weights while earlier mini-batches are still on their way. A
gradient is the derivative of one function at one point, so the backward of a mini-batch must use
the weights that its forward used: they are kept until then (PipeDream: Narayanan et al. 2019,
section 3.3).

Mini-batches and ranks are counted from 0. Version t of a stage's weights is what t updates made of
the starting weights.
"""

from collections import Counter
from typing import NamedTuple

import torch
from torch.func import functional_call

from pipeline.collectives import Summing
from pipeline.schedules import round_robin_warm_up
from pipeline.stage import Stage

MODES = {
    "stashed": "the backward uses the version that the forward used at this stage",
    "latest": "no stash: the backward uses whatever the weights are by then",
    "vertical-sync": "one version across all stages for a mini-batch",
    "double-buffered": "PipeDream-2BW: two versions, one update for several micro-batches",
}


def forward_version(mode, minibatch, stage, replicas, microbatches_per_update=1):
    """The version that the forward of a mini-batch uses on a stage.

    `replicas` has the number of ranks of each stage. Modes `stashed` and `latest` use the stage's
    newest version, which is version 0 while the pipeline fills. The paper counts from 1: with one
    rank per stage, mini-batch k at stage s of n uses version max(0, k - 1 - (n - s)). A stage of r
    replicas makes one update per r mini-batches. Mode `vertical-sync` uses the version that the
    input stage uses, and `double-buffered` that of PipeDream-2BW (Narayanan et al. 2021,
    section 3.1).
    """
    if mode == "double-buffered":
        return max(0, minibatch // microbatches_per_update - 1)
    seen_by = 0 if mode == "vertical-sync" else stage
    return max(0, minibatch // replicas[seen_by] - round_robin_warm_up(replicas, seen_by))


class VersionUse(NamedTuple):
    """The versions of the weights that one mini-batch used at one stage."""

    minibatch: int
    forward: int
    backward: int


class WeightStash:
    """The live versions of one stage's weights.

    Each version is stored once for all mini-batches that use it, and freed when none will need it.
    `parameters` are the current weights, by name, which an optimizer updates in place. If a
    mini-batch still needs them, the update works on a copy instead (copy on update).
    """

    def __init__(self, parameters, keep=True):
        self.parameters = {name: weight for name, weight in parameters if weight.requires_grad}
        self.keep = keep  # False: no stash, every version is the current storage
        self.current = 0
        self.versions = {0: self._alias()}
        self.users = Counter()  # version -> mini-batches between their forward and backward
        self.peak = 1

    def _alias(self):
        # .data has a version counter of its own: autograd does not see a later update in place.
        # That silences an error on purpose. With a stash it is safe, since a version in use is
        # never updated; without one a backward would use weights that its forward has not used.
        return {name: p.data.requires_grad_() for name, p in self.parameters.items()}

    def take(self, version):
        """Return the weights of a live version, and count one more mini-batch that uses it."""
        self.users[version] += 1
        return self.versions[version]

    def release(self, version, oldest_needed):
        """Note that one mini-batch no longer needs a version, and free unused versions.

        Versions from `oldest_needed` on stay, because later forwards use them.
        """
        self.users[version] -= 1
        self._free(oldest_needed)

    def update(self, optimizer, gradients, oldest_needed):
        """Apply `gradients` (by name) to the current weights and count a new version."""
        if self.keep and (self.users[self.current] > 0 or oldest_needed <= self.current):
            for parameter in self.parameters.values():
                parameter.data = parameter.data.clone()
        optimizer.zero_grad()
        for name, parameter in self.parameters.items():
            parameter.grad = gradients[name]
        optimizer.step()
        self.current += 1
        self.versions[self.current] = self._alias()
        self._free(oldest_needed)
        self.peak = max(self.peak, self.num_live())

    def _free(self, oldest_needed):
        for version in list(self.versions):
            if version < min(self.current, oldest_needed) and not self.users[version]:
                del self.versions[version]

    def num_live(self):
        """Return the number of versions in separate memory, including the current one."""
        storages = {
            weight.untyped_storage().data_ptr()
            for weights in self.versions.values()
            for weight in list(weights.values())[:1]
        }
        return len(storages)

    def is_current(self, weights):
        """Whether `weights`, as `take` returned them, share memory with the current version."""
        return all(
            weight.data_ptr() == self.parameters[name].data_ptr()
            for name, weight in weights.items()
        )

    def bytes_of_one(self):
        """Return the bytes of one version of the weights."""
        return sum(p.numel() * p.element_size() for p in self.parameters.values())


class StashingStage(Stage):
    """A stage whose forwards and backwards choose the version of the weights that they use.

    `mode` is a key of MODES, `replicas` has the number of ranks of each stage, and `ranks` are the
    ranks of this stage. An update follows every `per_update` micro-batches. `used` collects a
    VersionUse per mini-batch, and `version` is the version that the last action used.
    """

    def __init__(
        self, job, part, index, loss_function, optimizer, mode, replicas, ranks, per_update=1
    ):
        super().__init__(part, index, len(replicas), loss_function)
        self.job, self.replicas, self.ranks = job, replicas, ranks
        self.optimizer, self.mode, self.per_update = optimizer, mode, per_update
        self.stash = WeightStash(part.named_parameters(), keep=mode != "latest")
        self.used = []
        self.version = 0
        self.gradients = None  # by name, the sum since the last update

    def version_for(self, minibatch):
        return forward_version(self.mode, minibatch, self.index, self.replicas, self.per_update)

    def run_forward(self, minibatch, inputs, targets):
        """As that of Stage, with the weights of the version that `mode` asks for."""
        self.version = self.version_for(minibatch)
        weights = self.stash.take(self.version)
        output = functional_call(self.part, weights, (inputs,))
        if self.is_last:
            output = self.loss_function(output, targets)
        self.held[minibatch] = inputs, output, self.version, weights
        return output

    def run_backward(self, minibatch, gradient):
        """Run one micro-batch backward as Stage does; keep the weight gradients for `update`."""
        inputs, output, version, weights = self.held.pop(minibatch)
        wanted = ([] if self.is_first else [inputs]) + list(weights.values())
        found = torch.autograd.grad(output, wanted, gradient) if wanted else ()  # all frozen
        input_gradient, found = (None, found) if self.is_first else (found[0], found[1:])
        # Without a stash the weights have changed since the forward.
        self.version = self.stash.current if self.stash.is_current(weights) else version
        self.used.append(VersionUse(minibatch, version, self.version))
        self.stash.release(version, self.oldest_needed())
        if self.gradients is None:
            self.gradients = dict(zip(weights, found))
        else:
            for name, more in zip(weights, found):
                self.gradients[name] = self.gradients[name] + more
        return input_gradient

    def update(self, minibatch):
        """Apply the gradients summed since the last update; all replicas apply the same mean."""
        if len(self.ranks) > 1:
            self.average(list(self.gradients.values()))
        self.apply_update(minibatch)

    def average(self, gradients):
        Summing(self.job, gradients, self.ranks, "its gradients").wait()
        for gradient in gradients:
            gradient /= len(self.ranks)

    def apply_update(self, minibatch):
        self.stash.update(self.optimizer, self.gradients, self.oldest_needed())
        self.version = self.stash.current
        self.gradients = None

    def oldest_needed(self):
        """Return the oldest version that a later forward may use."""
        if self.mode in ("stashed", "latest"):
            return self.stash.current + 1  # later forwards use only versions that do not exist yet
        return self.version_for(len(self.used) + len(self.held))
