"""Draws timelines, predicted or performed, in the course's one visual language.

Time runs to the right, rank 0 is on top, timelines in one picture share one scale. Colours are
those of Okabe and Ito, and each kind has a second mark, so that no colour carries meaning alone.
Text outside the blocks is a grey that can be read on white and on black; the ground is clear.
"""

import io
from dataclasses import dataclass
from html import escape
from pathlib import Path

from pipeline.schedule import needs_of, result_of

TEXT = "#7a7a7a"
FILL = {"F": "#56B4E9", "B": "#009E73", "I": "#66C5AB", "W": "#E69F00", "U": "#D55E00"}
FILL["R"] = FILL["F"]  # a forward run again has a dashed outline
NUMBER = {"F": "#000000", "B": "#ffffff", "I": "#000000", "W": "#000000", "U": "#000000"}
NUMBER["R"] = NUMBER["F"]
LEGEND = {
    "F": "forward",
    "B": "backward",
    "I": "backward for the input",
    "W": "backward for the weights",
    "U": "update",
    "R": "recomputed forward",  # no action of a schedule: a part of a backward
}

WIDTH = 820  # of the drawing, in its own units; a page shows it about as large in pixels
LEFT = 62  # room for the names of the ranks
RIGHT = 14
ROW = 26
ROW_GAP = 6
FONT = 13
MOST_NUMBERS = 400


@dataclass(frozen=True)
class Picture:
    """A drawing as SVG text, and the same fact in words for those who cannot see it."""

    svg: str
    alt: str

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"image/svg+xml": self.svg, "text/plain": self.alt}

    def save(self, path):
        Path(path).write_text(self.svg)


def draw_timelines(timelines, unit="ms", caption=""):
    """A Picture of one timeline or several, one below the other on one scale.

    `timelines` is a dictionary from label to Timeline, such as {"predicted": ..., "performed": ...}.
    """
    longest = max(timeline.makespan for timeline in timelines.values())
    scale = (WIDTH - LEFT - RIGHT) / longest
    parts, top = [], 8
    for label, timeline in timelines.items():
        title = f"{label}: {describe(timeline, unit)}"
        parts.append(_text(LEFT, top + FONT, title, anchor="start"))
        top += FONT + 9
        parts += _draw_one(timeline, top, scale, unit)
        top += timeline.num_ranks * (ROW + ROW_GAP) + 30
    events = [event for timeline in timelines.values() for event in timeline.events]
    kinds = {event.action.kind for event in events}
    kinds |= {"R"} if any(event.recompute for event in events) else set()
    parts += _draw_legend(top, [kind for kind in FILL if kind in kinds])
    top += ROW + 4
    alt = caption or "; ".join(
        f"{label}: {describe(timeline, unit)}" for label, timeline in timelines.items()
    )
    return Picture(_wrap(parts, top, alt), alt)


def describe(timeline, unit="ms"):
    """One timeline in a few words."""
    return (
        f"{timeline.name}, {timeline.num_ranks} ranks, {timeline.makespan:.4g} {unit}, "
        f"{timeline.idle_fraction:.1%} idle"
    )


def table(timeline):
    """A timeline as text: one line a rank, with what it does and when. The figure's equivalent."""
    lines = []
    for rank, events in enumerate(timeline.by_rank):
        cells = (
            f"{event.action} {event.start - timeline.start:.4g}-{event.end - timeline.start:.4g}"
            for event in events
        )
        lines.append(f"rank {rank}: " + ", ".join(cells))
    return "\n".join(lines)


def _draw_one(timeline, top, scale, unit):
    parts = []
    numbers = len(timeline.events) <= MOST_NUMBERS

    def x(time):
        return LEFT + (time - timeline.start) * scale

    def y(rank):
        return top + rank * (ROW + ROW_GAP)

    for rank in range(timeline.num_ranks):
        width = timeline.makespan * scale
        parts.append(_text(LEFT - 8, y(rank) + ROW / 2 + 4.5, f"rank {rank}", anchor="end"))
        parts.append(
            f'<rect x="{LEFT}" y="{y(rank)}" width="{width:.1f}" height="{ROW}" '
            f'fill="{TEXT}" fill-opacity="0.13"/>'
        )
    chunk = {stage: i for stages in _stages_by_rank(timeline) for i, stage in enumerate(stages)}
    # Updates last: they are narrow, and the next action would cover them.
    for event in sorted(timeline.events, key=lambda event: event.action.kind == "U"):
        parts += _draw_block(event, x, y(event.rank), chunk[event.action.stage], numbers)
    parts += _draw_messages(timeline, x, y)
    parts += _draw_axis(timeline, y(timeline.num_ranks) - ROW_GAP + 2, x, unit)
    return parts


