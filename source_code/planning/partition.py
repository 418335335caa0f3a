# SPDX-License-Identifier: Apache-2.0
"""Profiles layers, and cuts a model into replicated stages.

The planner of PipeDream (Narayanan et al., SOSP 2019, section 3.1). A plan gives each stage a run
of consecutive layers and a number of workers that replicate it and take the mini-batches in turn.
The slowest part sets the pace of a pipeline; a dynamic program minimizes its time.
"""

import json
import math
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.autograd.graph import saved_tensors_hooks

from files.inputs import MEBIBYTE, InputError, is_number, read_json
from pipeline.model import ModelConfig, build_part, token_loss

FIELDS = ("forward_ms", "backward_ms", "activation_bytes", "parameter_bytes")
LARGEST_FIGURE = 1e18
LARGEST_FILE = 16 * MEBIBYTE
MOST_LETTERS = 80  # of a model's name
MOST_COMPARISONS = 30_000_000  # about ten seconds


class PartitionError(ValueError):
    """A profile is invalid or a plan does not exist; the message is one sentence."""


@dataclass(frozen=True)
class LayerProfile:
    """A layer on one worker: seconds per mini-batch, bytes of its output and of its weights.

    `kept_bytes` is what the forward of a mini-batch keeps for its backward, if it was measured.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    activation_bytes: int
    parameter_bytes: int
    kept_bytes: int | None = None

    @property
    def seconds(self):
        return self.forward_seconds + self.backward_seconds

    @property
    def kept(self):
        return self.activation_bytes if self.kept_bytes is None else self.kept_bytes


@dataclass(frozen=True)
class Profile:
    """What a model's layers cost on one worker."""

    model: str
    layers: tuple  # of LayerProfile, in the order of the forward pass


@dataclass(frozen=True)
class PlannedStage:
    """Layers `first_layer` to `last_layer`, both included, on `replicas` workers.

    `seconds` is the time per mini-batch if the replicas work in turn. `boundary_seconds` is the
    time of the messages to and from the next stage; it is 0 for the last stage and if boundaries
    cost nothing.
    """

    first_layer: int
    last_layer: int
    replicas: int
    seconds: float
    boundary_seconds: float


@dataclass(frozen=True)
class Plan:
    """`stages` in order; seconds per mini-batch of this plan, and of all workers as replicas."""

    stages: tuple
    seconds_per_minibatch: float
    data_parallel_seconds: float

    @property
    def cut(self):
        """The number of layers of each stage, as --cut takes them."""
        return [stage.last_layer - stage.first_layer + 1 for stage in self.stages]


def stage_seconds(compute_seconds, parameter_bytes, replicas, bandwidth, overlap=True):
    """Seconds per mini-batch of a stage whose layers take `compute_seconds` on one worker.

    Each of m replicas sends and receives (m - 1)/m of the weights' bytes to add up gradients, and
    the replicas share the mini-batches. With `overlap` (the paper, section 3.1) the messages travel
    while the replica computes. Without it (the authors' code, optimizer_graph_hierarchical.py) they
    are added, and count twice:

        with:     max(compute, 2 (m - 1)/m weights / bandwidth) / m
        without:  (compute + 4 (m - 1)/m weights / bandwidth) / m

    `bandwidth` is in bytes per second.
    """
    exchange = parameter_bytes * (replicas - 1) / replicas / bandwidth
    if overlap:
        return max(compute_seconds, 2 * exchange) / replicas
    return (compute_seconds + 4 * exchange) / replicas


