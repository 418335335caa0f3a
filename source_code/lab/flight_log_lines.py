# SPDX-License-Identifier: Apache-2.0
"""Checks the form of the lines of a recording.

flight_log.py writes the lines, and flight_log_reader.py puts them together.
"""

import re

from files.inputs import is_count, is_number

LONGEST_TIME = 1e12  # milliseconds: thirty years
MOST_RANKS = 16_384  # and most stages of a program without a schedule


class RecordingError(ValueError):
    """A folder has no valid recording, or two cannot be compared; the text says why."""

    def _render_traceback_(self):
        """The line that a notebook shows, without a traceback."""
        return [str(self)]


def forms_of_lines(num_ranks, rank, schedule):
    """{key of a kind of line: {field: function that says whether a value is valid there}}."""
    actions = set(map(str, schedule.orders[rank])) if schedule else None
    stages = schedule.stages_of(rank) if schedule else range(MOST_RANKS)

    def is_text(value):
        return isinstance(value, str)

    def is_rank(value):
        return is_count(value, num_ranks - 1)

    def is_stage(value):
        return type(value) is int and value in stages

    def is_action(value):
        return is_text(value) and (value in actions if actions else _is_action(value))

    def is_weights(value):
        return isinstance(value, dict) and all(map(_is_print, value.values()))

    did = {"did": is_action, "start": _is_time, "end": _is_time, "recompute": _is_time}
    did |= {"used": _is_print, "made": _is_print, "version": is_count, "held": is_number}
    return {
        "did": {**did, "gradient": _is_norm},
        "waits": {"waits": is_text, "from": is_rank, "at": _is_time},
        "received": {"received": is_text, "from": is_rank, "is": _is_print},
        "sent": {"sent": is_text, "to": is_rank, "is": _is_print},
        "weights": {"weights": is_weights, "stage": is_stage, "version": is_count},
        "updated": {"updated": is_stage, "gradient": _is_norm},
        "ended": {"ended": is_count},
    }


def _is_action(text):
    """Whether a text names one action on a stage with a valid number."""
    match = re.fullmatch(r"([0-9]{1,6})[FBIW][0-9]{1,9}", text)
    return match is not None and int(match[1]) < MOST_RANKS


def _is_time(value):
    return is_number(value, -LONGEST_TIME, LONGEST_TIME)


def _is_norm(value):
    return value is None or is_number(value)


def _is_print(value):
    return value is None or (
        isinstance(value, list)
        and len(value) == 3
        and isinstance(value[0], str)
        and re.fullmatch("[0-9a-f]{8}", value[0]) is not None
        and all(map(_is_norm, value[1:]))
    )


def check_line(line, forms, where):
    """Raise RecordingError for a line that flight_log.py would not write."""
    form = next((forms[k] for k in forms if k in line), {}) if isinstance(line, dict) else {}
    if not form or set(line) != set(form):
        raise RecordingError(f"{where} is not a line of a recording; record anew")
    for name, holds in form.items():
        if not holds(line[name]):
            raise RecordingError(f"{where}: {name} is {str(line[name])[:40]!r}; record anew")
    if "did" in line and line["end"] < line["start"]:
        raise RecordingError(f"{where}: {line['did']} ends before it starts; record anew")
