# SPDX-License-Identifier: Apache-2.0
"""Bars and curves as SVG elements, with the standard library alone, so that they work in a browser.

Notebooks whose curves need no browser use matplotlib (figures.py). A bar has its number beside it
and a curve its name, so that no colour carries meaning alone.
"""

from dataclasses import dataclass
from math import log2

from lab.drawing import FONT, TEXT, draw_text, round_step

CHOSEN, COMPARED = "#D55E00", "#0072B2"  # of Okabe and Ito; both stand out on white and on black
FILLED, OVER = "#56B4E9", "#D55E00"
EDGE = f'stroke="{TEXT}" stroke-width="0.7"'  # of a bar
HALF = 410  # half of the width of a drawing: the width of a plot, or of one schedule's bars

AXIS = 46  # left of a plot, for its numbers
ACROSS, DOWN = 205, 180  # a plot's width and height
SAMPLE = 20  # length of the piece of a curve before its name
PLOT = DOWN + 86  # height of a plot with its title and the words below it
SPACE = 15  # between two names at the end of curves
CLOSE = 24  # numbers on the axis that are closer together are left out
BAR, BAR_GAP, LONGEST = 14, 4, 215


@dataclass(frozen=True)
class Curve:
    """The points (x, y) of a curve and its name; `mark` is "circle", "square" or ""."""

    name: str
    points: tuple
    color: str = TEXT
    mark: str = ""
    dashes: str = ""
    width: float = 1.2


def draw_plot(left, top, title, x_label, curves, now, limit=None, doubling=False):
    """A plot of Curves as a list of SVG elements. Its corner is at (`left`, `top`).

    A line marks `now`, a value on the x axis, and another marks `limit`, a value on the y axis,
    unless it is None. With `doubling` the x axis is logarithmic.
    """
    x0, y0 = left + AXIS, top + 36
    places = [value for curve in curves for value, _ in curve.points]
    most = max([y for curve in curves for _, y in curve.points] + [limit or 0]) * 1.06 or 1
    scale = log2 if doubling else float
    first, last = scale(min(places)), scale(max(places))

    def x(value):
        return x0 + ACROSS * (scale(value) - first) / ((last - first) or 1)

    def y(value):
        return y0 + DOWN * (1 - value / most)

    parts = [draw_text(left, top + FONT, title), draw_text(x0, y0 + DOWN + 36, x_label)]
    parts += _draw_frame(x0, y, most) + _draw_places(sorted(set(places)), x, y0 + DOWN)
    parts.append(_line(f"M{x(now):.1f} {y0}v{DOWN}", TEXT, 1.2, "2 3"))
    parts.append(draw_text(x(now), y0 - 2, "now", "middle"))
    if limit is not None:
        ends = tuple((value, limit) for value in (min(places), max(places)))
        curves = [Curve("limit", ends, dashes="7 4", width=2), *curves]
    for curve in curves:
        parts += _draw_curve(curve, [(x(across), y(height)) for across, height in curve.points])
    return parts + _draw_names(curves, y, x0 + ACROSS + 8, y0 + DOWN)


def _draw_frame(x0, y, most):
    """Horizontal lines at round numbers, with the numbers."""
    parts, step, value = [], round_step(most / 4), 0.0
    while value <= most:
        parts.append(_line(f"M{x0} {y(value):.1f}h{ACROSS}", TEXT, 0.5))
        parts.append(draw_text(x0 - 6, y(value) + 4.5, f"{value:g}", "end"))
        value += step
    return parts


def _draw_places(values, x, bottom):
    parts, taken = [], -CLOSE
    for value in values:
        if x(value) - taken >= CLOSE:
            taken = x(value)
            parts.append(draw_text(taken, bottom + 17, f"{value:g}", "middle"))
    return parts


