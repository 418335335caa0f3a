"""Performs three schedules with an all-to-all of 5 and 15 ms, and compares them with predictions.

    python tools/benchmark_experts.py        # about four minutes, on a machine that does nothing else

Each row is the median step of five runs. The exit status is 1 if a step is more than 4 % longer or
shorter than predicted, or if two schedules are ordered otherwise than predicted although their
predictions differ by more than 8 %.
"""

import re
import statistics
import sys
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "source_code"))

from course.launch import run  # noqa: E402
from guard.one_sentence import in_one_sentence  # noqa: E402
from pipeline.command_line import Parser  # noqa: E402

RUNS, EXCHANGES = 5, (5, 15)  # milliseconds
WITHIN, APART = 0.04, 0.08
SMALL = "--layers 8 --dim 16 --heads 2 --seq-len 8 --batch-size 8 --microbatches 8 --device cpu"
SCHEDULES = {  # flags, and how many times the work of a chunk a stage has
    "1f1b": ("--schedule 1f1b", 2),
    "interleaved, in pairs": ("--schedule interleaved-1f1b --option more=1 --pairs", 1),
    "dualpipe-v, in pairs": ("--schedule dualpipe-v --pairs", 1),
}


@in_one_sentence()
def main():
    Parser(__doc__).parse_args()
    holds = True
    for exchange in EXCHANGES:
        found = {name: measure(*row, exchange) for name, row in SCHEDULES.items()}
        for name, (step, predicted) in found.items():
            error = step / predicted - 1
            holds &= abs(error) <= WITHIN
            print(
                f"{exchange:2} ms  {name:22} {step:7.1f} ms, predicted {predicted:6.1f} ({error:+.1%})"
            )
        for one, other in misordered(found):
            print(f"{exchange} ms: {one} and {other} are not ordered as predicted")
            holds = False
    return int(not holds)


def measure(schedule, double, exchange):
    """Return the median of the performed steps, and the predicted one, in milliseconds."""
    pace = f"--pace {10 * double} {20 * double} --exchange {exchange * double} {exchange * double}"
    steps = []
    for _ in range(RUNS):
        output = run(f"experts.py {SMALL} {schedule} {pace} --steps 6", 4, warm=True, show=False)
        step, predicted = re.search(r"step (\S+) ms \(predicted (\S+) ms\)", output.output).groups()
        steps.append(float(step))
    return statistics.median(steps), float(predicted)


def misordered(found):
    """Return the pairs of names whose order differs from a prediction that is clear."""
    return [
        (one, other)
        for one, other in combinations(found, 2)
        if abs(found[one][1] / found[other][1] - 1) > APART
        and (found[one][0] < found[other][0]) != (found[one][1] < found[other][1])
    ]


if __name__ == "__main__":
    sys.exit(main())
