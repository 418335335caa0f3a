# SPDX-License-Identifier: Apache-2.0
"""How many weights some layers of a model have, by its sizes; no layer is built."""


def count_weights(config, first=0, last=None):
    """(number of weights, number of tensors) of layers `first` to `last` - 1, by default of all.

    The first layer includes the embedding, the last one the last norm and the head.
    """
    last = config.layers if last is None else last
    kv_dim = config.kv_heads * config.head_dim
    attention = 2 * config.dim * (config.heads * config.head_dim + kv_dim)
    layer = attention + 3 * config.dim * config.hidden_dim + 2 * config.dim
    more = vectors_of_layer(config)
    numbers, tensors = (last - first) * (layer + sum(more)), (last - first) * (9 + len(more))
    if first == 0:
        numbers, tensors = numbers + config.vocabulary * config.dim, tensors + 1
    if last == config.layers:
        numbers, tensors = numbers + (config.vocabulary + 1) * config.dim, tensors + 2
    return numbers, tensors


def vectors_of_layer(config):
    """The lengths of a layer's biases and of its norms of queries and keys, if it has some."""
    width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    lengths = {
        "query_bias": [width, kv_width, kv_width],
        "output_bias": [config.dim],
        "head_norms": [config.head_dim, config.head_dim],
        "feed_forward_bias": [config.hidden_dim, config.hidden_dim, config.dim],
    }
    return [n for name, each in lengths.items() if getattr(config, name, False) for n in each]
