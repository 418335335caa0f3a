# SPDX-License-Identifier: Apache-2.0
"""How much a transformer computes and moves, counted from its sizes.

Matrix products are counted in operations, everything between them in bytes that go through the
GPU's memory: a norm, a sum or a softmax computes too little to matter and moves a lot. Both are
per GPU, where `tensor` GPUs share each layer. The embedding is a look-up without a product; the
head is a product as wide as the vocabulary, and has a weight of its own in every forecast.

"Megatron" is Narayanan et al. 2021, arXiv 2104.04473, "Korthikanti" is Korthikanti et al. 2022,
arXiv 2205.05198, "FlashAttention" is Dao et al. 2022, arXiv 2205.14135.
"""

from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace

BYTES_PER_VALUE = 2  # of an activation or a gradient that travels


@dataclass(frozen=True)
class Model:
    """A transformer and its batch: `batch` sequences of `length` tokens per update.

    With `gated` it is built as Llama is: a gated feed-forward part, no biases, no table of
    positions. Otherwise it is built as GPT is. Sizes of 0 follow from `hidden`: heads of 128
    numbers, as many for keys and values, and `inner` of four times the width. The last three fields
    come from a config.json and say what else there is: biases and norms of a layer, rows of a table
    of positions (otherwise `length` in a GPT), and the weights of the ends besides their matrices.
    """

    layers: int
    hidden: int
    length: int = 2048
    vocabulary: int = 51_200
    batch: int = 1536
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    inner: int = 0
    gated: bool = False
    tied: bool = True  # the head's weights are the embedding's
    norms_in_float32: bool = False  # for every dtype, as transformers computes saved models
    layer_rest: int | None = None
    positions: int | None = None
    ends_rest: int | None = None

    known_sizes = ()  # if given, the only micro-batch sizes whose times are known

    @property
    def head_count(self):
        return self.heads or max(self.hidden // 128, 1)

    @property
    def head_size(self):
        return self.head_dim or self.hidden // self.head_count

    @property
    def query_width(self):
        """Numbers in the queries of a token, in most models as many as the width."""
        return self.head_count * self.head_dim if self.head_dim else self.hidden

    @property
    def kv_width(self):
        return self.query_width * (self.kv_heads or self.head_count) // self.head_count

    @property
    def inner_width(self):
        return self.inner or 4 * self.hidden

    @property
    def layer_matrices(self):
        """Weights in a layer's matrices: four of attention, two or (gated) three feed-forward."""
        attention = 2 * self.hidden * (self.query_width + self.kv_width)
        return attention + (3 if self.gated else 2) * self.hidden * self.inner_width

    @cached_property
    def layer_weights(self):
        """All weights of one layer; a GPT's has 13 h in biases and norms (Megatron equation 2)."""
        if self.layer_rest is not None:
            return self.layer_matrices + self.layer_rest
        rest = 2 if self.gated else 8 + self.inner_width / self.hidden + 1
        return self.layer_matrices + int(rest * self.hidden)

    @property
    def embedding_weights(self):
        rows = 0 if self.gated else self.length
        return (
            self.vocabulary + (rows if self.positions is None else self.positions)
        ) * self.hidden

    @property
    def head_weights(self):
        """Weights of the head, of which the last stage has its own copy if they are tied."""
        return self.vocabulary * self.hidden

    @property
    def last_norm_weights(self):
        return self.hidden if self.gated else 0  # Megatron equation 2 leaves it out

    @property
    def parameters(self):
        """Weights of the model: Megatron equation 2, for a GPT. Tied weights count once."""
        ends = self.last_norm_weights if self.ends_rest is None else self.ends_rest
        ends += self.embedding_weights + (0 if self.tied else self.head_weights)
        return self.layers * self.layer_weights + ends

    def stage_weights(self, layers, stages):
        """The number of weights of these stages (indices), if each stage has so many `layers`."""
        last = len(layers) - 1
        count = sum(layers[stage] for stage in stages) * self.layer_weights
        if 0 in stages:
            count += self.embedding_weights
        if last in stages:
            count += self.last_norm_weights
            count += 0 if self.tied and 0 in stages else self.head_weights
        return count

    def balanced_cut(self, stages):
        """The number of layers of each stage that minimizes the time of the slowest: a tuple.

        The head counts as the layers whose products it equals. Each stage has a layer; the others
        go one by one to the stage with the least work, and of equal stages to the earlier one.
        """
        work, cut = [1.0] * stages, [1] * stages
        work[-1] += self.head_flops(1) / self.layer_flops(1)
        least = [(own, stage) for stage, own in enumerate(work)]
        heapify(least)
        for _ in range(self.layers - stages):
            own, stage = least[0]
            heapreplace(least, (own + 1, stage))
            cut[stage] += 1
        return tuple(cut)

    def layer_flops(self, sequences):
        """Operations of a layer's forward, scores of all pairs counted (Megatron's appendix)."""
        return 2 * sequences * self.length * self.layer_matrices + self.score_flops(sequences)

    def score_flops(self, sequences):
        """Operations of attention's two products without weights, in a forward."""
        return 4 * sequences * self.length**2 * self.query_width

    def head_flops(self, sequences):
        return 2 * sequences * self.length * self.hidden * self.vocabulary

    @property
    def model_flops(self):
        """Operations of an update as MFU counts: a backward is two forwards, no recomputation."""
        return 3 * (self.layers * self.layer_flops(self.batch) + self.head_flops(self.batch))

    @property
    def flops_per_update(self):
        """Operations of an update with the layers' second forward (Megatron equation 3)."""
        return self.model_flops + self.layers * self.layer_flops(self.batch)


def score_bytes(model, sequences, tensor, fused):
    """Bytes that attention's scores move in a forward; 0 if a fused kernel keeps them inside.

    Otherwise they are written once, read and written by the softmax and by dropout, and read once:
    six times in all.
    """
    if fused:
        return 0.0
    return 6 * BYTES_PER_VALUE * sequences * model.head_count / tensor * model.length**2


def passing_bytes(model, sequences, tensor, sequence_parallel):
    """Bytes that a layer's other operations move in a forward, without its matrix products.

    Two norms read and write, two sums with dropout read two values and write two: 12 h per token,
    on every GPU of the group, unless Korthikanti's sequence parallelism divides them. Queries, keys
    and values are copied, and the middle of the feed-forward part is read and written: both are
    divided over the group.
    """
    tokens = sequences * model.length
    whole = 12 * model.hidden / (tensor if sequence_parallel else 1)
    middle = (3 if model.gated else 2) * model.inner_width
    cut = (2 * (model.query_width + 2 * model.kv_width) + middle) / tensor
    return BYTES_PER_VALUE * tokens * (whole + cut)


def logit_bytes(model, sequences, tensor):
    """Bytes of the loss, forward and backward: ten passes over all scores in 32 bits."""
    return 40 * sequences * model.length * model.vocabulary / tensor


def kept_bytes(
    model, sequences, tensor, recompute, fused, sequence_parallel, kernels="plain", precision="bf16"
):
    """Bytes of activations that one layer keeps for its backward.

    A GPT keeps s b h (34 + 5 a s/h) bytes (Korthikanti equations 1 to 6); a fused or recomputed
    attention does not keep the scores. A gated layer in plain torch keeps 9 values of the width,
    keys and values, the middle four times, and a sum per head, as counted_memory.py counts and as
    measurements show. With "fused" kernels it keeps neither the inside of a norm nor the gate's
    result. With recomputation per "operator" it keeps its input, the result of attention, and every
    second matrix product: queries, values, one half of the gate, and the last. With "full"
    recomputation it keeps its input, which is cut where the sequence is.
    """
    values = sequences * model.length * model.hidden
    shared = tensor if sequence_parallel else 1
    if recompute == "full":
        return BYTES_PER_VALUE * values / shared
    inner, narrow = model.inner_width / model.hidden, model.kv_width / model.hidden
    wide = model.query_width / model.hidden
    if recompute == "operator":
        return values * (4 / shared + (4 * wide + 2 * narrow + 2 * inner) / tensor)
    whole = 14 if model.gated else 10  # on every GPU of the tensor group; the rest is cut
    middle = (8 if model.gated else 4) * inner
    if kernels == "fused":  # and no dropout, whose masks take two bytes
        whole, middle = 8, 4 * inner
    inside = 4 * wide + 4 * narrow + middle
    if precision == "fp8":  # the inputs of the four products have a byte per value
        whole, inside = whole - 2, inside - wide - inner
    scores = 0.0 if fused or recompute == "selective" else 5 * model.length
    scores = model.head_count / model.hidden * max(scores, 4 if model.gated else 0)
    return values * (whole / shared + (inside + scores) / tensor)


def deferred_bytes(model, sequences, tensor):
    """Bytes that one layer keeps from I to W: the input and the output gradient of each matrix."""
    values = 4 * model.hidden + 2 * model.query_width + 2 * model.kv_width
    values += (3 if model.gated else 2) * model.inner_width
    return BYTES_PER_VALUE * sequences * model.length * values / tensor


def kept_by_loss(model, sequences, tensor, in_pieces=True):
    """Bytes that norm, head and loss keep: three values of the width, and the scores of all tokens.

    The scores of a GPT have 32 bits. The course's own loss keeps the scores as they are, and
    processes one piece at a time. A loss that is not computed `in_pieces` has the scores and their
    gradients, both in 16 and in 32 bits.
    """
    tokens = sequences * model.length
    width = BYTES_PER_VALUE if model.gated else 4
    width = width if in_pieces else 12
    return tokens * (3 * BYTES_PER_VALUE * model.hidden + width * model.vocabulary / tensor)


def deferred_by_loss(model, sequences, tensor):
    """Bytes that the head keeps from a backward's first half to its second."""
    tokens = sequences * model.length
    return BYTES_PER_VALUE * tokens * (model.hidden + model.vocabulary / tensor)
