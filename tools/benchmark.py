"""Timings of this repository on this machine, beside the theory and torch's own schedule.

    python tools/benchmark.py
    python tools/benchmark.py --only "The flight log of any program"     # one table

Each line is the median of 7 runs (3 with --quick), with the smallest and the largest. Runs that are
compared take turns, so that a disturbance affects all of them. The tables are printed and, if all
were measured, written to build/benchmark.md. Close other programs first. No test uses these times.
"""

import contextlib
import io
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import benchmark_plans
import psutil
import torch
import torch.distributed as dist
from this_machine import processor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "source_code"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))  # ranks.py

from course import launch
from course.checks import build_steps
from course.views.explorer import Panel, explore
from extensions.torch_pipelining.library import LIBRARY_SCHEDULES, ONE_STAGE, schedule_as_data
from files.outputs import write_whole
from guard.one_sentence import in_one_sentence, naming_files
from lab.simulator import Costs, simulate
from lab.variables import pretended_nodes
from pipeline.command_line import Parser
from pipeline.schedules import build_schedule, gpipe, naive, one_f_one_b
from pipeline.schedules.text_form import to_csv
from small import pipeline as my_pipeline

OURS, NAIVE, ALTERNATING = "gpipe.py", "naive_model_parallelism.py", "one_f_one_b.py"
TORCHS = "torch_pipelining.py --schedule GPipe"
# Small enough for the computing to hide in the pace, also with eight ranks on two cores.
TINY = "--layers 8 --dim 16 --heads 2 --kv-heads 2 --seq-len 8"
PACED = f"{TINY} --pace 10 20 --steps 9"
# Large enough to make messages and Python negligible, and a micro-batch almost as efficient as the
# whole batch: 23 million weights, 4.4 s per step on a core.
LARGE = (
    "--layers 8 --dim 512 --heads 8 --kv-heads 4 --seq-len 128 --batch-size 32 --dtype float32 "
    "--learning-rate 0.05 --steps 5"
)
HEAD_TO_HEAD = "Every schedule of torch, ours beside it"
LIMIT = 120  # seconds that any one run may take
RESULT = launch.ROOT / "build" / "benchmark.md"


class Row(NamedTuple):
    """One line of the table: what was measured, the wanted value, and all measured values."""

    what: str
    target: str
    values: list
    form: str = "{:.1f} ms"


@in_one_sentence()
def main():
    parser = Parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="3 runs instead of 7")
    parser.add_argument("--only", choices=TABLES, metavar="TITLE", help="one table, by its title")
    arguments = parser.parse_args()
    repeats = 3 if arguments.quick else 7
    with naming_files():
        RESULT.parent.mkdir(exist_ok=True)
    machine = describe_machine(repeats)
    print(f"{machine}\n", flush=True)
    # torch's schedules take seconds to import. In the fork server they make our warm start a
    # little slower, never faster.
    launch.PRELOAD.extend(["torch.distributed.pipelining", "extensions.torch_pipelining.library"])
    launch.run(f"{OURS} {TINY} --steps 1", warm=True, show=False)

    titles = [arguments.only] if arguments.only else TABLES
    tables = {title: TABLES[title](repeats) for title in titles}
    text = "\n\n".join([machine] + [as_table(title, rows) for title, rows in tables.items()])
    if HEAD_TO_HEAD in tables:
        text += f"\n\n{where_ours_is_worse(tables[HEAD_TO_HEAD])}"
    print(text.removeprefix(machine).lstrip("\n"))
    if not arguments.only:
        with naming_files(RESULT):
            write_whole(RESULT, text + "\n")


def describe_machine(repeats):
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{processor()}, {psutil.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"load average {load:.2f} at the start, {repeats} runs of each"
    )


def measure_start(repeats):
    """Seconds until ranks start to work: warm, and cold compared with a bare script."""
    warm, cold, bare, library = [], [], [], []
    for round in each_round("start", repeats):
        warm.append(timed_run(OURS, "", 4).first_loss)
        scripts = (OURS, cold), ("../tools/benchmark_bare.py", bare), (TORCHS, library)
        for script, times in in_turns(round, *scripts):
            start = time.perf_counter()
            launch.run(script, warm=False, show=False, limit=LIMIT)
            times.append(time.perf_counter() - start)
    ratios = [ours / theirs for ours, theirs in zip(cold, bare)]
    return [
        Row("warm, 4 ranks: from the call to the first loss", "under 2 s", warm, "{:.2f} s"),
        Row("cold, torchrun of gpipe.py, 4 ranks, 10 steps", "", cold, "{:.2f} s"),
        Row("cold, torchrun of a bare script, 4 ranks", "", bare, "{:.2f} s"),
        Row("gpipe.py over the bare script", "at most 1.6", ratios, "{:.2f}"),
        Row("cold, torchrun of torch_pipelining.py, 4 ranks, 10 steps", "", library, "{:.2f} s"),
    ]


