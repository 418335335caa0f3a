"""Writes docs/certificates.md: the proven optimum of small pipelines, beside the named schedules.

python tools/certificates.py                 # takes some minutes
"""

import sys
from functools import partial
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "source_code"))

from files.outputs import can_be_written, not_written, write_whole  # noqa: E402
from guard.one_sentence import in_one_sentence, naming_files  # noqa: E402
from lab.known_schedules import TITLES  # noqa: E402
from lab.simulator import Costs  # noqa: E402
from pipeline.command_line import Parser  # noqa: E402
from planning.bounded_search import Question, search  # noqa: E402

PAGE = ROOT / "docs" / "certificates.md"
MOST_RANKS, MOST_MICROBATCHES = 4, 8
SECONDS = 10.0  # to search, for each cell
TOP = """# Certificates: how good the named schedules are

Which schedule is best for a given number of ranks, number of micro-batches and amount of memory?
*Room k* means that a rank can hold at most k micro-batches at a time. If backwards are split, a
micro-batch is held until the half for the weights has run. The
[exact search](../source_code/planning/exact_search.py) leaves out no order of actions that could be
shorter. Its answer is therefore a certificate: with these stages on these ranks, no schedule in this
room is shorter.

A forward takes 1 time unit, a whole backward takes 2, and each half of a split backward takes 1.
Messages take no time. The number in a cell is the shortest makespan in this room. Below the number,
the cell names the schedules of the course that fit into the room and reach this makespan. If no
schedule of the course does both, the cell names the shortest one that fits, with the makespan of
that schedule. If no schedule of the course fits, the cell has only the number. Some cases are open,
such as "≤ 29, ≥ 26": the best known schedule takes 29, and it is proven that none takes less than
26.

`python tools/certificates.py` writes this page. `python source_code/search_schedule.py` runs the
same search with costs of your own.
"""


@in_one_sentence()
def main():
    Parser(__doc__).parse_args()
    if not can_be_written(PAGE):
        raise SystemExit(f"{PAGE} cannot be written; make its folder writable, and start again")
    page = TOP + "".join(map(part, range(2, MOST_RANKS + 1)))
    with naming_files(PAGE):
        write_whole(PAGE, page)
    return int(bool(not_written))


def part(p):
    """The tables of pipelines of `p` ranks."""
    tables = [
        ("whole backwards", range(1, p + 1), partial(question_in_line, p, split=False)),
        ("split backwards", range(1, 2 * p), partial(question_in_line, p, split=True)),
        (
            "split backwards, two stages per rank in a V, room counted in micro-batches on one stage",
            range(2, 2 * p + 1),
            partial(question_in_v, p),
        ),
    ]
    text = ""
    for title, rooms, question in tables:
        text += f"\n## {p} ranks, {title}\n\n"
        text += "| micro-batches |" + "".join(f" room {room} |" for room in rooms) + "\n"
        text += "|---|" + "---|" * len(rooms) + "\n"
        for m in range(1, MOST_MICROBATCHES + 1):
            cells = row([question(m, room) for room in rooms], SECONDS)
            text += f"| {m} |" + "".join(f" {one} |" for one in cells) + "\n"
            print(f"{p} ranks, {title}, {m} micro-batches", file=sys.stderr, flush=True)
    return text


def question_in_line(p, m, room, split):
    """One stage per rank. With split backwards an activation is held until W, as in the papers."""
    costs = Costs([1] * p, [2] * p, [1] * p if split else None, {})
    return Question(tuple(range(p)), m, costs, split, (room,) * p, split)


def question_in_v(p, m, room):
    """Two stages per rank, placed there and back in a V."""
    places = (*range(p), *reversed(range(p)))
    costs = Costs([1] * 2 * p, [2] * 2 * p, [1] * 2 * p, {})
    return Question(places, m, costs, True, (room,) * p, True)


def row(questions, seconds):
    """The cells of questions that differ only in their room, the smallest room first.

    A schedule that fits a smaller room fits a larger one. The bound of a larger room holds for a
    smaller one.
    """
    answers = [search(question, seconds) for question in questions]
    makespans = list(accumulate((one.makespan for one in answers), min))
    bounds = list(accumulate((one.bound for one in reversed(answers)), max))[::-1]
    return [cell(*three) for three in zip(answers, makespans, bounds)]


def cell(answer, makespan, bound):
    """The makespan and the schedules that reach it, as a cell of a table."""
    if makespan == float("inf"):
        return "none found in time"
    best = [TITLES[name] for name, length in answer.known.items() if length == makespan]
    told = ", ".join(best)
    if not best and answer.known:
        name = min(answer.known, key=answer.known.get)
        told = f"{TITLES[name]} {answer.known[name]:g}"
    number = f"**{makespan:g}**" if makespan <= bound else f"≤ {makespan:g}, ≥ {bound:g}"
    return f"{number}<br>{told}" if told else number


if __name__ == "__main__":
    sys.exit(main())
