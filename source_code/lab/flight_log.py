# SPDX-License-Identifier: Apache-2.0
"""The flight log of a run: what every action of every rank used and made, and every message.

    torchrun --standalone --nproc-per-node 4 gpipe.py --record build/monday

The folder then has `run.json` (the schedule) and `rankN.jsonl`, with one line of JSON per event on
rank N, in its order; flight_log_reader.py reads them. A line is written before the rank waits for
anything, so the log of a run that was killed, or that hangs, is complete up to its last moment.

The log has fingerprints of tensors, not the tensors. A fingerprint is computed after the action and
after its message has left: while the rank waits for the next message, or within the next action's
pace. A tensor that was changed in place in between is therefore recorded as changed. On a GPU the
rank has to wait for the device first, so a recorded run is slower there.
"""

import json
import math
import zlib
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import torch

from files.outputs import json_line, say_not_written, write_whole
from lab.flight_log_reader import RANK_FILE, RUN_FILE
from pipeline.message import Message
from pipeline.schedules.text_form import to_csv

# Numbers read at once: at 64 bits each, two such pieces fit into a core's cache. The weights of a
# fingerprint's sum repeat after this many, a prime, which is not a multiple of a row's length.
AT_ONCE = 32_749


class FlightLog:
    """The flight log that a rank writes into `folder`. Every rank makes one, after all have joined.

    `clock` and `memory` are this rank's instruments. `first_version` is the number of updates of
    the weights so far, above 0 when a training run is continued.
    """

    def __init__(self, folder, rank, schedule, clock, memory, first_version=0):
        run = {"name": schedule.name, "rows": to_csv(schedule).split()}
        self.open(folder, rank, run, clock, memory, first_version)

    def open(self, folder, rank, run, clock, memory, first_version=0):
        """Open the rank's file. Raises FileExistsError if the file exists: it is another run's."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / RANK_FILE.format(rank)
        self.file = open(self.path, "x", buffering=1, encoding="utf-8")
        if rank == 0:
            write_whole(folder / RUN_FILE, json.dumps(run) + "\n")
        self.clock, self.memory = clock, memory
        self.version = first_version  # for stages without a version of their own
        self.pending = []  # events that are not written yet
        self.stages = {}  # index -> stage, for stages that have acted in this pass

    @contextmanager
    def acting(self, work):
        """A context for an action. `stage.version` is the number of updates of its weights."""
        self.flush()
        yield
        stage = work.stage
        version = getattr(stage, "version", self.version)
        if self.has_new_weights(stage, version):
            self.stages[stage.index] = stage
            self.pending.append((self.write_weights, stage, version))
        self.pending.append((self.write_action, work, version))
        if work.action.kind == "U":
            self.pending.append((self.write_weights, stage, version))

    def has_new_weights(self, stage, version):
        """Whether the weights still have to be written in this pass; an update writes its own."""
        return stage.index not in self.stages

    def moved(self, direction, message, peer, tensor):
        """Note a message that has been sent or received."""
        preposition = "to" if direction == "sent" else "from"
        self.pending.append(
            (self.write_message, direction, producer_of(message), preposition, peer, tensor)
        )

    @contextmanager
    def waiting(self, peer, what):
        """A context for a wait, during which the pending events are written."""
        if torch.is_grad_enabled():
            self.flush()
        if isinstance(what, Message) and torch.is_grad_enabled():
            self.write(waits=producer_of(what), **{"from": peer}, at=self.clock.now())
        yield

    def flush(self):
        """Write the pending events; after this call they survive the end of the process."""
        if self.pending:
            if self.clock.on_device:
                torch.cuda.synchronize()  # otherwise the ends of the actions are unknown
            pending, self.pending = self.pending, []
            known = {}  # one fingerprint for a tensor received and used, or made and sent
            for write, *arguments in pending:
                write(*arguments, known=known)

    def pass_ended(self):
        """Write the end of a pass, with the norm that each stage's gradients have by then."""
        self.flush()
        for stage in self.stages.values():
            self.write(updated=stage.index, gradient=norm_of(gradients_of(stage)))
        self.write(ended=self.version)
        self.version += 1
        self.stages = {}

    def close(self):
        self.flush()
        if self.file:
            self.file.close()

    def write_weights(self, stage, version, known):
        weights = getattr(stage, "prints", None) or {
            name: fingerprint(weight) for name, weight in sorted(stage.part.named_parameters())
        }
        self.write(weights=weights, stage=stage.index, version=version)

    def write_action(self, work, version, known):
        """Write the line of an action: times in ms, `held` in bytes, tensors as fingerprints."""
        gradient = norm_of(gradients_of(work.stage)) if work.action.kind in "BIWU" else None
        self.write(
            did=str(work.action),
            start=self.clock.in_milliseconds(work.start),
            end=self.clock.in_milliseconds(work.end),
            recompute=self.clock.recompute_time(work),
            used=look_at(work.used, known),
            made=look_at(work.made, known),
            version=version,
            held=self.memory.held(),
            gradient=gradient,
        )

    def write_message(self, direction, message, preposition, peer, tensor, known):
        self.write(**{direction: message, preposition: peer, "is": look_at(tensor, known)})

    def write(self, **line):
        if self.file is None:
            return
        try:
            self.file.write(json_line(line))
        except OSError as error:  # the disk is full: the run goes on without its recording
            say_not_written("--record", self.path, error)
            with suppress(OSError):
                self.file.close()
            self.file = None