def _draw_curve(curve, places):
    """A Curve through the given places of the drawing."""
    path = "M" + "L".join(f"{across:.1f} {down:.1f}" for across, down in places)
    parts = [_line(path, curve.color, curve.width, curve.dashes)]
    for across, down in places if curve.mark else []:
        if curve.mark == "circle":
            shape = f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3.6" '
        else:
            shape = f'<rect x="{across - 4:.1f}" y="{down - 4:.1f}" width="8" height="8" '
        parts.append(f'{shape}fill="{curve.color}"/>')
    return parts


def _draw_names(curves, y, left, bottom):
    """The names at the ends of the curves, moved apart until none overlap, each with a sample."""
    ends = sorted(curves, key=lambda curve: y(curve.points[-1][1]))
    places = []
    for curve in ends:
        least = places[-1] + SPACE if places else 0
        places.append(max(y(curve.points[-1][1]), least))
    for index in reversed(range(len(places))):
        below = places[index + 1] - SPACE if index + 1 < len(places) else bottom
        places[index] = min(places[index], below)
    parts = []
    for curve, at in zip(ends, places):
        sample = _draw_curve(curve, [(left, at), (left + SAMPLE, at)])
        parts += sample[:1] + sample[2:]  # one mark, at its end
        parts.append(draw_text(left + SAMPLE + 7, at + 4.5, curve.name))
    return parts


def bars_height(count):
    """The height of the drawing of `count` bars by `draw_bars`."""
    return 24 + count * (BAR + BAR_GAP) + 8


def draw_bars(left, top, title, bars, limit, most):
    """A bar for each of `bars`, (name, base, rest, words), as a list of SVG elements.

    `base` is hatched, `rest` is filled, and the part above `limit` has another colour: see
    `draw_bars_legend`. A line marks `limit`; `most` is the longest of all bars on this scale.
    """
    parts = [draw_text(left, top + FONT, title)]
    scale = LONGEST / max(most, limit)
    x0, y0 = left + 54, top + 24
    for index, (name, base, rest, words) in enumerate(bars):
        y = y0 + index * (BAR + BAR_GAP)
        box = f'y="{y}" height="{BAR}"'
        parts.append(draw_text(x0 - 8, y + 11.5, name, "end"))
        parts += _draw_hatched(f'x="{x0}" width="{base * scale:.1f}" {box}')
        parts.append(
            f'<rect x="{x0 + base * scale:.1f}" width="{rest * scale:.1f}" {box} fill="{FILLED}" {EDGE}/>'
        )
        over = (base + rest - limit) * scale
        if over > 0.01:
            parts.append(
                f'<rect x="{x0 + limit * scale:.1f}" width="{over:.1f}" {box} fill="{OVER}" {EDGE}/>'
            )
        parts.append(draw_text(x0 + LONGEST + 8, y + 11.5, words))
    down = len(bars) * (BAR + BAR_GAP) + 2
    parts.append(_line(f"M{x0 + limit * scale:.1f} {y0 - 4}v{down}", TEXT, 1.6, "7 4"))
    return parts


def draw_bars_legend(left, top, base, rest):
    """The legend of the two parts of a bar and the dashed line, as a list of SVG elements."""
    words = [base, rest, "limit", "over it"]
    at = [left]
    for each in words:
        at.append(at[-1] + 52 + 7.2 * len(each))
    box = f'y="{top}" width="26" height="{BAR}"'
    parts = _draw_hatched(f'x="{at[0]}" {box}')
    parts.append(f'<rect x="{at[1]:.1f}" {box} fill="{FILLED}" {EDGE}/>')
    parts.append(_line(f"M{at[2] + 13:.1f} {top - 3}v{BAR + 6}", TEXT, 1.6, "7 4"))
    parts.append(f'<rect x="{at[3]:.1f}" {box} fill="{OVER}" {EDGE}/>')
    return parts + [draw_text(x + 32, top + 11.5, each) for x, each in zip(at, words)]


def _draw_hatched(box):
    return [
        f'<rect {box} fill="{TEXT}" fill-opacity="0.4" {EDGE}/>',
        f'<rect {box} fill="url(#hatch)"/>',
    ]


def _line(path, color, width, dashes=""):
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<path d="{path}" fill="none" stroke="{color}" stroke-width="{width}"{dashed}/>'
