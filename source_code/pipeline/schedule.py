"""A schedule is data: for each rank, the actions it takes, in order.

The simulator predicts it, the worker performs it and the figures draw it; none of them knows how
it was made. This file holds the data, its text form and the check that it is legal.

Text form: one row a rank, cells `stage kind micro-batch` such as `0F3`, separated by commas. It is
the form that torch.distributed.pipelining reads and writes.
"""

import re
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from pipeline.needs import needs_of, result_of, update_group

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward for the input",
    "W": "backward for the weights",
    "U": "update",  # in asynchronous schedules only: elsewhere the update follows the whole step
}


class ScheduleError(ValueError):
    """A schedule that cannot be performed; the text says which rank, which step, and why."""


class Action(NamedTuple):
    """One thing a rank does: `kind` (a key of KINDS) of `microbatch` on `stage`."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self):
        return f"{self.stage}{self.kind}{self.microbatch}"

    def describe(self):
        return f"the {KINDS[self.kind]} of micro-batch {self.microbatch} on stage {self.stage}"


class Message(NamedTuple):
    """What travels from one rank to another: the activation or the gradient of a micro-batch.

    `producer` is the action that made it, `consumer_stage` the stage that needs it.
    """

    source: int
    destination: int
    producer: Action
    consumer_stage: int

    def __str__(self):
        what = "activation" if self.producer.kind == "F" else "gradient"
        return (
            f"the {what} of micro-batch {self.producer.microbatch} from stage {self.producer.stage}"
        )


@dataclass(frozen=True)
class Schedule:
    """`orders[rank]` is the tuple of actions that the rank takes, in order.

    A stage belongs to one rank. In an asynchronous schedule it may be replicated on several, which
    take its micro-batches in turn and update their copies together (PipeDream's 1F1B-RR: Narayanan
    et al. 2019, section 3.2). Several equal pipelines side by side are one schedule, too, in which
    every micro-batch has one rank for each stage (see replicas.py).
    """

    name: str
    orders: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self):
        return len(self.orders)

    @cached_property
    def num_stages(self):
        return 1 + max(action.stage for order in self.orders for action in order)

    @cached_property
    def num_microbatches(self):
        return 1 + max(action.microbatch for order in self.orders for action in order)

    @cached_property
    def rank_of_passage(self):
        """The rank of every (stage, micro-batch), as a dictionary."""
        return {
            (stage, microbatch): rank
            for rank, order in enumerate(self.orders)
            for stage, _, microbatch in order
        }

    def rank_of(self, stage, microbatch):
        """The rank on which a micro-batch passes a stage."""
        return self.rank_of_passage[stage, microbatch]

    @cached_property
    def ranks_of_stage(self):
        """The ranks of every stage, as a dictionary of tuples: one, or the replicas in turn."""
        ranks = {}
        for stage, microbatch in sorted(self.rank_of_passage):
            ranks.setdefault(stage, {})[self.rank_of(stage, microbatch)] = None
        return {stage: tuple(found) for stage, found in ranks.items()}

    def stages_of(self, rank):
        """The stages that a rank has, in order."""
        return sorted({action.stage for action in self.orders[rank]})

    @cached_property
    def pairs(self):
        """The ordered pairs of ranks that exchange messages."""
        return sorted({(message.source, message.destination) for message in self.messages})

    def needs_of(self, action):
        """The results that must exist before `action` can start (see needs.py)."""
        replicas = len(self.ranks_of_stage[action.stage]) if action.kind == "U" else 1
        return needs_of(action, self.num_stages, replicas)

    @cached_property
    def playable_order(self):
        """All actions as (rank, action, needs), each after everything it needs.

        Raises ScheduleError when the schedule comes to a stop before its end.
        """
        return _play(self)

    def message_after(self, action):
        """The message that `action` sends to another rank, or None."""
        if action.kind in "WU":
            return None
        consumer_stage = action.stage + (1 if action.kind == "F" else -1)
        if not 0 <= consumer_stage < self.num_stages:
            return None
        source = self.rank_of(action.stage, action.microbatch)
        destination = self.rank_of(consumer_stage, action.microbatch)
        if source == destination:
            return None
        return Message(source, destination, action, consumer_stage)

    @cached_property
    def messages(self):
        """Every message, in the order in which each sender sends."""
        sent = (self.message_after(action) for order in self.orders for action in order)
        return [message for message in sent if message is not None]


def _play(schedule):
    """Let each rank go on until it has to wait, then the ranks that wait for what it made.

    Linear in the number of actions.
    """
    played = []
    done = set()
    waiting = {}  # result -> ranks that wait for it
    step = [0] * schedule.num_ranks
    ready = deque(range(schedule.num_ranks))
    while ready:
        rank = ready.popleft()
        order = schedule.orders[rank]
        while step[rank] < len(order):
            action = order[step[rank]]
            needs = schedule.needs_of(action)
            missing = [need for need in needs if need not in done]
            if missing:
                waiting.setdefault(missing[0], []).append(rank)
                break
            played.append((rank, action, needs))
            step[rank] += 1
            result = result_of(action)
            done.add(result)
            if result in waiting:
                ready.extend(waiting.pop(result))
    stuck = [rank for rank, order in enumerate(schedule.orders) if step[rank] < len(order)]
    if stuck:
        raise ScheduleError(_explain_deadlock(schedule, step, waiting, stuck))
    return played


def _explain_deadlock(schedule, step, waiting, stuck):
    needed = {rank: result for result, ranks in waiting.items() for rank in ranks}
    made_by = {result_of(a): rank for rank, order in enumerate(schedule.orders) for a in order}

    def waits(rank):
        return (
            f"rank {rank} cannot take step {step[rank]} ({schedule.orders[rank][step[rank]]}) "
            f"before {Action(*needed[rank]).describe().replace(' for the input', '')}"
        )

    for rank in stuck:
        if needed[rank] not in made_by:
            return f"{waits(rank)}, which no rank takes"
    # Follow who waits for whom until a rank comes up twice: the ranks from there on are the cycle.
    chain = [stuck[0]]
    while chain.count(chain[-1]) < 2:
        chain.append(made_by[needed[chain[-1]]])
    cycle = chain[chain.index(chain[-1]) : -1]
    sentences = [
        f"{waits(rank)}, which rank {made_by[needed[rank]]} has still ahead of it" for rank in cycle
    ]
    return "deadlock: " + "; ".join(sentences)


def validate(schedule):
    """Return `schedule` if it can be performed to its end, else raise ScheduleError.

    Each stage belongs to one rank, or in an asynchronous schedule to several in turn; each
    micro-batch passes each stage once forward and once backward, in full (B) or split (I, then W);
    on a rank every action comes after what it needs there; and the ranks together can be played to
    the end without a deadlock.
    """
    if not schedule.orders or not any(schedule.orders):
        raise ScheduleError("the schedule has no actions")
    steps = _validate_steps(schedule)
    for stage in range(schedule.num_stages):
        if stage not in schedule.ranks_of_stage:
            raise ScheduleError(f"stage {stage} belongs to no rank")
    for (stage, microbatch), rank in schedule.rank_of_passage.items():
        _validate_passage(rank, stage, microbatch, steps)
    for stage, ranks in schedule.ranks_of_stage.items():
        for microbatch in range(schedule.num_microbatches):
            if (stage, microbatch) not in schedule.rank_of_passage:
                forward = Action(stage, "F", microbatch)
                rank = ranks[microbatch % len(ranks)]
                raise ScheduleError(f"rank {rank} never runs {forward.describe()}")
        if len(ranks) > 1:
            _validate_joint_updates(schedule, stage, ranks, steps)
    schedule.playable_order  # noqa: B018 - raises if there is none
    return schedule


def _validate_steps(schedule):
    """Each action for itself: known, on the right rank, once. Returns the step of each."""
    updated = {action.stage for order in schedule.orders for action in order if action.kind == "U"}
    owner, steps = {}, {}
    for rank, order in enumerate(schedule.orders):
        if not order:
            raise ScheduleError(f"rank {rank} has no actions")
        for step, action in enumerate(order):
            stage, kind, microbatch = action
            if kind not in KINDS:
                raise ScheduleError(
                    f"rank {rank}, step {step} ({action}): the kind is one of {', '.join(KINDS)}"
                )
            if stage < 0 or microbatch < 0:
                raise ScheduleError(
                    f"rank {rank}, step {step} ({action}): stages and micro-batches are counted "
                    "from 0"
                )
            if stage in updated:
                _validate_turn(schedule, rank, step, action)
            elif owner.setdefault(stage, rank) != rank:
                raise ScheduleError(
                    f"rank {rank}, step {step} ({action}): stage {stage} already belongs to rank "
                    f"{owner[stage]}"
                )
            if action in steps:
                raise ScheduleError(
                    f"rank {rank} runs {action.describe()} twice, at steps {steps[action]} and {step}"
                )
            steps[action] = step
    return steps


def _validate_turn(schedule, rank, step, action):
    """The replicas of a stage take its micro-batches in turn."""
    ranks = schedule.ranks_of_stage[action.stage]
    in_turn = ranks[action.microbatch % len(ranks)]
    if rank == in_turn:
        return
    where = f"rank {rank}, step {step} ({action})"
    if len(ranks) == 1:
        raise ScheduleError(f"{where}: stage {action.stage} belongs to rank {in_turn}")
    raise ScheduleError(
        f"{where}: stage {action.stage} belongs to ranks {', '.join(map(str, ranks))}, which take "
        f"its micro-batches in turn, and this one is rank {in_turn}'s"
    )


def _validate_passage(rank, stage, microbatch, steps):
    """One micro-batch on one stage: complete, and in order."""
    forward, full, for_input, for_weights, update = [
        steps.get((stage, kind, microbatch)) for kind in "FBIWU"
    ]

    def named(kind):
        return Action(stage, kind, microbatch).describe()

    if forward is None:
        kind, step = next(
            (kind, steps[stage, kind, microbatch])
            for kind in "BIWU"
            if (stage, kind, microbatch) in steps
        )
        raise ScheduleError(
            f"rank {rank} runs {named(kind)} at step {step}, but never {named('F')}"
        )
    if full is not None and (for_input is not None or for_weights is not None):
        extra, part = (for_weights, "W") if for_input is None else (for_input, "I")
        raise ScheduleError(
            f"rank {rank} runs {named('B')} in full at step {full} and a part of it again at step "
            f"{extra} ({stage}{part}{microbatch})"
        )
    if full is None and for_input is None:
        raise ScheduleError(f"rank {rank} never runs {named('B')}")
    if full is None and for_weights is None:
        raise ScheduleError(f"rank {rank} never runs {named('W')}")
    taken = [(forward, "F")]
    taken += [(for_input, "I"), (for_weights, "W")] if full is None else [(full, "B")]
    taken += [] if update is None else [(update, "U")]
    for (before, first), (step, second) in zip(taken, taken[1:]):
        if step < before:
            raise ScheduleError(
                f"rank {rank} runs {named(second)} at step {step}, but {named(first)} comes at "
                f"step {before}"
            )


def _validate_joint_updates(schedule, stage, ranks, steps):
    """The replicas of a stage update after each complete group of micro-batches, and only then."""
    for microbatch in range(schedule.num_microbatches):
        update = Action(stage, "U", microbatch)
        rank = ranks[microbatch % len(ranks)]
        last = update_group(microbatch, len(ranks))[-1]
        if last >= schedule.num_microbatches and update in steps:
            raise ScheduleError(
                f"rank {rank} runs {update.describe()} at step {steps[update]}, but there is no "
                f"micro-batch {last} to complete the group of {len(ranks)}"
            )
        if last < schedule.num_microbatches and update not in steps:
            raise ScheduleError(
                f"rank {rank} never runs {update.describe()}, which the {len(ranks)} replicas of "
                "the stage make together"
            )


def to_csv(schedule):
    """The text form: one row a rank."""
    return "".join(",".join(map(str, order)) + "\n" for order in schedule.orders)


def from_csv(text, name="custom"):
    """Read the text form. Empty cells are ignored. Raises ScheduleError; does not validate.

    torch's cells of two actions at once, `(0F1;3B0)OVERLAP_F_B`, are read as one after the other.
    """
    orders = []
    for row in text.strip().splitlines():
        row = re.sub(r"\(([^();]*);([^();]*)\)OVERLAP_F_B", r"\1,\2", row)
        cells = [cell.strip() for cell in row.split(",")]
        order = []
        for step, cell in enumerate(cell for cell in cells if cell):
            match = re.fullmatch(r"(\d+)([A-Z])(\d+)", cell)
            if match is None or match[2] not in KINDS:
                raise ScheduleError(
                    f"rank {len(orders)}, step {step}: '{cell}' is no action; "
                    "write stage, kind (F, B, I, W or U) and micro-batch, as in 0F3"
                )
            order.append(Action(int(match[1]), match[2], int(match[3])))
        orders.append(tuple(order))
    return Schedule(name, tuple(orders))


def read_csv(path):
    """Read and validate a schedule from a file. Raises ScheduleError or OSError."""
    return validate(from_csv(Path(path).read_text(), name=Path(path).stem))