def measure_paced_steps(repeats):
    """Milliseconds and idle fractions of paced steps, compared with theory."""
    rows = []
    for num_ranks, num_microbatches, tolerance in ((4, 8, 0.05), (8, 16, 0.06)):
        flags = f"{PACED} --microbatches {num_microbatches} --batch-size {num_microbatches}"
        predicted = simulate(gpipe(num_ranks, num_microbatches), Costs(10, 20))
        ours, torchs, differences = [], [], []
        name = f"GPipe, {num_ranks} ranks, {num_microbatches} micro-batches"
        for round in each_round(name, repeats):
            for script, runs in in_turns(round, (OURS, ours), (TORCHS, torchs)):
                runs.append(timed_run(script, flags, num_ranks))
            differences.append(largest_difference(ours[-1], torchs[-1]))
        target = f"{predicted.makespan:g} ms, +{tolerance:.0%} at most"
        idle_target = f"{predicted.idle_fraction:.1%}, +3 points at most"
        rows += [
            Row(f"{name}: step, ours", target, [run.step for run in ours]),
            Row(f"{name}: step, torch's ScheduleGPipe", "", [run.step for run in torchs]),
            Row(f"{name}: idle, ours", idle_target, [run.idle for run in ours], "{:.1%}"),
            Row(f"{name}: idle, torch's", "", [run.idle for run in torchs], "{:.1%}"),
            Row(f"{name}: losses, ours - torch's", "at most 1e-12", differences, "{:.1e}"),
        ]
    flags = f"{PACED} --microbatches 1 --batch-size 1"
    predicted = simulate(naive(4, 1), Costs(10, 20)).makespan
    steps = [timed_run(NAIVE, flags, 4).step for _ in each_round("naive", repeats)]
    rows.append(Row("naive, 4 ranks, 1 micro-batch: step", f"{predicted:g} ms", steps))
    between = [steady_interval() for _ in each_round("PipeDream", repeats)]
    target = "30 ms, 5% more at most"
    return rows + [Row("PipeDream, 4 ranks: a mini-batch in the steady state", target, between)]


def measure_every_schedule(repeats):
    """Steps of our worker and of torch's, with the same actions, stages and ranks.

    The actions are those of the library's schedule. They are written to a file for our worker.
    """
    rows = []
    for name in LIBRARY_SCHEDULES:
        schedule = schedule_as_data(name, 4, 8, 1 if name in ONE_STAGE else 2)
        file = RESULT.with_name("benchmark_schedule.csv")
        file.write_text(to_csv(schedule), encoding="utf-8")
        ours, torchs, differences = [], [], []
        flags = f"{TINY} --pace 20 40 --steps 5 --batch-size 8"
        for round in each_round(name, repeats):
            scripts = (
                (f"train.py {file}", ours),
                (f"torch_pipelining.py --schedule {name} --microbatches 8", torchs),
            )
            for script, runs in in_turns(round, *scripts):
                runs.append(timed_run(script, flags, 4))
            differences.append(largest_difference(ours[-1], torchs[-1]))
        file.unlink()
        theory = f"{simulate(schedule, Costs(20, 40)).makespan:g} ms, +5% at most"
        for whose, runs in (("ours", ours), ("torch's", torchs)):
            rows += [
                Row(f"{name}: step, {whose}", theory, [run.step for run in runs]),
                Row(
                    f"{name}: warm, to the first loss, {whose}",
                    "",
                    [run.first_loss for run in runs],
                    "{:.2f} s",
                ),
                Row(
                    f"{name}: peak memory of the largest rank, {whose}",
                    "",
                    [run.peak for run in runs],
                    "{:.0f} MiB",
                ),
            ]
        rows.append(Row(f"{name}: losses, ours - torch's", "at most 1e-12", differences, "{:.1e}"))
    return rows


