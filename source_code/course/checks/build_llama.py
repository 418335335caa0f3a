# SPDX-License-Identifier: Apache-2.0
"""The checks of lesson 12c's builds: flags that fit a machine, a layer in a verified training."""

import re
import shlex
from functools import cache

from course import launch
from course.building.examining import examine
from course.checks.answer import NotAttempted, WrongAnswer, checked
from course.checks.build_text import request_of
from course.checks.build_words import Words
from course.failed_run import RunFailed
from extensions.pretraining.cut_by_work import cut_by_work
from lab.simulator import Costs, simulate
from pipeline.model import ModelConfig, cut_as
from pipeline.schedule import ScheduleError
from pipeline.schedules import SCHEDULES, build_schedule
from planning.counted_memory import predict_memory

MACHINES = {"A": (8, 16), "B": (8, 8), "C": (4, 14), "D": (2, 12)}  # devices, GiB of each
ROWS, LEAST_ROWS = 64, 2  # rows of the batch; least rows of a micro-batch that keep a device busy
MODEL = f"--model 1b --dtype bfloat16 --seq-len 2048 --batch-size {ROWS} --device cpu"
CHOICES = ("schedule", "chunks", "microbatches", "recompute")
TOLERANCE = 1.10  # the most that a step may take, relative to the best plan that fits
AGAIN = {"none": 0.0, "selective": 0.1, "layer": 1.0, "stage": 1.0}  # forwards rerun per backward
LAYER_FLAGS = (
    "--dtype float64 --device cpu --dim 16 --heads 2 --kv-heads 2 --seq-len 16 --layers 4 --steps 3 "
    "--batch-size 8 --microbatches 4 --evaluate-windows 2 --schedule 1f1b --verify"
)
COMPUTING = 20  # seconds; the layer runs in a whole training, and may be slow
LAYER_PROGRAM = "course.checks.build_llama_in_training.main"


@checked("each plan fits its machine, and a step takes at most a tenth longer than it has to.")
def plans(flags):
    """Check `flags`, a dictionary: for each of MACHINES one text with pretrain_llama.py's flags."""
    if not isinstance(flags, dict) or set(flags) != set(MACHINES):
        raise WrongAnswer('give a text for each machine, as in {"A": "--schedule gpipe ...", ...}')
    if all(text is ... for text in flags.values()):
        raise NotAttempted
    for name, (devices, room) in MACHINES.items():
        if flags[name] is ...:
            return f"machine {name} still has its ..."
        complaint = _complaint_on_plan(f"machine {name}", flags[name], devices, room)
        if complaint:
            return complaint
    return None


def _complaint_on_plan(machine, flags, devices, room):
    choice = _choice_of(machine, flags)
    try:
        step = _step_of(devices, **choice)
    except (ScheduleError, ValueError, ZeroDivisionError) as error:
        raise WrongAnswer(f"{machine}: {error}") from None
    needed = _planned(machine, flags, devices)
    most = max(range(devices), key=needed.__getitem__)
    if needed[most] > room:
        return f"{machine}: plan.py says {needed[most]:.1f} GiB on rank {most}, which has {room}"
    best = min(step for memory, step, _ in _all_plans(devices) if memory <= room)
    if step <= TOLERANCE * best:
        return None
    sentence = f"{machine}: it fits, and a step takes {step / best:.2f} times as long as it has to"
    return f"{sentence}; {_why_slow(choice, devices, room, step)}"


def _choice_of(machine, flags):
    """{name: value} of the flags in CHOICES. Raises WrongAnswer for any other flag."""
    try:
        words = shlex.split(_one_line(flags.replace("=", " "))) if isinstance(flags, str) else ["?"]
    except ValueError:
        words = ["?"]
    pairs = dict(zip(words[::2], words[1::2]))
    unknown = [word for word in words[::2] if word.removeprefix("--") not in CHOICES]
    if unknown or len(words) % 2:
        names = ", ".join(f"--{name}" for name in CHOICES)
        raise WrongAnswer(f"{machine}: use {names}, each with its value; not {flags!r}")
    choice = {"schedule": "1f1b", "chunks": None, "microbatches": "8", "recompute": "none"}
    choice |= {name.removeprefix("--"): value for name, value in pairs.items()}
    for name in ("chunks", "microbatches"):
        if choice[name] is not None:
            if not re.fullmatch(r"[1-9]\d{0,3}", choice[name]):
                raise WrongAnswer(f"{machine}: --{name} takes a whole number above 0")
            choice[name] = int(choice[name])
    if choice["schedule"] not in SCHEDULES:
        raise WrongAnswer(f"{machine}: there is no schedule {choice['schedule']!r}")
    if choice["recompute"] not in AGAIN:
        raise WrongAnswer(f"{machine}: --recompute takes one of {', '.join(AGAIN)}")
    if ROWS % choice["microbatches"]:
        raise WrongAnswer(f"{machine}: {ROWS} rows cannot be cut into that many micro-batches")
    return choice