def producer_of(message):
    """The action that made a message, in text: "2F3" or "2I3"; other messages by their name."""
    kind = {"activation": "F", "gradient": "I"}.get(getattr(message, "what", None))
    return f"{message.stage}{kind}{message.microbatch}" if kind else str(message)


def gradients_of(stage):
    """The gradients of the weights, as added up by the backwards so far, as a list of tensors.

    A stage with updates of its own has them in `gradients`; right after an update, they are those
    that the update used.
    """
    gathered = getattr(stage, "gradients", None)
    if gathered:
        return list(gathered.values())
    return [weight.grad for weight in stage.part.parameters() if weight.grad is not None]


def look_at(tensor, known):
    """The fingerprint of a tensor, or None; `known` has the fingerprints already computed."""
    if tensor is None:
        return None
    key = tensor.data_ptr(), tensor.shape, tensor.dtype
    if key not in known:
        known[key] = fingerprint(tensor)
    return known[key]


def fingerprint(tensor):
    """[digest, norm, weighted sum] of a tensor.

    The digest says whether two tensors are equal to the last bit; it is a CRC-32, which costs a
    fifth of a cryptographic hash and misses one difference in 2**32. The two numbers say whether
    they are nearly equal: a change of the tensor by a vector of length e moves neither by more than
    e, and the weighted sum notices what the norm does not, such as two rows that changed places.
    """
    values = tensor.detach().cpu().contiguous().flatten()
    digest = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype} ".encode())
    ramp, square, weighted = _ramp(), 0.0, 0.0
    for part in values.split(AT_ONCE):
        digest = zlib.crc32(part.view(torch.uint8).numpy(), digest)
        part = part.double()
        square += torch.dot(part, part).item()
        weighted += torch.dot(part, ramp[: len(part)]).item()
    return [f"{digest:08x}", math.sqrt(square), weighted / _norm_of_ramps(len(values))]


@lru_cache(maxsize=1)
def _ramp():
    """The vector 1, 2, 3, ..., of length AT_ONCE."""
    return torch.arange(1, AT_ONCE + 1, dtype=torch.float64)


def _norm_of_ramps(length):
    """The norm of so many numbers 1, 2, 3, ..., AT_ONCE, 1, 2, 3, ..."""
    whole, rest = divmod(length, AT_ONCE)
    squares = whole * _sum_of_squares(AT_ONCE) + _sum_of_squares(rest)
    return math.sqrt(squares or 1)


def _sum_of_squares(last):
    return last * (last + 1) * (2 * last + 1) // 6


def norm_of(tensors):
    """The norm of all tensors together; None if there are none."""
    if not tensors:
        return None
    return math.sqrt(math.fsum(norm.item() ** 2 for norm in torch._foreach_norm(tensors)))
