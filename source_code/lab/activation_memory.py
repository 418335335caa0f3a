"""Counts activation memory: the bytes that forwards leave behind for their backwards.

Autograd keeps tensors for the backward of every operation. Hooks count each one as it is saved, so
the count is exact on any device; a tensor that several operations share counts once, and weights
and tables, which are there anyway, do not count at all. On a GPU the allocator's peak says the
same from outside, with everything else that lives there.
"""

from contextlib import contextmanager

import torch


class ActivationMemory:
    """The activation memory of one rank, now and at its peak, in bytes.

    Counting takes time, and every pass is alike: only the first is counted, unless
    `every_pass` is set.
    """

    def __init__(self, every_pass=False):
        self.active, self.every_pass = True, every_pass
        self.storages = {}  # (stage, micro-batch) -> {address: bytes}
        self.peak = 0
        self.work = None

    @contextmanager
    def acting(self, work):
        """Around an action: a forward adds what it saves, a backward takes it away."""
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
        self.work = None  # its tensors would otherwise stay

    @contextmanager
    def running_again(self, stage, function, inputs):
        """Around a forward inside a backward: what it saves is there for a moment, on top.

        The hooks of torch.utils.checkpoint may be at work inside, which see what is saved instead
        of others. So the forward is run once more on the side, where no other hook counts.
        """
        if self.active:
            index, _, microbatch = self.work.action
            if hasattr(stage, "kept"):  # it has let go of some of them
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
        """Count what a forward of `stage` saves for its backward, without its weights and tables."""
        storages = {}

        def pack(tensor):
            # Whole numbers are the tokens, which the caller keeps for the whole step.
            if tensor.is_floating_point():
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # the tensor itself would keep its own graph alive for ever

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        # Afterwards: a forward may have gathered weights that lay in shards.
        for tensor in [*weights_of(stage), *there_anyway]:
            storages.pop(tensor.untyped_storage().data_ptr(), None)
        self.storages[key] = storages
        self.peak = max(self.peak, self.held())

    def keep(self, key, tensors):
        """Add tensors that the stage itself keeps."""
        floats = (tensor for tensor in tensors if tensor.is_floating_point())
        storages = (tensor.untyped_storage() for tensor in floats)
        self.storages[key].update({s.data_ptr(): s.nbytes() for s in storages})
        self.peak = max(self.peak, self.held())

    def held(self):
        """Bytes now; a storage that two micro-batches share counts once."""
        return sum({k: v for held in self.storages.values() for k, v in held.items()}.values())


def weights_of(stage):
    """The tensors of a stage that are there anyway: weights, tables and older versions."""
    older = getattr(stage, "stash", None)
    versions = older.versions.values() if older else ()
    stashed = [weight for version in versions for weight in version.values()]
    return [*stage.part.parameters(), *stage.part.buffers(), *stashed]


def kept_by(stage, microbatch):
    """What a stage itself keeps beside autograd: inputs to recompute from, deferred gradients."""
    inputs = stage.kept(microbatch) if hasattr(stage, "kept") else []
    deferred = getattr(stage, "deferred", {}).get(microbatch, [])
    return inputs + [tensor for layer in deferred for tensor in (layer.inputs, layer.gradient)]
