"""How much a transformer computes and moves, counted from its sizes.

Matrix products are counted in operations, everything between them in bytes that go through the
GPU's memory: a norm, a sum or a softmax computes too little to matter and moves a lot. Both are
per GPU, where `tensor` GPUs share each layer. The embedding is a look-up without a product; the
head is a product as wide as the vocabulary, and has a weight of its own in every forecast.

"Megatron" is Narayanan et al. 2021, arXiv 2104.04473, "Korthikanti" is Korthikanti et al. 2022,
arXiv 2205.05198, "FlashAttention" is Dao et al. 2022, arXiv 2205.14135.
"""

from dataclasses import dataclass

BYTES_PER_VALUE = 2  # of an activation or a gradient that travels


@dataclass(frozen=True)
class Model:
    """A transformer and its batch: `batch` sequences of `length` tokens per update.

    With `gated` it is built as Llama is: a gated feed-forward part, no biases, no table of
    positions. Otherwise as GPT. What is left out follows from `hidden`: heads of 128 numbers, as
    many for keys and values, and `inner` of four times the width.
    """

    layers: int
    hidden: int
    length: int = 2048
    vocabulary: int = 51_200
    batch: int = 1536
    heads: int = 0
    kv_heads: int = 0
    inner: int = 0
    gated: bool = False
    tied: bool = True  # the head's weights are the embedding's

    @property
    def head_count(self):
        return self.heads or max(self.hidden // 128, 1)

    @property
    def kv_width(self):
        return self.hidden * (self.kv_heads or self.head_count) // self.head_count

    @property
    def inner_width(self):
        return self.inner or 4 * self.hidden

    @property
    def layer_matrices(self):
        """Weights of one layer that multiply: attention's four matrices, and two or three more."""
        attention = 2 * self.hidden**2 + 2 * self.hidden * self.kv_width
        return attention + (3 if self.gated else 2) * self.hidden * self.inner_width

    @property
    def layer_weights(self):
        """All weights of one layer; a GPT's has 13 h in biases and norms (Megatron equation 2)."""
        rest = 2 if self.gated else 8 + self.inner_width / self.hidden + 1
        return self.layer_matrices + int(rest * self.hidden)

    @property
    def embedding_weights(self):
        return (self.vocabulary + (0 if self.gated else self.length)) * self.hidden

    @property
    def head_weights(self):
        """Of the last stage; where they are tied to the embedding, it has a copy of its own."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self):
        """Megatron equation 2, for a GPT; tied weights count once."""
        ends = self.embedding_weights + (0 if self.tied else self.head_weights)
        return self.layers * self.layer_weights + ends

    def layer_flops(self, sequences):
        """Forward of one layer, scores of all pairs of tokens counted (Megatron's appendix)."""
        return 2 * sequences * self.length * self.layer_matrices + self.score_flops(sequences)

    def score_flops(self, sequences):
        """The two products of attention that have no weights."""
        return 4 * sequences * self.length**2 * self.hidden

    def head_flops(self, sequences):
        return 2 * sequences * self.length * self.hidden * self.vocabulary

    @property
    def model_flops(self):
        """Of an update, as MFU counts: a backward is two forwards, nothing is run again."""
        return 3 * (self.layers * self.layer_flops(self.batch) + self.head_flops(self.batch))

    @property
    def flops_per_update(self):
        """Megatron equation 3: the same, and the layers' second forward."""
        return self.model_flops + self.layers * self.layer_flops(self.batch)


def score_bytes(model, sequences, tensor, fused):
    """What attention's scores move in a forward: nothing where one kernel keeps them inside.

    Else they are written, read and written by the softmax and by dropout, and read: six times.
    """
    if fused:
        return 0.0
    return 6 * BYTES_PER_VALUE * sequences * model.head_count / tensor * model.length**2


def passing_bytes(model, sequences, tensor, sequence_parallel):
    """What a layer's other operations move in a forward, without its matrix products.

    Two norms read and write, two sums with dropout read two values and write two: 12 h per token,
    on every GPU of the group, unless Korthikanti's sequence parallelism cuts them. Queries, keys
    and values are copied, and the middle of the feed-forward part is read and written: cut.
    """
    tokens = sequences * model.length
    whole = 12 * model.hidden / (tensor if sequence_parallel else 1)
    middle = (3 if model.gated else 2) * model.inner_width
    cut = (2 * (model.hidden + 2 * model.kv_width) + middle) / tensor
    return BYTES_PER_VALUE * tokens * (whole + cut)


def logit_bytes(model, sequences, tensor):
    """Forward and backward of the loss: ten passes over the scores of the vocabulary in 32 bits."""
    return 40 * sequences * model.length * model.vocabulary / tensor


def kept_bytes(model, sequences, tensor, recompute, fused, sequence_parallel):
    """Activations of one layer for its backward.

    A GPT: s b h (34 + 5 a s/h) bytes (Korthikanti equations 1 to 6), of which a fused or recomputed
    attention drops the scores. A gated layer in plain torch, as footprint.py counts it and as is
    measured: 9 values of the width, keys and values, the middle four times, a sum for each head.
    Recomputed whole: the input.
    """
    values = sequences * model.length * model.hidden
    if recompute == "full":
        return BYTES_PER_VALUE * values
    shared = tensor if sequence_parallel else 1
    whole = 14 if model.gated else 10  # on every GPU of the tensor group; the rest is cut
    middle = (8 if model.gated else 4) * model.inner_width / model.hidden
    inside = 4 + 4 * model.kv_width / model.hidden + middle
    scores = 0.0 if fused or recompute == "selective" else 5 * model.length
    scores = model.head_count / model.hidden * max(scores, 4 if model.gated else 0)
    return values * (whole / shared + (inside + scores) / tensor)


def deferred_bytes(model, sequences, tensor):
    """What one layer keeps from a backward's first half to its second: each matrix's input, and the
    gradient of its output."""
    values = 6 * model.hidden + 2 * model.kv_width
    values += (3 if model.gated else 2) * model.inner_width
    return BYTES_PER_VALUE * sequences * model.length * values / tensor


def kept_by_loss(model, sequences, tensor):
    """What norm, head and loss keep: three values of the width, and the scores of all tokens.

    A GPT's in 32 bits. The course's own loss keeps them as they are, and looks at a piece at a time.
    """
    tokens = sequences * model.length
    width = BYTES_PER_VALUE if model.gated else 4
    return tokens * (3 * BYTES_PER_VALUE * model.hidden + width * model.vocabulary / tensor)


def deferred_by_loss(model, sequences, tensor):
    """What the head keeps from a backward's first half to its second."""
    tokens = sequences * model.length
    return BYTES_PER_VALUE * tokens * (model.hidden + model.vocabulary / tensor)