def _one_line(flags):
    """Flags on several lines, each of which may end in a backslash, as in a raw string."""
    return flags.replace("\\\n", " ")


def _step_of(devices, schedule, chunks, microbatches, recompute):
    """The length of a step. The unit is the forward of one row through one device's layers.

    A backward takes two units. A micro-batch of fewer than LEAST_ROWS rows takes as long as one of
    LEAST_ROWS rows.
    """
    order = build_schedule(schedule, devices, microbatches, chunks)
    rows = max(ROWS / microbatches, LEAST_ROWS) * devices / order.num_stages
    return simulate(order, Costs(rows, rows * (2 + AGAIN[recompute]), rows)).makespan


def _planned(machine, flags, devices):
    """The GiB that each rank needs, as plan.py prints them for the program's flags."""
    command = f"plan.py pretrain_llama.py --gpus {devices} {MODEL} {_one_line(flags)}"
    try:
        output = launch.run(command, None, warm=True, show=False, limit=60).output
    except RunFailed as failed:
        raise WrongAnswer(f"{machine}: {str(failed).splitlines()[0]}") from None
    return [float(mib) / 1024 for mib in re.findall(r"^rank .* ([\d.]+)$", output, re.MULTILINE)]


@cache
def _all_plans(devices):
    """(GiB of the fullest rank, length of a step, choice) of each plan for comparison."""
    config = ModelConfig(20, 2048, 32, 4, 2048, 32000)
    found = []
    for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1)):
        for microbatches in (8, 16, 32, 64):
            order = build_schedule(schedule, devices, microbatches, chunks if chunks > 1 else None)
            cut = cut_as(cut_by_work(config, devices * chunks))
            for recompute in AGAIN:
                memory = predict_memory(
                    config, order, cut, ROWS // microbatches, 2, recompute=recompute
                )
                choice = schedule, chunks if chunks > 1 else None, microbatches, recompute
                most = max(rank.total for rank in memory) / 2**30
                found.append((most, _step_of(devices, *choice), choice))
    return found


def _why_slow(choice, devices, room, step):
    """A half-sentence on the flag whose change alone gives the fastest plan that still fits."""
    shorter = []
    for memory, other_step, other in _all_plans(devices):
        changed = [name for name, value in zip(CHOICES, other) if value != choice[name]]
        if set(changed) - {"chunks"} and len(set(changed) - {"chunks"}) == 1 and memory <= room:
            shorter.append((other_step, [name for name in changed if name != "chunks"][0]))
    other_step, name = min(shorter, default=(step, ""))
    if other_step >= step:
        return "no single flag is to blame: change two"
    return {
        "recompute": "there is room for what you recompute",
        "microbatches": f"look at how many rows are in a micro-batch: {ROWS // choice['microbatches']}",
        "schedule": "another schedule has less of a bubble, and fits",
    }[name]


@checked(
    "four ranks and one process agree to the last digits: your layer can be trained in a pipeline."
)
def feed_forward(function):
    """Check `function(x, gate, up, down)`, which replaces the feed-forward network of each layer.

    `x` has shape (rows, length, dim), `gate` and `up` (hidden, dim), `down` (dim, hidden); the
    result has the shape of x. Four ranks train with the function, and --verify compares them with
    one process.
    """
    request = request_of(function, program=LAYER_PROGRAM, flags=LAYER_FLAGS, seconds=COMPUTING)
    observed = examine(request, 4, show=False)
    apart = re.search(r"largest difference from one process: (\S+), MORE", observed.printed)
    if apart:
        return (
            f"the losses differ from those of one process by {apart[1]}: what a position gets "
            "depends on something besides its own activation and the weights, such as the other "
            "rows of the micro-batch, what an earlier call has kept, or random numbers, which differ "
            "between ranks; or your layer rounds to fewer digits than x has"
        )
    return Words(observed, request).transport() or next(iter(observed.ranks[0].reports), None)
