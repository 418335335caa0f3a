"""Checks of lesson 10: who sums with whom, the weight of a token, and which way for which machine."""

from functools import lru_cache

from course.checks.answer import NotAttempted, WrongAnswer, call, call_for_number, checked, close
from extensions.planning.choosing import ways
from extensions.planning.machine import Link, Machine
from extensions.planning.transformer import Model


@checked("ranks with the same stages sum their gradients; everything else stays in a pipeline.")
def peers_of(peers):
    """`peers(rank, num_ranks, replicas)`: all ranks that have this rank's stages, in order."""
    for num_ranks, replicas in [(4, 2), (8, 2), (8, 4), (6, 3), (4, 4), (4, 1)]:
        ranks = num_ranks // replicas
        for rank in range(num_ranks):
            right = list(range(rank % ranks, num_ranks, ranks))
            answer = call(peers, rank, num_ranks, replicas)
            try:
                answer = list(answer)
            except TypeError:
                raise WrongAnswer(f"return a list of ranks, not {answer!r}") from None
            if not all(isinstance(peer, int) for peer in answer):
                raise WrongAnswer(f"return a list of ranks, not {answer}")
            if answer == right:
                continue
            case = f"rank {rank} of {num_ranks} in {replicas} replicas: you say {answer}"
            first = rank // ranks * ranks
            if answer == list(range(first, first + ranks)):
                return f"{case}, which is its own pipeline: those ranks have other stages"
            if sorted(answer) == right:
                return f"{case}, the right ranks in the wrong order"
            if sorted([*answer, rank]) == right:
                return f"{case}; the rank itself adds its own gradient, too"
            if answer == list(range(rank % replicas, num_ranks, replicas)):
                return f"{case}; step by the ranks of a pipeline ({ranks}), not by the replicas"
            return f"{case}, and its stages are on {right}"


@checked("one divisor for the whole batch, and every real token weighs the same.")
def share_of_loss(share):
    """`share(losses, counts)`: what one micro-batch adds to the loss of the whole batch.

    `losses` are those of its real tokens, a list, and `counts` the real tokens of every
    micro-batch of every replica.
    """
    cases = [[[2.0, 4.0], [9.0]], [[1.0], [], [5.0, 6.0, 7.0]], [[2.0, 2.0], [4.0, 4.0]]]
    for pieces in cases:
        counts = [len(piece) for piece in pieces]
        right = sum(map(sum, pieces)) / sum(counts)
        shares = []
        for piece in pieces:
            try:
                shares.append(call_for_number(share, piece, counts))
            except WrongAnswer as error:
                if "ZeroDivisionError" in str(error):
                    raise WrongAnswer(
                        f"{error}; a micro-batch may be all padding, and then it adds 0"
                    ) from None
                raise
        answer = sum(shares)
        if close(answer, right):
            continue
        case = f"token losses {pieces}: your shares add up to {answer:.6g}"
        means = [sum(piece) / max(len(piece), 1) for piece in pieces]
        if close(answer, sum(means) / len(means)):
            return f"{case}, a mean of means: the tokens of a short micro-batch weigh more there"
        if close(answer, sum(means)):
            return f"{case}, as many losses as there are micro-batches; one divisor for all of them"
        if close(answer, sum(map(sum, pieces))):
            return f"{case}, a sum: a batch with more tokens would take a longer step"
        return f"{case}, and one process with the whole batch has {right:.6g}"


MODELS = {
    "1.3 billion": Model(layers=24, hidden=2048, vocabulary=32_000, batch=256),
    "6.6 billion": Model(layers=32, hidden=4096, vocabulary=32_000, batch=256),
}
MACHINES = {
    "one node": Machine(gpus=8),
    "four nodes": Machine(gpus=32),
    "four nodes, one slow card each": Machine(gpus=32, between=Link(2.8e9, 30e-6, number=1)),
}
CLOSE = 1 + 2 * MACHINES["one node"].error  # two forecasts, each with its error: equals


@lru_cache
def ways_of(name, where):
    """{name of a way: Way} of one model on one machine."""
    return {way.name: way for way in ways(MODELS[name], MACHINES[where])}


@checked("the network between the nodes decides, and the answer is not always a pipeline.")
def choices(chosen):
    """`chosen`: {(model, machine): name} of a way that can be done and that no other beats clearly."""
    if not isinstance(chosen, dict):
        raise WrongAnswer("chosen is a dictionary, {(model, machine): name}")
    if chosen and all(pick is ... for pick in chosen.values()):
        raise NotAttempted
    for name in MODELS:
        for where in MACHINES:
            if (name, where) not in chosen:
                return f"nothing is chosen for {name}, {where}"
            pick = chosen[name, where]
            if pick is ... or pick is None:
                return f"{name}, {where} is still open"
            found = ways_of(name, where)
            if pick not in list(found):
                return f"{name}, {where}: there is no way called {pick!r}; use {', '.join(found)}"
            way = found[pick]
            if way.problem:
                return f"{name}, {where}: {pick} cannot be done, {way.problem}"
            best = min((w for w in found.values() if not w.problem), key=lambda w: w.seconds)
            if way.seconds > CLOSE * best.seconds:
                return (
                    f"{name}, {where}: {pick} takes {way.seconds:.2f} s a step, and {best.name} "
                    f"takes {best.seconds:.2f} s; look at {reason(way, best)}"
                )


def reason(way, best):
    """What makes a way slower than the best one."""
    if way.leaving > best.leaving:
        return f"the {way.leaving / 1e9:.0f} GB that leave each node"
    if way.plan.tensor > 1:
        return f"the {way.sent / 1e9:.0f} GB that each GPU sends within the layers"
    return "how long its ranks wait, and at the head on its last stage"
