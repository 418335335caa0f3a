# SPDX-License-Identifier: Apache-2.0
"""The course's one visual language: a timeline as SVG elements, in a figure and in the explorer.

Time runs to the right, rank 0 is on top, timelines in one picture share one scale. Colours are
those of Okabe and Ito, and each kind has a second mark, so that no colour carries meaning alone.
The background is transparent, and the grey of the text beside the blocks is readable on white and
on black.
"""

from dataclasses import dataclass
from html import escape

from lab.longest_path import longest_path
from lab.story import stories_of, waits_of
from lab.timeline import Timeline
from pipeline.schedule import KINDS

TEXT = "#767676"
FILL = {"F": "#56B4E9", "B": "#009E73", "I": "#66C5AB", "W": "#E69F00", "U": "#D55E00"}
NUMBER = {"F": "#000000", "B": "#ffffff", "I": "#000000", "W": "#000000", "U": "#000000"}

WIDTH = 820  # of the drawing, in its own units; a page shows it about as large in pixels
LEFT = 62  # room for the names of the ranks
RIGHT = 14
ROW = 26
ROW_GAP = 6
FONT = 13
OUTLINE = "#000000"  # of blocks: on white their colours alone would be too pale
WAITING = f'fill="{TEXT}" fill-opacity="0.24" stroke="{TEXT}" stroke-width="0.7"'
WHITE_NUMBER = "paint-order: stroke; stroke: #000; stroke-opacity: 0.5; stroke-width: 2px"
MOST_NUMBERS = 400
READING = 16  # the height of a line of a block's story
LABEL = 45  # the least distance from one time of an axis to the next
SHADE = 0.24  # difference in shade between the blocks of two consecutive stages of a rank

PATH = (  # the line of a longest path
    'fill="none" stroke="#D3006E" stroke-width="3.4" stroke-linejoin="round" pointer-events="none"'
)
DASHED = 'stroke="#555555" stroke-dasharray="3 2.4"'  # the outline of a forward run again


@dataclass(frozen=True)
class Placement:
    """The place of one timeline in a drawing: the heights of its parts, and its scale."""

    label: str
    timeline: Timeline
    title: float
    reading: float | None  # height of the first of two lines for a block's story, if any
    top: float  # of rank 0
    scale: float  # units of the drawing for one unit of time

    @property
    def bottom(self):
        return self.y(self.timeline.num_ranks) - ROW_GAP

    def x(self, time):
        return LEFT + (time - self.timeline.start) * self.scale

    def y(self, rank):
        return self.top + rank * (ROW + ROW_GAP)


def arrange(timelines, reading=False, longest_path=False, width=WIDTH):
    """The Placement of each timeline, on one scale, and the height of the whole drawing."""
    longest = max(timeline.makespan for timeline in timelines.values())
    scale = (width - LEFT - RIGHT) / longest
    places, top = [], 8
    for label, timeline in timelines.items():
        title = top + FONT
        top += FONT + 9
        story = top + FONT - 2 if reading else None
        top += 2 * READING + 4 if reading else 0
        places.append(Placement(label, timeline, title, story, top, scale))
        top += timeline.num_ranks * (ROW + ROW_GAP) + 30
    _, lines, _ = _legend_of(timelines.values(), longest_path, width)
    return places, places[-1].bottom + 34 + lines * (18 + ROW_GAP)


def draw_cursor(timelines, time, reading=False, marked=(), width=WIDTH):
    """A transparent drawing of the same size, with a line at `time` and outlines of the actions
    under way. Actions in `marked` have a dashed outline and the sign ≠."""
    places, height = arrange(timelines, reading, width=width)
    parts = []
    for place in places:
        at = place.x(time)
        parts.append(
            f'<path d="M{at:.1f} {place.top - 4:.1f}V{place.bottom + 4:.1f}" fill="none" '
            f'stroke="currentColor" stroke-width="1.6"/>'
        )
        for event in place.timeline.events:
            left, wide = place.x(event.start), (event.end - event.start) * place.scale
            outline = (
                f'<rect x="{left:.1f}" y="{place.y(event.rank):.1f}" width="{wide:.1f}" '
                f'height="{ROW}" fill="none" stroke="currentColor" '
            )
            if event.start <= time < event.end:
                parts.append(f'{outline}stroke-width="2"/>')
            if event.action in marked:
                parts.append(f'{outline}stroke-width="3" stroke-dasharray="4 3"/>')
                parts.append(
                    f'<text x="{left + wide / 2:.1f}" y="{place.y(event.rank) - 1:.1f}" '
                    f'text-anchor="middle" font-size="16" font-weight="bold" '
                    f'fill="currentColor">≠</text>'
                )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" '
        f'width="{width}" height="{height:.0f}" aria-hidden="true">' + "".join(parts) + "</svg>"
    )


