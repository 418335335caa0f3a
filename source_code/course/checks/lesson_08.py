# SPDX-License-Identifier: Apache-2.0
"""The check of lesson 08: which stages lie on which rank."""

from course.checks.answer import WrongAnswer, call, checked


@checked("a loop begins anew on rank 0; a V comes back to it, and the loss with it.")
def placement(place):
    """Check `place(shape, rank, num_ranks)`: the two stages of a rank; `shape` is "loop" or "V"."""
    for num_ranks in (4, 2, 8, 3, *range(1, 33)):
        for shape in ("loop", "V"):
            for rank in range(num_ranks):
                answer = call(place, shape, rank, num_ranks)
                second = rank + num_ranks if shape == "loop" else 2 * num_ranks - 1 - rank
                case = f"{shape}, rank {rank} of {num_ranks}: you say {answer!r}"
                try:
                    stages = sorted(answer)
                except TypeError:
                    raise WrongAnswer(f"{case}; return a list of two numbers") from None
                if stages == [rank, second]:
                    continue
                if stages == [2 * rank, 2 * rank + 1]:
                    return f"{case}, two neighbours, which together are one large stage again"
                if shape == "V" and stages == [rank, rank + num_ranks]:
                    return f"{case}, the loop; with it ZB-V waits for ever"
                if shape == "V" and stages == [rank, 2 * num_ranks - rank]:
                    return f"{case}, but there are {2 * num_ranks} stages, counted from 0"
                if shape == "loop" and stages == [rank, 2 * num_ranks - 1 - rank]:
                    return f"{case}, the V; in a loop, stage {num_ranks} is on rank 0 again"
                if stages == [rank + 1, second + 1]:
                    return f"{case}, but stages are counted from 0"
                why = ", one stage, and each rank has two" if len(stages) == 1 else ""
                return f"{case}{why}; it is {[rank, second]}"
