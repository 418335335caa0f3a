# SPDX-License-Identifier: Apache-2.0
"""A model that is known only by a measured profile: the seconds and bytes of each layer.

The file is that of plan_partition.py: times in milliseconds and sizes in bytes, for each layer and
one mini-batch, which here is a micro-batch. Four more fields make the forecast more accurate, and
`plan_partition.py --save` writes them: "rows" and "length", the sequences of that mini-batch and
their tokens; "bytes_per_value", the bytes of a weight; and for each layer "kept_bytes", what its
forward keeps for its backward. Without "kept_bytes" only the layer's output is counted.

The times hold only for the machine and the micro-batch that were measured: no other size of a
micro-batch and no tensor group is forecast from them. Each half of a split backward counts as half
of its time.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from files.inputs import InputError, is_count
from planning.partition import PartitionError, check_size, profile_from
from planning.transformer import Model

MOST = 10_000_000
MOST_LAYERS = 256  # twice those of the largest model in known_models.py
FREE = 1e18  # bytes per second of links that a cut ignores


@dataclass(frozen=True)
class ProfiledModel(Model):
    """`profile` has a LayerProfile per layer, measured with `rows` sequences per micro-batch.

    `hidden` and the other sizes of a transformer are not used.
    """

    profile: tuple = ()
    rows: int = 1
    bytes_per_value: int = 4

    @property
    def known_sizes(self):
        return (self.rows,)

    def stage_weights(self, layers, stages):
        first = [sum(layers[:stage]) for stage in stages]
        parts = [self.profile[at : at + layers[stage]] for at, stage in zip(first, stages)]
        return sum(layer.parameter_bytes for part in parts for layer in part) / self.bytes_per_value

    def balanced_cut(self, stages):
        return fastest_cut(self, stages)

    @property
    def parameters(self):
        return sum(layer.parameter_bytes for layer in self.profile) // self.bytes_per_value

    @property
    def model_flops(self):
        """Always 0: a profile has no operations, so MFU is unknown."""
        return 0


def check_layers(count, name):
    """Raise InputError if comparing a model's plans would take too long, for its many layers."""
    if count > MOST_LAYERS:
        raise InputError(
            f"{name} has {count:,} layers, and plans are compared for up to {MOST_LAYERS:,}"
        )


def profiled_model(content, path, batch):
    """The ProfiledModel of a parsed file, `batch` sequences per update. Raises InputError."""
    try:
        profile = profile_from(content)
    except PartitionError as error:
        raise InputError(f"{path}: {error}") from None
    check_layers(len(profile.layers), path)
    counts = {}
    for key, otherwise in (("rows", 1), ("length", 1), ("bytes_per_value", 4)):
        counts[key] = content.get(key, otherwise)
        if not is_count(counts[key], MOST) or counts[key] == 0:
            value = repr(counts[key])[:40]
            raise InputError(f"{path}: {key} {value} is not a whole number from 1")
    if counts["bytes_per_value"] not in (2, 4, 8):
        raise InputError(f"{path}: bytes_per_value {counts['bytes_per_value']} is not 2, 4 or 8")
    if batch % counts["rows"]:
        raise InputError(
            f"{path} was measured with {counts['rows']} rows at a time, which do not divide a batch "
            f"of {batch}; use a --batch-size that is a multiple"
        )
    return ProfiledModel(
        len(profile.layers), 1, vocabulary=1, batch=batch, heads=1, profile=profile.layers, **counts
    )


@lru_cache(maxsize=1000)
def fastest_cut(model, stages):
    """The number of layers of each stage that minimizes the time of the slowest.

    Raises InputError if finding it would take minutes.
    """
    try:
        check_size(model.layers, stages, straight=True)
    except PartitionError:
        raise InputError(
            f"a profile of {model.layers:,} layers is too long for {stages} stages; profile several "
            "layers as one, or use fewer --gpus"
        ) from None
    tables = first_tables(model)
    while len(tables) <= stages:
        tables.append(with_one_more_stage(model, tables[-1]))
    cut, end = [], model.layers
    for count in range(stages, 0, -1):
        _, first = tables[count][end]
        cut.insert(0, end - first)
        end = first
    return tuple(cut)


@lru_cache(maxsize=10)
def first_tables(model):
    """A list that begins with the table of no stages; `fastest_cut` appends one per stage.

    Every search for a cut of this model goes on from it: a search of its own for each number of
    stages takes minutes together.
    """
    return [[(0.0, 0), *[(math.inf, 0)] * model.layers]]


def with_one_more_stage(model, before):
    """The table of one stage more: for the first 0, 1, 2, ... layers (slowest, first layer).

    `slowest` is the time of the slowest part, and the last stage begins with the first layer. The
    parts and the choice between equal ones are those of plan_stages, over links that are FREE.
    """
    seconds = list(accumulate((layer.seconds for layer in model.profile), initial=0.0))
    crossings = [0.0, *(2 * layer.activation_bytes / FREE for layer in model.profile)]
    earlier = [max(slowest, added) for (slowest, _), added in zip(before, crossings)]
    ends = range(1, model.layers + 1)
    times = [
        [max(earlier[first], seconds[end] - seconds[first]) for first in range(end)] for end in ends
    ]
    found = [min(each) for each in times]
    return [(math.inf, 0), *((least, each.index(least)) for least, each in zip(found, times))]


def stage_times(model, plan):
    """(forwards, backwards, second forwards) in seconds, each a list by stage."""
    parts = layers_of_stages(model, plan)
    forwards = [sum(layer.forward_seconds for layer in part) for part in parts]
    backwards = [sum(layer.backward_seconds for layer in part) for part in parts]
    again = forwards if plan.recompute == "full" else [0.0] * len(parts)
    return forwards, backwards, list(again)


def layers_of_stages(model, plan):
    """The LayerProfiles of each stage."""
    first, parts = 0, []
    for count in plan.layers_of(model):
        parts.append(model.profile[first : first + count])
        first += count
    return parts


def activation_bytes(model, plan, stage):
    """Bytes of one micro-batch's activation between a stage and the next."""
    return layers_of_stages(model, plan)[stage][-1].activation_bytes


def kept_per_stage(model, plan):
    """(bytes kept from a forward to its backward, further bytes during a backward), lists by stage.

    If layers are recomputed, one at a time, each keeps only its input. The first layer's input is
    tokens, which are not counted.
    """
    kept, at_work, before = [], [], 0
    for part in layers_of_stages(model, plan):
        if plan.recompute != "full":
            kept.append(sum(layer.kept for layer in part))
            at_work.append(0)
        else:
            kept.append(before + sum(layer.activation_bytes for layer in part[:-1]))
            at_work.append(max(layer.kept for layer in part))
        before = part[-1].activation_bytes
    return kept, at_work