def measure_own_schedules(repeats):
    """Steps of the handcrafted zero-bubble orders, for which the library has no class."""
    rows = []
    for name in ("zb-h1", "zb-h2"):
        flags = f"{TINY} --pace 20 40 --steps 5 --batch-size 8 --schedule {name}"
        steps = [timed_run("zero_bubble.py", flags, 4).step for _ in each_round(name, repeats)]
        predicted = simulate(build_schedule(name, 4, 8), Costs(20, 40)).makespan
        rows.append(Row(f"{name}: step", f"{predicted:g} ms, +5% at most", steps))
    return rows


def measure_slow_hops(repeats):
    """Steps of two ranks per node on two nodes, with 30 ms of latency or occupancy between them."""
    rows, flags = [], f"{PACED} --microbatches 8 --batch-size 8"
    for name, kind, pretended in (
        ("far", "transfer", "delay"),
        ("narrow", "occupancy", "occupancy"),
    ):
        costs = Costs(10, 20, **{kind: {(1, 2): 30, (2, 1): 30}})
        steps = {OURS: [], ALTERNATING: []}
        with pretended_nodes(2, **{pretended: 30}):
            for round in each_round(f"a {name} hop", repeats):
                for script, times in in_turns(round, *steps.items()):
                    times.append(timed_run(script, flags, 4).step)
        for schedule, times in zip((gpipe(4, 8), one_f_one_b(4, 8)), steps.values()):
            predicted = simulate(schedule, costs).makespan
            what = f"{name} hop, {schedule.name}: step"
            rows.append(Row(what, f"{predicted:g} ms, 4% more or less at most", times))
        ratios = [late / early for early, late in zip(*steps.values())]
        wanted = "above 1" if name == "far" else "below 1"
        rows.append(Row(f"{name} hop: 1F1B over GPipe", f"{wanted} in each run", ratios, "{:.3f}"))
    return rows


def measure_replicas(repeats):
    """2 x 4 ranks compared with 1 x 4, with the same work per replica: twice the samples.

    A whole step is timed, from loss line to loss line, including the sum of the gradients.
    """
    one, two, ratios = [], [], []
    for round in each_round("replicas", repeats):
        for count, runs in in_turns(round, (1, one), (2, two)):
            flags = f"{TINY} --pace 50 100 --steps 4 --replicas {count} --batch-size {8 * count}"
            script = "pipeline_with_data_parallel.py --microbatches 8"
            runs.append(timed_run(script, flags, 4 * count))
        ratios.append(2 * one[-1].between_losses / two[-1].between_losses)
    steps = {"1 x 4": one, "2 x 4": two}
    rows = [
        Row(f"{name} ranks, 8 sequences a replica: whole step", "1650 ms and the sum",
            [run.between_losses for run in runs])
        for name, runs in steps.items()
    ]  # fmt: skip
    what = "samples a second of 2 x 4 ranks over those of 1 x 4"
    return [*rows, Row(what, "1.86 to 2.14", ratios, "{:.3f}")]


def measure_inference(repeats):
    """Tokens per second with as many groups as ranks, compared with one group of the same size."""
    rows = []
    large = (
        "--layers 8 --dim 384 --heads 6 --kv-heads 6 --slots 32 --tokens-per-pass 32 --tokens 24"
    )
    for what, ranks, flags, wanted in (
        ("paced, 4 ranks", 4, "--slots 1 --tokens 48 --pace 20 20", "3.8 at least"),
        ("real compute, 2 ranks", 2, large, "1.7 at least"),
    ):
        rates = {1: [], ranks: []}
        for round in each_round(f"inference, {what}", repeats):
            for groups, found in in_turns(round, *rates.items()):
                requests = groups * (32 if "--slots 32" in flags else 1)
                command = f"inference.py {flags} --groups {groups} --requests {requests}"
                output = launch.run(command, ranks, warm=True, show=False).output
                found.append(float(re.search(r"([\d.]+) per second", output)[1]))
        ratios = [many / one for one, many in zip(*rates.values())]
        name = f"{what}: tokens per second of {ranks} groups over those of one"
        rows.append(Row(name, wanted, ratios, "{:.2f}"))
    return rows


