# SPDX-License-Identifier: Apache-2.0
"""Reads a recording of a run and describes what its ranks waited for at its end.

flight_log.py writes recordings. A recording may be incomplete if the run was killed or hung.
"""

import math
import os
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from files.inputs import (
    MEBIBYTE,
    InputError,
    is_count,
    parse_json,
    read_json,
    read_text,
)
from lab.flight_log_lines import MOST_RANKS, RecordingError, check_line, forms_of_lines
from lab.timeline import Event, Timeline
from pipeline.schedule import Action, Schedule, ScheduleError, message_of
from pipeline.schedules.legal import check_legal
from pipeline.schedules.text_form import from_csv

RUN_FILE = "run.json"
RANK_FILE = "rank{}.jsonl"
LARGEST_FILE = 256 * MEBIBYTE


class Fingerprint(NamedTuple):
    """The fingerprint of a tensor in a recording: see `fingerprint` in flight_log.py."""

    digest: str
    norm: float
    weighted: float

    def __str__(self):
        return f"{self.digest[:6]} (norm {self.norm:.6g})"

    def distance(self, other):
        """A lower bound of the distance of the two tensors, as a fraction of the larger norm."""
        if self.digest == other.digest:
            return 0.0
        apart = max(abs(self.norm - other.norm), abs(self.weighted - other.weighted))
        apart /= max(abs(self.norm), abs(other.norm)) or 1.0
        return math.inf if math.isnan(apart) else apart  # a tensor that is not finite is not close


class Travelled(NamedTuple):
    """A message as recorded by one of its two ranks; `peer` is the other rank."""

    peer: int
    what: Fingerprint


class Unanswered(NamedTuple):
    """A rank's wait at the end of its recording, for the result of `producer` from `source`."""

    producer: str
    source: int
    since: float


@dataclass
class Entry:
    """One action of one rank as it was recorded.

    `used` and `made` are Fingerprints of the stage's input and output, or None. `received` and
    `sent` are its messages, None if the action has none. `version` is the number of updates of the
    weights that it used. `held` is the activation memory in bytes. `gradient` is the norm of the
    stage's gradients so far, None after a forward.
    """

    event: Event
    used: Fingerprint | None
    made: Fingerprint | None
    version: int
    held: int
    gradient: float | None
    received: Travelled | None = None
    sent: Travelled | None = None


@dataclass
class Step:
    """One pass through the schedule; `ended` has the ranks that reached its end.

    `weights` is {(stage, version): {name: Fingerprint}}, before any action used the weights.
    `updated` is {stage: norm of its gradient at the end of the step}. The norm includes changes to
    the gradients within the step, but not those between the step and the update.
    """

    entries: list = field(default_factory=list)
    weights: dict = field(default_factory=dict)
    updated: dict = field(default_factory=dict)
    ended: set = field(default_factory=set)

    @cached_property
    def by_result(self):
        """{Action, as given by `recorded_as`: its Entry}."""
        return {recorded_as(entry.event.action): entry for entry in self.entries}

    @cached_property
    def by_action(self):
        return {entry.event.action: entry for entry in self.entries}


