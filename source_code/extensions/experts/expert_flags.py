# SPDX-License-Identifier: Apache-2.0
"""The flags of experts.py, and which of their values are rejected."""

import argparse
import math

from extensions.experts.expert_layer import Routing
from pipeline.command_line import number_from_zero, positive_integer, positive_number

MOST_EXPERTS = 1024  # of a layer; all of them are built
MOST_FACTOR = 1_000_000  # of the auxiliary loss, so that it does not become infinite by that alone


def add_expert_flags(parser):
    """Add the flags of the layers with experts, and of their all-to-alls."""
    add, count = parser.add_argument, {"type": positive_integer, "metavar": "N"}
    add("--experts", default=4, help="routed experts of a layer", **count)
    add("--top", default=2, help="routed experts that a token uses", **count)
    add("--expert-ranks", help="ranks that share the experts, by default as many as fit", **count)
    add("--capacity", type=positive_number, metavar="X",
        help="tokens that an expert takes of a sequence, over those of a balanced router")  # fmt: skip
    add("--auxiliary", type=factor, default=0.01, metavar="X", help="factor of the auxiliary loss")
    add("--exchange", type=positive_number, nargs=2, metavar="MS",
        help="with --pace: how long a forward and a backward wait for all-to-alls")  # fmt: skip
    add("--pairs", action="store_true", help="with --exchange: hide it behind another action")


def factor(text):
    """Convert a flag's value to a number, either 0 or positive."""
    value = number_from_zero(text)
    if value > MOST_FACTOR:
        raise argparse.ArgumentTypeError(f"must be at most {MOST_FACTOR}, not '{text}'")
    return value


def check_experts(arguments):
    """Reject numbers that do not fit, and set `routing` and the default of --expert-ranks."""
    a = arguments
    if a.experts > MOST_EXPERTS:
        raise SystemExit(f"--experts {a.experts}: {MOST_EXPERTS:,} are the most; use fewer")
    if a.top > a.experts:
        raise SystemExit(
            f"--top {a.top} is more than --experts {a.experts}; use at most {a.experts}"
        )
    if a.capacity and a.capacity > a.experts / a.top:
        raise SystemExit(
            f"--capacity {a.capacity:g} is more than all tokens; use at most "
            f"{a.experts / a.top:g}, or leave it out"
        )
    a.expert_ranks = a.expert_ranks or math.gcd(a.replicas, a.experts)
    for flag, number in (("--replicas", a.replicas), ("--experts", a.experts)):
        if number % a.expert_ranks:
            raise SystemExit(
                f"--expert-ranks {a.expert_ranks} does not divide {flag} {number}; use a number "
                f"that divides both, such as {math.gcd(a.replicas, a.experts)}"
            )
    check_exchange(a)
    a.routing = Routing(a.experts, a.top, a.capacity, a.auxiliary)


def check_exchange(arguments):
    """Reject --exchange and --pairs without what they need, or with what they cannot time."""
    a = arguments
    if (a.exchange and not getattr(a, "pace", None)) or (a.pairs and not a.exchange):
        raise SystemExit(
            "--pairs needs --exchange, and --exchange needs --pace; give both, or leave them out"
        )
    if not a.exchange:
        return
    if a.record or a.profile or a.pace_per_layer or a.device == "cuda":
        raise SystemExit(
            "--exchange is for paced CPU ranks, which it times itself; leave out --record, "
            "--profile and --pace-per-layer, and use --device cpu"
        )
    if max(a.exchange) >= 1000 * a.timeout:
        raise SystemExit(
            f"--exchange: {max(a.exchange):g} ms outlast --timeout {a.timeout:g} s; use a shorter "
            "time or a longer --timeout"
        )
