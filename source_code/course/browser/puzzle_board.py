# SPDX-License-Identifier: Apache-2.0
"""Draws rows that are not yet a whole schedule, on a board with a fixed axis and a target.

The board shows all ranks of the puzzle. An action in the rows that cannot start yet is dashed, with
an arrow to the rank that has to make what it waits for: a deadlock is a ring of such arrows.
"""

from typing import NamedTuple

from lab.drawing import (
    FONT,
    LEFT,
    RIGHT,
    ROW,
    WIDTH,
    Placement,
    draw_legend,
    draw_place,
    draw_text,
    wrap,
)
from lab.figures import Picture
from lab.simulator import simulate
from lab.story import short
from pipeline.schedule import Schedule, ScheduleError, message_of, needs_of
from pipeline.schedules.text_form import from_csv

STUCK = "#D3006E"
TOP = 2 * FONT + 12


class Stuck(NamedTuple):
    """An action that cannot start, the message that it needs, and the rank that makes it."""

    rank: int
    action: tuple
    message: tuple
    maker: int


def read_rows(rows):
    """The actions of each row as a list of tuples, or None where a row cannot be read."""
    try:
        return [from_csv(row).orders[0] if row.strip() else () for row in rows]
    except ScheduleError:
        return None


def actions_to_go(given, written):
    """How many actions of the puzzle the rows lack; None if they have a wrong one or one twice."""
    kinds = "FIW" if given.split and any(a.kind in "IW" for row in written for a in row) else "FB"
    wanted = {
        (rank, stage, kind, microbatch)
        for stage, rank in enumerate(given.rank_of_stage)
        for kind in kinds
        for microbatch in range(given.num_microbatches)
    }
    found = [(rank, *action) for rank, row in enumerate(written) for action in row]
    if len(set(found)) < len(found) or not wanted.issuperset(found):
        return None
    return len(wanted) - len(found)


def tell_rows(given, written):
    """The sentence on rows that lack actions: how many, and which cannot start; otherwise None."""
    missing = actions_to_go(given, written)
    if not missing:
        return None
    stuck = stuck_actions(given, written, runnable(written, len(given.rank_of_stage)))
    words = [f"{missing} action{'s' * (missing > 1)} to go"]
    words += [f"rank {each.rank} waits with {each.action} for {each.message}" for each in stuck]
    return "; ".join(words) + "."


def runnable(orders, num_stages):
    """The actions that each rank can run before no rank can run its next action."""
    done, steps = set(), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            for action in order[steps[rank] :]:
                if action.stage >= num_stages or not done.issuperset(needs_of(action, num_stages)):
                    break
                done.add(message_of(action))
                steps[rank] += 1
                moved = True
    return tuple(tuple(order[:step]) for order, step in zip(orders, steps))


def stuck_actions(given, written, orders):
    """The Stuck action of each rank whose next action cannot start."""
    num_stages = len(given.rank_of_stage)
    done = {message_of(action) for order in orders for action in order}
    found = []
    for rank, (row, order) in enumerate(zip(written, orders)):
        if len(row) == len(order) or row[len(order)].stage >= num_stages:
            continue
        action = row[len(order)]
        message = next(need for need in needs_of(action, num_stages) if need not in done)
        found.append(Stuck(rank, action, message, given.rank_of_stage[message.stage]))
    return found


def draw_board(given, written, width=WIDTH):
    """The Picture of the actions that can run, and of those that cannot start."""
    orders = runnable(written, len(given.rank_of_stage))
    schedule = Schedule("so far", orders)
    vars(schedule)["num_stages"] = len(given.rank_of_stage)  # the rows may lack some stages so far
    timeline = simulate(schedule, given.costs)
    taken = timeline.makespan if timeline.events else 0
    # The puzzle, not the rows, sets the axis, so that a tap does not change the scale.
    vars(timeline)["num_ranks"] = given.num_ranks
    vars(timeline)["makespan"] = max(taken, 1.02 * axis_of(given))
    vars(timeline)["start"] = 0.0
    scale = (width - LEFT - RIGHT) / timeline.makespan
    place = Placement("yours", timeline, FONT + 8, None, TOP, scale)
    target = f" of {short(given.target)} ms" if given.measure == "makespan" else " ms"
    title = f"yours so far: {short(taken)}{target}"
    parts = draw_place(place, "ms", title)
    if given.measure == "makespan":
        at = place.x(given.target)
        parts.append(
            f'<path d="M{at:.1f} {TOP - 4}V{place.bottom + 2}" stroke="{STUCK}" stroke-width="2" '
            f'stroke-dasharray="6 4"/>'
        )
        parts.append(draw_text(at, TOP - 7, "target", "end"))
    stuck = stuck_actions(given, written, orders)
    parts += draw_stuck(place, stuck, given.costs)
    if timeline.events:
        parts += draw_legend([timeline], place.bottom + 30, width=width)
    alt = f"{title}, {given.num_ranks} ranks"
    alt += "".join(f"; rank {s.rank} waits with {s.action} for {s.message}" for s in stuck)
    return Picture(wrap(parts, place.bottom + 104, alt, titled=False, width=width), alt)


def axis_of(given):
    """The least length of the board's axis in ms: the target, or 1.3 times the work of a rank."""
    if given.measure == "makespan":
        return given.target
    stages = max(given.rank_of_stage.count(rank) for rank in range(given.num_ranks))
    costs = given.costs
    return 1.3 * stages * given.num_microbatches * (costs.forward + costs.backward)


def draw_stuck(place, stuck, costs):
    """Dashed blocks of the actions that cannot start, and an arrow from each to its maker's row."""
    ends = {each.rank: 0.0 for each in stuck}
    for event in place.timeline.events:
        ends[event.rank] = max(ends.get(event.rank, 0.0), event.end)
    parts = []
    for each in stuck:
        left, top = place.x(ends[each.rank]), place.y(each.rank)
        width = max(32, costs.of(each.action) * place.scale)
        parts.append(
            f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW}" fill="none" '
            f'stroke="{STUCK}" stroke-width="2" stroke-dasharray="4 3"/>'
        )
        parts.append(draw_text(left + width / 2, top + ROW / 2 + 4.5, str(each.action), "middle"))
        if each.maker != each.rank:
            down = each.maker > each.rank
            x1 = left + (width + 8 if down else 8)
            y1 = top + (ROW if down else 0)
            x2 = place.x(ends.get(each.maker, 0.0)) + (22 if down else 16)
            y2 = place.y(each.maker) + (0 if down else ROW)
            tip = -6 if down else 6
            parts.append(
                f'<path d="M{x1:.1f} {y1}L{x2:.1f} {y2}M{x2 - 5:.1f} {y2 + tip}L{x2:.1f} {y2}'
                f'L{x2 + 5:.1f} {y2 + tip}" fill="none" stroke="{STUCK}" stroke-width="2"/>'
            )
    return parts
