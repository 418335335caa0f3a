"""A model of which only a measured profile is known: what each of its layers takes and keeps.

The file is that of plan_partition.py: times in milliseconds and bytes, for each layer and one
mini-batch, which here is a micro-batch. Four more fields make the answer better, and
`plan_partition.py --save` writes them: "rows" and "length", the sequences of that mini-batch and
their tokens; "bytes_per_value", that of a weight; and for a layer "kept_bytes", what its forward
leaves for its backward, where a profile without it has only the layer's output.

The times are what they are, on the machine that was measured: no other size of a micro-batch and no
tensor group is forecast from them, and a half of a split backward takes half of it.
"""

from dataclasses import dataclass
from functools import lru_cache

from extensions.planning.partition import PartitionError, Profile, plan_stages, profile_from
from extensions.planning.transformer import Model
from pipeline.inputs import InputError, is_count

MOST = 10_000_000
FREE = 1e18  # bytes per second of links that a cut does not look at


@dataclass(frozen=True)
class ProfiledModel(Model):
    """`profile` has a LayerProfile per layer, `rows` sequences to a micro-batch.

    `hidden` and the other sizes of a transformer mean nothing here.
    """

    profile: tuple = ()
    rows: int = 1
    bytes_per_value: int = 4

    @property
    def parameters(self):
        return sum(layer.parameter_bytes for layer in self.profile) // self.bytes_per_value

    @property
    def model_flops(self):
        """Not in a profile, so that MFU is not known."""
        return 0


def profiled_model(content, path, batch):
    """The ProfiledModel of a parsed file, `batch` sequences per update. Raises InputError."""
    try:
        profile = profile_from(content)
    except PartitionError as error:
        raise InputError(f"{path}: {error}") from None
    counts = {}
    for key, otherwise in (("rows", 1), ("length", 1), ("bytes_per_value", 4)):
        counts[key] = content.get(key, otherwise)
        if not is_count(counts[key], MOST) or counts[key] == 0:
            raise InputError(f"{path}: {key} {counts[key]!r} is no whole number from 1")
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
    """Layers of each stage whose slowest takes least."""
    cut = plan_stages(Profile("profile", model.profile), stages, FREE, straight=True).cut
    return tuple(cut)


def stage_times(model, plan):
    """(forwards, backwards, second forwards) in seconds, each a list by stage."""
    parts = layers_of_stages(model, plan)
    forwards = [sum(layer.forward_seconds for layer in part) for part in parts]
    backwards = [sum(layer.backward_seconds for layer in part) for part in parts]
    again = forwards if plan.recompute == "full" else [0.0] * len(parts)
    return forwards, backwards, list(again)


def seconds_of_all_layers(model, plan):
    """Of one micro-batch."""
    forward = sum(layer.forward_seconds for layer in model.profile)
    backward = sum(layer.backward_seconds for layer in model.profile)
    return backward + (2 if plan.recompute == "full" else 1) * forward


def layers_of_stages(model, plan):
    """The LayerProfiles of each stage."""
    first, parts = 0, []
    for count in plan.layers_of(model):
        parts.append(model.profile[first : first + count])
        first += count
    return parts


def activation_bytes(model, plan, stage):
    """Of one micro-batch between a stage and the next."""
    return layers_of_stages(model, plan)[stage][-1].activation_bytes


def kept_per_stage(model, plan):
    """(kept from a forward to its backward, at work in a backward) in bytes, by stage.

    Where layers are recomputed, one at a time, each keeps its input; the first layer's are tokens.
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