def plan_stages(profile, workers, bandwidth, *, overlap=True, straight=False, memory=None):
    """The Plan on exactly `workers` workers that minimizes the time of its slowest part.

    `stage_seconds` gives the time of a stage. With `overlap` a boundary takes 2 activation /
    `bandwidth`, for the activation forward and its gradient back. Without `overlap` it takes no
    time, as in the authors' code. `straight` allows one replica per stage, so there are as many
    stages as workers. Of equally good plans it takes the one whose last stage starts first, then
    the one with the fewest replicas.

    `memory`, in bytes, admits a stage of m replicas with n workers behind it only if

        ceil(n/m) * (activation bytes + parameter bytes of its layers) <= memory

    This is a copy of both for each mini-batch in progress behind the stage. For the first stage of
    M workers the factor is ceil((M - m)/m). The authors' code has this filter. It leaves out the
    stage's own mini-batch and the current weights, so the last stage always passes, and with it a
    single stage on all workers.

    Raises PartitionError if no plan exists, or if the search would take minutes.
    """
    check_size(len(profile.layers), workers, straight)
    layers = profile.layers
    seconds = list(accumulate((layer.seconds for layer in layers), initial=0.0))
    activations = list(accumulate((layer.activation_bytes for layer in layers), initial=0))
    parameters = list(accumulate((layer.parameter_bytes for layer in layers), initial=0))

    def seconds_of(first, end, replicas):  # of a stage with layers `first` to `end` - 1
        sums = seconds[end] - seconds[first], parameters[end] - parameters[first]
        return stage_seconds(*sums, replicas, bandwidth, overlap)

    def seconds_before(first):  # of the boundary in front of layer `first`
        crossing = overlap and first > 0
        return 2 * layers[first - 1].activation_bytes / bandwidth if crossing else 0.0

    # slowest[end][used] is A(end, used) of the paper: the slowest part of the best plan for the
    # first `end` layers on `used` workers. last_stage[end, used] is how that plan ends.
    slowest = [[math.inf] * (workers + 1) for _ in range(len(layers) + 1)]
    slowest[0][0] = 0.0
    last_stage = {}
    for end in range(1, len(layers) + 1):
        for first in range(end):
            held = activations[end] - activations[first] + parameters[end] - parameters[first]
            for replicas in range(1, 2 if straight else workers + 1):
                added = max(seconds_before(first), seconds_of(first, end, replicas))
                for used in range(replicas, workers + 1):
                    copies = -(-(workers - used) // replicas)  # rounded up
                    if memory is not None and copies * held > memory:
                        continue
                    candidate = max(slowest[first][used - replicas], added)
                    if candidate < slowest[end][used]:
                        slowest[end][used] = candidate
                        last_stage[end, used] = first, replicas

    if math.isinf(slowest[-1][workers]):
        raise PartitionError(
            f"--memory {memory:g}: every plan has a stage that needs more; allow more bytes"
        )

    # Walk back from the last layer, one stage at a time.
    stages = []
    end, used = len(layers), workers
    while end > 0:
        first, replicas = last_stage[end, used]
        costs = seconds_of(first, end, replicas), seconds_before(end) if stages else 0.0
        stages.insert(0, PlannedStage(first, end - 1, replicas, *costs))
        end, used = first, used - replicas
    return Plan(tuple(stages), slowest[-1][workers], seconds_of(0, len(layers), workers))


def check_size(num_layers, workers, straight=False):
    """Raise PartitionError for a plan that cannot exist, or whose search would take minutes."""
    if straight and workers > num_layers:
        raise PartitionError(
            f"--straight: {workers} workers need a layer each; use at most {num_layers} workers"
        )
    shares = workers if straight else workers * (workers + 1) // 2
    if num_layers * (num_layers + 1) // 2 * shares > MOST_COMPARISONS:
        raise PartitionError(
            f"--workers {workers} and {num_layers} layers make too many plans; use fewer of either"
        )


EXAMPLE_PROFILE = (  # PipeDream's graph.txt has the same four figures of a node
    '{"layers": [{"forward_ms": 1, "backward_ms": 2, "activation_bytes": 4e6, '
    '"parameter_bytes": 8e6}, ...]}, and write a graph.txt of PipeDream in this form'
)


def read_profile(path):
    """Read a Profile from JSON: {"model": ..., "layers": [{"name": ..., and FIELDS}, ...]}.

    Times in milliseconds, sizes in bytes, of one mini-batch. Raises PartitionError.
    """
    try:
        return profile_from(read_json(path, LARGEST_FILE))
    except InputError as error:
        raise PartitionError(
            f"--profile {error}; name a JSON file like {EXAMPLE_PROFILE}"
        ) from None
    except PartitionError as error:
        raise PartitionError(f"--profile {path}: {error}") from None


def profile_from(content):
    """The Profile of a parsed JSON file; see `read_profile`. Raises PartitionError."""
    layers = content.get("layers") if isinstance(content, dict) else None
    if not isinstance(layers, list) or not layers:
        raise PartitionError("a profile has a list 'layers' with at least one layer")
    layers = tuple(layer_profile_from(index, layer) for index, layer in enumerate(layers))
    if not any(layer.seconds for layer in layers):
        raise PartitionError("every forward_ms and backward_ms is 0, so there is nothing to plan")
    name = content.get("model", "model")
    if not (isinstance(name, str) and name.isprintable() and len(name) <= MOST_LETTERS):
        raise PartitionError(f"'model' is not a name of at most {MOST_LETTERS} letters")
    return Profile(name, layers)


def layer_profile_from(index, layer):
    """A LayerProfile from a layer of a profile's JSON. Raises PartitionError with the field."""
    if not isinstance(layer, dict):
        raise PartitionError(f"layer {index} is not an object with the fields {', '.join(FIELDS)}")
    for key in (*FIELDS, *(["kept_bytes"] if "kept_bytes" in layer else [])):
        if key not in layer:
            raise PartitionError(f"layer {index} has no {key}")
        value = layer[key]
        if not is_number(value, 0, LARGEST_FIGURE):
            value = json.dumps(value)[:40]
            raise PartitionError(f"layer {index}: {key} {value} is not a number from 0 to 1e18")
    forward, backward, activation, parameters = (layer[key] for key in FIELDS)
    times = forward / 1000, backward / 1000
    name = str(layer.get("name", index))
    return LayerProfile(name, *times, activation, parameters, layer.get("kept_bytes"))


def profile_as_json(profile, config, batch_size, dtype):
    """A Profile of the course's model in the form of `read_profile`, with its sizes for plan.py."""
    return {
        "model": profile.model,
        "rows": batch_size,
        "length": config.seq_len,
        "bytes_per_value": dtype.itemsize,
        "layers": [
            {
                "name": layer.name,
                "forward_ms": 1000 * layer.forward_seconds,
                "backward_ms": 1000 * layer.backward_seconds,
                "activation_bytes": layer.activation_bytes,
                "parameter_bytes": layer.parameter_bytes,
                "kept_bytes": layer.kept_bytes,
            }
            for layer in profile.layers
        ],
    }


def profile_model(config, batch_size, dtype=torch.float64, device="cpu", repeats=5):
    """Measure the course's model, layer by layer, into a Profile of one mini-batch.

    Times are the median of `repeats` rounds over all layers, after a round that is not counted, on
    one thread as in training. If another program disturbs a round, it disturbs one time of many
    layers, and not all times of one layer. The weights and gradients of all layers are in memory at
    once. The embedding counts with the first layer; the norm, the head and the loss count with the
    last, whose output is the scores.
    """
    torch.set_num_threads(1)
    sizes = batch_size, dtype, torch.device(device)
    layers = [TimedLayer(config, index, *sizes) for index in range(config.layers)]
    for _ in range(1 + repeats):
        for layer in layers:
            layer.run()
    return Profile("the course's model", tuple(layer.profile() for layer in layers))


class TimedLayer:
    """One decoder layer of the course's model, whose forward and backward are timed in each run."""

    def __init__(self, config, index, batch_size, dtype, device):
        shape = batch_size, config.seq_len
        self.name, self.device = f"layer {index}", device
        self.part = build_part(config, index, index + 1, dtype=dtype, device=device)
        self.tokens = torch.randint(ModelConfig.vocabulary, shape, device=device)
        activation = torch.randn(*shape, config.dim, dtype=dtype, device=device)
        self.inputs = self.tokens if self.part.is_first else activation.requires_grad_()
        self.gradient = None if self.part.is_last else torch.randn_like(activation)
        self.times, self.kept, self.output_bytes = [], {}, 0

    def run(self):
        """Run the forward and the backward once. The first run notes what the forward keeps."""
        hooks = nullcontext() if self.times else saved_tensors_hooks(self._note, lambda kept: kept)
        start = now(self.device)
        with hooks:
            output = self.part(self.inputs)
            result = token_loss(output, self.tokens) if self.part.is_last else output
        middle = now(self.device)
        torch.autograd.backward(result, self.gradient)
        self.times.append((middle - start, now(self.device) - middle))
        self.output_bytes = output.nbytes

    def _note(self, tensor):
        own = [*self.part.parameters(), *self.part.buffers(), self.tokens]
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in {one.data_ptr() for one in own}:
            self.kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def profile(self):
        """The LayerProfile of all runs but the first."""
        forward, backward = (statistics.median(column) for column in zip(*self.times[1:]))
        weights = sum(parameter.nbytes for parameter in self.part.parameters())
        sizes = self.output_bytes, weights, sum(self.kept.values())
        return LayerProfile(self.name, forward, backward, *sizes)


def now(device):
    """The time in seconds, read once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
