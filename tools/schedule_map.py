"""The map of the synchronous schedules: idle share of a step over micro-batches held, a dot for each.

All schedules train the same model on the same batch.
"""

from lab.drawing import FILL, FONT, OUTLINE, TEXT, draw_text, wrap
from lab.figures import Picture
from lab.held_curve import fullest_rank
from lab.simulator import Costs, simulate
from pipeline.schedule import ScheduleError
from pipeline.schedules import SCHEDULES, build_schedule

WIDE, TALL = 480, 330  # in the drawing's own units; the letters can be read on a phone
LEFT, TOP, RIGHT, BOTTOM = 48, 34, 16, 46
WHOLE, SPLIT = "#0072B2", FILL["W"]  # dots: schedules with whole backwards, and with split ones
DOT = 6
BOLD = f'font-size="{FONT}" font-weight="bold"'


def same_work(name, ranks, microbatches):
    """The predicted Timeline of one step, with the same model and the same batch for every schedule.

    All layers of a rank take 10 ms forward and 20 ms backward for one micro-batch, so a stage of a
    rank with v stages takes 1/v of that. Raises ScheduleError for sizes that the schedule does not
    have.
    """
    schedule = build_schedule(name, ranks, microbatches)
    share = schedule.num_ranks / schedule.num_stages
    return simulate(schedule, Costs(10 * share, 20 * share))


def comparable(ranks, microbatches):
    """{name: Timeline} of `same_work`: all schedules that have these sizes and update once per step.

    Naive model parallelism is left out, because its only micro-batch is the whole batch.
    """
    found = {}
    for name, row in SCHEDULES.items():
        if row.synchronous and name != "naive":
            try:
                found[name] = same_work(name, ranks, microbatches)
            except ScheduleError:
                continue
    return found


def places(timelines):
    """{name: (micro-batches that the fullest rank holds, idle share of the step, 0 to 1)}."""
    return {
        name: (fullest_rank(timeline)[1], timeline.bubble_over_total)
        for name, timeline in timelines.items()
    }


def draw_map(ranks=4, microbatches=8):
    """The map as a Picture. Further left is less memory, further down is less waiting."""
    timelines = comparable(ranks, microbatches)
    found = places(timelines)
    most = max(held for held, _ in found.values())
    highest = max(0.1, *(idle for _, idle in found.values()))

    def x(held):
        return LEFT + held / (1.08 * most) * (WIDE - LEFT - RIGHT)

    def y(idle):
        return TALL - BOTTOM - idle / (1.1 * highest) * (TALL - TOP - BOTTOM)

    parts = [*_axes(x, y, most, highest)]
    parts.append(draw_text(4, FONT, "share of a step in which a rank is idle", "start"))
    parts.append(
        draw_text(
            WIDE - RIGHT, TALL - 8, "micro-batches that the fullest rank holds at most", "end"
        )
    )
    dots = {name: (x(held), y(idle)) for name, (held, idle) in found.items()}
    for name, (across, down) in dots.items():
        split = any(event.action.kind == "W" for event in timelines[name].events)
        parts.append(
            f'<circle cx="{across:.1f}" cy="{down:.1f}" r="{DOT}" '
            f'fill="{SPLIT if split else WHOLE}" stroke="{OUTLINE}"/>'
        )
    parts += _names(dots)
    words = ", ".join(
        f"{name} {idle:.1%} with {held:g} held".replace("%", " %")
        for name, (held, idle) in found.items()
    )
    alt = (
        f"Idle share over micro-batches held, {ranks} ranks, {microbatches} micro-batches: {words}."
    )
    return Picture(wrap(parts, TALL, alt, width=WIDE), alt)


def _axes(x, y, most, highest):
    across = max(1, round(most / 8))
    down = 0.05 if highest < 0.2 else 0.1
    for step in range(int(1.1 * highest / down) + 1):
        idle = step * down
        yield f'<path d="M{LEFT} {y(idle):.1f}H{WIDE - RIGHT}" stroke="{TEXT}" stroke-opacity="0.4"/>'
        yield draw_text(LEFT - 8, y(idle) + 4.5, f"{idle:.0%}".replace("%", " %"), "end")
    for held in range(0, int(1.08 * most) + 1, across):
        yield draw_text(x(held), y(0) + 18, str(held), "middle")


def _names(dots):
    """The name of each dot, on the first side where it covers no other dot and no other name."""
    taken = [(across - DOT, down - DOT, across + DOT, down + DOT) for across, down in dots.values()]
    parts = []
    for name, (across, down) in dots.items():
        wide = 0.6 * FONT * len(name)
        sides = [(11, 5), (-11 - wide, 5), (-wide / 2, -11), (-wide / 2, 21), (11, 19), (11, -9)]
        boxes = [
            (across + right, down + below - 10, across + right + wide, down + below + 3)
            for right, below in sides
        ]
        free = [box for box in boxes if box[2] < WIDE and not any(_overlap(box, t) for t in taken)]
        left, _, _, bottom = (free or boxes)[0]
        taken.append((free or boxes)[0])
        parts.append(draw_text(left, bottom - 3, name, "start", BOLD))
    return parts


def _overlap(one, other):
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
