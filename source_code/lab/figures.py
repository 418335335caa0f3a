# SPDX-License-Identifier: Apache-2.0
"""Pictures for notebooks and pages: timelines, predicted or performed, and curves.

Each picture has a text with the same content. drawing.py draws the timelines.
"""

import io
from dataclasses import dataclass
from html import escape
from pathlib import Path

from lab.drawing import TEXT, WIDTH, arrange, draw_legend, draw_longest_path, draw_place, wrap
from lab.held_curve import held_parts
from lab.story import short

LETTER = 8.3  # approximate width of a caption's letter


@dataclass(frozen=True)
class Picture:
    """A drawing as SVG text, and its content in words for readers who cannot see it."""

    svg: str
    alt: str

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"image/svg+xml": self.svg, "text/plain": self.alt}

    def save(self, path):
        Path(path).write_text(self.svg, encoding="utf-8")


def draw_timelines(
    timelines,
    unit="ms",
    caption="",
    reading=False,
    stories=None,
    longest_path=False,
    held=None,
    width=WIDTH,
):
    """A Picture of one timeline or several, one below the other on one scale.

    `timelines` is a dictionary from label to Timeline, such as {"predicted": ..., "performed":
    ...}. Each block has its story: as its title, or with `reading` in lines above its timeline,
    which a page's style shows for the block that is pointed at (stepping.py). `stories` replaces
    the timelines' own stories, by label; with `stories=False` a block has none. With `longest_path`
    a line shows a longest path through each timeline (longest_path.py). If `held` is a rank, the
    curve of what it holds is below the timelines (held_curve.py). `width` is that of the drawing,
    in its own units; letters have the same size in a narrow drawing.
    """
    places, height = arrange(timelines, reading, longest_path, width)
    parts = []
    for place in places:
        title = f"{place.label}: {describe(place.timeline, unit)}"
        if len(title) * LETTER > width:
            title = describe(place.timeline, unit)
        told = stories if stories is False else (stories or {}).get(place.label)
        parts += draw_place(place, unit, title, told)
        parts += draw_longest_path(place) if longest_path else []
    parts += draw_legend(timelines.values(), places[-1].bottom + 30, longest_path, width)
    alt = caption or "; ".join(
        f"{label}: {describe(timeline, unit)}" for label, timeline in timelines.items()
    )
    if held is not None:
        curves, tall, told = held_parts(timelines, width, held)
        parts += [f'<g transform="translate(0 {height:.0f})">', *curves, "</g>"]
        height, alt = height + tall + 8, f"{alt}; {told}"
    return Picture(wrap(parts, height, alt, titled=not reading, width=width), alt)


def describe(timeline, unit="ms"):
    """A short description of one timeline."""
    ranks = "1 rank" if timeline.num_ranks == 1 else f"{timeline.num_ranks} ranks"
    return (
        f"{timeline.name}, {ranks}, {short(timeline.makespan)} {unit}, "
        f"{timeline.idle_fraction:.1%} idle"
    )


def new_plot(x_label, y_label, titles=("",), width=8.0, height=3.4):
    """A matplotlib figure and its axes, with a transparent background and grey text.

    With several `titles` there is one panel per title, the panels share the y axis, and the axes
    are returned as a list.
    """
    from matplotlib.figure import Figure  # slow, and needed only for curves

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0)
    panels = figure.subplots(1, len(titles), sharey=True, squeeze=False)[0]
    for axes, title in zip(panels, titles):
        axes.patch.set_alpha(0)
        axes.set_title(title, color=TEXT, fontsize=11)
        axes.set_xlabel(x_label, color=TEXT)
        axes.tick_params(which="both", colors=TEXT)
        axes.grid(color=TEXT, alpha=0.25)
        for spine in axes.spines.values():
            spine.set_color(TEXT)
    panels[0].set_ylabel(y_label, color=TEXT)
    return figure, panels[0] if len(titles) == 1 else list(panels)


def picture_of(figure, alt):
    """A matplotlib figure as a Picture; `alt` describes it in words."""
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