@dataclass
class Recording:
    """A whole recording. `steps` are the passes through `schedule`. `unanswered` is {rank: its wait
    at the end of the recording}, for the ranks that waited.

    For a program without a schedule, `seen` is True, and `schedule` has the actions of the step
    with the most actions.
    """

    schedule: Schedule
    steps: list
    unanswered: dict
    seen: bool = False

    def timeline(self, step=-1):
        """One step as a Timeline in milliseconds that starts at 0."""
        events = [entry.event for entry in self.steps[step].entries]
        start = min(event.start for event in events)
        return Timeline(
            self.schedule.name,
            tuple(e._replace(start=e.start - start, end=e.end - start) for e in events),
        )

    def entry(self, action, step=-1):
        """The Entry of an action such as "2F3". Raises RecordingError if no rank has taken it."""
        for entry in self.steps[step].entries:
            if str(entry.event.action) == action:
                return entry
        raise RecordingError(f"no rank has taken {action} in step {step} of this recording")

    def updates(self, step=-1):
        """{stage: (gradient norm after its last backward, gradient norm at the step's end)}."""
        step = self.steps[step]
        gathered = {}
        for entry in sorted(step.entries, key=lambda entry: entry.event.end):
            if entry.gradient is not None:
                gathered[entry.event.action.stage] = entry.gradient
        return {stage: (gathered.get(stage), step.updated[stage]) for stage in sorted(step.updated)}

    def weight(self, name, step=-1):
        """The Fingerprint of the weight `name` at the start of a step. Raises RecordingError."""
        for _, prints in sorted(self.steps[step].weights.items()):
            if name in prints:
                return prints[name]
        raise RecordingError(f"no stage has a weight named {name}")

    def name_of(self, print_, step):
        """The name of a tensor that was made in a step, in words; None if no action made it."""
        for entry in self.steps[step].entries:
            if print_ and entry.made and entry.made.digest == print_.digest:
                return str(message_of(entry.event.action))
        return None


def recorded_as(action):
    """The Action by which two recordings are compared: for a full backward, the I in it."""
    return action._replace(kind="I") if action.kind == "B" else action


def maker_of(message):
    """The Action, F or I, that made a message and whose text is its name in a recording."""
    kind = "F" if message.what == "activation" else "I"
    return Action(message.stage, kind, message.microbatch)


def message_in(text):
    """The Message that a text such as "2F3" names, or None for other words."""
    try:
        return message_of(from_csv(text).orders[0][0])
    except (ValueError, IndexError):
        return None


def read_recording(folder):
    """Read the Recording in a folder. Raises RecordingError with the file and the damaged line."""
    folder = Path(folder)
    name, num_ranks, schedule = _read_run(folder)
    steps, unanswered = [], {}
    for rank in range(num_ranks):
        forms = forms_of_lines(num_ranks, rank, schedule)
        unanswered[rank] = _read_rank(
            rank, _lines_of(folder / RANK_FILE.format(rank), forms), steps
        )
    seen = schedule is None
    for rank in range(num_ranks):
        order = None if seen else schedule.orders[rank]
        _check_complete(folder / RANK_FILE.format(rank), rank, order, steps)
    steps = [step for step in steps if step.entries]
    if seen:
        schedule = _schedule_seen(folder, name, num_ranks, steps)
    waits = {rank: wait for rank, wait in unanswered.items() if wait}
    return Recording(schedule, steps, waits, seen)


def _read_run(folder):
    """The content of run.json: the name, the number of ranks, and the schedule or None."""
    try:
        run = read_json(folder / RUN_FILE, LARGEST_FILE)
    except InputError as error:
        sentence = f"{folder} holds no recording: {error}; make one with --record {folder}"
        raise RecordingError(sentence) from None
    run = run if isinstance(run, dict) else {}
    name, rows, num_ranks = run.get("name"), run.get("rows"), run.get("ranks")
    if isinstance(name, str) and rows is None and is_count(num_ranks, MOST_RANKS) and num_ranks:
        return name, num_ranks, None
    if not isinstance(rows, list) or not {type(text) for text in [name, *rows]} == {str}:
        raise RecordingError(f"{folder / RUN_FILE} has no name and rows of a schedule; record anew")
    try:
        schedule = check_legal(from_csv("\n".join(rows), name))
    except ScheduleError as error:
        raise RecordingError(f"{folder / RUN_FILE}: {error}; record anew") from None
    return name, schedule.num_ranks, schedule


def _schedule_seen(folder, name, num_ranks, steps):
    """The actions of a program's ranks in the step with the most actions, as a Schedule."""
    if not steps:
        raise RecordingError(f"{folder}: no rank has recorded an action; record anew")
    most = max(steps, key=lambda step: len(step.entries))
    events = [entry.event for entry in most.entries]
    return Schedule(
        name,
        tuple(tuple(e.action for e in events if e.rank == rank) for rank in range(num_ranks)),
    )


