# SPDX-License-Identifier: Apache-2.0
"""Checks of lesson 00: a pipeline of two stations, and the memory wall."""

from itertools import product

from course.checks.answer import call_for_number, checked, close, drawn, many, require_number

# Loads, and the minutes of the washer and of the dryer.
LAUNDRIES = [(5, 30, 40), (4, 40, 30), (1, 30, 40), (40, 20, 40), (3, 25, 25), (3, 22.5, 12)]
LAUNDRIES += product(range(1, 7), (12, 22.5, 30, 1), (12, 22.5, 30, 1))
LAUNDRIES += drawn(
    lambda c: (c.randint(1, 10 ** c.randint(1, 3)), c.randint(1, 800) / 8, c.randint(1, 800) / 8)
)
MISTAKES = {  # what a sentence says of it: the minutes
    ", as if each load waited until the one before is dry; the washer is free": (
        lambda n, w, d: n * (w + d)
    ),
    ", but the dryer is the slower machine here, and loads queue before it": (
        lambda n, w, d: n * w + d
    ),
    ", but the washer is the slower machine here, and the dryer waits for it": (
        lambda n, w, d: w + n * d
    ),
    ": the turns of the slower machine are right, the filling is missing": (
        lambda n, w, d: n * max(w, d)
    ),
    ", one turn too many: the first load is already in the filling": (
        lambda n, w, d: w + d + n * max(w, d)
    ),
    ", one turn too few: after the filling, each load but the first takes one": (
        lambda n, w, d: w + d + (n - 2) * max(w, d)
    ),
}


@checked("the first load fills the line, then one load comes out each turn of the slower machine.")
def laundry(laundry_minutes):
    """Check `laundry_minutes(loads, washer, dryer)`: the minutes until the last load is dry."""
    for loads, washer, dryer in LAUNDRIES:
        answer = call_for_number(laundry_minutes, loads, washer, dryer)
        right = _play_laundry(loads, washer, dryer)
        if close(answer, right):
            continue
        case = f"{many(loads, 'load')}, washer {washer}, dryer {dryer}: you say {answer:g} minutes"
        # One number may fit two mistakes: a mistake is named if it fits the first laundries, too.
        told = [(*each, call_for_number(laundry_minutes, *each)) for each in LAUNDRIES[:4]]
        for said, mistake in MISTAKES.items():
            if all(close(minutes, mistake(n, w, d)) for n, w, d, minutes in told):
                return f"{case}{said}"
        return f"{case}, and playing it load by load gives {right:g}"


def _play_laundry(loads, washer, dryer):
    washed = dried = 0.0
    for _ in range(loads):
        washed += washer
        dried = max(dried, washed) + dryer
    return dried


@checked("12 bytes per parameter, before any activation: optimizer state needs memory, too.")
def memory_wall(bytes_per_parameter, ranks):
    """Check the bytes per parameter for float32 weights, gradients and momentum, and the least
    number of devices of 80e9 bytes for 30e9 parameters."""
    bytes_per_parameter = require_number(bytes_per_parameter, "bytes_per_parameter is")
    ranks = require_number(ranks, "ranks is")
    known = {
        4: "that is the weights alone; training also keeps a gradient and a running mean for each",
        8: "weights and gradients are in; momentum keeps one more number for each parameter",
        16: "that is AdamW's; momentum keeps one running mean, not two",
    }
    if bytes_per_parameter != 12:
        reason = known.get(
            bytes_per_parameter, "count the numbers kept for one parameter, 4 bytes each"
        )
        return f"{bytes_per_parameter} bytes per parameter: {reason}"
    if ranks == 360 / 80:
        return f"{ranks} devices: a device cannot be bought in parts, so round up"
    if ranks == 4:
        return "4 devices hold 320e9 bytes, and 30e9 x 12 bytes are 360e9"
    if ranks != 5:
        return f"{ranks} devices: divide 30e9 x 12 bytes by 80e9 and round up"
