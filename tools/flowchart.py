"""Mermaid flowcharts for pages without a network: a drawing as SVG, and the same as a list.

The input is the output of `tools/architecture.py`: one `name["label"]` or `name --> other` per
line.
"""

import html
import re

LETTER, LINE, MARGIN = 7.9, 18, 12  # pixels of a letter and a line of 13 px type, and around them
GAP, ROW, WIDTH = 16, 66, 900  # between boxes, from row to row, and the widest row
SWEEPS = 8  # sweeps until each box is near its neighbours


def as_picture(mermaid):
    """The drawing as SVG, boxes that lead to no other at the bottom; below it the same in words."""
    labels, arrows = read(mermaid)
    rows = rows_of(labels, arrows)
    places, height = places_of(rows, labels)
    boxes = [box_of(name, labels, arrows, places) for row in rows for name in row]
    words = [f"<li>{html.escape(said(name, labels, arrows))}</li>" for row in rows for name in row]
    alt = f"{len(labels)} boxes and {sum(map(len, arrows.values()))} arrows, in words below"
    return (
        f'<div class="wide"><svg class="flowchart" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{alt}">{"".join(boxes)}</svg></div>'
        f"<details><summary>The picture in words</summary><ul>{''.join(words)}</ul></details>"
    )


def read(mermaid):
    """({name: label}, {name: the names that its arrows lead to}), in the order of the text."""
    labels = dict(re.findall(r'^\s*(\w+)\["(.*)"\]\s*$', mermaid, re.MULTILINE))
    arrows = {name: [] for name in labels}
    for name, other in re.findall(r"^\s*(\w+)\s*-->\s*(\w+)\s*$", mermaid, re.MULTILINE):
        for end in (name, other):
            labels.setdefault(end, end)
            arrows.setdefault(end, [])
        arrows[name].append(other)
    return labels, arrows


def rows_of(labels, arrows):
    """Rows of names from top to bottom: each box above and near those that its arrows lead to."""
    floors = {}

    def floor(name):
        if name not in floors:
            floors[name] = 1 + max(map(floor, arrows[name]), default=-1)
        return floors[name]

    near = {name: list(others) for name, others in arrows.items()}
    for name, others in arrows.items():
        for other in others:
            near[other].append(name)
    levels = [[] for _ in range(1 + max(map(floor, labels)))]
    for name in labels:
        levels[floors[name]].append(name)
    middle = {}  # position of each box in its level, from -1 to 1
    for _ in range(SWEEPS):
        for level in levels:
            known = {name: [middle[o] for o in near[name] if o in middle] for name in level}
            level.sort(key=lambda name: sum(known[name]) / max(1, len(known[name])))
            middle |= {name: (2 * i + 1) / len(level) - 1 for i, name in enumerate(level)}
    return [row for level in reversed(levels) for row in wrapped(level, labels)]


def wrapped(names, labels):
    """`names` in as few rows of even length as fit into the width."""
    total = sum(width_of(labels[name]) + GAP for name in names)
    count = -(-total // (WIDTH * 0.9))
    rows, filled = [[]], 0.0
    for name in names:
        width = width_of(labels[name]) + GAP
        if rows[-1] and filled + width / 2 > total / count * len(rows):
            rows.append([])
        rows[-1].append(name)
        filled += width
    return rows


def width_of(label):
    return LETTER * max(map(len, lines_of(label))) + 2 * MARGIN


def lines_of(label):
    return re.split(r"<br ?/?>", label)


def places_of(rows, labels):
    """({name: (left, top, width, height)}, height of the whole drawing)."""
    places, top = {}, MARGIN
    for row in rows:
        taken = sum(width_of(labels[name]) for name in row)
        gap = (WIDTH - taken) / (len(row) + 1)
        left = gap
        highest = LINE * max(len(lines_of(labels[name])) for name in row) + MARGIN
        for name in row:
            places[name] = (left, top, width_of(labels[name]), highest)
            left += width_of(labels[name]) + gap
        top += highest + ROW - LINE - MARGIN
    return places, top - ROW + LINE + 3 * MARGIN


def box_of(name, labels, arrows, places):
    """A box after its arrows, so that boxes further down lie on top of them."""
    left, top, width, height = places[name]
    middle, bottom = left + width / 2, top + height
    paths = []
    for other in arrows[name]:
        x, y, w, _ = places[other]
        x += w / 2
        bend = min(50, (y - bottom) / 2)
        paths.append(
            f'<path d="M{middle:.0f} {bottom:.0f}C{middle:.0f} {bottom + bend:.0f} '
            f'{x:.0f} {y - bend:.0f} {x:.0f} {y:.0f}"/>'
        )
    lines = lines_of(labels[name])
    first = top + height / 2 + 4.5 - LINE * (len(lines) - 1) / 2
    text = "".join(
        f'<text x="{middle:.0f}" y="{first + LINE * i:.0f}">{html.escape(line)}</text>'
        for i, line in enumerate(lines)
    )
    return (
        f'<g tabindex="0"><title>{html.escape(said(name, labels, arrows))}</title>{"".join(paths)}'
        f'<rect x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{height:.0f}" rx="5"/>'
        f"{text}</g>"
    )


def said(name, labels, arrows):
    """A sentence with a box's label and the boxes that it builds on."""
    others = [" ".join(lines_of(labels[other])) for other in arrows[name]]
    label = " ".join(lines_of(labels[name]))
    return f"{label} builds on {', '.join(others)}" if others else f"{label} builds on nothing here"
