"""Where a model is cut if its ends are not free: the head is a product, and may be worth layers.

The work is counted, as in transformer.py: multiplications of a token's forward. The embedding is
looked up and multiplies nothing. A backward is twice a forward for layers and head alike.
"""

from pipeline.model import cut_evenly


def head_in_layers(config):
    """What the head of a ModelConfig computes, in layers: attention looks at half of all pairs."""
    width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    products = 2 * config.dim * (width + kv_width) + 3 * config.dim * config.hidden_dim
    return config.vocabulary * config.dim / (products + config.seq_len * width)


def cut_by_work(config, num_stages):
    """The number of layers of each stage whose slowest stage has least work, the head included.

    As even as it goes, as long as that is as fast; each stage has a layer. None for fewer layers
    than stages.
    """
    layers, head = config.layers, head_in_layers(config)
    if layers < num_stages:
        return None
    even = [last - first for first, last in cut_evenly(layers, num_stages)]
    cuts = [even]
    for last in range(1, even[-1] if num_stages > 1 else 0):
        others = cut_evenly(layers - last, num_stages - 1)
        # The larger ones behind: the first stages hold the most micro-batches.
        cuts.append([end - first for first, end in reversed(others)] + [last])
    return min(cuts, key=lambda cut: max(*cut[:-1], cut[-1] + head, 0))
