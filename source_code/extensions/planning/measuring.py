"""Measures a machine as a training uses it: every rank runs stages at the same time.

    cd source_code
    torchrun --standalone --nproc-per-node 2 -m extensions.planning.measuring 128 OUT.json

128 is the length of the sequences. Stages of several widths, depths and micro-batches run forward
and backward, whole and in halves; two ranks exchange messages; all update and sum their gradients.
What OUT.json holds is fitted to that by least squares: see measured.py. plan.py --this-machine calls
it. How far the fit is off is found by leaving out each size in turn and forecasting it.
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
from extensions.planning.known_models import of_the_course
from extensions.planning.measured import (
    KINDS,
    TERMS,
    Measured,
    as_text,
    embedding_quantities,
    head_quantities,
    layer_quantities,
)
from pipeline.collectives import Summing, gather, open_groups
from pipeline.command_line import reject
from pipeline.files import write_whole
from pipeline.job import join_job
from pipeline.message import Message
from pipeline.model import ModelConfig, build_part, token_loss
from pipeline.one_process import build_optimizer
from pipeline.split_stage import SplitStage
from pipeline.stage import Stage

WIDTHS = (64, 128, 256, 384)
ROWS = (1, 4, 16)
LARGEST = 6e8  # operations of a layer's forward, on a CPU; a GPU gets a thousand times as many
VOCABULARY = 256
REPEATS = 5
MESSAGES = (2**10, 2**17, 2**21)  # numbers


def main():
    """Measure, fit, and write what was found on rank 0."""
    if len(sys.argv) != 3 or not sys.argv[1].isdecimal() or int(sys.argv[1]) < 2:
        reject("give the length of the sequences, from 2, and the file to write")
    job = join_job()
    rows = measure_stages(job, int(sys.argv[1]))
    links = measure_links(job) if job.num_ranks > 1 else ((1e-6, 0.0), (1e-6, 0.0))
    everyone = gather(job, (rows, measure_updates(job)))
    if job.rank == 0:
        found = {**fitted(everyone, *links), **device_of(job)}
        write_whole(sys.argv[2], json.dumps(found, indent=1) + "\n")
    job.leave()


def sizes(length, device):
    """(width, rows) of the stages that are run."""
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
    """Rows (width, rows, kind, quantities, seconds) of this rank."""
    found = []
    dtype = torch.float32 if job.device.type == "cpu" else torch.bfloat16
    for width, rows in sizes(length, job.device):
        model = of_the_course_at(width, length)
        heads = model.head_count
        config = ModelConfig(8, width, heads, model.kv_heads, length, VOCABULARY)
        for first, last in ((3, 4), (2, 5), (7, 8), (0, 1)):
            quantities = {"action": 1, **layer_quantities(model, rows, last - first)}
            if last == 8:
                quantities |= head_quantities(model, rows)
            if first == 0:
                quantities |= embedding_quantities(model, rows)
            for kind, seconds in time_stage(job, config, first, last, rows, dtype).items():
                found.append((width, rows, kind, quantities, seconds))
    return found


def time_stage(job, config, first, last, rows, dtype):
    """{kind: median seconds} of the actions of a stage with layers `first` to `last` - 1."""
    times = defaultdict(list)
    index = 0 if first == 0 else 2 if last == config.layers else 1
    for stage_class, kinds in ((Stage, ("F", "B")), (SplitStage, ("F", "I", "W"))):
        part = build_part(config, first, last, 0, dtype, job.device)
        stage = stage_class(
            part, index, 3, lambda scores, targets: token_loss(scores.float(), targets)
        )
        tokens = torch.randint(VOCABULARY, (rows, config.seq_len), device=job.device)
        for repeat in range(1 + REPEATS):
            inputs = tokens
            shape = rows, config.seq_len, config.dim
            if first:
                inputs = torch.randn(shape, dtype=dtype, device=job.device)
            gradient = None
            if index < 2:
                gradient = torch.randn(shape, dtype=dtype, device=job.device)
            calls = {
                "F": (stage.forward, 0, inputs, tokens),
                "B": (stage.backward, 0, gradient),
                "I": (getattr(stage, "backward_input", None), 0, gradient),
                "W": (getattr(stage, "backward_weight", None), 0),
            }
            together(job)
            for kind in kinds:
                seconds = time_of(job, *calls[kind])
                if repeat and (stage_class is Stage or kind != "F"):
                    times[kind].append(seconds)
    return {kind: statistics.median(values) for kind, values in times.items()}


def together(job):
    """Let all ranks begin at the same time, as in a training they all compute."""
    if job.num_ranks > 1:
        with job.waiting_for_all("the start of a measurement"):
            dist.barrier()


def time_of(job, function, *arguments):
    """Seconds of a call, until the device has done what it was given."""
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
    """((seconds, per byte) of a message between two ranks, the same of a sum over all)."""
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
    """A tensor goes from rank 0 to rank 1 and back."""
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if job.rank == 0:
        job.send(tensor, 1, Message("measured", 0, 0))
        job.receive(1, Message("measured", 1, 0), shape, dtype).wait()
    elif job.rank == 1:
        job.receive(0, Message("measured", 0, 0), shape, dtype).wait()
        job.send(tensor, 0, Message("measured", 1, 0))
    job.complete_sends()


def line_through(points):
    """(at nothing, slope) with the least relative errors; neither is below 0."""
    a, b = least_squares([[1.0, size] for size, _ in points], [time for _, time in points])
    return a, b


def least_squares(rows, times):
    """Coefficients, none below 0, with which the relative errors of `times` are least."""
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
    """For each kind a coefficient per term, from rows as `measure_stages` gives them."""
    actions = []
    for kind in KINDS:
        own = [(quantities, seconds) for _, _, k, quantities, seconds in rows if k == kind]
        table = [[quantities.get(term, 0.0) for term in TERMS] for quantities, _ in own]
        actions.append(tuple(least_squares(table, [seconds for _, seconds in own])))
    return tuple(actions)


def left_out_errors(rows):
    """How far a fit is off on each size that it has not seen: absolute relative errors."""
    errors = []
    for size in sorted({row[:2] for row in rows}):
        actions = fit_actions([row for row in rows if row[:2] != size])
        fitted_without = Measured(actions, 0, 0, 0, 0, 0, 0)
        for width, count, kind, quantities, seconds in rows:
            if (width, count) == size:
                errors.append(abs(fitted_without.seconds(kind, quantities) / seconds - 1))
    return errors


def fitted(everyone, link, sums):
    """What a machine's JSON holds of the measurements of all ranks."""
    rows = [row for of_rank, _ in everyone for row in of_rank]
    updates = [row for _, of_rank in everyone for row in of_rank]
    table = [[1.0, tensors, numbers] for tensors, numbers, _ in updates]
    update = least_squares(table, [seconds for _, _, seconds in updates])
    measured = Measured(fit_actions(rows), *update, *sums, 0.0)
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
    """Bytes of a value in a training there, and the memory of a GPU in gigabytes if it is one."""
    if job.device.type == "cpu":
        return {"bytes_per_value": 4}
    memory = torch.cuda.get_device_properties(job.device).total_memory
    return {"bytes_per_value": 2, "memory_gigabytes": memory / 1e9}


if __name__ == "__main__":
    sys.exit(main())
