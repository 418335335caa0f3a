# SPDX-License-Identifier: Apache-2.0
"""What a rank holds over time, in micro-batches, and its drawing below a timeline.

A rank holds the activation of a stage from the start of its forward to the end of its backward, or
of the backward for the weights. With v stages per rank, each activation counts as 1/v of a
micro-batch, so that schedules with different numbers of stages can be compared.
"""

import re
from html import escape

from lab.drawing import FONT, LEFT, RIGHT, TEXT, WIDTH, draw_text

HELD = "#D55E00"
LETTER = 6.7  # the width of a letter, in units of the drawing
TALL = 54  # of the curve's own part of a drawing


def held_over_time(timeline, rank):
    """[(time, held)] of one rank: from each time on it holds that many micro-batches."""
    events = timeline.by_rank[rank]
    stages = len({event.action.stage for event in events})
    changes = [(event.start, 1) for event in events if event.action.kind == "F"]
    changes += [(event.end, -1) for event in events if event.action.kind in "BW"]
    steps, held = [], 0
    for time, change in sorted(changes):  # at equal times, what ends comes first
        held += change
        if steps and steps[-1][0] == time - timeline.start:
            steps.pop()
        steps.append((time - timeline.start, held / stages))
    return steps


def fullest_rank(timeline):
    """(the rank that holds the most micro-batches, how many). The first of several equal ranks."""
    peaks = [peak_held(timeline, rank) for rank in range(timeline.num_ranks)]
    return peaks.index(max(peaks)), max(peaks)


def peak_held(timeline, rank):
    """The most micro-batches that one rank holds at a time."""
    return max((held for _, held in held_over_time(timeline, rank)), default=0)


def outline(steps, end, x, y):
    """The path of a curve of steps from time 0 to `end`; `x` and `y` place a time and a number."""
    path, before = f"M{x(0):.1f} {y(0):.1f}", 0
    for time, held in [*steps, (end, 0)]:
        path += f"H{x(time):.1f}" + (f"V{y(held):.1f}" if held != before else "")
        before = held
    return path


def draw_held(timelines, width=WIDTH):
    """The SVG text of what the fullest rank of each timeline holds (see `held_parts`)."""
    parts, height, alt = held_parts(timelines, width)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{escape(alt)}" '
        f'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">{"".join(parts)}</svg>'
    )


def held_parts(timelines, width, rank=None):
    """(SVG elements, their height, the same in words): what `rank` holds in each timeline.

    Without `rank` it is the fullest rank of each timeline. `timelines` is {label: Timeline}, as in
    `draw_timelines`, and the time axis is the same as there. All curves have one scale; the first
    is an area, the others are dashed lines.
    """
    longest = max(timeline.makespan for timeline in timelines.values())
    scale = (width - LEFT - RIGHT) / longest
    found = [
        (timeline, *(fullest_rank(timeline) if rank is None else (rank, peak_held(timeline, rank))))
        for timeline in timelines.values()
    ]
    most = max(peak for *_, peak in found)
    bottom = 2 * FONT + TALL

    def x(time):
        return LEFT + time * scale

    def y(held):
        return bottom - held * TALL / most

    if rank is None:
        words = [f"{each.name} {peak:g} (rank {fullest})" for each, fullest, peak in found]
        alt = "micro-batches held: " + ", dashed: ".join(words)
    else:
        words = [f"{each.name} {peak:g}" for each, _, peak in found]
        alt = f"micro-batches that rank {rank} holds, at the peak: " + ", ".join(words)
    shown = alt
    for less in (r" \(rank \d+\)", " held"):  # on a phone
        if LETTER * len(shown) > width - 8:
            shown = re.sub(less, "", shown)
    parts = [draw_text(8, FONT, shown, "start")]
    for number, (timeline, holder, peak) in enumerate(found):
        path = outline(held_over_time(timeline, holder), timeline.makespan, x, y)
        paint = f'fill="{HELD}" fill-opacity="0.6" stroke="{HELD}"'
        if number:
            paint = 'fill="none" stroke="currentColor" stroke-width="2" stroke-dasharray="5 3"'
        parts.append(f'<path d="{path}" {paint}/>')
        if not number or abs(y(peak) - y(found[0][2])) > FONT:
            parts.append(draw_text(LEFT - 8, y(peak) + 4.5, f"{peak:g}", "end"))
    parts.append(f'<path d="M{LEFT} {bottom}H{x(longest):.1f}" stroke="{TEXT}"/>')
    return parts, bottom + 4, alt
