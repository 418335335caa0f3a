# SPDX-License-Identifier: Apache-2.0
"""Describes the first error in an examination of a reader's function, in one sentence."""

from collections import Counter

from course.checks.answer import many
from course.checks.build_transport import TransportWords, left_schedule, name_of

LOCALS = 2  # outputs that variables of the reader's may keep a little longer than needed
EXACT = 1e-12  # largest difference of losses and gradients in float64


class Words(TransportWords):
    """Sentences about one examination, also about the results of its steps.

    `rows[step][rank]` has the actions of the schedule in text form, such as "1F0".
    """

    def step(self, number):
        """The error in step `number`, as a sentence, or None."""
        rows = self.rows[number]
        complaint = self._step(number, rows)
        return complaint and (self._shapes(same_count=True) or complaint)

    def _step(self, number, rows):
        events = [rank.steps[number] for rank in self.ranks]
        results = [rank.reports[number] for rank in self.ranks]
        return (
            self._updated(results)
            or self._pairing(events, rows)
            or self._gradients(events, results, rows)
            or self.order(events, rows)
            or self._late(events)
            or self._memory(events)
            or self._loss(results[-1])
        )

    def _updated(self, results):
        for rank, result in enumerate(results):
            if result["updated"]:
                return (
                    f"the step changes the weights on rank {rank}: it leaves the gradients there, "
                    "and the optimizer's step comes after it, once"
                )

    def _late(self, events):
        """The sentence about a result that is sent after a later action, or None.

        A backward may come between a forward and its send, as when a rank runs one of each and
        then exchanges all messages.
        """
        last = len(self.ranks) * self.chunks - 1
        for rank, done in enumerate(events):
            done = [event for event in done if event["kind"] != "W"]
            made = []  # the actions so far whose result another rank needs
            for before, event in zip(done, done[1:]):
                if before["stage"] < last if before["kind"] == "F" else before["stage"] > 0:
                    made.append(before)
                sent = event["sent"] - done[0]["sent"]
                spare = 1 if made[-1:] == [before] and before["kind"] != event["kind"] else 0
                if sent < len(made) - spare:
                    return (
                        f"the gradients and the order are right, but when rank {rank} takes "
                        f"{name_of(event)}, it has not yet sent what {name_of(made[sent])} has made, "
                        "and another rank waits for it: send each result before the next action"
                    )

    def _pairing(self, events, rows):
        """The sentence about an action that used a tensor of another micro-batch, or None."""
        left = left_schedule(events, rows)
        for rank, done in enumerate(events):
            for event in done:
                kind = event["event"]
                if kind == "forward" and event.get("rounded"):
                    return (
                        f"rank {rank} runs its stage at {self.at(event['at'])} on numbers with too "
                        "few digits: were they rounded to float32 on their way?"
                    )
                if kind == "forward" and event["k"] is None:
                    return (
                        f"rank {rank} runs its stage at {self.at(event['at'])} on numbers that no "
                        "micro-batch has there"
                        + (
                            left
                            or ": has the receive been waited for, is it the right tensor, and as it came?"
                        )
                    )
        for rank, done in reversed([*enumerate(events)]):
            for event in done:
                if event.get("empty"):
                    why = "has not arrived: wait() for its receive first"
                    if (
                        event["stage"] == len(self.ranks) * self.chunks - 1
                    ):  # the last stage receives none
                        why = "is nan: is something divided by zero?"
                    return (
                        f"rank {rank} runs the backward of micro-batch {event['k']} at "
                        f"{self.at(event['at'])} with a gradient that {why}"
                    )
        for rank, done in enumerate(events):
            for event in done:
                if event["event"] == "backward" and event["of"] not in (None, event["k"]):
                    return (
                        f"rank {rank} runs the backward of micro-batch {event['k']} at "
                        f"{self.at(event['at'])} with the gradient of micro-batch {event['of']}{left}"
                    )

    def _overwritten(self, events):
        """The sentence about a receive into memory that a later backward still needs, or None."""
        for rank, done in enumerate(events):
            for event in done:
                if event.get("over") and event["stage"] == 0:
                    return (
                        f"rank {rank} uses the tokens of micro-batch {event['k']} in two forwards; the "
                        "tokens of micro-batch k are inputs[k]"
                    )
                if event.get("over"):
                    return (
                        f"rank {rank} receives the activation of micro-batch {event['k']} into the "
                        f"memory of that of micro-batch {event['over'][0]}, whose backward still "
                        "needs it: make room for each of them, or copy it"
                    )

    def _memory(self, events):
        """The sentence on what a rank keeps longer than its schedule needs; or None."""
        for rank, done in enumerate(events):
            for event in done:
                case = f"the gradients are right, but when rank {rank} takes {name_of(event)}, "
                if event.get("graphs"):
                    return (
                        f"{case}the whole graph of micro-batch {event['graphs'][0]} is still in "
                        "memory, although its backward is over: without retain_graph=True, "
                        "backward() frees it"
                    )
                kept = event.get("outputs", [])
                if self.frees and len(kept) > LOCALS:
                    return (
                        f"{case}it still holds the outputs of micro-batches {kept[0]} to {kept[-1]}, "
                        "whose backwards are over, so its memory grows with the number of "
                        "micro-batches: take each out with pop() in its backward"
                    )

    def _gradients(self, events, results, rows):
        for rank in reversed(range(len(results))):
            for found in results[rank]["gradients"]:
                if found["difference"] <= EXACT:
                    continue
                if complaint := self._overwritten(events):
                    return complaint
                on = f"on rank {rank}"
                if len(results[rank]["gradients"]) > 1:
                    on = f"on rank {rank}, stage {found['stage']},"
                if found["none"] and any(event.get("kind") == "I" for event in events[rank]):
                    return (
                        f"an I ran {on}, but no W: call what backward_input returned for it; "
                        "backward in its place returns nothing to call"
                    )
                if found["none"] and any(event.get("kind") == "B" for event in events[rank]):
                    return (
                        f"a backward ran {on} but its weights have no gradient at the end: has "
                        "zero_grad() removed it, or autograd.grad() not stored it?"
                    )
                if found["none"]:
                    return f"no backward ran {on.rstrip(',')}: its weights have no gradient"
                lost = set(rows[rank]) - {name_of(event) for event in events[rank]}
                if lost and found["rest"] > 1e-6:
                    name = next(name for name in rows[rank] if name in lost)
                    return (
                        f"a part of the gradient is missing {on.rstrip(',')}: it never took {name}"
                    )
                if found["rest"] > 1e-6:
                    said = f"the gradient {on} points another way than that of one process"
                    if len(results[rank]["gradients"]) > 1:
                        return said
                    if rank + 1 == len(results):
                        said += "; this rank has the loss: of which scores and which targets is it?"
                    else:
                        said += (
                            f", and that on rank {rank + 1} is right: look at what rank {rank + 1} "
                            f"sends back and at what rank {rank} does with it"
                        )
                    return said
                return self._factor(on, found["parts"])

    def _factor(self, on, parts):
        m, factors = len(parts), {part for part in parts}
        if set(map(short, parts)) == {"1"}:
            return (
                f"the gradient {on} is that of one process in its first digits only: was it rounded "
                "to float32 on its way?"
            )
        if len(factors) == 1 and max(self.counts) == 1:
            return (
                f"the gradient {on} is {short(parts[0])} times that of one process: a backward begins "
                "at the loss itself, and what it sends back is not changed on its way"
            )
        if len(factors) == 1:
            count = many(m, "micro-batch")
            case = f"with {count} every gradient {on} is {short(parts[0])} times too large"
            if abs(parts[0] - m) < 1e-6:
                return f"{case}: each micro-batch counts as a whole batch; divide its loss by {m}"
            if abs(parts[0] * m - 1) < 1e-6:
                return f"{case.replace('too large', 'the right one')}: it is divided by {m} twice"
            return case.replace("too large", "the right one")
        on, usual = on.rstrip(","), Counter(parts).most_common(1)[0][0]
        k = next(k for k, part in enumerate(parts) if part != (1 if usual == 1 else usual))
        k = next((k for k, part in enumerate(parts) if part == 0), k)
        if parts[k] == 0:
            return f"the gradient of micro-batch {k} is missing {on}"
        if parts[k] == 2:
            return f"the gradient of micro-batch {k} is counted twice {on}"
        return f"the gradient of micro-batch {k} counts {short(parts[k])} times {on}"

    def order(self, events, rows):
        """Where a rank left the schedule with these `rows`, as a sentence, or None."""
        for rank, (done, row) in enumerate(zip(events, rows)):
            names = [name_of(event) for event in done]
            for step, (name, wanted) in enumerate(zip(names, row)):
                if name != wanted:
                    return (
                        f"the losses agree, but rank {rank} takes {name} as its action {step} at "
                        f"{self.at(done[step]['at'])}, where the schedule has {wanted}"
                    )
            for name in Counter(names) - Counter(row):
                return f"the losses agree, but rank {rank} takes {name} once more than the schedule"
            for name in Counter(row) - Counter(names):
                return f"the losses agree, but rank {rank} never takes {name}"

    def _loss(self, result):
        last, wanted, loss = len(self.ranks) - 1, result["wanted"], result["loss"]
        if loss is None:
            said = "nothing" if result["kind"] == "NoneType" else f"a {result['kind']}"
            return f"the gradients are right, but rank {last} returns {said}; it has the loss"
        case = f"the gradients are right, but the loss that rank {last} returns"
        if EXACT * 10 < abs(loss - wanted) < 1e-5:
            how = "rounded" if loss == round(loss, 8) else "rounded to float32 on its way"
            return f"{case} is off by {abs(loss - wanted):.0e}: was it {how}?"
        if not abs(loss - wanted) <= EXACT * 10:
            factor = short(loss / wanted)
            times = "not" if factor in ("1", "nan") else f"{factor} times"
            return f"{case} is {loss:.6f}, {times} that of the batch, {wanted:.6f}"
        if result["kind"] == "graph":
            return f"{case} still has its whole graph behind it: detach() it, or take its item()"


def short(number):
    return f"{number:.4g}" if number is not None else "not a number"
