"""Measures how long a rank holds one micro-batch: from its forward to the backward that frees it.

A rank that holds every micro-batch for a time L and starts one in every time T holds L / T
micro-batches on average (Little's law). So a schedule that shortens L saves memory.
"""

from dataclasses import replace

from lab.drawing import FILL, FONT, LEFT, ROW, TEXT, WIDTH, arrange, draw_legend, draw_place, wrap
from lab.figures import Picture
from lab.story import short
from lab.timeline import Timeline

NARROWER = 0.75  # leaves room for the sums on the right
BAND = f'fill-opacity="0.3" stroke="{TEXT}" pointer-events="none"'


def lives_of(timeline, microbatch):
    """For each rank, the times for which its stages hold the micro-batch, by stage."""
    return [[end - start for start, end in spans] for spans in _spans(timeline, microbatch)]


def _spans(timeline, microbatch):
    """For each rank (start of the forward, end of the backward or of its weights' half)."""
    found = []
    for events in timeline.by_rank:
        of_stage = {}
        for event in events:
            if event.action.microbatch == microbatch:
                of_stage.setdefault(event.action.stage, []).append(event)
        found.append(
            [(of_stage[stage][0].start, of_stage[stage][-1].end) for stage in sorted(of_stage)]
        )
    return found


def draw_lives(timelines, microbatch):
    """A Picture with one micro-batch alone in each timeline, and a band while a rank holds it.

    `timelines` is {label: Timeline}. Where two stages of a rank hold the micro-batch at the same
    time, the band is darker. The sum of a rank's times is printed at its right.
    """
    alone = {label: _alone(timeline, microbatch) for label, timeline in timelines.items()}
    places, height = arrange(alone)
    parts, words = [], []
    for place in (replace(place, scale=NARROWER * place.scale) for place in places):
        sums = [_sum(times) for times in lives_of(place.timeline, 0)]
        for rank, spans in enumerate(_spans(place.timeline, 0)):
            parts += [_band(place, rank, *span) for span in spans]
            parts.append(_words(WIDTH - 8, place.y(rank), sums[rank], "end"))
        parts.append(_words(WIDTH - 8, place.title - 17.5, "held, ms", "end"))
        parts += draw_place(place, "ms", place.label)
        words.append(f"{place.label}: held for {', '.join(sums)} ms")
    legend = places[-1].bottom + 30
    # The rank is not idle in the gaps: it works on other micro-batches.
    parts += [
        part.replace(">waiting<", ">not held<") for part in draw_legend(alone.values(), legend)
    ]
    parts += _legend_of_bands(height)
    alt = "One micro-batch, and how long ranks 0, 1 and so on hold it. " + "; ".join(words)
    return Picture(wrap(parts, height + ROW, alt), alt)


def _alone(timeline, microbatch):
    """The Timeline of one micro-batch alone, renumbered as 0."""
    events = [
        event._replace(action=event.action._replace(microbatch=0))
        for event in timeline.events
        if event.action.microbatch == microbatch
    ]
    return Timeline(timeline.name, tuple(events))


def _sum(times):
    total = short(sum(times))
    return f"{'+'.join(map(short, times))} = {total}" if len(times) > 1 else total


def _band(place, rank, start, end):
    left, width = place.x(start), (end - start) * place.scale
    shape = f"M{left:.1f} {place.y(rank)}h{width:.1f}v{ROW}h-{width:.1f}z"
    return f'<path d="{shape}" fill="{FILL["F"]}" {BAND}/>'


def _legend_of_bands(top):
    box = f'<rect x="{LEFT}" y="{top}" width="{ROW}" height="18" fill="{FILL["F"]}" {BAND}/>'
    return [box, _words(LEFT + ROW + 6, top - 4, "held; darker: by both stages of the rank")]


def _words(x, y, words, anchor="start"):
    return (
        f'<text x="{x}" y="{y + 17.5:.1f}" text-anchor="{anchor}" font-size="{FONT}" '
        f'fill="{TEXT}">{words}</text>'
    )
