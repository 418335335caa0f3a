# SPDX-License-Identifier: Apache-2.0
"""Search the best order of actions for a pipeline: uneven stages, slow hops, little room.

    python source_code/search_schedule.py --ranks 3 --microbatches 4 --forward 4,9,4 \\
        --backward 8,18,8 --hop 1,2=10 --room 4,3,2 --csv build/best.csv
    torchrun --standalone --nproc-per-node 3 source_code/train.py build/best.csv --verify

Costs are given, or measured: --timeline takes what a training script wrote. The result is never
longer than the shortest named schedule that fits. A lower bound for all schedules is printed beside
it; if the two are equal, the schedule is proven to be best.
"""

import argparse
import re
import sys
from pathlib import Path
from shlex import quote

from files.outputs import not_written, to_json, write_output
from guard.flags import check_alone
from guard.one_sentence import in_one_sentence
from guard.paths import check_file, check_paths_apart
from lab.known_schedules import TITLES
from lab.report import measured_costs
from lab.simulator import Costs, cost, cost_or_nothing, costs_in
from lab.timeline import TimelineError, read_timeline
from pipeline.command_line import Parser, check_same, positive_integer, positive_number
from pipeline.schedules.from_flags import by_name
from pipeline.schedules.text_form import to_csv
from planning.bounded_search import Question, search

PLACEMENTS = {
    "loop": lambda stage, ranks: stage % ranks,
    "v": lambda stage, ranks: stage % ranks if stage < ranks else 2 * ranks - 1 - stage,
}
OF_TIMELINE = "chunks", "placement", "forward", "backward", "backward_weight", "split"
LARGEST = 4096  # actions; with more, the search is too slow to find anything


@in_one_sentence()
def main():
    arguments = parse_arguments()
    question = question_of(arguments)
    answer = search(question, arguments.seconds)
    if answer.schedule is None:
        raise SystemExit(
            "--room leaves no schedule that can run, or none was found; allow more room"
        )
    if arguments.csv:
        write_output("--csv", arguments.csv, to_csv(answer.schedule))
    print(to_json(figures(answer)) if arguments.json else in_words(arguments, answer))
    return int(bool(not_written))


