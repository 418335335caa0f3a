# SPDX-License-Identifier: Apache-2.0
"""A timeline as text for a terminal, at most 78 columns wide.

A block starts with the last digit of its micro-batch. It goes on with > in a forward, < in a
backward, and w in a backward for the weights; dots are waiting. Colours only repeat that.
"""

from textwrap import wrap

from lab.figures import describe
from lab.story import short

COLUMNS = 78
NAME = 8  # columns for "rank 12 "
SIGN = {"F": ">", "B": "<", "I": "<", "W": "w", "U": "u"}
# Of the terminal's 256 colours the nearest to those of drawing.py: (block, letters on it).
PAINT = {"F": (74, 16), "B": (29, 231), "I": (79, 16), "W": (214, 16), "U": (166, 16)}
LEGEND = {
    "F": "0> forward of micro-batch 0",
    "B": "< backward",
    "W": "w backward for weights",
    "U": "u update",
}


def in_text(timelines, colours=False, unit="ms", columns=COLUMNS):
    """The lines of one timeline or several, on one scale. `timelines` is {label: Timeline}."""
    longest = max(timeline.makespan for timeline in timelines.values())
    cells = columns - NAME
    lines = []
    for label, timeline in timelines.items():
        lines.append(f"{label}: {describe(timeline, unit).strip()}"[:columns])
        for rank, events in enumerate(timeline.by_rank):
            row = _row(events, timeline.start, longest / cells, cells)
            lines.append(f"{f'rank {rank}':<{NAME}}" + "".join(_painted(row, colours)))
        lines.append("")
    return [*lines[:-1], _axis(longest, cells, unit), *_legend(timelines.values(), columns)]


def _legend(timelines, columns):
    """The meanings of the signs that occur, in lines that break between two meanings."""
    kinds = {event.action.kind.replace("I", "B") for each in timelines for event in each.events}
    entries = [words for kind, words in LEGEND.items() if kind in kinds] + [". waiting"]
    unbroken = "   ".join(entry.replace(" ", "\xa0") for entry in entries)
    return [line.replace("\xa0", " ") for line in wrap(unbroken, columns)]


def _row(events, start, step, cells):
    """[(kind, letter)] of each cell: what the rank does in the middle of it, or (None, ".")."""
    row, ahead, before = [], list(events), None
    for cell in range(cells):
        time = start + (cell + 0.5) * step
        while ahead and ahead[0].end <= time:
            ahead.pop(0)
        event = ahead[0] if ahead and ahead[0].start <= time else None
        if event is None:
            row.append((None, "."))
        else:
            first = event != before
            sign = str(event.action.microbatch % 10) if first else SIGN[event.action.kind]
            row.append((event.action.kind, sign))
        before = event
    return row


def _painted(row, colours):
    for kind, letter in row:
        if colours and kind:
            block, text = PAINT[kind]
            yield f"\x1b[48;5;{block};38;5;{text}m{letter}\x1b[0m"
        else:
            yield letter


def _axis(longest, cells, unit):
    end = f"{short(longest)} {unit}".strip()
    return " " * NAME + f"0{end:>{cells - 1}}"
