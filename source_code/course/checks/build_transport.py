# SPDX-License-Identifier: Apache-2.0
"""Describes in one sentence what kept a reader's ranks from reaching the end, or a wrong message."""

import math
import re
from textwrap import shorten

from course.building import ANY_RANK, EVERY_RANK
from course.checks.answer import many
from course.checks.build_text import zero_as_none

NO_TENSOR = (
    "recv(), irecv() and wait() do not return the tensor: the numbers arrive in the one that was "
    "passed to the receive"
)
# The end of an error message of Python or torch as it is shown, and what it means.
HINTS = {
    "a send needs a tensor, not None": (
        "a received tensor has a .grad after the backward, if requires_grad_() was called on it; a "
        "computed one, such as a stage's output, has none"
    ),
    "a send needs a tensor": f"a list is not one, and {NO_TENSOR}",
    "'Watched'": NO_TENSOR,
    **{
        f"{kind}' object {what}": NO_TENSOR
        for kind in ("'bool", "'int", "c10d.Work")
        for what in ("is not iterable", "has no attribute 'requires_grad_'")
    },
    "does not require grad": (
        "call requires_grad_() on a new tensor whose gradient is needed; and there is no backward from "
        "what a forward under no_grad makes, nor from an output that detach_() has cut itself"
    ),
    "failed finding central directory": "this file is not whole",
    "losses but got 0": "a schedule computes losses only if it is given a loss_fn",
    "a second wait() for the same message never returns": (
        "take each handle out of the list when you wait for it"
    ),
}
CELL_HINTS = HINTS | {
    "is not defined": (
        "each rank gets the functions, classes, imports and assignments of your cells that the "
        "function uses, and nothing else"
    ),
}
AT_MOST_16 = "a batch has 16 texts, so it has at most 16 micro-batches"
OF_A_FILE = {
    "is not defined": "a file can use only what it imports and defines itself, and no name of your cells",
    "smaller than num_chunks": AT_MOST_16,
    "_mbs but got 16": AT_MOST_16,
    "scalar types: Long, Int": (
        "only the first stage gets tokens, and what this rank's module begins with wants tokens, too"
    ),
    "not compiled with CUDA enabled": "a stage's device is that of its module, which is on the CPU",
    "'list' object has no attribute 'num_stages'": "with one stage per rank, a schedule takes no list",
    "'PipelineStage' object is not subscriptable": (
        "a schedule with several stages per rank takes a list of them"
    ),
}
PER_MICROBATCH = (
    "inputs and targets have one element per micro-batch, and inputs[k] is that of micro-batch k"
)
STEP_HINTS = CELL_HINTS | {
    "grad can be implicitly created only for scalar outputs": (
        "a stage before the last gives backward() the gradient that it has received"
    ),
    "through the graph a second time": (
        "is the output of each micro-batch kept under its own number?"
    ),
    "'tuple' object has no attribute 'detach'": PER_MICROBATCH,
    "'tuple' object has no attribute 'shape'": PER_MICROBATCH,
    "'tuple' object has no attribute 'flatten'": PER_MICROBATCH,
    "shapes cannot be multiplied": (
        "does the stage get what has arrived, with a last dimension of DIM?"
    ),
    "log_softmax_lastdim_kernel_impl\" not implemented for 'Long'": (
        "the scores come first, as in loss_of(scores, targets)"
    ),
    "'int' and 'NoneType'": (
        "forward returns a share of the loss on the last stage, and None elsewhere"
    ),
}


