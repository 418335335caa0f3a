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

    None for fewer layers than stages.
    """
    return best_cut(config.layers, num_stages, head=head_in_layers(config))


def best_cut(layers, num_stages, embedding=0.0, head=0.0):
    """The layers of each stage, with the least for the slowest; both ends are worth so many layers.

    As even as it goes, as long as that is as fast; each stage has a layer. None for fewer layers
    than stages.
    """
    if layers < num_stages:
        return None
    cuts = [[last - first for first, last in cut_evenly(layers, num_stages)]]
    for last in range(1, layers - num_stages + 2) if num_stages > 1 else ():
        most = (layers - last) // (num_stages - 1)
        for first in range(most, 0, -1) if num_stages > 2 else [layers - last]:
            inner = cut_evenly(layers - first - last, num_stages - 2) if num_stages > 2 else []
            # The larger ones behind: the first stages hold the most micro-batches.
            cuts.append([first, *(end - begin for begin, end in reversed(inner)), last])
    return min(cuts, key=lambda cut: slowest(cut, embedding, head))


def slowest(cut, embedding, head):
    """What the slowest stage computes, in layers."""
    work = [float(layers) for layers in cut]
    work[0] += embedding
    work[-1] += head
    return max(work)
