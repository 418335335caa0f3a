"""Keeps little of a forward, and runs it again when its backward needs the rest."""

from functools import partial

from torch.utils.checkpoint import checkpoint


def recompute(part, mode):
    """Let `part` keep less of each forward; the backward runs forward again what it needs."""
    layers = list(part.layers.values())
    chosen = {
        "none": [],
        "stage": [part],
        "layer": layers,
        "selective": [layer.attention for layer in layers],
    }
    for module in chosen[mode]:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
