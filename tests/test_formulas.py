"""A formula in the README, the glossary, a lesson or a sheet is the one that the simulator gives.

Each case takes a formula as it is printed on a page, works it out for many sizes, and compares it
with a schedule that is played, or with the course's own count. p ranks, m micro-batches, v chunks,
r the rank; F and B are the costs of a forward and a backward.
"""

import json
import re
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest

from lab.longest_path import longest_path
from lab.simulator import Costs, simulate
from pipeline.schedules import (
    gpipe,
    interleaved_1f1b,
    naive,
    one_f_one_b,
)

ROOT = Path(__file__).resolve().parents[1]
SIZES = [(p, m) for p, m in product((2, 3, 4, 7), (8, 12, 32)) if m >= p]
PAGES = {
    "README": "README.md",
    "glossary": "docs/glossary.md",
    "errors": "docs/torch-distributed-pipelining-errors.md",
}


def prose_of(page):
    """The text of a page, or of the lesson whose number it is."""
    if page in PAGES:
        return (ROOT / PAGES[page]).read_text()
    (path,) = (ROOT / "notebooks").glob(f"{page}_*.ipynb")
    cells = json.loads(path.read_text())["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def value_of(formula, **letters):
    """What a printed formula gives: minus signs and dots as they are printed, products implied."""
    code = re.sub(r"\\frac\{(.*?)\}\{(.*?)\}", r"(\1)/(\2)", formula)
    code = code.replace("−", "-").replace("·", "*").replace(" ", "").replace("\u00a0", "")
    code = re.sub(r"(?<=[\w)])(?=\()|(?<=[\d)])(?=[a-zA-Z])", "*", code)
    return eval(code, {"__builtins__": {}}, {k: Fraction(v) for k, v in letters.items()})


def bubble_over_total(make):
    return lambda p, m, v, r: 1 - Fraction(m * 3, round(simulate(make(p, m), Costs(1, 2)).makespan))


def bubble_over_ideal(make):
    return lambda p, m, v, r: Fraction(round(simulate(make(p, m), Costs(1, 2)).makespan), m * 3) - 1


def held(p, m, v, r):
    return simulate(one_f_one_b(p, m), Costs()).peak_held_per_rank[r]


def step_of_1f1b(p, m, v, r):
    return simulate(one_f_one_b(p, m), Costs(1, 2)).makespan


def naive_idle(p, m, v, r):
    return Fraction(round(simulate(naive(p), Costs(1, 2)).idle_per_rank[r]), 3 * p)


def interleaved_bubble(p, m, v, r):
    makespan = simulate(interleaved_1f1b(p, m, v), Costs(1, 2)).makespan
    return Fraction(round(makespan), 3 * v * m) - 1


def warm_up(p, m, v, r):
    return [action.kind for action in one_f_one_b(p, m).orders[r]].index("B") - 1


CASES = [
    ("README", r"a schedule as data; the bubble is (.*?) \|", bubble_over_total(gpipe)),
    ("README", r"the same share of either step, (.*?)\. ", bubble_over_total(one_f_one_b)),
    ("README", r"rank r holds at most ([^|,]{1,12}) micro-batches instead of all", held),
    ("glossary", r"\| 1F1B \|.*rank r holds at most (.{1,12}?) micro-batches", held),
    ("errors", r"each rank is idle for (.*?) of the time", bubble_over_total(one_f_one_b)),
    ("01", r"so the idle share is\s+\$\$(.*?)\.?\$\$", naive_idle),
    ("02", r"\{total\}\} = (.*?), \\qquad", bubble_over_total(gpipe)),
    ("02", r"\{busy\}\} = (.*?)\.\$\$", bubble_over_ideal(gpipe)),
    ("02", r"In total, the step takes (.*?), which is", step_of_1f1b),
    ("03", r"Rank r first runs one forward fewer, (.*?), to fill", warm_up),
    ("03", r"exactly as large: (.*?)\. ", bubble_over_total(one_f_one_b)),
    ("03", r"rank r holds at most (.{1,12}?) micro-batches", held),
    ("03", r"Together they take .* = (\(m \+ p − 1\)\(F \+ B\))\.", step_of_1f1b),
    ("05", r"bubble over ideal is (.*?)\.$", interleaved_bubble),
    ("05", r"messages rises from (2m\(p − 1\)) to", lambda p, m, v, r: len(gpipe(p, m).messages)),
    (
        "05",
        r"messages rises from .*? to (2m\(p·v − 1\))",
        lambda p, m, v, r: len(interleaved_1f1b(p, m, v).messages),
    ),
]


@pytest.mark.parametrize("page, pattern, played", CASES, ids=[case[1] for case in CASES])
def test_the_printed_formula_is_what_the_simulator_plays(page, pattern, played):
    printed = set(re.findall(pattern, prose_of(page), re.MULTILINE))
    assert len(printed) == 1, f"on {page}, {pattern}: {printed}"
    (formula,) = printed
    for p, m in SIZES:
        for v, r in product((2, 3) if "v" in formula else (2,), range(p)):
            if "v" in formula and m % p:
                continue  # groups of p micro-batches
            letters = {"p": p, "m": m, "v": v, "r": r, "F": 1, "B": 2}
            assert value_of(formula, **letters) == played(p, m, v, r), (p, m, v, r)


def test_the_reader_of_formulas_knows_minus_dots_and_products():
    assert value_of(r"\frac{p-1}{m+p-1}", p=4, m=8) == Fraction(3, 11)
    assert value_of("2m(p·v − 1)", p=4, m=8, v=2) == 112
    assert value_of("(p − 1)F + m(F + B)", p=4, m=8, F=1, B=2) == 27


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_the_last_rank_of_both_works_without_a_gap_so_their_steps_are_equally_long(make):
    for p, m in SIZES:
        timeline = simulate(make(p, m), Costs(1, 2))
        last = timeline.by_rank[-1]
        assert last[0].start == p - 1
        assert last[-1].end - last[0].start == 3 * m
        assert timeline.makespan - last[-1].end == 2 * (p - 1)


def test_of_the_messages_of_gpipe_2_p_minus_1_lie_on_the_longest_path_whatever_m_is():
    for p, m in SIZES:
        path = longest_path(simulate(gpipe(p, m), Costs(1, 2, transfer=0.01)))
        assert sum(step.by_message for step in path) == 2 * (p - 1)