def parse_arguments():
    parser = Parser(__doc__)
    add, count = parser.add_argument, {"type": positive_integer, "metavar": "N"}
    add("--ranks", help="default 4", **count)
    add("--microbatches", help="default 8", **count)
    add("--chunks", default=1, help="stages per rank", **count)
    add("--placement", choices=list(PLACEMENTS), default="loop", help="of several stages per rank")
    add("--forward", type=costs_in, default=[1.0], metavar="T,...", help="of each stage, or of all")
    add("--backward", type=costs_in, default=[2.0], metavar="T,...", help="full, likewise")
    add("--backward-weight", type=costs_in, metavar="T,...", help="its part for the weights")
    add("--split", action="store_true", help="let a backward come in two halves")
    add("--transfer", type=cost_or_nothing, default=0.0, metavar="T", help="latency of a message")
    add("--hop", type=hop, action="append", metavar="A,B=T", help="the same between two ranks")
    add("--room", type=rooms, metavar="N,...", help="most stages' activations that a rank may hold")
    add("--timeline", metavar="FILE", help="take stages, ranks and costs from a run's --timeline")
    add("--seconds", type=positive_number, default=10.0, metavar="S", help="to search")
    add("--csv", metavar="FILE", help="write the schedule, for train.py")
    add("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    check_alone(parser, arguments, "timeline", OF_TIMELINE)
    check_paths_apart(arguments, {"--csv": "csv"}, {"--timeline": "timeline"})
    if arguments.csv:
        check_file("--csv", arguments.csv)
    return arguments


def rooms(text):
    return [positive_integer(value) for value in text.split(",")]


def hop(text):
    """((rank, rank), time) of A,B=T, the smaller rank first."""
    pair, equals, time = text.partition("=")
    ends = [end.strip() for end in pair.split(",")]
    if not equals or len(ends) != 2 or not all(re.fullmatch("[0-9]{1,9}", end) for end in ends):
        raise argparse.ArgumentTypeError(f"must be A,B=T with two ranks, not '{text}'")
    return tuple(sorted(map(int, ends))), cost(time)


def question_of(arguments):
    """Return the Question of the flags, or of a run's timeline."""
    a = arguments
    if a.timeline:
        places, m, given, split = from_timeline(a.timeline)
        check_same("--ranks", a.ranks, f"--timeline {a.timeline}", 1 + max(places))
        check_same("--microbatches", a.microbatches, f"--timeline {a.timeline}", m)
        a.ranks = 1 + max(places)
        check_size(f"--timeline {a.timeline}", len(places), m)
    else:
        a.ranks = a.ranks or 4
        stages, m, split = a.ranks * a.chunks, a.microbatches or 8, a.split
        check_size(f"--ranks {a.ranks} --microbatches {m}", stages, m)
        if a.placement == "v" and a.chunks != 2:
            raise SystemExit("--placement v has two stages per rank; add --chunks 2")
        places = tuple(PLACEMENTS[a.placement](stage, a.ranks) for stage in range(stages))
        columns = [
            spread(flag, values, stages)
            for flag, values in (("--forward", a.forward), ("--backward", a.backward))
        ]
        weight = spread("--backward-weight", a.backward_weight, stages) or [
            time / 2 for time in columns[1]
        ]
        if a.backward_weight and not split:
            raise SystemExit("--backward-weight is that of a backward in two halves; add --split")
        if any(part >= whole for part, whole in zip(weight, columns[1])):
            raise SystemExit(
                "--backward-weight must be less than --backward, of which it is a part"
            )
        given = Costs(*columns, weight if split else None)
    given = Costs(given.forward, given.backward, given.backward_weight, hops(a))
    room = tuple(spread("--room", a.room, a.ranks)) if a.room else None
    return Question(places, m, given, split, room)


def check_size(flags, stages, microbatches):
    if 3 * microbatches * stages > LARGEST:
        raise SystemExit(
            f"{flags}: {stages} stages and {microbatches} micro-batches are too many actions to "
            "search; use fewer of either"
        )


def spread(flag, values, count):
    """Return a value for each of `count` stages or ranks; a single value applies to all."""
    if values is None or len(values) == count:
        return values
    if len(values) != 1:
        raise SystemExit(f"{flag} has {len(values)} values; give one, or {count}")
    return values * count


def hops(arguments):
    """Return {(rank, rank): latency} in both directions, from --transfer and --hop."""
    ranks = range(arguments.ranks)
    found = {(a, b): arguments.transfer for a in ranks for b in ranks if a != b}
    for pair, time in by_name("--hop", arguments.hop).items():
        if pair not in found:
            raise SystemExit(
                f"--hop {pair[0]},{pair[1]}: use two of the ranks 0 to {arguments.ranks - 1}"
            )
        found[pair] = found[pair[::-1]] = time
    return {pair: time for pair, time in found.items() if time}


def from_timeline(path):
    """(rank of each stage, micro-batches, Costs, whether backwards are split) of a run's file."""
    try:
        timeline = read_timeline(path)
    except TimelineError as error:
        raise SystemExit(f"--timeline {error}; name a file that a training script wrote") from None
    pairs = {(event.action.stage, event.rank) for event in timeline.events}
    places = dict(pairs)
    m = 1 + max(event.action.microbatch for event in timeline.events)
    kinds = {}  # kind -> {(stage, micro-batch)}
    for event in timeline.events:
        stage, kind, microbatch = event.action
        kinds.setdefault(kind, set()).add((stage, microbatch))
    backwards = kinds.get("B", set()) | kinds.get("I", set())
    whole = len(kinds.get("F", ())) == len(backwards) == len(places) * m
    whole = whole and len(pairs) == len(places)  # each stage is on one rank
    if "U" in kinds or not whole or kinds.get("I") != kinds.get("W"):
        raise SystemExit(
            f"--timeline {path} is not that of one synchronous training step; name another one"
        )
    measured = measured_costs([timeline])
    whole = [time + more for time, more in zip(measured.backward, measured.recompute)]
    if not min(*measured.forward, *whole) > 0:
        raise SystemExit(
            f"--timeline {path} has a stage without a forward or a backward; name another one"
        )
    split = "I" in kinds
    weight = measured.backward_weight if split else None
    return (
        tuple(places[stage] for stage in range(len(places))),
        m,
        Costs(measured.forward, whole, weight),
        split,
    )


def figures(answer):
    """Return the result, under the names that --json prints."""
    return {
        "makespan": answer.makespan,
        "bound": answer.bound,
        "proven": answer.proven,
        "distance_from_bound": answer.distance,
        "named_schedules": answer.known,
        "schedule": to_csv(answer.schedule).split(),
        "moments": answer.moments,
    }


def in_words(arguments, answer):
    """Return the text that is printed without --json."""
    lines = [f"{answer.makespan:10.6g}  the best that was found, {answer.schedule.name}"]
    if answer.proven:
        lines.append("            proven: no schedule is shorter")
    else:
        lines.append(
            f"{answer.bound:10.6g}  no schedule can be below: at most {answer.distance:.1%} are lost"
        )
    for name, makespan in sorted(answer.known.items(), key=lambda pair: pair[1]):
        longer = makespan / answer.makespan - 1
        lines.append(f"{makespan:10.6g}  {TITLES.get(name, name)}, {longer:+.1%}")
    if arguments.csv and "--csv" not in not_written:
        lines.append(
            f"written to {Path(arguments.csv)}; train with: train.py {quote(arguments.csv)}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