def has_numbers(timeline):
    """Whether numbers and messages are drawn: with more blocks they could not be read."""
    return len(timeline.events) <= MOST_NUMBERS


def draw_place(place, unit, title, stories=None):
    """One timeline at its place, as a list of SVG elements.

    `stories` has two lines for each event; None takes them from story.py, False leaves them out.
    """
    timeline = place.timeline
    width = timeline.makespan * place.scale
    few = has_numbers(timeline)
    names = [
        draw_text(LEFT - 8, place.y(rank) + ROW / 2 + 4.5, f"rank {rank}", anchor="end")
        for rank in range(timeline.num_ranks)
    ]
    rows = "".join(
        f"M{LEFT} {place.y(rank)}h{width:.1f}v{ROW}H{LEFT}z" for rank in range(len(names))
    )
    return [
        draw_text(8, place.title, title, "start", 'font-size="15" font-weight="bold"'),
        *names,
        f'<path d="{rows}" {WAITING}/>',
        *_draw_blocks(place, stories_of(timeline, unit) if stories is None else stories),
        *(_draw_messages(place) if few else []),
        *(_draw_numbers(place) if few else []),  # on top of the lines
        *_draw_axis(timeline, place.bottom + 2, place.x, unit),
    ]


def _draw_blocks(place, stories):
    timeline = place.timeline
    # The more blocks, the thinner the outline: otherwise it would cover a dense drawing.
    widths = sorted((event.end - event.start) * place.scale for event in timeline.events)
    outline = min([0.7, *(0.1 * width for width in widths[len(widths) // 4 :][:1])])
    chunk = _chunks(timeline)
    fills = {}
    parts, updates, hatches = [], [], []
    for event, story in zip(timeline.events, stories or [None] * len(timeline.events)):
        kind = event.action.kind
        key = kind, chunk[event.rank, event.action.stage]
        if key not in fills:
            fills[key] = shade_of(*key)
        least = 3 if kind == "U" else 0.5  # an update is a bar, however short
        left, width = place.x(event.start), max((event.end - event.start) * place.scale, least)
        y = place.y(event.rank)
        block = (
            f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" fill="{fills[key]}">'
        )
        if story is None:
            block = block[:-1] + "/>"
        elif place.reading is None:
            block += f"<title>{story[0]}; {story[1]}</title></rect>"
        else:
            lines = f'{story[0]}<tspan x="8" dy="{READING}">{story[1]}</tspan>'
            block = f'<g>{block}</rect><text x="8" y="{place.reading}">{lines}</text></g>'
        # Updates last: they are narrow, and the next action would cover them.
        (updates if kind == "U" else parts).append(block)
        if kind == "W":
            hatches.append(f"M{left:.1f} {y}h{width:.1f}v{ROW}h-{width:.1f}z")
    hatch = f'<path d="{"".join(hatches)}" fill="url(#hatch)" pointer-events="none"/>'
    return [
        f'<g class="blocks" stroke="{OUTLINE}" stroke-width="{outline:.2f}">',
        *parts,
        *updates,
        "</g>",
        *([hatch] if hatches else []),
        *_draw_recomputed(place, chunk),
    ]


def _draw_recomputed(place, chunk):
    """Draw the recomputed forwards over the start of the backwards that contain them."""
    parts = []
    for event in place.timeline.events:
        if event.recompute:
            width = max(event.recompute * place.scale - 1, 0.5)
            parts.append(
                f'<rect x="{place.x(event.start) + 0.5:.1f}" y="{place.y(event.rank) + 0.5}" '
                f'width="{width:.1f}" height="{ROW - 1}" '
                f'fill="{shade_of("F", chunk[event.rank, event.action.stage])}"/>'
            )
    return [f'<g class="recomputed" {DASHED} pointer-events="none">', *parts, "</g>"] * bool(parts)


def _chunks(timeline):
    """{(rank, stage): number of the stage among the rank's stages, from 0}."""
    chunks = {}
    for rank, events in enumerate(timeline.by_rank):
        for chunk, stage in enumerate(sorted({event.action.stage for event in events})):
            chunks[rank, stage] = chunk
    return chunks


def shade_of(kind, chunk):
    """The colour of a block: stages of one rank differ, and the number on it stays readable.

    Kinds with a black number become lighter from stage to stage, those with a white one darker.
    """
    towards = 255 - int(NUMBER[kind][1:3], 16)
    part = min(SHADE * chunk, 0.72)
    channels = (int(FILL[kind][i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + (towards - c) * part):02X}" for c in channels)


def _draw_numbers(place):
    numbers, dots = [], []
    for event in place.timeline.events:
        kind, number = event.action.kind, str(event.action.microbatch)
        middle, y = place.x(event.start + event.recompute), place.y(event.rank)
        left, right = place.x(event.start), place.x(event.end)
        for start, end, color in ((left, middle, NUMBER["F"]), (middle, right, NUMBER[kind])):
            if end - start >= 9.5 * len(number):  # a digit is 9.05 wide in DejaVu Sans
                numbers.append(
                    f'<text x="{(start + end) / 2:.1f}" y="{y + ROW / 2 + 4.5}" '
                    f'fill="{color}">{number}</text>'
                )
        if kind == "I":
            dots.append(_dot(right, y))
    return [
        f'<g class="numbers" text-anchor="middle" font-size="{FONT}" font-weight="bold" '
        'pointer-events="none">',
        *numbers,
        "</g>",
        *_draw_dots(dots),
    ]


def _dot(right, y):
    """The second mark of a backward for the input, in the upper right corner of its block."""
    return f"M{right - 3.6:.1f} {y + 4}h0"


def _draw_dots(dots):
    path = (
        f'<path class="dots" d="{"".join(dots)}" stroke="{NUMBER["I"]}" stroke-width="4" '
        'stroke-linecap="round" pointer-events="none"/>'
    )
    return [path] if dots else []


def _draw_messages(place):
    """Draw a thin line from the end of each sending action to the start of the receiving one."""
    lines = []
    for wait in waits_of(place.timeline):
        if wait.source is None:
            continue
        down = wait.source.rank < wait.event.rank
        y1 = place.y(wait.source.rank) + (ROW if down else 0)
        y2 = place.y(wait.event.rank) + (0 if down else ROW)
        lines.append(f"M{place.x(wait.source.end):.1f} {y1}L{place.x(wait.event.start):.1f} {y2}")
    return [
        f'<path class="messages" d="{"".join(lines)}" stroke="{TEXT}" stroke-width="0.8" '
        'fill="none" pointer-events="none"/>'
    ]


def draw_longest_path(place):
    """A longest path as a line: through its blocks, and along its messages to other ranks."""
    low = ROW - 3.5  # below the numbers
    line = ""
    for event, before, _ in longest_path(place.timeline):
        left, right = place.x(event.start), place.x(event.end)
        start = "L" if before else "M"
        line += f"{start}{left:.1f} {place.y(event.rank) + low}H{right:.1f}"
    return [f'<path class="longest-path" d="{line}" {PATH}/>']


def _draw_axis(timeline, top, x, unit):
    step = round_step(max(timeline.makespan / 8, LABEL / (x(1) - x(0))))
    parts = []
    time = 0.0
    while time <= timeline.makespan * 1.0001:
        at = x(timeline.start + time)
        parts.append(
            f'<line x1="{at:.2f}" y1="{top}" x2="{at:.2f}" y2="{top + 4}" stroke="{TEXT}"/>'
        )
        label = f"{time:g}" + (f" {unit}" if time == 0 and unit else "")
        parts.append(draw_text(at, top + 4 + FONT, label, anchor="middle"))
        time += step
    return parts


def round_step(least):
    magnitude = 1.0
    while magnitude * 10 <= least:
        magnitude *= 10
    while magnitude > least:
        magnitude /= 10
    return next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= least)


def _legend_of(timelines, longest_path, most):
    """The entries of the legend, as (sign, words, left, line), and the number of lines."""
    kinds = {event.action.kind for timeline in timelines for event in timeline.events}
    few = [timeline for timeline in timelines if has_numbers(timeline)]
    entries = []
    for kind in (kind for kind in FILL if kind in kinds):
        first = few and not entries
        entries.append((kind, KINDS[kind] + (" of micro-batch 0" if first else "")))
    if any(event.recompute for timeline in timelines for event in timeline.events):
        entries.append(("recomputed", "recomputed forward"))
    last = max(chunk for timeline in timelines for chunk in _chunks(timeline).values())
    if last:
        which = "1st, 2nd" if last == 1 else "first to last"
        entries.append(("shades", f"rank's {which} stage"))
    entries.append(("waiting", "waiting"))
    entries += [("message", "message")] if few else []
    entries += [("longest path", "longest path")] if longest_path else []
    placed, left, line = [], LEFT, 0
    for sign, words in entries:
        width = ROW + 6 + 7.2 * len(words)
        if left + width > most and left > LEFT:
            left, line = LEFT, line + 1
        placed.append((sign, words, left, line))
        left += width + 24
    return placed, line + 1, bool(few)


def draw_legend(timelines, top, longest_path=False, width=WIDTH):
    """The legend of colours and marks, as a list of SVG elements."""
    parts = []
    entries, _, few = _legend_of(timelines, longest_path, width)
    count = 1 + max(chunk for timeline in timelines for chunk in _chunks(timeline).values())
    for sign, words, left, line in entries:
        y = top + line * (18 + ROW_GAP)
        box = f'<rect x="{left:.1f}" y="{y}" width="{ROW}" height="18" '
        if sign == "shades":
            kinds = [kind for kind in "FBIW" if kind in {entry[0] for entry in entries}]
            for row, kind in enumerate(kinds):
                height = 18 / len(kinds)
                for i in range(count):
                    parts.append(
                        f'<rect x="{left + i * ROW / count:.1f}" y="{y + row * height:.1f}" '
                        f'width="{ROW / count:.1f}" height="{height:.1f}" '
                        f'fill="{shade_of(kind, i)}"/>'
                    )
        elif sign == "waiting":
            parts.append(f"{box}{WAITING}/>")
        elif sign == "message":
            parts.append(
                f'<line x1="{left + 6:.1f}" y1="{y + 2}" x2="{left + ROW - 6:.1f}" y2="{y + 16}" '
                f'stroke="{TEXT}"/>'
            )
        elif sign == "longest path":
            parts.append(f'<path d="M{left:.1f} {y + 9}h{ROW}" {PATH}/>')
        else:
            kind = "F" if sign == "recomputed" else sign
            outline = DASHED if sign != kind else f'stroke="{OUTLINE}" stroke-width="0.7"'
            parts.append(f'{box}fill="{FILL[kind]}" {outline}/>')
            parts += [f'{box}fill="url(#hatch)"/>'] if sign == "W" else []
            parts.append(
                f'<text x="{left + ROW / 2:.1f}" y="{y + 13.5}" text-anchor="middle" '
                f'font-size="{FONT}" font-weight="bold" fill="{NUMBER[kind]}">'
                f"{0 if few else ''}</text>"
            )
            parts += _draw_dots([_dot(left + ROW, y)] if sign == "I" else [])
        parts.append(draw_text(left + ROW + 6, y + 13.5, words, anchor="start"))
    return parts


def draw_text(x, y, text, anchor="start", font=f'font-size="{FONT}"'):
    """The SVG element of a text in the grey of all texts."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {font} '
        f'fill="{TEXT}">{escape(text)}</text>'
    )


def wrap(parts, height, alt, titled=True, width=WIDTH):
    """The SVG text of a whole drawing, with `alt` as its description for screen readers.

    A title would pop up under the pointer everywhere, so a drawing whose blocks have stories has
    none.
    """
    title = f"<title>{escape(alt)}</title>" if titled else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" '
        f'width="{width}" height="{height:.0f}" style="max-width:100%;height:auto" role="img" '
        f'aria-label="{escape(alt)}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif">'
        f"{title}"
        f'<style>text[fill="#ffffff"] {{ {WHITE_NUMBER} }}</style>'
        '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="5" stroke="#000000" '
        'stroke-opacity="0.35" stroke-width="1.4"/></pattern></defs>' + "".join(parts) + "</svg>\n"
    )