def _lines_of(path, forms):
    """The lines of a rank's file as dictionaries whose form has been checked."""
    if not os.path.lexists(path):  # the run ended before the rank began
        return
    try:
        text = read_text(path, LARGEST_FILE)
        for number, row in enumerate(text.split("\n")[:-1], 1):  # the last one may be cut off
            where = f"{path}, line {number}"
            line = parse_json(row, where)
            check_line(line, forms, where)
            yield line
    except InputError as error:
        raise RecordingError(f"{error}; record anew") from None


def _check_complete(path, rank, order, steps):
    """Raise RecordingError if a step that a rank has ended lacks an action or has one twice.

    `order` is None for a program without a schedule; there, missing actions cannot be found.
    """
    wanted = sorted(recorded_as(action) for action in order or () if action.kind != "W")
    for number, step in enumerate(steps):
        own = [entry.event.action for entry in step.entries if entry.event.rank == rank]
        doubled = [action for action, times in Counter(own).items() if times > 1]
        if doubled:
            hint = "record anew" if order else "call end_step() before each update, and record anew"
            raise RecordingError(f"{path}: step {number} has {doubled[0]} twice; {hint}")
        taken = sorted(recorded_as(action) for action in own if action.kind != "W")
        if order is not None and rank in step.ended and taken != wanted:
            missing = next(iter(set(wanted) - set(taken)))
            raise RecordingError(f"{path}: step {number} lacks {missing}; record anew")


def _read_rank(rank, lines, steps):
    """Add one rank's lines to the steps. Returns its last wait if no message ended it."""
    number, travelled, wait = 0, {}, None
    for line in lines:
        while len(steps) <= number:
            steps.append(Step())
        step = steps[number]
        if "waits" in line:
            wait = Unanswered(line["waits"], line["from"], line["at"])
        elif "received" in line:
            wait = None
            travelled["received", line["received"]] = Travelled(line["from"], _print(line["is"]))
        elif "sent" in line:
            travelled["sent", line["sent"]] = Travelled(line["to"], _print(line["is"]))
        elif "weights" in line:
            prints = {name: _print(values) for name, values in line["weights"].items()}
            step.weights[line["stage"], line["version"]] = prints
        elif "did" in line:
            step.entries.append(_entry(rank, line))
        elif "updated" in line:
            step.updated[line["updated"]] = line["gradient"]
        elif "ended" in line:
            step.ended.add(rank)
            _attach(step, rank, travelled)
            number, travelled = number + 1, {}
    if number < len(steps):
        _attach(steps[number], rank, travelled)
    return wait


def _print(values):
    """A Fingerprint; JSON has no NaN, so null stands for a norm that is not finite."""
    if values is None:
        return None
    return Fingerprint(
        values[0], *(math.nan if number is None else number for number in values[1:])
    )


def _entry(rank, line):
    action = from_csv(line["did"]).orders[0][0]
    event = Event(rank, action, line["start"], line["end"], line["recompute"])
    return Entry(
        event,
        _print(line["used"]),
        _print(line["made"]),
        line["version"],
        line["held"],
        line["gradient"],
    )


def _attach(step, rank, travelled):
    """Add to each Entry of a rank the messages of its action."""
    for entry in step.entries:
        action = entry.event.action
        if entry.event.rank != rank or action.kind in "WU":
            continue
        message = message_of(action)
        entry.sent = travelled.get(("sent", str(maker_of(message))))
        source = message._replace(stage=action.stage + (-1 if action.kind == "F" else 1))
        entry.received = travelled.get(("received", str(maker_of(source))))


def describe_unanswered_waits(recording):
    """One sentence for each rank that waited when the recording ended."""
    sentences = []
    for rank, wait in sorted(recording.unanswered.items()):
        what = message_in(wait.producer) or wait.producer
        sentences.append(f"rank {rank} waits for {what}, from rank {wait.source}")
    return sentences
