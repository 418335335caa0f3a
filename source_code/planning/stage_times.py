# SPDX-License-Identifier: Apache-2.0
"""The seconds of a plan's stages, of its sums and its update, and the bytes of its messages.

`stages_of` returns the object that computes them: by counting operations and bytes (CountedStages),
by the coefficients of a machine that was measured (MeasuredStages), or, for the stages themselves,
by a profile of the model's layers (ByProfile). Times are in seconds, sizes in bytes.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from planning.plan_memory import SPLIT
from planning.profiled import (
    ProfiledModel,
    activation_bytes,
    stage_times,
)
from planning.time_coefficients import (
    embedding_quantities,
    head_quantities,
    layer_quantities,
)
from planning.traffic import all_reduce_time, gather_time
from planning.training_plan import Plan
from planning.transformer import (
    BYTES_PER_VALUE,
    Model,
    logit_bytes,
    passing_bytes,
    score_bytes,
)

OPTIMIZER_PASS = 60  # bytes per weight that unscaling, the norm, clipping and AdamW read and write
RECOMPUTED_PRODUCTS = 0.45  # of a layer's products: every second, see transformer.py
# A gated layer in plain torch moves about twice the bytes of one with fused kernels: on an H100 the
# compiled layer was faster by the time of 0.9 to 1.5 times these bytes (docs/measurements.md).
PLAIN_PASSES = 2
TENSORS_PER_LAYER = 9  # of a layer of the course's own model


def stages_of(model, machine, plan):
    """Return the object that computes the times of a plan's stages."""
    profiled = isinstance(model, ProfiledModel)
    if machine.measured:
        return (ProfiledStagesHere if profiled else MeasuredStages)(model, machine, plan)
    return (ProfiledStages if profiled else CountedStages)(model, machine, plan)