def _stages_by_rank(timeline):
    return [sorted({event.action.stage for event in events}) for events in timeline.by_rank]


def _draw_block(event, x, y, chunk, numbers):
    kind = event.action.kind
    least = 3 if kind == "U" else 0.5  # an update is a bar, however short
    left = x(event.start + event.recompute)
    width = max(x(event.end) - left, least)
    shade = max(0.45, 1 - 0.25 * chunk)  # stages of one rank differ in shade
    story = f"{event.action.describe()}, rank {event.rank}, {event.start:.4g} to {event.end:.4g}"
    again = _draw_recomputed(event, x, y, shade, numbers) if event.recompute else []
    parts = again + [
        f'<rect x="{left:.2f}" y="{y}" width="{width:.2f}" height="{ROW}" fill="{FILL[kind]}" '
        f'fill-opacity="{shade}" stroke="#ffffff" stroke-width="0.7">'
        f"<title>{escape(story)}</title></rect>"
    ]
    if kind == "W":
        parts.append(
            f'<rect x="{left:.2f}" y="{y}" width="{width:.2f}" height="{ROW}" '
            'fill="url(#hatch)" pointer-events="none"/>'
        )
    number = f"{event.action.microbatch}" + ("·" if kind == "I" else "")
    return parts + (_draw_number(number, left, width, y, NUMBER[kind]) if numbers else [])


def _draw_recomputed(event, x, y, shade, numbers):
    """The part of a backward in which the forward is run again, with a dashed outline."""
    left, width = x(event.start), x(event.start + event.recompute) - x(event.start)
    story = f"of it {event.recompute:.4g} for the forward of micro-batch {event.action.microbatch}"
    return [
        f'<rect x="{left + 0.6:.2f}" y="{y + 0.6}" width="{max(width - 1.2, 0.5):.2f}" '
        f'height="{ROW - 1.2}" fill="{FILL["R"]}" fill-opacity="{shade}" stroke="{TEXT}" '
        f'stroke-width="1.2" stroke-dasharray="3 2.4"><title>{escape(story)} again</title></rect>',
        *(
            _draw_number(f"{event.action.microbatch}", left, width, y, NUMBER["R"])
            if numbers
            else []
        ),
    ]


def _draw_number(number, left, width, y, color):
    if width < 7.5 * len(number) + 2:
        return []
    return [
        f'<text x="{left + width / 2:.2f}" y="{y + ROW / 2 + 4.5}" text-anchor="middle" '
        f'font-size="{FONT}" font-weight="bold" fill="{color}" '
        f'pointer-events="none">{number}</text>'
    ]


def _draw_messages(timeline, x, y):
    """A thin line from the end of the action that sends to the start of the one that needs it."""
    if len(timeline.events) > MOST_NUMBERS:
        return []
    made = {result_of(event.action): event for event in timeline.events}
    parts = []
    for event in timeline.events:
        for need in needs_of(event.action, timeline.num_stages):
            source = made[need]
            if source.rank == event.rank:
                continue
            down = source.rank < event.rank
            y1 = y(source.rank) + (ROW if down else 0)
            y2 = y(event.rank) + (0 if down else ROW)
            parts.append(
                f'<line x1="{x(source.end):.2f}" y1="{y1}" x2="{x(event.start):.2f}" y2="{y2}" '
                f'stroke="{TEXT}" stroke-width="0.8" pointer-events="none"/>'
            )
    return parts


def _draw_axis(timeline, top, x, unit):
    step = _round_step(timeline.makespan / 8)
    parts = []
    time = 0.0
    while time <= timeline.makespan * 1.0001:
        at = x(timeline.start + time)
        parts.append(
            f'<line x1="{at:.2f}" y1="{top}" x2="{at:.2f}" y2="{top + 4}" stroke="{TEXT}"/>'
        )
        label = f"{time:g}" + (f" {unit}" if time == 0 and unit else "")
        parts.append(_text(at, top + 4 + FONT, label, anchor="middle"))
        time += step
    return parts


