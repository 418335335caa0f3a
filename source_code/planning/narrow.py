# SPDX-License-Identifier: Apache-2.0
"""Text and tables that fit into a terminal of 80 columns."""

import re
import textwrap

WIDTH = 80
NO_BREAK = "\N{NO-BREAK SPACE}"


def how_many(count, what):
    """A number of things, as in "1 layer" or "2 batches"."""
    ending = "es" if what.endswith("ch") else "s"
    return f"{count} {what}{ending * (count != 1)}"


def lines_of(text, indent=""):
    """The lines of a paragraph; those after the first begin with `indent`."""
    return textwrap.wrap(
        text,
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def command_lines(command):
    """The lines of a shell command: all but the last end with a backslash.

    A flag and its value are on one line, and so is what is quoted.
    """
    quoted = re.sub(r"'[^']*'", lambda found: found[0].replace(" ", NO_BREAK), command)
    bound = re.sub(r"(?<= )(--\S+) (?!-)", rf"\1{NO_BREAK}", quoted)
    wide = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": "    "}
    *first, last = textwrap.wrap(bound, WIDTH - 2, **wide)
    return [line.replace(NO_BREAK, " ") for line in [*(f"{line} \\" for line in first), last]]


def columns(rows, names, to_the_right):
    """A heading and a line per row, each column as wide as its widest text.

    `rows` are {name: text}, `names` the columns to show, and those of `to_the_right` are aligned
    to the right.
    """
    width = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    lines = []
    for row in ({name: name for name in names}, *rows):
        cells = [
            row[name].rjust(width[name]) if name in to_the_right else row[name].ljust(width[name])
            for name in names
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
