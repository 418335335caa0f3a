# SPDX-License-Identifier: Apache-2.0
"""Runs a reader's functions on warm ranks with a time limit, and notes what each rank did.

An examination always ends and leaves no process behind: as soon as no rank can continue, all ranks
are ended.
"""

import json
import queue
import tempfile
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field

from course.building import ANY_RANK, MARK
from course.failed_run import failed_rank, how_it_ended, readable_errors
from course.followed_run import MOST_LINES, read_stream
from course.launch import started_ranks

START, LIMIT = 120, 30  # seconds: until the first event, and without any event after it
LONGEST = 120  # seconds from the first event on
# Characters of all ranks. There is a limit because a rank's reports come after what it has printed.
MOST_PRINTED = 100_000
SCRIPT = "course/building/on_ranks.py"


@dataclass
class Rank:
    """The events of one rank so far. `steps` has its actions, one list for each step."""

    number: int
    steps: list = field(default_factory=list)
    reports: list = field(default_factory=list)  # what the lesson's program has reported
    waits: dict | None = None  # the event of the present wait
    unwaited: dict = field(default_factory=dict)  # message -> the event that began it
    changed: dict | None = None  # the event of a tensor that changed while it was sent
    raised: dict | None = None
    lost: dict | None = None  # the event of an error caused by the loss of another rank
    arrived: int = 0  # how many messages it has received and waited for
    joined: list = field(default_factory=list)  # the events of its collectives
    last: dict | None = None  # its last event
    ended: bool = False  # whether the present step has ended
    done: bool = False  # whether the whole program has ended

    @property
    def collectives(self):
        """The names of its collectives; "join" is the first."""
        return [event["name"] for event in self.joined]


@dataclass
class Observed:
    """The events of all ranks. `begun` has the starts of transfers, as a list of events for each
    (sender, receiver, tag, "send" or "receive")."""

    ranks: list
    begun: dict = field(default_factory=lambda: defaultdict(list))
    stuck: bool = False
    silent: bool = False  # whether a time limit has passed
    crash: str | None = None
    printed: str = ""  # what the ranks have printed

    def waits_in_vain(self, rank):
        """Whether what `rank` waits for has not been started by the other side."""
        what, peer, tag, number = rank.waits["message"]
        if what == "send":
            receives = self.count(rank.number, peer, tag, "receive")
            return receives + self.count(ANY_RANK, peer, tag, "receive") < number
        if what == "receive" and peer == ANY_RANK:
            others = [other.number for other in self.ranks]
            untaken = [self.sends_left(other, rank.number, tag) for other in others]
            return sum(untaken) < number
        if what == "receive":
            return self.count(peer, rank.number, tag, "send") < number
        return bool(self.missing_in(what, number))

    def count(self, source, destination, tag, what):
        return len(self.begun[source, destination, tag, what])

    def sends_left(self, source, destination, tag):
        """How many sends have begun for which no receive names their source."""
        ends = (self.count(source, destination, tag, what) for what in ("send", "receive"))
        return max(0, next(ends) - next(ends))

    def missing_in(self, name, number):
        """The ranks whose collective of this number is another one, or has not begun."""
        return [rank for rank in self.ranks if rank.collectives[number - 1 : number] != [name]]

    def nobody_can_go_on(self):
        left = [rank for rank in self.ranks if not rank.ended]
        return bool(left) and all(rank.waits and self.waits_in_vain(rank) for rank in left)

    def note(self, event):
        """Add one event, a dictionary that a rank has sent."""
        rank = self.ranks[event["rank"]]
        rank.last = event
        kind, name = event["event"], tuple(event.get("message", ()))
        if kind == "begins":
            what, peer, tag, _ = name
            event["arrived"] = rank.arrived
            pair = (rank.number, peer) if what == "send" else (peer, rank.number)
            self.begun[(*pair, tag, what)].append(event)
            rank.unwaited[name] = event
        elif kind == "joins in":
            rank.joined.append(event)
        elif kind == "waits":
            rank.waits = event
            if event.get("own", True):  # not for an earlier message in the queue
                rank.unwaited.pop(name, None)
        elif kind == "waited":
            rank.unwaited.pop(name, None)
        elif kind == "goes on":
            rank.arrived += rank.waits["message"][0] == "receive"
            rank.waits = None
        elif kind == "begins step":
            rank.steps.append([])
        elif kind in ("forward", "backward", "weights"):
            rank.steps[-1].append(event)
        elif kind == "changed":
            rank.changed = rank.changed or event
        elif kind == "report":
            rank.reports.append(event["value"])
        elif kind == "ends step":
            rank.ended = True
            if all(other.ended for other in self.ranks):  # then all continue with the next step
                for other in self.ranks:
                    other.ended = False
        elif kind == "raised" and " by peer" in event["said"]:
            rank.lost = event
        elif kind == "raised":
            rank.raised = event
        elif kind == "done":
            rank.ended = rank.done = True


