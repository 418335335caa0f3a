# SPDX-License-Identifier: Apache-2.0
"""Counts activation memory: the bytes that forwards save for their backwards.

Autograd saves tensors for the backward of every operation. Hooks count each tensor as it is saved,
so the count is exact on any device. A tensor that several operations share counts once. Weights and
tables do not count, since they exist anyway. On a GPU the allocator's peak is a second measure,
which includes all other memory in use.
"""

from contextlib import contextmanager

import torch


class ActivationMemory:
    """The activation memory of one rank, now and at its peak, in bytes.

    Counting takes time, and all passes are alike, so only the first pass is counted unless
    `every_pass` is set.
    """

    def __init__(self, every_pass=False):
        self.active, self.every_pass = True, every_pass
        self.storages = {}  # (stage, micro-batch) -> {address: bytes}
        self.peak = 0
        self.work = None

    @contextmanager
    def acting(self, work):
        """A context for an action: a forward adds its saved bytes, a backward removes them."""
        if not self.active:
            yield
            return
        self.work = work
        stage, (index, kind, microbatch) = work.stage, work.action
        key = index, microbatch
        if kind == "F":
            with self.saved_under(key, stage):
                yield
            self.keep(key, kept_by(stage, microbatch))
        else:
            yield
            if kind in "BW":
                self.storages.pop(key, None)
            elif kind == "I" and hasattr(stage, "deferred"):
                self.storages[key] = {}
                self.keep(key, kept_by(stage, microbatch))
        self.work = None  # otherwise its tensors would stay alive

    @contextmanager
    def running_again(self, stage, function, inputs):
        """A context for a forward inside a backward: its saved bytes are added for a short time.

        Inside, the hooks of torch.utils.checkpoint may receive the saved tensors in place of the
        hooks here. So the forward is first run once more by itself, without other hooks.
        """
        if self.active:
            index, _, microbatch = self.work.action
            if hasattr(stage, "kept"):  # the stage has freed some kept tensors
                self.storages[index, microbatch] = {}
                self.keep((index, microbatch), kept_by(stage, microbatch))
            inside = ActivationMemory()
            tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
            with inside.saved_under("inside", stage, tensors):
                function(*inputs)
            self.peak = max(self.peak, self.held() + inside.peak)
        yield

    def pass_ended(self):
        self.active = self.every_pass

    @contextmanager
    def saved_under(self, key, stage, there_anyway=()):
        """A context that counts the bytes that a forward of `stage` saves, without weights and
        tables."""
        storages = {}

        def pack(tensor):
            # Integer tensors are the tokens, which the caller keeps for the whole step.
            if tensor.is_floating_point():
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # the tensor itself would keep its graph alive

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        # Weights are removed after the forward, which may have gathered them from shards.
        for tensor in [*weights_of(stage), *there_anyway]:
            storages.pop(tensor.untyped_storage().data_ptr(), None)
        self.storages[key] = storages
        self.peak = max(self.peak, self.held())

    def keep(self, key, tensors):
        """Add the bytes of tensors that the stage itself keeps."""
        floats = (tensor for tensor in tensors if tensor.is_floating_point())
        storages = (tensor.untyped_storage() for tensor in floats)
        self.storages[key].update({s.data_ptr(): s.nbytes() for s in storages})
        self.peak = max(self.peak, self.held())

    def held(self):
        """The bytes held now; a storage that two micro-batches share counts once."""
        return sum({k: v for held in self.storages.values() for k, v in held.items()}.values())


def weights_of(stage):
    """The tensors of a stage that do not count: weights, tables, older versions of the weights."""
    older = getattr(stage, "stash", None)
    versions = older.versions.values() if older else ()
    stashed = [weight for version in versions for weight in version.values()]
    return [*stage.part.parameters(), *stage.part.buffers(), *stashed]


def kept_by(stage, microbatch):
    """The tensors that a stage itself keeps: inputs for recomputation, deferred gradients."""
    inputs = stage.kept(microbatch) if hasattr(stage, "kept") else []
    deferred = getattr(stage, "deferred", {}).get(microbatch, [])
    return inputs + [tensor for layer in deferred for tensor in (layer.inputs, layer.gradient)]
