# SPDX-License-Identifier: Apache-2.0
"""Measures a machine under the load of a training run: all ranks run stages at the same time.

    cd source_code
    torchrun --standalone --nproc-per-node 2 -m planning.machine_timing 128 OUT.json

128 is the length of the sequences. Stages of several widths, depths and micro-batches run forward
and backward, whole and in halves. Two ranks exchange messages. All ranks sum their gradients and
update. OUT.json has coefficients that are fitted to these times by least squares: see time_coefficients.py.
plan.py --this-machine calls this program. The error of the fit is found by leaving out each size in
turn and forecasting it.
"""

import json
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import replace

import torch
import torch.distributed as dist

from extensions.optimization.clipping import clip_gradients
from files.outputs import write_whole
from guard.around_main import guarded
from pipeline.collectives import Summing, gather, open_groups, share
from pipeline.job import join_job
from pipeline.message import Message
from pipeline.model import ModelConfig, build_part, token_loss
from pipeline.one_process import build_optimizer
from pipeline.split_stage import SplitStage
from pipeline.stage import Stage
from planning.known_models import of_the_course
from planning.time_coefficients import (
    KINDS,
    TERMS,
    TimeCoefficients,
    as_text,
    embedding_quantities,
    head_quantities,
    layer_quantities,
)

WIDTHS = (64, 128, 256, 384)
ROWS = (1, 4, 16)
LARGEST = 6e8  # operations of a layer's forward, on a CPU; a GPU gets a thousand times as many
VOCABULARY = 256
REPEATS = 5
HELD = 3  # micro-batches in flight
ROUNDS = 5
LONGEST = 40  # seconds after which no further round begins, on a slow or busy machine
MESSAGES = (2**10, 2**17, 2**21)  # numbers


@guarded
def main():
    """Measure on all ranks; rank 0 fits the coefficients and writes them."""
    if len(sys.argv) != 3 or not sys.argv[1].isdecimal() or int(sys.argv[1]) < 2:
        raise SystemExit("give the length of the sequences, from 2, and the file to write")
    job = join_job()
    rows = measure_stages(job, int(sys.argv[1]))
    links = measure_links(job) if job.num_ranks > 1 else ((1e-6, 0.0), (1e-6, 0.0))
    everyone = gather(job, (rows, measure_updates(job)))
    if job.rank == 0:
        found = {**fitted(everyone, *links), **device_of(job)}
        write_whole(sys.argv[2], json.dumps(found, indent=1) + "\n")
    job.leave()


def sizes(length, device):
    """(width, rows) of the stages that are measured."""
    widths, most = (WIDTHS, LARGEST) if device.type == "cpu" else ((512, 1024, 2048), 1e3 * LARGEST)
    for width in widths:
        for rows in ROWS:
            if of_the_course_at(width, length).layer_flops(rows) <= most:
                yield width, rows