def examine(request, num_ranks, show=True):
    """Run `request` (see on_ranks.py) on `num_ranks` ranks and return an Observed.

    It ends at the latest LIMIT seconds after the last event. `show` prints what the ranks print.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(request, file)
        file.flush()
        with started_ranks(SCRIPT, [file.name], num_ranks) as ranks:
            observed = Observed([Rank(number) for number in range(num_ranks)])
            _follow(ranks, observed, show)
    for rank in observed.ranks if observed.stuck or observed.silent else ():
        rank.raised = rank.raised or (rank.waits or {}).get("behind")  # a `finally` waits in vain
    if show and observed.printed and not observed.printed.endswith("\n"):
        print()  # the verdict begins a line of its own
    return observed


def _follow(started, observed, show):
    lines, errors = queue.Queue(), deque(maxlen=MOST_LINES)
    for name, stream in started.streams.items():
        threading.Thread(target=read_stream, args=(name, stream, lines), daemon=True).start()
    deadline, last = time.monotonic() + START, None
    while time.monotonic() < deadline:
        try:
            name, line = lines.get(timeout=0.1)
        except queue.Empty:
            observed.crash = _crash(started, errors) or _left(started, observed)
            # Under torchrun, the end of a rank is noticed later than its loss by other ranks.
            explained = observed.crash or not any(rank.done for rank in observed.ranks)
            for rank in observed.ranks:
                rank.raised = rank.raised or (None if explained else rank.lost)
            if observed.crash or any(rank.raised for rank in observed.ranks):
                return
            continue
        if name == "stdout":
            text, mark, event = line.partition(MARK)  # the reader's text may end without a newline
            observed.printed += text
            if len(observed.printed) > MOST_PRINTED:
                observed.crash = f"more than {MOST_PRINTED:,} characters are printed; does a loop print without end?"
                return
            if text and show:
                print(text, end="")
            if mark:
                observed.note(json.loads(event))
                last = last or time.monotonic() + LONGEST
                deadline = min(last, time.monotonic() + LIMIT)
        elif name == "stderr":
            errors.append(line)
        if any(rank.raised for rank in observed.ranks):
            return
        if all(rank.done for rank in observed.ranks):
            return
        if observed.nobody_can_go_on():
            observed.stuck = True
            return
    observed.silent = True


def _crash(started, errors):
    """How the first rank that failed has ended, with the last line of the errors, or None."""
    failure = started.failure()
    if not failure:
        return None
    last = readable_errors(errors).strip().splitlines()[-1:]
    return (failed_rank(errors) or failure) + "".join(f" ({line.strip()})" for line in last)


def _left(started, observed):
    """How the first rank that left before the end of its program has ended, or None."""
    for rank in observed.ranks:
        if not rank.done and started.has_ended_well(rank.number):
            said = how_it_ended(rank.number, 0)
            return f"{said} and without a report, as os._exit() does; sys.exit() leaves one"
