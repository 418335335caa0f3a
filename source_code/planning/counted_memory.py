# SPDX-License-Identifier: Apache-2.0
"""How many bytes a rank needs to train: weights, gradients, optimizer, activations.

All bytes are counted from the sizes of the model and the order of the schedule; nothing is run.
Weights, gradients and optimizer states follow from the number of weights. Activations are the
tensors that a forward keeps for its backward: a known list per layer and token, held for as long as
the rank's order of actions requires. Not counted are messages in transit, temporary memory within
an operation, and Python and torch themselves.
"""

from dataclasses import dataclass
from typing import ClassVar

from extensions.pretraining.weight_count import count_weights
from lab.held_bytes import RankMemory
from pipeline.model import cut_evenly

STATES = {"sgd": 0, "momentum": 1, "adamw": 2}  # numbers that an optimizer keeps for each weight
STEP_BYTES = 4  # AdamW also has a step counter for each tensor


@dataclass(frozen=True)
class ActivationSizes:
    """Bytes that the forward of a micro-batch of `tokens` tokens keeps; a number has `width` bytes.

    With `selective` the tensors that attention recomputes are left out.
    """

    config: object
    tokens: int
    width: int
    selective: bool = False
    has_input: ClassVar[bool] = True  # the input of a layer is among what its norm keeps

    def input(self):
        """Bytes of one activation between two layers."""
        return self.tokens * self.config.dim * self.width

    def attention(self):
        """The output of attention's kernel, and a sum per token and head for its backward."""
        sums = self.tokens * self.config.heads * max(self.width, 4)
        return self.input() + sums

    def inside(self, first, last):
        """Everything that the backward of layers `first` to `last` - 1 needs, the input included.

        A norm keeps what `norm` says; each matrix its input; attention queries, keys, values and
        what `attention` says; the gate its own two sides.
        """
        config = self.config
        kv_dim = config.kv_heads * config.head_dim
        numbers = 4 * config.dim + 2 * kv_dim + 4 * config.hidden_dim
        layer = self.tokens * numbers * self.width + 2 * self.norm()
        layer += 0 if self.selective else self.attention()
        return (last - first) * layer + (self.end() if last == config.layers else 0)

    def norm(self):
        """The norm's input, the input times the weight, and one number per token.

        In 16 bits it keeps only the input and the number.
        """
        times_weight = self.input() if self.width >= 4 else 0
        return self.input() + times_weight + self.tokens * max(self.width, 4)

    def end(self):
        """What the last norm and the head keep, and the scores of all tokens."""
        config = self.config
        return self.tokens * (config.dim + config.vocabulary) * self.width + self.norm()

    def deferred(self, first, last):
        """What a backward keeps from I to W: the input and the output gradient of each matrix."""
        config = self.config
        kv_dim = config.kv_heads * config.head_dim
        numbers = (last - first) * (6 * config.dim + 2 * kv_dim + 3 * config.hidden_dim)
        if last == config.layers:
            numbers += config.dim + config.vocabulary
        return self.tokens * numbers * self.width


class SizesWithCopies(ActivationSizes):
    """ActivationSizes of a saved model whose type is not the float32 in which its norms compute."""

    has_input = False

    def norm(self):
        """The input as float32, the result before the weight, and one number per token."""
        return self.tokens * (self.config.dim * (4 + self.width) + 4)


def most_held(order, stage_layers, kept, recompute="none", pieces=1):
    """Peak bytes of activations on a rank that runs the actions of `order`.

    `stage_layers[stage]` is (first, last), `kept` is an ActivationSizes, and `recompute` is a key
    of MODES in recompute.py. `pieces` is the number of pieces per stage that are recomputed one at
    a time; with "layer" each layer is a piece.
    """
    held = {}  # (stage, micro-batch) -> bytes
    total = most = 0

    def hold(key, more):
        nonlocal total
        held[key] = held.get(key, 0) + more
        total += more

    def reaches(extra=0):
        nonlocal most
        most = max(most, total + extra)

    for stage, kind, microbatch in order:
        key, (first, last) = (stage, microbatch), stage_layers[stage]
        if kind == "F" and recompute in ("none", "selective"):
            hold(key, kept.inside(first, last))
        elif kind == "F":
            cuts = cut_pieces(first, last, recompute, pieces)
            hold(key, sum(kept.input() for start, _ in cuts if start > 0))
        elif kind in "BI":
            if recompute == "selective":
                reaches(kept.attention())
            for start, end in reversed(cut_pieces(first, last, recompute, pieces)):
                # The input of the piece is in `held`: if `inside` includes it as well, count it
                # once.
                own = kept.input() if start > 0 else 0
                reaches(kept.inside(start, end) - own * kept.has_input)
                hold(key, (kept.deferred(start, end) if kind == "I" else 0) - own)
                reaches()
            if kind == "I" and recompute in ("none", "selective"):
                hold(key, kept.deferred(first, last) - held[key])
        if kind in "BW":
            total -= held.pop(key)
        reaches()
    return most


def cut_pieces(first, last, recompute, pieces=1):
    """(start, end) of each run of layers that is recomputed as one piece."""
    if recompute in ("none", "selective"):
        return []
    count = last - first if recompute == "layer" else pieces
    return [(first + start, first + end) for start, end in cut_evenly(last - first, count)]


def predict_memory(
    config,
    schedule,
    stage_layers,
    microbatch_size,
    width,
    optimizer="adamw",
    recompute="none",
    pieces=1,
    shards=1,
):
    """A RankMemory for each rank of `schedule`. `shards` replicas share the optimizer's states.

    `width` is the bytes per number. With 2, weights compute in 16 bits; gradients are summed and
    weights updated in 32 bits (mixed_precision.py).
    """
    master = max(width, 4)
    selective = recompute == "selective"
    copies = getattr(config, "norms_in_float32", False) and width != 4
    sizes_of = SizesWithCopies if copies else ActivationSizes
    kept = sizes_of(config, microbatch_size * config.seq_len, width, selective)
    ranks = []
    for rank, order in enumerate(schedule.orders):
        parts = [count_weights(config, *stage_layers[s]) for s in schedule.stages_of(rank)]
        numbers, tensors = (sum(column) for column in zip(*parts))
        states = numbers * STATES[optimizer] * master // shards
        states += tensors * STEP_BYTES if optimizer == "adamw" else 0
        states += numbers * master if master > width else 0
        activations = most_held(order, stage_layers, kept, recompute, pieces)
        ranks.append(RankMemory(numbers * width, numbers * master, states, activations))
    return ranks