def _round_step(least):
    magnitude = 1.0
    while magnitude * 10 <= least:
        magnitude *= 10
    while magnitude > least:
        magnitude /= 10
    return next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= least)


def _draw_legend(top, kinds):
    parts, left = [], LEFT
    for kind in kinds:
        dashes = f' stroke="{TEXT}" stroke-dasharray="3 2.4"' if kind == "R" else ""
        parts.append(
            f'<rect x="{left}" y="{top}" width="{ROW}" height="18" fill="{FILL[kind]}"{dashes}/>'
            f'<text x="{left + ROW / 2}" y="{top + 13.5}" text-anchor="middle" '
            f'font-size="{FONT}" font-weight="bold" fill="{NUMBER[kind]}">'
            f"{'0·' if kind == 'I' else 0}</text>"
        )
        if kind == "W":
            parts.append(
                f'<rect x="{left}" y="{top}" width="{ROW}" height="18" fill="url(#hatch)"/>'
            )
        text = LEGEND[kind] + (" of micro-batch 0" if kind == kinds[0] else "")
        parts.append(_text(left + ROW + 6, top + 13.5, text, anchor="start"))
        left += ROW + 30 + 7.2 * len(text)
    parts.append(
        f'<rect x="{left}" y="{top}" width="{ROW}" height="18" fill="{TEXT}" fill-opacity="0.13"/>'
    )
    parts.append(_text(left + ROW + 6, top + 13.5, "waiting", anchor="start"))
    left += ROW + 30 + 7.2 * len("waiting")
    parts.append(
        f'<line x1="{left}" y1="{top + 2}" x2="{left + 14}" y2="{top + 16}" stroke="{TEXT}"/>'
    )
    parts.append(_text(left + 20, top + 13.5, "message", anchor="start"))
    return parts


def _text(x, y, text, anchor):
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{FONT}" '
        f'fill="{TEXT}">{escape(text)}</text>'
    )


def _wrap(parts, height, alt):
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'width="{WIDTH}" height="{height:.0f}" style="max-width:100%;height:auto" role="img" '
        f'aria-label="{escape(alt)}" font-family="Helvetica, Arial, DejaVu Sans, sans-serif">'
        f"<title>{escape(alt)}</title>"
        '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="5" stroke="#000000" '
        'stroke-opacity="0.35" stroke-width="1.4"/></pattern></defs>' + "".join(parts) + "</svg>\n"
    )


def new_plot(x_label, y_label, titles=("",), width=8.0, height=3.4):
    """A matplotlib figure in the course's style, clear ground and grey text, and its axes.

    With several `titles` there is a panel for each, on one y axis, and the axes are a list.
    """
    from matplotlib.figure import Figure  # only notebooks with a curve pay for the import

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0)
    panels = figure.subplots(1, len(titles), sharey=True, squeeze=False)[0]
    for axes, title in zip(panels, titles):
        axes.patch.set_alpha(0)
        axes.set_title(title, color=TEXT, fontsize=11)
        axes.set_xlabel(x_label, color=TEXT)
        axes.tick_params(colors=TEXT)
        axes.grid(color=TEXT, alpha=0.25)
        for spine in axes.spines.values():
            spine.set_color(TEXT)
    panels[0].set_ylabel(y_label, color=TEXT)
    return figure, panels[0] if len(titles) == 1 else list(panels)


def picture_of(figure, alt):
    """A matplotlib figure as a Picture; `alt` says in words what there is to see in it."""
    import matplotlib

    for axes in figure.axes:
        if legend := axes.get_legend():
            legend.get_frame().set_alpha(0)
            for text in legend.get_texts():
                text.set_color(TEXT)
    settings = {"svg.fonttype": "none", "svg.hashsalt": "course", "font.size": 11}
    with matplotlib.rc_context(settings):
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    label = f'<svg role="img" aria-label="{escape(alt)}" '
    return Picture(text.getvalue().replace("<svg ", label, 1), alt)
