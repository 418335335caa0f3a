# SPDX-License-Identifier: Apache-2.0
"""Describes the first error in an examination of a reader's function, in one sentence."""

from collections import Counter
from textwrap import shorten

from course.building import ANY_RANK, EVERY_RANK
from course.checks.build_text import zero_as_none

LOCALS = 2  # outputs that variables of the reader's may keep a little longer than needed
EXACT = 1e-12  # largest difference of losses and gradients in float64

# The end of an error message of Python or torch as it is shown, and what it means.
HINTS = {
    "is not defined": (
        "each rank gets the functions, classes, imports and assignments of your cells that the "
        "function uses, and nothing else"
    ),
    "a send needs a tensor, not None": (
        "a received tensor has a .grad only after the backward, and only if requires_grad_() was "
        "called on it"
    ),
    "a send needs a tensor": (
        "irecv() and wait() return no tensor, the numbers are in the one that irecv() was given"
    ),
    "a second wait() for the same message never returns": (
        "take each handle out of the list when you wait for it"
    ),
}
PER_MICROBATCH = (
    "inputs and targets have one element per micro-batch, and inputs[k] is that of micro-batch k"
)
STEP_HINTS = HINTS | {
    "grad can be implicitly created only for scalar outputs": (
        "a stage before the last gives backward() the gradient that it has received"
    ),
    "through the graph a second time": (
        "is the output of each micro-batch kept under its own number?"
    ),
    "'tuple' object has no attribute 'detach'": PER_MICROBATCH,
    "'tuple' object has no attribute 'shape'": PER_MICROBATCH,
    "'int' and 'NoneType'": (
        "forward returns a share of the loss on the last stage, and None elsewhere"
    ),
}


