# SPDX-License-Identifier: Apache-2.0
"""Rejects flags of the lab before a run starts: outputs that cannot be written, a wrong pace."""

import os
from dataclasses import replace

from files.outputs import can_be_written
from lab.simulator import Costs
from pipeline.schedules import MOST_ACTIONS, SCHEDULES


def check_has_ranks(arguments):
    """Reject the lab's flags for one process with several stages: the lab attaches to ranks."""
    names = "pace", "timeline", "profile", "record", "rehearse"
    if getattr(arguments, "single_process", None) and any(getattr(arguments, n) for n in names):
        raise SystemExit(
            "--single-process has no ranks to pace or draw; leave out --pace, --timeline, "
            "--profile, --record and --rehearse"
        )


def check_actions(arguments):
    """Reject more micro-batches than the lab's schedule of a step may have actions for."""
    stages = arguments.num_ranks * _chunks_of(arguments)
    actions = 2 * stages * getattr(arguments, "microbatches", 0)
    if actions > MOST_ACTIONS:
        raise SystemExit(
            f"--microbatches {arguments.microbatches:,}: a step is made of {actions:,} actions, and "
            f"{MOST_ACTIONS:,} are the most; use fewer"
        )


def _chunks_of(arguments):
    """The number of stages of a rank: that of --chunks, or the default of --schedule."""
    generator = SCHEDULES.get(getattr(arguments, "schedule", None))
    return getattr(arguments, "chunks", None) or (generator and generator.chunks) or 1


def check_recording(arguments):
    """Reject a --record that could not be written, or that would mix two recordings."""
    folder = arguments.record
    if folder is None:
        return
    parent, whole = os.path.dirname(os.path.abspath(folder)), os.path.abspath(folder)
    if not os.path.isdir(parent):
        raise SystemExit(f"--record {folder}: the folder {parent} does not exist; make it first")
    if not os.path.isdir(whole):
        possible = not os.path.lexists(whole) and can_be_written(whole)
    elif not os.access(whole, os.R_OK | os.X_OK):
        possible = False
    elif os.listdir(whole):
        raise SystemExit(
            f"--record {folder}: there is something in it; name a new folder, or empty this one"
        )
    else:
        possible = can_be_written(os.path.join(whole, "recording"))
    if not possible:
        raise SystemExit(f"--record {folder} cannot be written; name a folder of yours")


def check_pace(arguments):
    """Set `arguments.pace_costs`: --pace as Costs in milliseconds, or None. Reject a wrong pace."""
    pace, timeout = arguments.pace, arguments.timeout
    arguments.pace_costs = None
    if pace is None:
        return
    if len(pace) not in (2, 3):
        raise SystemExit(
            "--pace takes two or three times in milliseconds: forward, backward, and the weights' "
            "part of the backward"
        )
    if len(pace) == 3 and pace[2] >= pace[1]:
        raise SystemExit(
            "--pace: the weights' part must be less than the full backward; lower the third time"
        )
    if max(pace) >= 1000 * timeout:
        raise SystemExit(
            f"--pace: an action of {max(pace):g} ms outlasts --timeout {timeout:g} s; use a "
            "shorter time or a longer --timeout"
        )
    costs = Costs(*pace)
    if getattr(arguments, "recompute", "none") in ("stage", "layer"):
        # --pace gives no time for attention alone, so selective recomputation adds nothing.
        costs = replace(costs, recompute=costs.forward)
    arguments.pace_costs = costs
    longest = costs.backward + costs.recompute
    if longest >= 1000 * timeout:
        raise SystemExit(
            f"--pace: a backward that recomputes takes {longest:g} ms and outlasts --timeout "
            f"{timeout:g} s; use shorter times or a longer --timeout"
        )


def check_pace_per_layer(arguments):
    """Reject --pace-per-layer without a pace, or if an action would last longer than --timeout."""
    if not arguments.pace_per_layer:
        return
    pace, timeout = arguments.pace_costs, arguments.timeout
    if pace is None:
        raise SystemExit("--pace-per-layer says what --pace is the time of; give --pace, too")
    replicas = getattr(arguments, "replicas", None) or 1  # pipedream.py has a number for each stage
    ranks = arguments.num_ranks // replicas if isinstance(replicas, int) else len(replicas)
    stages = ranks * _chunks_of(arguments)
    cut = arguments.cut if isinstance(arguments.cut, list) else None  # not --cut auto
    most = max(cut or [-(-arguments.layers // stages)])
    longest = most * max(pace.forward, pace.backward + pace.recompute)
    if longest >= 1000 * timeout:
        raise SystemExit(
            f"--pace-per-layer: an action of a stage with {most} layers takes {longest:g} ms and "
            f"outlasts --timeout {timeout:g} s; use a shorter --pace"
        )


def pace_by_layers(pace, cut):
    """`pace` times the number of layers of each stage in `cut`, as Costs in milliseconds."""
    layers = [last - first for first, last in cut]
    weight = pace.backward / 2 if pace.backward_weight is None else pace.backward_weight
    return replace(
        pace,
        forward=[pace.forward * count for count in layers],
        backward=[pace.backward * count for count in layers],
        backward_weight=[weight * count for count in layers],
        recompute=[pace.recompute * count for count in layers],
    )