class TransportWords:
    """Sentences about what kept the ranks of one examination from their end, or about messages.

    `rows[step][rank]` has the actions of the schedule in text form, such as "1F0".
    """

    def __init__(self, observed, request, rows=()):
        self.observed, self.ranks, self.rows = observed, observed.ranks, rows
        self.sources = {name: text.splitlines() for name, text in request["sources"]}
        self.counts = request.get("microbatches", [])
        of_functions = STEP_HINTS if self.counts else CELL_HINTS
        self.hints = of_functions if request.get("functions", True) else HINTS | OF_A_FILE
        self.hints = request.get("hints", {}) | self.hints  # those of an exercise
        self.chunks = request.get("chunks", 1)
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
            self._shapes()
            or self._raised()
            or self._changed()
            or self._sums()
            or (self._stuck() if self.observed.stuck else None)
            or (f"the ranks did not finish: {self.observed.crash}" if self.observed.crash else None)
            or (self._silent() if self.observed.silent else None)
            or self._unwaited()
        )
        return complaint and re.sub(r"(?<!\.)\.$", "", complaint) + self._zero_as_none()

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
            empty = "grad" in said or "None" in said or "type torch.Tensor" in said  # as of P2POp
            if deaf and empty and "is not defined" not in said:
                return (
                    f"rank {rank.number} has no gradient to send back: what it received went into "
                    f"its stage at {self.at(deaf['at'])} without asking for one; call "
                    "requires_grad_() on what arrived"
                )
            if "process group has not been initialized" in said:
                return (
                    f"rank {rank.number} belongs to no group at {self.at(where)}: "
                    'dist.init_process_group("gloo") comes before everything else, and '
                    "dist.destroy_process_group() after it"
                )
            if kind == "KeyError" and said.isdigit() and self.counts:
                said += self._left(rank) or (
                    f"; did a forward on this rank store an entry under {said}, and did another "
                    "backward remove it?"
                )
            told = f"raised {kind}: {self._with_hint(rank, said)}".removesuffix(": ")
            if where:
                return f"{self.at(where)} {told} (on rank {rank.number})"
            return f"rank {rank.number} {told}"

    def _left(self, rank):
        """Where this rank left the schedule in its last step, as the end of a sentence, or ""."""
        if not self.rows or not rank.steps:
            return ""
        done, row = rank.steps[-1], self.rows[len(rank.steps) - 1][rank.number]
        following = row[len(done)] if len(done) < len(row) else ""
        too_early = f"; the schedule has {following} there" if "F" in following else ""
        return left_schedule([done], [row], rank.number) or too_early

    def _with_hint(self, rank, said):
        """An error message of Python or torch, followed by what it means."""
        if said == "tuple index out of range" and rank.steps and self.counts:
            count = self.counts[len(rank.steps) - 1]
            return f"{said}; this step has {many(count, 'micro-batch')}, counted from 0"
        for part, hint in self.hints.items():
            if part in said:
                return f"{said[: said.index(part) + len(part)]}; {hint}"
        return shorten(said, 140, placeholder=" ...")

    def _first(self, wanted, ranks=None):
        """The first action of a rank for which `wanted(event)` holds, or None."""
        events = (e for rank in ranks or self.ranks for step in rank.steps for e in step)
        return next((event for event in events if wanted(event)), None)

    def _changed(self):
        for rank in self.ranks:
            if rank.changed:
                return (
                    f"rank {rank.number} changes the tensor that it sends at "
                    f"{self.at(rank.changed['at'])} before it has waited for the send, and may send "
                    "the later numbers: give each message a tensor of its own, or wait first"
                )

    def _shapes(self, same_count=False):
        """The sentence about a message for which there is room of another size, or None.

        With `same_count`, also about room for as many numbers in another shape, which can be right.
        """
        begun = self.observed.begun
        for (source, destination, tag, what), sends in list(begun.items()):
            if what != "send":
                continue
            receives = begun.get((source, destination, tag, "receive"), [])
            for send, receive in zip(sends, receives):
                made, room = ((e["shape"], e["dtype"]) for e in (send, receive))
                fits = made[1] == room[1] and math.prod(made[0]) == math.prod(room[0])
                if made != room and (same_count or not fits):
                    return (
                        f"rank {source} sends {self._tensor(made)} at {self.at(send['at'])}, and "
                        f"rank {destination} has made room for {self._tensor(room)} at "
                        f"{self.at(receive['at'])}"
                    )

    def _sums(self):
        """The sentence about a collective to which two ranks give tensors of different sizes, or None."""
        for one, *others in zip(*(rank.joined for rank in self.ranks)):
            for other in others:
                sizes = {size_of(one), size_of(other)} - {None}
                if one["name"] == other["name"] and len(sizes) > 1:
                    ours, theirs = (self._tensor((e["shape"], e["dtype"])) for e in (one, other))
                    where = "" if one["at"] == other["at"] else f" at {self.at(other['at'])}"
                    return (
                        f"rank {one['rank']} gives {ours} to {one['name']} at {self.at(one['at'])}, "
                        f"and rank {other['rank']} gives {theirs}{where}: the size and the type "
                        "have to be the same on every rank"
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
            until = "for a message from any rank, since it names None"
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
        done, missing = f"waits {self._wait(rank)}", "a send"
        if what == "send":  # the wait for it may be later, in code that is not the reader's
            at, missing = self.at(rank.waits["at"]), "a receive"
            done = f"sends at {at} what rank {other.number} never receives"
        said = (
            f"rank {rank.number} {done}, and rank {other.number} has already returned: {missing} is "
            "missing there, or this is one too many"
        )
        return said + self._otherwise(other)

    def _otherwise(self, rank):
        """Where a rank that did not finish leaves the schedule, as the end of a sentence."""
        if not self.rows or not rank.steps:
            return ""
        names = [name_of(event) for event in rank.steps[-1]]
        row = self.rows[len(rank.steps) - 1][rank.number]
        for number, (name, wanted) in enumerate(zip(names, row)):
            if name != wanted:
                again = " again" if name in names[:number] else ""
                twice = ": was the same tensor sent twice?" if again and rank.number else ""
                return f"; rank {rank.number} took {name}{again} where the schedule has {wanted}{twice}"
        if rank.ended and len(names) < len(row):
            return f"; it never took {row[len(names)]}"
        if len(names) < len(row) and rank.waits["message"][0] == "receive":
            last = len(self.ranks) * self.chunks - 1
            if row[len(names)].startswith(("0F", f"{last}B", f"{last}I")):
                return (
                    f"; the schedule has {row[len(names)]} next on rank {rank.number}, which needs "
                    "no message"
                )
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
                    "keep the handle that is returned, and wait for it before the end, or the "
                    "tensor may be gone before it is sent"
                )


def size_of(event):
    """(number of elements, type) of the tensor of a collective; None without one."""
    return (math.prod(event["shape"]), event["dtype"]) if "shape" in event else None


def left_schedule(events, rows, first=0):
    """Where the first rank left the schedule before it used a wrong tensor, as the end of a sentence.

    `events` and `rows` are those of the ranks from `first` on.
    """
    for rank, (done, row) in enumerate(zip(events, rows), first):
        for event, wanted in zip(done, row):
            if event["k"] is None:
                break
            if name_of(event) != wanted:
                return f"; rank {rank} took {name_of(event)} where the schedule has {wanted}"
    return ""


def name_of(event):
    """An action in its text form, such as "1F0"."""
    return f"{event['stage']}{event['kind']}{event['k']}"