class Words:
    """Sentences about one examination.

    `rows[step][rank]` has the actions of the schedule in text form, such as "1F0".
    """

    def __init__(self, observed, request, rows=()):
        self.observed, self.ranks, self.rows = observed, observed.ranks, rows
        self.sources = {name: text.splitlines() for name, text in request["sources"]}
        self.counts = request.get("microbatches", [])
        self.frees = request.get(
            "frees", False
        )  # whether a rank holds fewer than all micro-batches

    def at(self, place):
        """A place in words, such as "line 7 of gpipe_step (`output.backward(gradient)`)"."""
        if place is None:
            return "a line that is not yours"
        name, line = place
        text = self.sources[name][line - 1].split("  #")[0].strip()
        return f"line {line} of {name} (`{text}`)"

    def transport(self):
        """What kept the ranks from reaching the end, or an error with messages; or None."""
        complaint = (
            self._raised()
            or self._shapes()
            or (self._stuck() if self.observed.stuck else None)
            or (f"the ranks came to no end: {self.observed.crash}" if self.observed.crash else None)
            or (self._silent() if self.observed.silent else None)
            or self._unwaited()
        )
        return complaint and complaint.rstrip(".") + self._zero_as_none()

    def _zero_as_none(self):
        """A condition such as `if stage.previous:`, as the end of a sentence."""
        places = []
        for name, lines in self.sources.items():
            if found := zero_as_none("\n".join(lines)):
                places.append(f"`{found[1]}` in line {found[0]} of {name}")
        if not places:
            return ""
        return (
            f". Rank 0 counts as false, as None does, for {' and '.join(places)}: use `is not None`"
        )

    def _raised(self):
        for rank in self.ranks:
            if rank.raised is None:
                continue
            kind, said, where = (rank.raised[part] for part in ("kind", "said", "where"))
            deaf = self._first(lambda event: event.get("asks") is False, [rank])
            if deaf and ("grad" in said or "None" in said):
                return (
                    f"rank {rank.number} has no gradient to send back: what it received went into "
                    f"its stage at {self.at(deaf['at'])} without asking for one; call "
                    "requires_grad_() on what arrived"
                )
            if "process group has not been initialized" in said:
                return (
                    f"rank {rank.number} belongs to no group at {self.at(where)}: "
                    'dist.init_process_group("gloo") comes before everything else'
                )
            if kind == "KeyError" and said.isdigit() and self.counts:
                said = (
                    f"{said}; has the forward of micro-batch {said} been run on this rank, and has "
                    "no other stage taken its entry?"
                )
            told = f"raised {kind}: {self._with_hint(rank, said)}"
            if where:
                return f"{self.at(where)} {told} (on rank {rank.number})"
            return f"rank {rank.number} {told}"

    def _with_hint(self, rank, said):
        """An error message of Python or torch, followed by what it means."""
        if said == "tuple index out of range" and rank.steps and self.counts:
            count = self.counts[len(rank.steps) - 1]
            return f"{said}; this step has {count} micro-batches, counted from 0"
        for part, hint in (STEP_HINTS if self.counts else HINTS).items():
            if part in said:
                return f"{said[: said.index(part) + len(part)]}; {hint}"
        return shorten(said, 140, placeholder=" ...")

    def _first(self, wanted, ranks=None):
        """The first action of a rank for which `wanted(event)` holds, or None."""
        events = (e for rank in ranks or self.ranks for step in rank.steps for e in step)
        return next((event for event in events if wanted(event)), None)

    def _shapes(self):
        begun = self.observed.begun
        for (source, destination, tag, what), sends in list(begun.items()):
            if what != "send":
                continue
            receives = begun.get((source, destination, tag, "receive"), [])
            for send, receive in zip(sends, receives):
                made, room = ((e["shape"], e["dtype"]) for e in (send, receive))
                if made != room:
                    return (
                        f"rank {source} sends {self._tensor(made)} at {self.at(send['at'])}, and "
                        f"rank {destination} has made room for {self._tensor(room)} at "
                        f"{self.at(receive['at'])}"
                    )

    def _tensor(self, shape_and_dtype):
        shape, dtype = shape_and_dtype
        return f"{tuple(shape)} in {dtype}"

    def _stuck(self):
        """Follow the waits to a rank that has returned, or around a cycle of waits."""
        rank = next(rank for rank in self.ranks if not rank.ended)
        chain = []
        while rank not in chain:
            chain.append(rank)
            what, peer = rank.waits["message"][0], self._missing(rank)
            if self.ranks[peer].ended:
                return self._left_alone(rank, self.ranks[peer], what)
            rank = self.ranks[peer]
        cycle = sorted(chain[chain.index(rank) :], key=lambda rank: rank.number)
        waits = ", ".join(f"rank {rank.number} waits {self._wait(rank)}" for rank in cycle)
        others = next(filter(None, map(self._otherwise, cycle)), "")
        return f"deadlock: {waits}; each of these ranks waits for another of them{others}"

    def _missing(self, rank):
        """The number of the rank for which `rank` waits; one that has returned, if there are more."""
        what, peer, _, number = rank.waits["message"]
        if peer >= 0:
            return peer
        others = [other for other in self.ranks if other is not rank]
        if peer == EVERY_RANK:
            others = self.observed.missing_in(what, number)
        return next((other for other in others if other.ended), others[0]).number

    def _wait(self, rank):
        what, peer, *_ = rank.waits["message"]
        until = f"for a message from rank {peer}"
        if what == "send":
            until = f"until rank {peer} receives"
        if peer == ANY_RANK:
            until = "for a message from any rank"
        if peer == EVERY_RANK:
            until = f"until every rank calls {what}"
        return f"at {self.at(rank.waits['at'])} {until}"

    def _left_alone(self, rank, other, what):
        if what == "join":
            return (
                f"rank {rank.number} waits at {self.at(rank.waits['at'])} for all ranks to join, "
                f"and rank {other.number} has returned without joining: every rank runs that line"
            )
        if rank.waits["message"][1] == EVERY_RANK:
            return (
                f"rank {rank.number} waits {self._wait(rank)}, and rank {other.number} has returned "
                "without it: a collective is for every rank, so none may go around that line"
            )
        missing = "a receive" if what == "send" else "a send"
        said = (
            f"rank {rank.number} waits {self._wait(rank)}, and rank {other.number} has already "
            f"returned: {missing} is missing there, or this is one too many"
        )
        return said + self._otherwise(other)

    def _otherwise(self, rank):
        """Where a rank that did not finish left the schedule, as the end of a sentence."""
        if not self.rows or not rank.steps:
            return ""
        names = [name_of(event) for event in rank.steps[-1]]
        row = self.rows[len(rank.steps) - 1][rank.number]
        for name, wanted in zip(names, row):
            if name != wanted:
                return f"; rank {rank.number} took {name} where the schedule has {wanted}"
        if rank.ended and len(names) < len(row):
            return f"; it never took {row[len(names)]}"
        return ""

    def _silent(self):
        """The sentence about ranks that did nothing any more, without a deadlock that is certain."""
        left = [rank for rank in self.ranks if not rank.ended]
        rank = next((rank for rank in left if not rank.waits), left[0])
        if rank.waits:
            return f"rank {rank.number} waits in vain {self._wait(rank)}"
        if rank.last is None:
            return f"rank {rank.number} did not start"
        return (
            f"rank {rank.number} did nothing for a long time after {self.at(rank.last['at'])}: what "
            "does it wait for there, and does its loop end?"
        )

    def _unwaited(self):
        for rank in self.ranks:
            for (what, *_), event in rank.unwaited.items():
                if what == "receive":
                    return (
                        f"rank {rank.number} never waits for what it receives at "
                        f"{self.at(event['at'])}: before wait() returns, nothing has arrived"
                    )
                return (
                    f"rank {rank.number} never waits for what it sends at {self.at(event['at'])}: "
                    "keep the handle that is returned, and wait for it before the step ends, or the "
                    "tensor may be gone before it is sent"
                )

    def step(self, number):
        """The error in step `number`, as a sentence, or None."""
        rows = self.rows[number]
        events = [rank.steps[number] for rank in self.ranks]
        results = [rank.reports[number] for rank in self.ranks]
        return (
            self._pairing(events)
            or self._gradients(events, results, rows)
            or self.order(events, rows)
            or self._memory(events)
            or self._loss(results[-1])
        )

    def _pairing(self, events):
        """The sentence about an action that used a tensor of another micro-batch, or None."""
        for rank, done in enumerate(events):
            for event in done:
                kind = event["event"]
                if kind == "forward" and event.get("rounded"):
                    return (
                        f"rank {rank} runs its stage at {self.at(event['at'])} on numbers with too "
                        "few digits: have they been a float32 on their way?"
                    )
                if kind == "forward" and event["k"] is None:
                    return (
                        f"rank {rank} runs its stage at {self.at(event['at'])} on numbers that no "
                        "micro-batch has there: has the receive been waited for, and is it the "
                        "right tensor?"
                    )
                if kind == "backward" and event["of"] not in (None, event["k"]):
                    return (
                        f"rank {rank} runs the backward of micro-batch {event['k']} at "
                        f"{self.at(event['at'])} with the gradient of micro-batch {event['of']}"
                    )

    def _overwritten(self, events):
        """The sentence about a receive into memory that a later backward still needs, or None."""
        for rank, done in enumerate(events):
            for event in done:
                if event.get("over"):
                    return (
                        f"rank {rank} receives the activation of micro-batch {event['k']} into the "
                        f"memory of that of micro-batch {event['over'][0]}, whose backward still "
                        "needs it: make room for each of them, or copy it"
                    )

    def _memory(self, events):
        """The sentence about what a rank keeps longer than its schedule needs it, or None."""
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
                    return f"an I ran {on}, but no W: call what backward_input returned for it"
                if found["none"]:
                    return f"no backward ran {on.rstrip(',')}: its weights have no gradient"
                lost = set(rows[rank]) - {name_of(event) for event in events[rank]}
                if lost and found["rest"] > 1e-6:
                    name = next(name for name in rows[rank] if name in lost)
                    return f"a part of the gradient is missing {on}: it never took {name}"
                if found["rest"] > 1e-6:
                    said = f"the gradient {on} points another way than that of one process"
                    if rank + 1 < len(results) and len(results[rank]["gradients"]) == 1:
                        said += (
                            f", and that on rank {rank + 1} is right: look at what rank {rank + 1} "
                            f"sends back and at what rank {rank} does with it"
                        )
                    return said
                return self._factor(on, found["parts"])

    def _factor(self, on, parts):
        m, factors = len(parts), {part for part in parts}
        if len(factors) == 1 and m == 1:
            return f"the gradient {on} is {short(parts[0])} times that of one process"
        if len(factors) == 1:
            case = (
                f"with {m} micro-batches every gradient {on} is {short(parts[0])} times too large"
            )
            if abs(parts[0] - m) < 1e-6:
                return f"{case}: each micro-batch counts as a whole batch; divide its loss by {m}"
            if abs(parts[0] * m - 1) < 1e-6:
                return f"{case.replace('too large', 'the right one')}: it is divided by {m} twice"
            return case.replace("too large", "the right one")
        usual = Counter(parts).most_common(1)[0][0]
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
            return f"{case} is off by {abs(loss - wanted):.0e}: has it been a float32 on its way?"
        if not abs(loss - wanted) <= EXACT * 10:
            return f"{case} is {loss:.6f}, {short(loss / wanted)} times that of the batch, {wanted:.6f}"
        if result["kind"] == "graph":
            return f"{case} still has its whole graph behind it: detach() it, or take its item()"


def name_of(event):
    """An action in its text form, such as "1F0"."""
    return f"{event['stage']}{event['kind']}{event['k']}"


def short(number):
    return f"{number:.4g}" if number is not None else "not a number"
