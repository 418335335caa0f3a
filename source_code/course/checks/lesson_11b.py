# SPDX-License-Identifier: Apache-2.0
"""Checks of lesson 11b: a decode loop on real ranks, and the number of groups for a chat."""

from itertools import accumulate

from course.checks.answer import call_for_number, checked, first_complaint, many
from course.checks.build_text import request_of
from course.checks.reader_on_ranks import perform
from extensions.inference.passes import plan_passes, schedule_of
from extensions.inference.requests import Request
from lab.simulator import Costs, simulate

# Ranks, groups, new tokens of each.
CASES = {"": (3, 3, 4), "on 2 ranks with 4 groups: ": (2, 4, 5)}
PROGRAM = "course.checks.lesson_11b_on_ranks.main"


@checked("the texts of one process, and rank 0 kept all groups under way.")
def decode_loop(decode):
    """Check `decode(rank, last, first, count, forward, send, receive)` on three ranks with three
    groups, and on two ranks with four."""
    return first_complaint(lambda sizes: wrong_decoding(decode, *sizes), CASES)


def wrong_decoding(decode, ranks, groups, count):
    """The error in the texts of `groups` groups, in what is under way or kept back; or None."""
    from course.checks.lesson_11b_on_ranks import texts_of_one_process

    request = request_of(decode, program=PROGRAM, groups=groups, count=count)
    reports = perform(request, ranks)
    texts, did = reports[0]["texts"], reports[0]["did"]
    if texts is None:
        return "rank 0 returned no dictionary: return {group: its tokens} there"
    for group, right in texts_of_one_process(groups, count).items():
        ours = texts.get(str(group))
        if ours is None:
            return f"the texts have no group {group}"
        if ours != right:
            return wrong_forwards(reports, groups * count) or tell_difference(group, ours, right)
    most = max(under_way(did), default=0)
    if most < groups:
        return (
            f"the texts are right, but rank 0 never had more than {most} of {groups} groups "
            "under way: it waited for a token of one group before it began the next one"
        )
    left = fewest_until_the_last_forward(did, groups)
    if left < groups - 1:
        return (
            f"the texts are right, but in the middle rank 0 had only {left} of {groups} groups under "
            "way: with the token of one group it can begin that group's next pass, before it waits "
            "for the token of another group"
        )
    for rank, report in enumerate(reports):
        if what := kept_back(rank, report["did"]):
            return (
                f"the texts are right, but rank {rank} waits for the next message while it holds "
                f"{what}: until that is sent on, the next rank has nothing to do with it"
            )


def wrong_forwards(reports, wanted):
    """The first rank with other forwards than rank 0, or than the `wanted` ones, or None."""
    ran = [[group for what, group in report["did"] if what == "forward"] for report in reports]
    for rank, own in enumerate(ran):
        if len(own) != wanted:
            return (
                f"the texts are wrong, and rank {rank} runs {many(len(own), 'forward')}: each rank "
                f"runs {wanted}, one for each new token of each group"
            )
        for number, (group, other) in enumerate(zip(own, ran[0])):
            if group != other:
                return (
                    f"the texts are wrong, and forward {number} of rank {rank} is for group {group}, "
                    f"that of rank 0 for group {other}: what arrives belongs to the group that was sent"
                )


def tell_difference(group, ours, right):
    """The sentence about the first wrong token of a group."""
    if not isinstance(ours, list):
        return f"group {group} has {ours!r} in place of a list of tokens"
    if not ours:
        return (
            f"group {group} has no token: is it begun, and does rank 0 keep each that it receives?"
        )
    if len(ours) != len(right):
        why = "was the last one received?"
        if len(ours) > len(right):
            why = "return the new ones only, and each group's in a list of its own"
        return f"group {group} has {len(ours)} tokens instead of {len(right)}; {why}"
    if ours[1:] == right[:-1]:
        return f"group {group} begins with the token that was given: return the new tokens only"
    first = next(k for k, (a, b) in enumerate(zip(ours, right)) if a != b)
    return (
        f"token {first} of group {group} is {ours[first]}, and one process chooses {right[first]}: "
        "did a token of another group go through, or one twice?"
    )


def under_way(did):
    """After each call of rank 0: the groups for which it has run a forward and awaits the token."""
    return list(accumulate({"forward": 1, "receive": -1}.get(what, 0) for what, _ in did))


def fewest_until_the_last_forward(did, groups):
    """The smallest number of groups under way between the first passes of all and the last pass."""
    counts = under_way(did)
    last = max(place for place, (what, _) in enumerate(did) if what == "forward")
    return min(counts[counts.index(groups) : last])


def kept_back(rank, did):
    """What a rank still holds when it waits for the next message, before its last send; or None."""
    calls = dict.fromkeys(("receive", "forward", "send"), 0)
    sends = [place for place, (what, _) in enumerate(did) if what == "send"]
    for what, _ in did[: max(sends, default=0)]:
        if what == "receive" and rank > 0 and calls["receive"] > calls["forward"]:
            return "an activation that has not gone through its layers"
        if what == "receive" and calls["forward"] > calls["send"]:
            return "an output that it has not sent"
        calls[what] += 1
    return None


@checked("a pipeline of more stages has more hops, and at some length no text is fast enough.")
def groups_for_chat(groups_of):
    """Check `groups_of(p)`: the number of groups, at most p, with the most tokens per second among
    those in which each text gets at least 30 tokens per second; 0 if there are none."""
    for p in (*range(1, 17), 25, 32):
        answer, stages = call_for_number(groups_of, p), many(p, "stage")
        if not 0 <= answer <= p:
            return f"for {stages} you say {answer} groups; it is from 0 to {p}"
        rates = {1: rates_of(p, 1)}
        if rates[1][1] >= 30:  # a text is fastest in a single group
            rates = {groups: rates_of(p, groups) for groups in range(1, p + 1)}
        fast = {groups: total for groups, (total, per_text) in rates.items() if per_text >= 30}
        if not fast and answer:
            return (
                f"for {stages} a text gets {rates_of(p, answer)[1]:.1f} tokens per second, since its token "
                "also takes the hop back to the first stage, and fewer groups do not make a text "
                "faster: answer 0"
            )
        if fast and answer not in fast:
            groups = max(fast)
            return (
                f"for {stages} you say {answer}, but with {many(groups, 'group')} "
                f"each text gets {rates[groups][1]:.1f} tokens per second, from token to token"
            )
        if fast and fast[answer] < max(fast.values()) - 1e-9:
            per_text = rates[max(fast, key=fast.get)][1]
            return (
                f"for {stages} more groups than {answer} write more in all, and each text still "
                f"gets {per_text:.1f} tokens per second, from token to token"
            )


def rates_of(p, groups, tokens=12):
    """(tokens per second of all texts, tokens per second of one text) in a full pipeline."""
    requests = [Request((0,), tokens) for _ in range(groups)]
    schedule = schedule_of(plan_passes(requests, groups, 1, 1), p)
    costs = Costs(forward=24 / p, transfer={(a, (a + 1) % p): 1 for a in range(p)})
    last = [e.end for e in simulate(schedule, costs).by_rank[-1] if e.action.microbatch == 0]
    per_token = (last[-1] - last[0]) / (len(last) - 1)
    return groups * 1000 / per_token, 1000 / per_token