def measure_plans(how):
    """Relative errors of plan.py's forecasts in per cent, for each plan and for all."""
    if how == "full speed":
        tables = benchmark_plans.full_speed()
    else:
        tables = {"one run": benchmark_plans.paced()}
    rows = []
    for which, found in tables.items():
        errors = [100 * abs(one.error) for one in found]
        rows += [Row(f"{one.name}, {which}", "-", [100 * one.error], "{:+.1f} %") for one in found]
        rows.append(
            Row(f"error, whatever its sign, {which}", "median at most 6 %", errors, "{:.1f} %")
        )
        rows += [
            Row(f"{bar}, {which}", wanted, [100 * value], "{:.1f} %")
            for bar, (wanted, value) in benchmark_plans.bars(found).items()
        ]
    return rows


def measure_search():
    """CPU seconds of a search among many plans that are not run."""
    compared, played, seconds = benchmark_plans.search_large()
    what = f"{compared:,} plans bounded, the best {played} forecast, one core"
    return [Row(what, "under 60 s", [seconds], "{:.1f} s")]


def where_ours_is_worse(rows):
    """A sentence that lists every measurement in which our median is above torch's."""
    medians = {row.what: (statistics.median(row.values), row.form) for row in rows}
    worse = []
    for what, (ours, form) in medians.items():
        theirs = medians.get(what.replace(", ours", ", torch's"), (ours, form))[0]
        if what.endswith(", ours") and ours > theirs:
            worse.append(f"{what.removesuffix(', ours')} ({form.format(ours)}, "
                         f"torch's {form.format(theirs)})")  # fmt: skip
    if not worse:
        return "Ours is worse than torch's in none of these medians."
    return "Ours is worse than torch's in: " + "; ".join(worse) + "."


def steady_interval():
    """Milliseconds from one mini-batch to the next on rank 0, once the pipeline is full."""
    timeline = launch.run(
        f"pipedream.py {TINY} --batch-size 2 --pace 10 20 --steps 40 --timeline build/steady.json",
        warm=True,
        show=False,
        limit=LIMIT,
    ).timeline
    ends = [event.end for event in timeline.by_rank[0] if event.action.kind == "B"]
    filled = ends[4:-3]  # neither the first ones nor those after the last forward
    return (filled[-1] - filled[0]) / (len(filled) - 1)


def measure_speed_up(repeats):
    """Two ranks on two cores compared with one process on one core, with no paced actions.

    A whole step is timed, from loss line to loss line, including the update.
    """
    cut, whole = f"{LARGE} --microbatches 8", f"{LARGE} --microbatches 1"
    runs = {"cut": [], "whole": [], "ours": [], "torch's": []}
    differences = []
    for _ in each_round("speed-up", repeats):
        runs["whole"].append(timed_run(OURS, whole, 1))
        runs["ours"].append(timed_run(OURS, cut, 2))
        runs["torch's"].append(timed_run(TORCHS, cut, 2))
        runs["cut"].append(timed_run(OURS, cut, 1))
        differences.append(largest_difference(runs["ours"][-1], runs["torch's"][-1]))
    steps = {name: [run.between_losses for run in these] for name, these in runs.items()}
    best = min(steps["whole"], steps["cut"], key=statistics.median)
    ideal = 2 * 8 / (8 + 1)

    def fractions(name):
        return [one / two / ideal for one, two in zip(best, steps[name])]

    return [
        Row("one process, the whole batch at once: step", "", steps["whole"]),
        Row("one process, 8 micro-batches: step", "", steps["cut"]),
        Row("two ranks, 8 micro-batches: step, ours", "", steps["ours"]),
        Row("two ranks, 8 micro-batches: step, torch's ScheduleGPipe", "", steps["torch's"]),
        Row(
            "speed-up over the faster single process, share of the ideal 16/9, ours",
            "at least 90%",
            fractions("ours"),
            "{:.1%}",
        ),
        Row("the same, torch's", "", fractions("torch's"), "{:.1%}"),
        Row("losses, ours - torch's (float32)", "", differences, "{:.1e}"),
    ]


