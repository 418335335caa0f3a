# SPDX-License-Identifier: Apache-2.0
"""Checks of lesson 10b: the collectives of a layer on real ranks, and a mesh for a machine."""

from course.checks.answer import NotAttempted, checked, close, first_complaint, many
from course.checks.build_text import request_of
from course.checks.reader_on_ranks import perform
from lab.simulator import Costs, simulate
from pipeline.schedules import one_f_one_b

PROGRAM = "course.checks.lesson_10b_on_ranks.main"
SIZES = {"": 2, "on 3 ranks, with other sizes, ": 3}
NAMES = {
    "output": "the layer's output",
    "down": "the gradient of the second matrix",
    "up": "the gradient of the first matrix",
    "input": "the gradient of the layer's input",
}
PLACES = {  # the code to look at first if that tensor is wrong
    "output": "forward",
    "down": "the backward of leaving",
    "up": "the backward of leaving",
    "input": "the backward of entering",
}


@checked("output and gradients of the whole layer, with one sum forward and one backward.")
def layer_ends(ends):
    """Check `ends(all_reduce)`: a pair (enter, leave), applied before and after a split layer."""
    request = request_of(ends, places=4, program=PROGRAM)
    return first_complaint(lambda ranks: complaint_on(perform(request, ranks)), SIZES)


def complaint_on(reports):
    """The first error in what the ranks have reported, or None."""
    for rank, report in enumerate(reports):
        if report is None:
            return "return a pair, such as Enter.apply, Leave.apply"
        if "wrong" in report:
            return (
                f"{report['wrong']}; each forward returns a tensor, and layer_ends returns "
                "Enter.apply, Leave.apply"
            )
        for name in NAMES:
            if complaint := complaint_of(name, *report[name]):
                return f"on rank {rank} {complaint}"
        if not report["beside"]:
            return (
                "all is right as long as nothing but the layer uses its input; the gradient of "
                "another use, such as a residual, is summed, too: put a hook on a tensor of your "
                "own, x.view_as(x), and return that tensor"
            )
        for way in ("forward", "backward"):
            if report[way] != 1:
                calls = many(report[way], "call")
                return f"all is right, but with {calls} of all_reduce {way}; it takes exactly one"


def complaint_of(name, factor, of):
    """The error in one of the four tensors, which is `factor` times the tensor `of`, or None."""
    what, where = NAMES[name], PLACES[name]
    if of == "none":
        return f"{what} is missing: does {where} return a tensor?"
    if of == "else":
        return f"{what} is not a multiple of the right one: look at {where}"
    if of == "own" and name == "output" and close(factor, 2):
        return f"{what} is 2 times this rank's own share: the sum is at the layer's entrance, not at its end"
    if of == "own":
        times = "" if close(factor, 1) else f"{factor:g} times "
        return f"{what} is {times}this rank's own share: the sum is missing in {where}"
    if close(factor, 1):
        return None
    if factor == 0:
        return f"{what} is zero; look at {where}"
    reason = "something is summed that is whole on every rank"
    if factor < 1:
        reason = "the ranks' terms are added up, and nothing is divided"
    return f"{what} is {factor:g} times the right one: {reason}; look at {where}"


# The second exercise: 8 layers, 16 micro-batches of 4 ms forward and 8 ms backward per layer.

LAYERS, MICROBATCHES = 8, 16
MACHINES = {
    "one node of 8": {"node": 8, "inside": 0.05, "between": 3.0, "least": 4},
    "two nodes of 4": {"node": 4, "inside": 0.05, "between": 3.0, "least": 4},
    "eight nodes of 1": {"node": 1, "inside": 0.05, "between": 3.0, "least": 2},
}


def step_of(mesh, machine):
    """Milliseconds of a step of 8 ranks; `mesh` is (replicas, stages, ranks that share a layer).

    A collective or a message takes `inside` ms within a node and `between` ms between nodes. The
    sum of all gradients takes 200 times as long, divided by the number of ranks per model.
    """
    replicas, stages, t = mesh
    node, inside, between = machine["node"], machine["inside"], machine["between"]
    layers = LAYERS // stages
    talk = 2 * (inside if t <= node else between) if t > 1 else 0  # an unsplit layer sends nothing
    hops = {
        pair: inside if s * t // node == (s + 1) * t // node else between
        for s in range(stages - 1)
        for pair in ((s, s + 1), (s + 1, s))
    }
    costs = Costs(layers * (4 / t + talk), layers * (8 / t + talk), transfer=hops)
    step = simulate(one_f_one_b(stages, MICROBATCHES // replicas), costs).makespan
    far = between if replicas * stages * t > node else inside
    return step + (200 * far / (stages * t) if replicas > 1 else 0)


def meshes(machine):
    """{mesh: milliseconds of a step} for all meshes of 8 ranks into which the model fits."""
    powers = (1, 2, 4, 8)
    all_of_8 = [(d, p, 8 // (d * p)) for d in powers for p in powers if d * p <= 8]
    return {
        mesh: step_of(mesh, machine) for mesh in all_of_8 if mesh[1] * mesh[2] >= machine["least"]
    }


@checked("sharing a layer stays in a node, stages cross, replicas take what is left.")
def chosen_meshes(chosen):
    """Check `chosen`: for each of MACHINES (replicas, stages, t), at most 3 % over the fastest."""
    if not isinstance(chosen, dict):
        return "chosen is a dictionary, {machine: (replicas, stages, t)}"
    if all(mesh is ... for mesh in chosen.values()):
        raise NotAttempted
    for name, machine in MACHINES.items():
        mesh = chosen.get(name)
        mesh = mesh.tolist() if hasattr(mesh, "tolist") else mesh  # of numpy or torch
        if not isinstance(mesh, (tuple, list)) or len(mesh) != 3:
            return f"{name}: give three numbers, (replicas, stages, t)"
        if not all(number in range(1, 9) for number in mesh):
            return f"{name}: {shown(mesh)} is not made of whole numbers from 1 to 8"
        mesh = tuple(map(int, mesh))
        if mesh not in meshes(machine):
            return complain_of_size(name, machine, mesh)
        took, best = step_of(mesh, machine), min(meshes(machine).values())
        if took > 1.03 * best:
            case = f"{name}: {shown(mesh)} takes {took:.0f} ms, and {best:.0f} ms can be had"
            return f"{case}; {what_costs(mesh, machine)}"


def what_costs(mesh, machine):
    """What makes a mesh slow on a machine, as the end of a sentence."""
    replicas, stages, t = mesh
    if t > machine["node"]:
        return "the collectives of its layers cross the network"
    if replicas > 1 and machine["node"] < 8:
        return "its sums of gradients cross the network"
    if stages > 1:
        return f"its pipelines of {stages} stages have a bubble"
    return "each of its collectives takes as long as with fewer ranks, and each rank has all micro-batches"


def complain_of_size(name, machine, mesh):
    """The sentence about a mesh that does not have 8 ranks or not enough memory, or None."""
    replicas, stages, t = mesh
    if replicas * stages * t != 8:
        return f"{name}: {shown(mesh)} is {replicas * stages * t} ranks, and there are 8"
    return (
        f"{name}: {shown(mesh)} spreads the model over {many(stages * t, 'rank')}, and it "
        f"needs {machine['least']}"
    )


def shown(mesh):
    return " x ".join(map(str, mesh))