@dataclass(frozen=True)
class CountedStages:
    """Matrix products at the machine's rate, all other operations at its memory speed."""

    model: Model
    machine: object
    plan: Plan
    sums_by_layer = True  # gradients are summed as soon as a layer's are ready

    def seconds(self):
        """(forwards, backwards, their parts for the weights, second forwards), a list by stage each.

        Times are for one micro-batch. The last stage includes the head and the loss.
        """
        forward, given, weight, again = self.layer()
        layers = self.plan.layers_of(self.model)
        forwards = [count * forward for count in layers]
        backwards = [count * (given + weight) for count in layers]
        weights = [count * weight for count in layers]
        for times, more in zip((forwards, backwards, weights), self.head()):
            times[-1] += more
        return forwards, backwards, weights, [count * again for count in layers]

    def layer(self):
        """(forward, backward for the input, backward for the weights, second forward) of a layer.

        A backward has two products for each product of the forward, and fused attention recomputes
        its scores (FlashAttention). The forward and the backward have two sums over the tensor
        group each. With FSDP, torch.utils.checkpoint recomputes a layer: it stops as soon as it has
        what the backward needs, so it does not repeat the layer's last product.
        """
        plan, machine = self.plan, self.machine
        if plan.flash_2 and machine.flash_2_flops:
            machine = replace(machine, attention_flops=machine.flash_2_flops)
        stops = plan.recompute == "full" and plan.sharding in ("hybrid", "full")
        recompute = "stopped" if stops else plan.recompute
        passes = PLAIN_PASSES if self.model.gated and plan.kernels == "plain" else 1
        kernels = plan.fused_attention, plan.sequence_parallel, passes
        shape = plan.microbatch, plan.tensor, recompute, plan.precision
        return _layer_times(self.model, machine, *shape, plan.overlapped_tensor, *kernels)

    def head(self):
        """(forward, backward, its part for the weights) of head and loss."""
        model, machine, plan = self.model, self.machine, self.plan
        product = model.head_flops(plan.microbatch) / plan.tensor / machine.flops
        loss = logit_bytes(model, plan.microbatch, plan.tensor) / machine.memory_speed / 2
        return product + loss, 2 * product + loss, product

    def message_bytes(self, stage):
        """Bytes of the activation of a micro-batch after `stage`, or of its gradient."""
        model, width = self.model, self.machine.bytes_per_value
        return width * self.plan.microbatch * model.length * model.hidden

    def summing(self, weights):
        """Seconds of the sum of the gradients of so many weights over the replicas."""
        machine, plan = self.machine, self.plan
        inside, copies = plan.replicas_in_node(machine), plan.replicas
        size = plan.gradient_bytes * weights
        if plan.sharding == "hybrid":
            return all_reduce_time(machine, size / inside, copies // inside, 1)
        times = 1 if plan.scatters else 2  # an all-reduce is a reduce-scatter and an all-gather
        return times * gather_time(machine, size, copies, inside)

    def gathering(self, weights):
        """Seconds of gathering so many updated weights, if the replicas share an optimizer."""
        inside = self.plan.replicas_in_node(self.machine)
        return gather_time(self.machine, BYTES_PER_VALUE * weights, self.plan.replicas, inside)

    def updating(self, weights):
        """Seconds of the optimizer's update of so many weights."""
        return OPTIMIZER_PASS * weights / self.machine.memory_speed


class MeasuredStages(CountedStages):
    """The times of a machine that was measured: see time_coefficients.py."""

    sums_by_layer = False  # one message per stage

    def seconds(self):
        """The lists of CountedStages; each message also costs its sender and its receiver time."""
        model, plan, measured = self.model, self.plan, self.machine.measured
        times, again = {kind: [] for kind in "FBIW"}, []
        for stage, layers in enumerate(plan.layers_of(model)):
            inside = layer_quantities(model, plan.microbatch, layers)
            quantities = {"action": 1, **inside}
            if stage == 0:
                quantities |= embedding_quantities(model, plan.microbatch)
            if stage == plan.stages - 1:
                quantities |= head_quantities(model, plan.microbatch)
            messages = measured.message * message_ends(plan, stage)
            for kind, column in times.items():
                seconds = measured.seconds(kind, quantities)
                column.append(seconds + (0.0 if kind == "W" else messages))
            again.append(measured.seconds("F", inside) if plan.recompute == "full" else 0.0)
        if plan.schedule in SPLIT:
            whole = [one + other for one, other in zip(times["I"], times["W"])]
            return times["F"], whole, times["W"], again
        return times["F"], times["B"], [one / 2 for one in times["B"]], again

    def summing(self, weights):
        return self.machine.measured.sum + self.machine.measured.sum_byte * 4 * weights

    def gathering(self, weights):
        return self.summing(weights) / 2  # an all-gather takes half of an all-reduce

    def updating(self, weights):
        one = self.machine.measured
        tensors = TENSORS_PER_LAYER * self.model.layers / self.plan.ranks
        return one.update + one.update_tensor * tensors + one.update_weight * weights + one.step


class ByProfile:
    """The times and activations of a profile; each half of a split backward is half of its time."""

    def seconds(self):
        forwards, backwards, again = stage_times(self.model, self.plan)
        return forwards, backwards, [one / 2 for one in backwards], again

    def message_bytes(self, stage):
        return activation_bytes(self.model, self.plan, stage)


class ProfiledStages(ByProfile, CountedStages):
    """A profile; sums and the update are counted."""


class ProfiledStagesHere(ByProfile, MeasuredStages):
    """A profile; sums and the update are those of the machine that was measured."""


def message_ends(plan, stage):
    """How many messages a forward of a stage receives and sends; a backward has as many."""
    neighbours = [other for other in (stage - 1, stage + 1) if 0 <= other < plan.stages]
    return sum(plan.rank_of(other) != plan.rank_of(stage) for other in neighbours)


@lru_cache(maxsize=10_000)
def _layer_times(model, machine, b, t, recompute, precision, overlapped, flash, parallel, passes):
    rate = machine.fp8_flops if precision == "fp8" else machine.flops
    products = 2 * b * model.length * model.layer_matrices / t / rate
    scores = model.score_flops(b) / t
    scores /= 2 * machine.attention_flops if flash else machine.flops  # flash: half of all pairs
    softmax = score_bytes(model, b, t, flash) / machine.memory_speed
    passing = passes * passing_bytes(model, b, t, parallel) / machine.memory_speed
    activation = BYTES_PER_VALUE * b * model.length * model.hidden
    sums = 2 * all_reduce_time(machine, activation, t, min(t, machine.gpus_per_node))
    sums *= 1 - machine.hidden if overlapped else 1
    forward = products + scores + softmax + passing + sums
    given = products + scores * (2.5 if flash else 2) + 2 * (softmax + passing) + sums
    again = {"none": 0.0, "selective": 0 if flash else scores + softmax, "full": forward}
    again["operator"] = RECOMPUTED_PRODUCTS * products + passing + sums / 2
    again["stopped"] = forward - 2 * b * model.length * model.hidden * model.inner_width / t / rate
    return forward, given, products, again[recompute]