def measure_plain_loop(repeats):
    """CPU time of pretrain_llama.py over that of a plain loop that trains the same model."""
    # Imported here: it imports modules that the other measurements do not need.
    from benchmark_pretraining import RUNS, microseconds_per_token

    times = {name: [] for name in RUNS}
    for round in each_round("beside a plain loop", repeats):
        for name, found in in_turns(round, *times.items()):
            found.append(microseconds_per_token(name))
    plain, one, two, crowded = times.values()
    rows = [
        Row(f"{name}: processor time per token", "", found, "{:.1f} us")
        for name, found in times.items()
    ]
    for what, wanted, found in (
        ("pretrain_llama.py, one rank", "at most 1.03", one),
        ("pretrain_llama.py, two ranks", "at most 1.05", two),
        ("one of two plain loops at once", "what two busy cores cost", crowded),
    ):
        ratios = [ours / theirs for ours, theirs in zip(found, plain)]
        rows.append(Row(f"{what}, over a plain loop", wanted, ratios, "{:.3f}"))
    return rows


def measure_prediction(repeats):
    """Seconds of a process that predicts a schedule of 262,144 actions, and one of half as many."""
    call = [sys.executable, launch.ROOT / "source_code" / "predict.py", "interleaved-1f1b"]
    seconds = {512: [], 256: []}
    for _ in each_round("prediction", repeats):
        for microbatches, times in seconds.items():
            flags = f"--ranks 64 --chunks 4 --microbatches {microbatches} --json".split()
            start = time.perf_counter()
            subprocess.run([*call, *flags], check=True, timeout=LIMIT, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - start)
    what = "predict.py interleaved-1f1b, 64 ranks, 4 chunks, {} micro-batches"
    return [
        Row(what.format(512), "under 3 s", seconds[512], "{:.2f} s"),
        Row(what.format(256), "", seconds[256], "{:.2f} s"),
    ]


def measure_explorer(repeats):
    """Milliseconds from a slider to new text for the page: 8 ranks, 64 micro-batches."""
    settings = explore("1f1b", ranks=8, microbatches=63).settings
    rows = []
    for name in ("1f1b", "gpipe", "zb-v"):
        panel = Panel(replace(settings, schedule=name))
        times = []
        for _ in each_round(f"explorer, {name}", repeats):
            panel.controls["microbatches"].value = 63
            start = time.perf_counter()
            panel.controls["microbatches"].value = 64
            times.append((time.perf_counter() - start) * 1000)
        blocks = len(panel.view.predictions[0].timeline.events)
        rows.append(Row(f"{name}, {blocks} blocks: slider to text", "under 60 ms", times))
    return rows


def measure_checks(repeats):
    """Seconds until a check of lesson 03 returns: for a right function, and for a deadlock."""
    rows = []
    for name, step in {"right": my_pipeline.one_f_one_b_step, "deadlock": all_wait}.items():
        times = []
        for _ in each_round(f"check, {name}", repeats):
            start = time.perf_counter()
            with contextlib.redirect_stdout(io.StringIO()) as told:
                build_steps.one_f_one_b_step(step)
            times.append(time.perf_counter() - start)
            if name not in told.getvalue().lower():
                raise SystemExit(f"the check says something else than {name}: {told.getvalue()}")
        rows.append(Row(f"1F1B on four warm ranks, {name}", "under 5 s", times, "{:.2f} s"))
    return rows


def all_wait(stage, inputs, targets):  # at the top of the file, where a check finds its text
    dist.recv(torch.empty(1), (dist.get_rank() + 1) % dist.get_world_size())


def measure_recording(repeats):
    """What recording adds to a paced step with update; steps with and without it take turns."""
    # Imported here: it makes the fork server import more than the other measurements need.
    from benchmark_recording import steps_in_turns
    from ranks import run_on_ranks

    rows = []
    for name, flags in (
        ("tiny model, 10 and 20 ms", f"{TINY} --pace 10 20"),
        ("default model, 20 and 40 ms", "--pace 20 40"),
    ):
        plain, recorded = [], []
        for _ in each_round(f"recording, {name}", repeats):
            with tempfile.TemporaryDirectory() as folder:
                ranks = run_on_ranks(steps_in_turns, 4, f"{flags} --steps 14", folder)
            for steps, medians in zip(ranks[0], (plain, recorded)):
                medians.append(statistics.median(steps))
        ratios = [more / less for less, more in zip(plain, recorded)]
        rows += [
            Row(f"GPipe, 4 ranks, {name}: step, not recorded", "", plain),
            Row(f"GPipe, 4 ranks, {name}: step, recorded", "", recorded),
            Row("recorded over not recorded", "under 1.05", ratios, "{:.3f}"),
        ]
    return rows


