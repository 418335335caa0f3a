"""Pictures that compare schedules: GPipe above 1F1B with their memory, the map, the same work.

make_images.py saves them as images/NAME.svg. Each is drawn from predicted timelines, and is narrow
enough to be read on a phone.
"""

from html import escape

from schedule_map import comparable, draw_map, same_work

from lab.drawing import FILL, NUMBER, OUTLINE, TEXT, WHITE_NUMBER, shade_of
from lab.figures import Picture
from lab.held_curve import HELD, fullest_rank, held_over_time, outline

WIDE = 480  # of a drawing in its own units
LEFT, RIGHT = 66, 62
RANKS, MICROBATCHES = 4, 8
SECONDS, SHOWN = 11, 0.8  # of one round of the animation, and the part of it in which time runs

HELD_WORDS = "#a84a00"  # darker than HELD, as words on white need

STYLE = f"""
text {{ fill: {TEXT}; font-size: 13px; }}
.title {{ font-size: 15px; font-weight: bold; }}
.number {{ font-size: 12px; font-weight: bold; text-anchor: middle; }}
.white {{ {WHITE_NUMBER} }}
.held {{ fill: {HELD}; }} text.held {{ fill: {HELD_WORDS}; font-size: 15px; font-weight: bold; }}
.ground {{ fill: {TEXT}; fill-opacity: 0.24; stroke: {TEXT}; stroke-width: 0.5; }}
.line {{ stroke: {TEXT}; fill: none; }}
@media (prefers-color-scheme: dark) {{ text {{ fill: #a9b0b7; }} text.held {{ fill: #ff8a3d; }} }}
"""
# It starts with the whole picture, for readers who look only once and browsers without animation.
MOVING = f"""
.moving {{ animation: grow {SECONDS}s linear -{SECONDS * SHOWN + 0.5:g}s infinite; }}
@keyframes grow {{ 0% {{ clip-path: inset(0 100% 0 0) }}
  {100 * SHOWN:.0f}%, 99% {{ clip-path: inset(0) }} 100% {{ clip-path: inset(0 100% 0 0) }} }}
@media (prefers-reduced-motion: reduce) {{ .moving {{ animation: none; }} }}
"""


def gpipe_above_1f1b():
    """GPipe and 1F1B on one time axis, each above what its fullest rank holds; time runs."""
    timelines = {
        "GPipe": same_work("gpipe", RANKS, MICROBATCHES),
        "1F1B": same_work("1f1b", RANKS, MICROBATCHES),
    }
    longest = max(timeline.makespan for timeline in timelines.values())
    parts, top, words = [], 6, []
    for name, timeline in timelines.items():
        rank, peak = fullest_rank(timeline)
        idle = f"{timeline.bubble_over_total:.1%}".replace("%", " %")
        title = f"{name}: {timeline.makespan:g} ms, each rank idle {idle} of it"
        parts.append(_text(LEFT, top + 13, title, "title"))
        parts += _rows(timeline, top + 20, longest, 17)
        top += 20 + timeline.num_ranks * 20
        parts += _memory(timeline, rank, peak, top, longest)
        top += 5 * MICROBATCHES + 16
        words.append(f"{title}, and rank {rank} holds {peak:g} micro-batches")
    parts += _legend(top + 2)
    return _picture(parts, top + 22, "; ".join(words) + ".", STYLE + MOVING)


def _legend(top):
    """What the boxes and the area mean, in one line."""
    entries = [
        (LEFT, f'style="fill:{FILL["F"]}"', "forward"),
        (LEFT + 74, f'style="fill:{FILL["B"]}"', "backward"),
        (LEFT + 158, 'class="ground"', "waiting"),
        (LEFT + 230, 'class="held"', "micro-batches on rank 0"),
    ]
    for left, look, words in entries:
        yield f'<rect x="{left}" y="{top}" width="12" height="12" {look}/>'
        yield _text(left + 16, top + 11, words)


