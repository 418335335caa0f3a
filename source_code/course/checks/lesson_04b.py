# SPDX-License-Identifier: Apache-2.0
"""Checks of lesson 04b: the cut with the shortest slowest stage, and the stages of spare ranks."""

from itertools import accumulate, combinations, product

from course.checks.answer import WrongAnswer, call, checked, drawn, many, whole_numbers_in


def _sixteenths(choose, most):
    """Seconds whose sums are exact, in whatever order they are added."""
    return [choose.randint(1, 99) / 16 for _ in range(choose.randint(1, most))]


# Seconds of the layers, and the number of stages.
LAYERS = [
    ([2, 2, 2, 2, 2, 2, 2, 2], 4),
    ([1, 1, 1, 1, 1, 7], 3),
    ([6, 1, 1, 1, 1, 6], 3),
    ([4, 4, 4, 4, 4], 3),
    ([4, 3, 2, 1, 9, 2, 2, 5], 4),
    ([2, 5, 1, 3], 4),
    ([3.5, 2, 0.5, 4.5, 3], 3),
    ([8, 2, 1, 7, 2, 9, 2], 4),
]
for number in range(1, 6):
    LAYERS += product(product((1, 2, 3), repeat=number), range(1, number + 1))
LAYERS += drawn(lambda c: (seconds := _sixteenths(c, 10), c.randint(1, len(seconds))))
# Seconds of the stages, and the number of ranks.
STAGES = [
    ([60, 30, 30], 4),
    ([30, 60, 20], 6),
    ([90, 10, 50], 6),
    ([20, 20], 4),
    ([10, 70], 2),
    ([70, 50, 20], 7),
    ([30, 20, 90], 9),
]
for number in range(1, 4):
    STAGES += product(product((2, 3, 5, 9), repeat=number), range(number, number + 6))
STAGES += drawn(lambda c: (seconds := _sixteenths(c, 5), len(seconds) + c.randint(0, 7)))


@checked("your slowest stage is as fast as that of the best of all cuts.")
def best_cut(cut):
    """Check `cut(seconds, num_stages)`: the number of layers of each stage, such as [3, 2, 1].

    `seconds` has one number per layer. The answer is compared with all possible cuts.
    """
    even = filled = True  # so far: equally many layers; stage after stage filled to the average
    for seconds, num_stages in LAYERS:
        seconds = list(seconds)
        case = f"layers of {seconds} s in {many(num_stages, 'stage')}"
        counts = _counts(call(cut, list(seconds), num_stages), num_stages, case)
        case += f": you say {counts}"
        if sum(counts) != len(seconds):
            return f"{case}, which are {sum(counts)} layers of {len(seconds)}"
        if min(counts) < 1:
            return f"{case}; each stage needs a layer"
        even = even and max(counts) - min(counts) <= 1
        filled = filled and _is_filled(seconds, counts)
        slowest = _slowest(seconds, counts)
        best = min(_slowest(seconds, each) for each in _all_cuts(len(seconds), num_stages))
        if slowest == best:
            continue
        told = f"{case}, and the slowest stage takes {slowest} s; {best} s is possible"
        if even:
            return f"{told}. Your stages have about the same number of layers; their seconds count"
        if filled and _seconds_of(seconds, counts)[-1] == slowest:
            return f"{told}. Your last stage gets what the others have left over"
        stage = _seconds_of(seconds, counts).index(slowest)
        return f"{told}. That is stage {stage}: its layers are too many for one stage"


def _counts(answer, length, case):
    try:
        counts = whole_numbers_in(answer)
    except TypeError:
        raise WrongAnswer(
            f"return a list with one whole number per stage, such as [3, 2, 1], not {answer!r:.60}"
        ) from None
    if len(counts) != length:
        numbers = many(len(counts), "number")
        raise WrongAnswer(f"{case}: you say {counts}, {numbers} for {many(length, 'stage')}")
    return counts


def _seconds_of(seconds, counts):
    ends = list(accumulate(counts))
    return [sum(seconds[end - count : end]) for count, end in zip(counts, ends)]


def _is_filled(seconds, counts):
    """Whether each stage but the last is filled up to the average."""
    loads, average = _seconds_of(seconds, counts), sum(seconds) / len(counts)
    return all(load + seconds[end] > average for load, end in zip(loads[:-1], accumulate(counts)))


def _slowest(seconds, counts):
    return max(_seconds_of(seconds, counts))


def _all_cuts(num_layers, num_stages):
    for inner in combinations(range(1, num_layers), num_stages - 1):
        ends = (0, *inner, num_layers)
        yield [end - start for start, end in zip(ends, ends[1:])]


@checked("no other way to hand out the ranks gives a faster slowest stage.")
def spare_ranks(ranks):
    """Check `ranks(seconds, num_ranks)`: the number of ranks of each stage, such as [2, 1, 1].

    `seconds` has one number per stage. A stage takes its seconds divided by its ranks, which is the
    planner's estimate.
    """
    even = True  # so far: equally many ranks
    for seconds, num_ranks in STAGES:
        seconds = list(seconds)
        case = f"stages of {seconds} s on {many(num_ranks, 'rank')}"
        counts = _counts(call(ranks, list(seconds), num_ranks), len(seconds), case)
        case += f": you say {counts}"
        if min(counts) < 1:
            return f"{case}; each stage needs a rank"
        if sum(counts) != num_ranks:
            return f"{case}, which are {many(sum(counts), 'rank')}"
        even = even and max(counts) - min(counts) <= 1
        slowest = _pace(seconds, counts)
        best = min(_pace(seconds, each) for each in _all_cuts(num_ranks, len(seconds)))
        if slowest == best:
            continue
        told = f"{case}, and a mini-batch comes every {slowest:g} s; every {best:g} s is possible"
        spare, longest = num_ranks - len(seconds), seconds.index(max(seconds))
        # If spare is 1, every answer puts all spare ranks on one stage.
        if spare > 1 and counts[longest] == spare + 1:
            return (
                f"{told}. All spare ranks are on stage {longest}, and another stage is slower now"
            )
        if spare > 1 and even:
            return f"{told}. The slowest stage sets the pace, and your ranks are spread evenly"
        stage = max(range(len(counts)), key=lambda k: seconds[k] / counts[k])
        return f"{told}. Stage {stage} sets the pace, and one rank more there makes it faster"


def _pace(seconds, counts):
    return max(time / count for time, count in zip(seconds, counts))