def measure_program_log(repeats):
    """What the flight log adds to a step of two ranks of a program that is not the course's."""
    from benchmark_recording import program_steps_in_turns
    from ranks import run_on_ranks

    plain, recorded = [], []
    for _ in each_round("a program with a flight log", max(5, repeats)):
        with tempfile.TemporaryDirectory() as folder:
            ranks = run_on_ranks(program_steps_in_turns, 2, folder, 18, timeout=LIMIT)
        for steps, medians in zip(ranks[0], (plain, recorded)):
            medians.append(statistics.median(steps))
    ratios = [more / less for less, more in zip(plain, recorded)]
    return [
        Row("2 ranks, 6 million weights, 8,192 positions, 1F1B by hand: step, no log", "", plain),
        Row("the same with a flight log", "", recorded),
        Row("with a flight log over without", "at most 1.05", ratios, "{:.3f}"),
    ]


def each_round(name, repeats):
    """Yield the numbers of the rounds, and print the progress to standard error."""
    for round in range(repeats):
        print(f"{name}: run {round + 1} of {repeats}", file=sys.stderr, flush=True)
        yield round


def in_turns(round, *pairs):
    """The pairs, in reverse order in every second round."""
    return pairs if round % 2 == 0 else pairs[::-1]


class TimedRun(NamedTuple):
    first_loss: float  # seconds from the call to the first loss line
    between_losses: float  # milliseconds, the median, the first step left out
    step: float  # milliseconds from the first action to the last, the script's own median
    idle: float  # as a fraction, likewise
    peak: float  # MiB of the largest rank's process
    losses: list  # in full precision


def timed_run(script, flags, ranks):
    """Run a script on warm ranks and time its loss lines as they arrive."""
    file = RESULT.with_name("benchmark_losses.json")
    lines = TimedLines()
    with contextlib.redirect_stdout(lines):
        launch.run(f"{script} {flags} --losses {file}", ranks, warm=True, limit=LIMIT)
    rows = [json.loads(row) for row in file.read_text(encoding="utf-8").splitlines()]
    file.unlink()
    arrivals = [moment for moment, line in lines.lines if "  loss " in line]
    gaps = [(after - before) * 1000 for before, after in zip(arrivals[1:], arrivals[2:])]
    # step 342.3 ms (predicted 330.0 ms)  idle 29.8% (predicted 27.3%)  peak memory ...
    summary = next(line for _, line in lines.lines if "  peak memory " in line).split()
    return TimedRun(
        first_loss=arrivals[0],
        between_losses=statistics.median(gaps),
        step=float(summary[1]),
        idle=float(summary[summary.index("idle") + 1].rstrip("%")) / 100,
        peak=max(map(float, summary[summary.index("memory") + 1 : summary.index("MiB,")])),
        losses=[row["loss"] for row in rows],
    )


class TimedLines:
    """A replacement of standard output that records the time of each line, in seconds."""

    def __init__(self):
        self.start = time.perf_counter()
        self.lines = []

    def write(self, text):
        self.lines.append((time.perf_counter() - self.start, text))

    def flush(self):
        pass


def largest_difference(one, other):
    return max(abs(ours - theirs) for ours, theirs in zip(one.losses, other.losses))


def as_table(title, rows):
    """A Markdown table."""
    lines = [f"| {title} | wanted | median | min | max |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        figures = (statistics.median(row.values), min(row.values), max(row.values))
        cells = [row.what, row.target, *(row.form.format(figure) for figure in figures)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


TABLES = {
    "Start": measure_start,
    "Paced steps": measure_paced_steps,
    HEAD_TO_HEAD: measure_every_schedule,
    "Schedules that only this course performs": measure_own_schedules,
    "Two nodes: a far hop and a narrow one": lambda repeats: measure_slow_hops(max(5, repeats)),
    "Two replicas": measure_replicas,
    "Inference": measure_inference,
    "Recording": measure_recording,
    "The flight log of any program": measure_program_log,
    "A real speed-up": lambda _: measure_speed_up(5),
    "Beside a plain loop": lambda _: measure_plain_loop(5),
    "A large prediction": measure_prediction,
    "Plans at full speed that were not fitted": lambda _: measure_plans("full speed"),
    "Plans of 4 and 8 paced ranks": lambda _: measure_plans("paced"),
    "Plans on paper": lambda _: measure_search(),
    "The explorer": measure_explorer,
    "What a reader builds": measure_checks,
}

if __name__ == "__main__":
    main()