def of_the_course_at(width, length):
    """The planner's Model of the course's own model with this width."""
    heads = max(width // 32, 1)
    return replace(of_the_course(1, width, heads, max(heads // 2, 1), VOCABULARY), length=length)


def measure_stages(job, length):
    """Rows (width, rows, kind, quantities, seconds) of this rank: lower quartiles over all rounds.

    Each round measures every size once, and the first one warms up. Other load makes a machine
    slower for a while, and never faster, so the lower quartile is close to the time without it.
    """
    times, amounts, parts = defaultdict(list), {}, {}
    dtype = torch.float32 if job.device.type == "cpu" else torch.bfloat16
    start = time.perf_counter()
    for round_number in range(1 + ROUNDS):
        if round_number > 1 and share(job, time.perf_counter() - start) > LONGEST:
            break
        for width, rows in sizes(length, job.device):
            model = of_the_course_at(width, length)
            heads = model.head_count
            config = ModelConfig(8, width, heads, model.kv_heads, length, VOCABULARY)
            for first, last in ((3, 4), (2, 5), (7, 8), (0, 1)):
                if (first, width) not in parts:
                    parts[first, width] = build_part(config, first, last, 0, dtype, job.device)
                quantities = {"action": 1, **layer_quantities(model, rows, last - first)}
                if last == 8:
                    quantities |= head_quantities(model, rows)
                if first == 0:
                    quantities |= embedding_quantities(model, rows)
                amounts[first, width, rows] = quantities
                index = {0: 0, 7: 2}.get(first, 1)
                found = time_stage(job, config, parts[first, width], index, rows, dtype)
                for kind, seconds in found.items() if round_number else ():
                    times[first, width, rows, kind] += seconds
    return [
        (width, rows, kind, amounts[first, width, rows], statistics.quantiles(seconds, n=4)[0])
        for (first, width, rows, kind), seconds in times.items()
    ]


def time_stage(job, config, part, index, rows, dtype):
    """{kind: [seconds, ...]} of the actions of stage `index` of three, which is `part`.

    HELD micro-batches are in flight, as in a training run. With one, its activations would always
    lie in memory that has just been used. The first HELD are not timed: they obtain the memory for
    this size from the system, which takes long, and a training run reuses its memory.
    """
    times = defaultdict(list)
    for stage_class, halves in ((Stage, ""), (Stage, "B"), (SplitStage, "IW")):
        stage = stage_class(
            part, index, 3, lambda scores, targets: token_loss(scores.float(), targets)
        )
        tokens = torch.randint(VOCABULARY, (rows, config.seq_len), device=job.device)
        whole = {"size": (rows, config.seq_len, config.dim), "dtype": dtype, "device": job.device}
        inputs = [torch.randn(**whole) if index else tokens for _ in range(HELD)]
        gradients = [torch.randn(**whole) if index < 2 else None for _ in range(HELD)]
        calls = [("F", stage.forward, k, inputs[k], tokens) for k in range(HELD)]
        for k in range(HELD):
            if halves == "IW":
                calls.append(("I", stage.backward_input, k, gradients[k]))
                calls.append(("W", stage.backward_weight, k))
            else:
                calls.append(("B", stage.backward, k, gradients[k]))
        together(job)
        for kind, *call in calls:
            seconds = time_of(job, *call)
            if halves == "B" or kind in halves:
                times[kind].append(seconds)
    return times


def together(job):
    """Wait for all ranks, so that all of them compute at the same time, as in a training run."""
    if job.num_ranks > 1:
        with job.waiting_for_all("the start of a measurement"):
            dist.barrier()


def time_of(job, function, *arguments):
    """Seconds of a call until the device has finished its work."""
    start = time.perf_counter()
    function(*arguments)
    if job.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_updates(job):
    """Rows (tensors, numbers, seconds) of clipping and AdamW."""
    found = []
    for width, layers in ((64, 1), (64, 8), (128, 8), (256, 4), (384, 4)):
        model = of_the_course_at(width, 32)
        config = ModelConfig(layers + 2, width, model.head_count, model.kv_heads, 32, VOCABULARY)
        part = build_part(config, 1, 1 + layers, 0, torch.float32, job.device)
        optimizer = build_optimizer("adamw", part.parameters(), 1e-4)
        for parameter in part.parameters():
            parameter.grad = torch.ones_like(parameter)
        # Names differ from rank to rank, as the stages of a pipeline do.
        named = [(f"layers.{job.rank}.{name}", p) for name, p in part.named_parameters()]
        times = []
        for _ in range(1 + REPEATS):
            together(job)
            clipped = time_of(job, clip_gradients, job, dict(named).items(), 1.0)
            times.append(clipped + time_of(job, optimizer.step))
        numbers = sum(parameter.numel() for parameter in part.parameters())
        found.append((len(named), numbers, statistics.median(times[1:])))
    return found


def measure_links(job):
    """((seconds, seconds per byte) of a message between two ranks, the same of a sum over all)."""
    everyone = tuple(range(job.num_ranks))
    open_groups(job, [everyone])
    messages, sums = [], []
    for numbers in MESSAGES:
        tensor = torch.zeros(numbers, device=job.device)
        seconds = median_of(job, there_and_back, job, tensor) / 2
        messages.append((4 * numbers, seconds))
        sums.append((4 * numbers, median_of(job, sum_up, job, tensor, everyone)))
    return line_through(messages), line_through(sums)


def median_of(job, function, *arguments):
    """Median seconds of a call that all ranks make."""
    times = []
    for _ in range(1 + REPEATS):
        together(job)
        times.append(time_of(job, function, *arguments))
    return statistics.median(times[1:])


def sum_up(job, tensor, ranks):
    Summing(job, [tensor], ranks, "a sum that is measured").wait()


def there_and_back(job, tensor):
    """Send a tensor from rank 0 to rank 1 and back."""
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if job.rank == 0:
        job.send(tensor, 1, Message("measured", 0, 0))
        job.receive(1, Message("measured", 1, 0), shape, dtype).wait()
    elif job.rank == 1:
        job.receive(0, Message("measured", 0, 0), shape, dtype).wait()
        job.send(tensor, 0, Message("measured", 1, 0))
    job.complete_sends()


def line_through(points):
    """(intercept, slope) of a fit by `least_squares`; neither is below 0."""
    a, b = least_squares([[1.0, size] for size, _ in points], [time for _, time in points])
    return a, b


def least_squares(rows, times):
    """Coefficients from 0 on that fit `times` with small squared relative errors.

    While one is negative, the most negative one is set to 0 and the others are fitted again.
    """
    inputs, wanted = torch.tensor(rows, dtype=torch.float64), torch.tensor(times)
    inputs = inputs / wanted.double()[:, None]
    used = [column for column in range(inputs.shape[1]) if inputs[:, column].any()]
    while used:
        scale = inputs[:, used].norm(dim=0)
        ones = torch.ones(len(times), 1, dtype=torch.float64)
        found = torch.linalg.lstsq(inputs[:, used] / scale, ones, driver="gelsd").solution[:, 0]
        if (found >= 0).all():
            break
        used.pop(int(found.argmin()))
    coefficients = [0.0] * inputs.shape[1]
    for column, value in zip(used, (found / scale).tolist() if used else []):
        coefficients[column] = value
    return coefficients


def fit_actions(rows):
    """For each of KINDS one coefficient per term, from the rows of `measure_stages`."""
    actions = []
    for kind in KINDS:
        own = [(quantities, seconds) for _, _, k, quantities, seconds in rows if k == kind]
        table = [[quantities.get(term, 0.0) for term in TERMS] for quantities, _ in own]
        actions.append(tuple(least_squares(table, [seconds for _, seconds in own])))
    return tuple(actions)


def left_out_errors(rows):
    """Absolute relative errors of a fit, each for a size that was left out of the fit.

    An error is that of the total time of all stages of a size, because a step adds up such times:
    once with whole backwards, and once with backwards in halves.
    """
    errors = []
    for size in sorted({row[:2] for row in rows}):
        fitted_without = TimeCoefficients(fit_actions([row for row in rows if row[:2] != size]))
        for kinds in ("FB", "FIW"):
            own = [row[2:] for row in rows if row[:2] == size and row[2] in kinds]
            expected = sum(fitted_without.seconds(kind, amounts) for kind, amounts, _ in own)
            errors.append(abs(expected / sum(seconds for _, _, seconds in own) - 1))
    return errors


def fitted(everyone, link, sums):
    """The fields of a machine's JSON that follow from the measurements of all ranks."""
    rows = [row for of_rank, _ in everyone for row in of_rank]
    updates = [row for _, of_rank in everyone for row in of_rank]
    table = [[1.0, tensors, numbers] for tensors, numbers, _ in updates]
    update = least_squares(table, [seconds for _, _, seconds in updates])
    measured = TimeCoefficients(fit_actions(rows), *update, *sums)
    largest = max((row for row in rows if row[2] == "F"), key=lambda row: row[3]["layer_operation"])
    errors = sorted(left_out_errors(rows))
    return {
        "gpus_per_node": len(everyone),
        "teraflops": largest[3]["layer_operation"] / largest[4] / 1e12,
        "inside": {
            "gigabytes_per_second": 1e-9 / max(link[1], 1e-12),
            "microseconds": max(link[0], 1e-7) * 1e6,
        },
        "error_left_out": {
            "median": statistics.median(errors),
            "nine_tenths": errors[int(0.9 * len(errors))],
        },
        "measured": as_text(measured),
    }


def device_of(job):
    """Fields of a machine's JSON: bytes per value and, for a GPU, its memory in gigabytes."""
    if job.device.type == "cpu":
        return {"bytes_per_value": 4}
    memory = torch.cuda.get_device_properties(job.device).total_memory
    return {"bytes_per_value": 2, "memory_gigabytes": memory / 1e9}


if __name__ == "__main__":
    sys.exit(main())
