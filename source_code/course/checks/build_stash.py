# SPDX-License-Identifier: Apache-2.0
"""The check of the stash of lesson 04: PipeDream's loop, run on real ranks, version by version."""

from course.building.examining import examine
from course.checks.answer import checked, first_complaint
from course.checks.build_text import request_of
from course.checks.build_words import EXACT, Words
from pipeline.schedules import pipedream

PROGRAM = "course.checks.build_stash_on_ranks.main"
RUNS = {  # ranks, mini-batches, learning rate
    "": (4, 8, 0.5),
    "on 4 ranks, 2 mini-batches, a rate of 0.5: ": (4, 2, 0.5),
    "on 2 ranks, 10 mini-batches, a rate of 0.3: ": (2, 10, 0.3),
    "on 3 ranks, 5 mini-batches, a rate of 0.4: ": (3, 5, 0.4),
}


@checked(
    "each backward has the weights of its forward, and rank r keeps tensors of p - r versions only."
)
def pipedream_run(function):
    """Check `pipedream_run(stage, inputs, targets, rate)` in each of RUNS."""
    request = request_of(function, program=PROGRAM)
    return first_complaint(lambda run: complaint_of(request, *run), RUNS)


def complaint_of(request, num_ranks, count, rate):
    """The error in the loop of a request with these numbers, or None."""
    request = request | {"microbatches": [count], "rate": rate}
    orders = pipedream(num_ranks, count).orders
    rows = [[str(action) for action in order if action.kind != "U"] for order in orders]
    observed = examine(request, num_ranks)
    words = Words(observed, request, [rows])
    complaint = complaint_of_versions(observed.ranks, words)
    if complaint and any(rank.raised for rank in observed.ranks):
        return complaint  # the error follows from it
    transport, left = words.transport(), None
    if all(rank.done for rank in observed.ranks):
        left = words.order([rank.steps[0] for rank in observed.ranks], rows)
    if transport and not left:
        return transport
    copied = {"forward_with", "backward_with"} & words.sources.keys()
    if left and copied:
        names = " and ".join(sorted(copied))
        return f"your cells define {names}, but the check can follow only those of small.weight_stash; import them"
    if left and (complaint or transport):  # the order is why versions differ, or a wait is missing
        return left.removeprefix("the losses agree, but ")
    return left or complaint


def complaint_of_versions(ranks, words):
    """The first error in the versions of the weights that actions used. Of several of one kind, it
    is that of the earliest mini-batch, on the last rank: the others can follow from it."""
    events = [(event, rank) for rank in reversed(ranks) for event in sum(rank.steps[:1], [])]
    events.sort(key=lambda pair: pair[0]["k"])
    for wrong, kinds in ((_backward, "B"), (_forward, "F"), (_copies, "F"), (_memory, "FB")):
        for event, rank in events:
            said = wrong(rank, event, words, len(ranks)) if event["kind"] in kinds else None
            if said:
                return said
    for rank in ranks if all(rank.reports for rank in ranks) else []:
        (result,) = rank.reports
        if not result["whole"]:
            return f"rank {rank.number} returns no weights: return newest, losses"
        if result["version"] is None:
            return (
                f"rank {rank.number} ends with weights that no sequence of updates makes: is there "
                "one update for each mini-batch, and none besides?"
            )
        count = len(result["wanted"])
        if result["version"] != count:
            return (
                f"rank {rank.number} ends with version {result['version']} of its weights, and "
                f"{count} updates make version {count}"
            )
    if ranks[-1].reports:
        return _losses(ranks[-1].reports[0], len(ranks) - 1)


def _forward(rank, event, words, num_ranks):
    k, version = event["k"], event["version"]
    wanted = max(0, k - (num_ranks - 1 - rank.number))
    if version == wanted:
        return None
    case = f"rank {rank.number} runs the forward of mini-batch {k}"
    if version is not None:
        return f"{case} with version {version}, and the newest by then is version {wanted}"
    if event["factor"] is not None:
        return (
            f"{case} after an update that is {event['factor']:g} times that of the rule: is it "
            f"`rate` times the gradient{', and subtracted' if event['factor'] < 0 else ''}?"
        )
    return (
        f"{case} with weights that no sequence of updates makes: does each update start from the "
        "newest version, and is it `weight - rate * gradient` for every weight?"
    )


def _backward(rank, event, words, num_ranks):
    case = f"rank {rank.number} runs the backward of mini-batch {event['k']}"
    if not event["kept"]:
        return (
            f"{case} with weights that have been overwritten since its forward: make new tensors "
            "for a new version"
        )
    if not event["same"]:
        return (
            f"{case} with other weights than its forward had, at {words.at(event['at'])}: "
            "keep those by the number of the mini-batch"
        )


def _copies(rank, event, words, num_ranks):
    if event["copies"]:
        return (
            f"rank {rank.number} runs the forward of mini-batch {event['k']} with a copy of version "
            f"{event['version']}, which mini-batch {event['copies'][0]} uses, too: keep the version "
            "itself under both numbers, and make new tensors in the update only"
        )


def _memory(rank, event, words, num_ranks):
    case = f"rank {rank.number} runs the {event['event']} of mini-batch {event['k']}"
    if event["history"]:
        return (
            f"{case} with weights that remember how they were made, and so does every version "
            "before them: detach() a new version"
        )
    in_use = "1 is" if rank.number == num_ranks - 1 else f"{num_ranks - rank.number} are"
    if event["alive"] > num_ranks - rank.number:
        return (
            f"{case} with {event['alive']} versions in memory, and {in_use} in use there: forget a "
            "version when its mini-batch has come back"
        )


def _losses(result, rank):
    count = len(result["wanted"])
    if result["losses"] is None or len(result["losses"]) != count:
        return f"rank {rank} returns no list with the loss of each of the {count} mini-batches"
    for k, (loss, wanted) in enumerate(zip(result["losses"], result["wanted"])):
        if loss is None or not abs(loss - wanted) <= 10 * EXACT:
            return f"the loss of mini-batch {k} is {wanted:.6f} by the rule, and rank {rank} has {loss}"
