"""Checks of lesson 08: where stages lie, what a rank passes to step(), and one factor for all."""

import math

from course.checks.answer import WrongAnswer, call, call_for_number, checked, close


@checked("a loop begins anew on rank 0; a V comes back to it, and the loss with it.")
def placement(place):
    """`place(shape, rank, num_ranks)`: the two stages of a rank, `shape` is "loop" or "V"."""
    for num_ranks in (4, 2, 8):
        for shape in ("loop", "V"):
            for rank in range(num_ranks):
                answer = call(place, shape, rank, num_ranks)
                second = rank + num_ranks if shape == "loop" else 2 * num_ranks - 1 - rank
                case = f"{shape}, rank {rank} of {num_ranks}: you say {answer}"
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
                return f"{case}; it is {[rank, second]}"


@checked("each rank passes what its own stages use, and asks its stages, not its number.")
def what_to_pass(passed):
    """`passed(has_first, has_last)`: a set out of "inputs", "target", "losses", "mask"."""
    ranks = {
        (True, False): "the rank of the first stage",
        (False, False): "a rank between",
        (False, True): "the rank of the last stage",
        (True, True): "rank 0 of a V, which has the first stage and the last",
    }
    for (has_first, has_last), who in ranks.items():
        answer = call(passed, has_first, has_last)
        try:
            names = set(answer) if not isinstance(answer, str) else {answer}
        except TypeError:
            raise WrongAnswer(f"{who}: you return {answer!r}; return a set of names") from None
        right = {"mask"} | ({"inputs"} if has_first else set())
        right |= {"target", "losses"} if has_last else set()
        if names == right:
            continue
        case = f"{who}: you pass {sorted(names)}"
        if "mask" not in names:
            return f"{case}; keyword arguments do not travel, so each stage needs its own mask"
        if "inputs" in names and not has_first:
            return f"{case}, but its input comes from the stage before, as a message"
        if {"target", "losses"} & names and not has_last:
            return f"{case}, but it has no scores to compare a target with"
        wrong = {"missing": right - names, "too much": names - right}
        parts = [f"{what} is {', '.join(sorted(some))}" for what, some in wrong.items() if some]
        return f"{case}; {', '.join(parts)}"


@checked("norms add as squares, and all ranks scale by the same factor.")
def clip_factor(factor):
    """`factor(norms, largest)`: by what every rank scales its gradients."""
    for norms, largest in [
        ([3.0, 4.0], 1.0),
        ([1.0, 2.0, 2.0], 1.5),
        ([0.3, 0.4], 1.0),
        ([2.0], 1),
    ]:
        answer = call_for_number(factor, list(norms), largest)
        whole = math.sqrt(sum(norm**2 for norm in norms))
        right = min(1.0, largest / whole)
        # torch's clip_grad_norm_ adds 1e-6 to the norm, against a division by zero.
        if close(answer, right) or close(answer, min(1.0, largest / (whole + 1e-6))):
            continue
        case = f"norms {norms}, largest {largest:g}: you say {answer:g}"
        if close(answer, largest / whole):
            return f"{case}, which makes gradients longer that are short enough already"
        if close(answer, min(1.0, largest / sum(norms))):
            return f"{case}; norms of parts do not add, their squares do"
        if close(answer, min(1.0, largest / max(norms))):
            return f"{case}, from the longest part alone; the whole has the norm {whole:g}"
        return f"{case}; the whole has the norm {whole:g}, so it is {right:g}"
