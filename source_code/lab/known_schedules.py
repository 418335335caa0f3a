# SPDX-License-Identifier: Apache-2.0
"""Finds the published name of a schedule by comparing it with the results of all generators."""

from lab.simulator import Costs, simulate
from pipeline.schedule import ScheduleError
from pipeline.schedules import SCHEDULES, build_schedule

# How papers write a name; the others are written as in SCHEDULES.
TITLES = {
    "naive": "the naive schedule",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "pipedream": "PipeDream",
    "interleaved-1f1b": "interleaved 1F1B",
    "looped-bfs": "looped BFS",
    "zb-h1": "ZB-H1",
    "zb-h2": "ZB-H2",
    "zb-v": "ZB-V",
    "v-half": "V-Half",
    "v-min": "V-Min",
    "dualpipe-v": "DualPipeV",
}


def known_names(schedule):
    """The keys of SCHEDULES whose generator gives the same schedule for this size.

    Two schedules count as the same if every rank takes the same kinds of actions on the same stages
    in the same order, and the steps have the same length. The micro-batches may have other numbers,
    so GPipe's backwards may run in either order. Small pipelines have several equal schedules.
    """
    return [name for name in SCHEDULES if _is_made_by(name, schedule)]


def _is_made_by(name, schedule):
    chunks, rest = divmod(schedule.num_stages, schedule.num_ranks)
    has_chunks = SCHEDULES[name].chunks is not None
    if rest or has_chunks != (chunks > 1):
        return False
    try:
        made = build_schedule(
            name, schedule.num_ranks, schedule.num_microbatches, chunks if has_chunks else None
        )
    except ScheduleError:  # the generator does not allow this size
        return False
    return _kinds(made) == _kinds(schedule) and _length(made) == _length(schedule)


def _kinds(schedule):
    return [[action[:2] for action in order] for order in schedule.orders]


def _length(schedule):
    return simulate(schedule, Costs(1, 2, 1)).makespan


def tell_name(schedule):
    """A sentence with the names of the schedule, or "" if it has none."""
    titles = [TITLES.get(name, name) for name in known_names(schedule)]
    if not titles:
        return ""
    built = f"You have built {titles[0]}."
    if len(titles) == 1:
        return built
    others = ", ".join(titles[1:])
    return f"{built} With so few ranks and micro-batches the same order is also {others}."
