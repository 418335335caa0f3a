"""Writes down what every action of a rank took in, made and used: the recording of a run.

    mkdir -p build
    torchrun --standalone --nproc-per-node 4 source_code/gpipe.py --record build/monday

FOLDER then holds `run.json` (the schedule and the pace) and `rankN.jsonl`, one line of JSON for
each thing that happened on rank N, in its order; recorded_run.py reads them. A line is on its way
to the disk before the rank waits for anything, so that a run that was killed, or that waits for
ever, can be read up to its last moment.

Tensors are not kept but fingerprinted, and that after the action and after its message has left:
while the rank waits for the next message, or within the next action's pace. So a tensor that was
changed in place in between is seen as it is by then. On a GPU the rank has to wait for the device
first, and a recorded run is slower there.
"""

import hashlib
import json
import math
import re
from functools import lru_cache
from pathlib import Path

import torch

from pipeline.files import write_whole
from pipeline.message import Message
from pipeline.schedule import to_csv

RUN_FILE = "run.json"
RANK_FILE = "rank{}.jsonl"


class RecordingWriter:
    """What one rank writes into `folder`. Every rank makes one, after all have joined.

    `first_version` is the number of updates that the weights have behind them, above 0 when a
    training is continued.
    """

    def __init__(self, folder, job, schedule, recorder, first_version=0):
        folder = Path(folder)
        folder.mkdir(exist_ok=True)
        if job.rank == 0:
            run = {"name": schedule.name, "rows": to_csv(schedule).split()}
            write_whole(folder / RUN_FILE, json.dumps(run) + "\n")
        self.file = open(folder / RANK_FILE.format(job.rank), "w", buffering=1)
        self.job = job
        self.recorder = recorder
        self.version = first_version  # of stages that do not count for themselves
        self.pending = []  # what has happened and is not written yet
        self.stages = {}  # those that have acted in this pass, by index
        recorder.meter.keep_counting = True
        job.recording = self

    def note_action(self, stage, times, used, made, version=None):
        """`stage` has ended an action: `times` is the recorder's own record of it.

        `used` is what it took in and `made` what it gave, tensors or None. `version` counts the
        updates behind the weights that it used.
        """
        version = self.version if version is None else version
        action = times[0]
        if stage.index not in self.stages:
            self.stages[stage.index] = stage
            self.pending.append((self.write_weights, stage, version))
        self.pending.append((self.write_action, stage, times, used, made, version))
        if action.kind == "U":
            self.pending.append((self.write_weights, stage, version))

    def note_sent(self, what, destination, tensor):
        """A message has left; `what` names it, as a Message or in words."""
        message = producer_of(what, self.job.rank)
        self.pending.append((self.write_message, "sent", message, "to", destination, tensor))

    def note_wait(self, what, source):
        """The rank is about to wait for a message: the moment to write what has gathered."""
        self.flush()
        at = self.recorder.now()
        self.write(waits=producer_of(what, source), **{"from": source}, at=at)

    def note_received(self, what, source, tensor):
        """A message that was waited for is here."""
        message = producer_of(what, source)
        self.pending.append((self.write_message, "received", message, "from", source, tensor))

    def flush(self):
        """Write what is pending: after this call it survives the process."""
        if self.pending:
            if self.recorder.on_device:
                torch.cuda.synchronize()  # else the ends of the actions are not known yet
            pending, self.pending = self.pending, []
            known = {}  # a tensor that was received and used, or made and sent, is looked at once
            for write, *arguments in pending:
                write(*arguments, known=known)

    def end_pass(self):
        """The schedule has been performed once and the weights are updated."""
        self.flush()
        for stage in self.stages.values():
            self.write(updated=stage.index, gradient=norm_of(stage.gathered()))
        self.write(ended=self.version)
        self.version += 1
        self.stages = {}

    def close(self):
        self.flush()
        self.file.close()
        self.job.recording = None

    def write_weights(self, stage, version, known):
        weights = {
            name: fingerprint(weight) for name, weight in sorted(stage.part.named_parameters())
        }
        self.write(weights=weights, stage=stage.index, version=version)

    def write_action(self, stage, times, used, made, version, known):
        """The line of one action: times in milliseconds, `held` in bytes, tensors as fingerprints."""
        action, start, end, again = times
        gathered = norm_of(stage.gathered()) if action.kind in "BIWU" else None
        self.write(
            did=str(action),
            start=self.recorder.in_milliseconds(start),
            end=self.recorder.in_milliseconds(end),
            recompute=self.recorder.recompute_time(action, again),
            used=look_at(used, known),
            made=look_at(made, known),
            version=version,
            held=self.recorder.meter.held(),
            gradient=gathered,
        )

    def write_message(self, direction, message, preposition, peer, tensor, known):
        self.write(**{direction: message, preposition: peer, "is": look_at(tensor, known)})

    def write(self, **line):
        self.file.write(json.dumps(line) + "\n")


def producer_of(what, source):
    """The action that made a message, in text: "2F3", or the words themselves if they name none.

    `what` is a Message or, in the loops written by hand, "activation 3": there each rank has the
    stage of its own number.
    """
    if isinstance(what, Message):
        return f"{what.stage}{'F' if what.what == 'activation' else 'I'}{what.microbatch}"
    found = re.fullmatch(r"(activation|gradient) (\d+)", what)
    return f"{source}{'F' if found[1] == 'activation' else 'I'}{found[2]}" if found else what


def look_at(tensor, known):
    """The fingerprint of a tensor, or None; `known` has those of tensors just looked at."""
    if tensor is None:
        return None
    key = tensor.data_ptr(), tensor.shape, tensor.dtype
    if key not in known:
        known[key] = fingerprint(tensor)
    return known[key]


def fingerprint(tensor):
    """[digest, norm, weighted sum] of a tensor.

    The digest says whether two tensors are equal to the last bit. The two numbers say whether they
    are nearly equal: a change of the tensor by a vector of length e moves neither by more than e,
    and the weighted sum notices what the norm does not, such as two rows that changed places.
    """
    values = tensor.detach().cpu().contiguous().flatten()
    digest = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype} ".encode(), digest_size=8)
    digest.update(values.view(torch.uint8).numpy())
    values = values.double()
    weighted = torch.dot(values, _ramp(len(values)))
    return [digest.hexdigest(), values.norm().item(), weighted.item()]


@lru_cache(maxsize=16)
def _ramp(length):
    """1, 2, 3, ..., as a vector of length one."""
    ramp = torch.arange(1, length + 1, dtype=torch.float64)
    return ramp / ramp.norm()


def norm_of(tensors):
    """The norm of all of them together, None if there are none."""
    if not tensors:
        return None
    return math.sqrt(math.fsum(norm.item() ** 2 for norm in torch._foreach_norm(tensors)))