def _rows(timeline, top, longest, tall, gap=3):
    """The blocks of a timeline, rank below rank, with the names of the ranks."""
    scale = (WIDE - LEFT - RIGHT) / longest
    parts, blocks = [], []
    for rank, events in enumerate(timeline.by_rank):
        y = top + rank * (tall + gap)
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{longest * scale:.1f}" height="{tall}" '
            'class="ground"/>'
        )
        if tall > 12:
            parts.append(_text(LEFT - 8, y + tall - 4, f"rank {rank}", anchor="end"))
        for event in events:
            _, kind, number = event.action
            left, width = LEFT + event.start * scale, (event.end - event.start) * scale
            chunk = event.action.stage // timeline.num_ranks
            block = (
                f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{tall}" '
                f'fill="{shade_of(kind, chunk)}" stroke="{OUTLINE}" stroke-width="0.5"/>'
            )
            if tall > 12:
                kinds = "number white" if NUMBER[kind] == "#ffffff" else "number"
                block += (
                    f'<text x="{left + width / 2:.1f}" y="{y + tall - 4}" class="{kinds}" '
                    f'style="fill:{NUMBER[kind]}">{number}</text>'
                )
            blocks.append(block)
    return [*parts, f'<g class="moving">{"".join(blocks)}</g>']


def _memory(timeline, rank, peak, top, longest):
    """What one rank holds, as an area, with its peak at the right."""
    bottom = top + 5 * MICROBATCHES + 2
    scale = (WIDE - LEFT - RIGHT) / longest

    def x(time):
        return LEFT + time * scale

    def y(held):
        return bottom - 5 * held

    path = outline(held_over_time(timeline, rank), timeline.makespan, x, y)
    return [
        _text(LEFT - 8, bottom - 12, "memory", anchor="end"),
        f'<path d="{path}" class="held moving"/>',
        f'<path d="M{LEFT} {bottom}H{x(longest):.1f}" class="line"/>',
        _text(x(longest) + 6, y(peak) + 9, f"{peak:g} held", "held"),
    ]


def the_same_work():
    """Every schedule that updates once per step, each with the same work, all on one time axis."""
    timelines = comparable(RANKS, MICROBATCHES)
    longest = max(timeline.makespan for timeline in timelines.values())
    parts, top, words = [], 4, []
    for name, timeline in timelines.items():
        peak = fullest_rank(timeline)[1]
        found = f"{timeline.makespan:g} ms, {peak:g} held"
        parts.append(_text(LEFT, top + 13, f"{name}: {found}", "title"))
        parts += _rows(timeline, top + 18, longest, 9, gap=2)
        top += 18 + timeline.num_ranks * 11 + 8
        words.append(f"{name} {found}")
    parts.append(_axis(top, longest))
    alt = f"The same work with every schedule, on one time axis: {'; '.join(words)}."
    return _picture(parts, top + 24, alt, STYLE)


def _axis(top, longest):
    scale = (WIDE - LEFT - RIGHT) / longest
    times = range(0, int(longest) + 1, 60)
    return "".join(
        f'<path d="M{LEFT + time * scale:.1f} {top - 4}v5" class="line"/>'
        + _text(LEFT + time * scale, top + 15, f"{time}{'' if time else ' ms'}", anchor="middle")
        for time in times
    )


def _picture(parts, height, alt, style):
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {height}" '
        f'width="{WIDE * 1.5:.0f}" height="{height * 1.5:.0f}" role="img" '
        f'aria-label="{escape(alt)}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif">'
        f"<title>{escape(alt)}</title><style>{style}</style>{''.join(parts)}</svg>\n"
    )
    return Picture(svg, alt)


def _text(x, y, words, kind="", anchor="start"):
    kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'


# {name of the file: function}
COMPARISONS = {
    "gpipe-above-1f1b": gpipe_above_1f1b,
    "map-of-schedules": draw_map,
    "the-same-work": the_same_work,
}
