"""Counts what a rank holds: the bytes that forwards leave behind for their backwards.

Autograd keeps tensors for the backward of every operation. Hooks see each one as it is saved, so
the count is exact on any device; a tensor that several operations share counts once, and weights
and tables, which are there anyway, do not count at all. On a GPU the allocator's peak says the
same from outside, with everything else that lives there.
"""

from contextlib import contextmanager

import torch


class HeldMeter:
    """The bytes that one rank holds now, and the most it has held."""

    def __init__(self):
        self.active = True
        self.keep_counting = False  # after the first step, too
        self.storages = {}  # (stage, micro-batch) -> {address: bytes}
        self.peak = 0

    @contextmanager
    def holding(self, weights, key):
        """Around a forward: what it saves is held under `key` until `release`.

        `weights` are the tensors that do not count: weights and tables.
        """
        if not self.active:
            yield
            return
        always_there = {tensor.untyped_storage().data_ptr() for tensor in weights}
        storages = self.storages[key] = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            # Whole numbers are the tokens, which the caller keeps for the whole step.
            if tensor.is_floating_point() and storage.data_ptr() not in always_there:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # the tensor itself would keep its own graph alive for ever

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self.peak = max(self.peak, self.held())

    def hold(self, key, tensors):
        """From now on `tensors` are held under `key`, and nothing else."""
        if self.active:
            floats = (tensor for tensor in tensors if tensor.is_floating_point())
            storages = (tensor.untyped_storage() for tensor in floats)
            self.storages[key] = {storage.data_ptr(): storage.nbytes() for storage in storages}
            self.peak = max(self.peak, self.held())

    def hold_for_a_moment(self, num_bytes):
        """Beside what is held there are `num_bytes` more, and soon they are not."""
        self.peak = max(self.peak, self.held() + num_bytes)

    def release(self, key):
        """After a backward: its forward's tensors are gone."""
        self.storages.pop(key, None)

    def stop(self):
        """Counting takes time, and every step holds the same: one is enough, unless asked for."""
        self.active = self.keep_counting

    def held(self):
        """Bytes held now; a storage that two micro-batches share counts once."""
        return sum({k: v for held in self.storages.values() for k, v in held.items()}.values())
