"""Collect the timelines of sweep.sbatch into a table and a figure.

python slurm/collect_sweep.py build/sweep-17
"""

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "source_code"))

from files.outputs import not_written, write_whole  # noqa: E402
from guard.one_sentence import in_one_sentence, naming_files  # noqa: E402
from lab.figures import new_plot, picture_of  # noqa: E402
from lab.timeline import TimelineError, read_timeline  # noqa: E402


@in_one_sentence()
def main():
    os.environ["MPLBACKEND"] = "agg"  # a shell may name one that is not there
    if len(sys.argv) != 2 or not os.path.isdir(sys.argv[1]):
        sys.exit("name the folder that sweep.sbatch has filled")
    folder = Path(sys.argv[1])
    timelines = {}
    for path in folder.glob("*.json"):
        if re.fullmatch("[1-9][0-9]{0,8}", path.stem):
            try:
                timelines[int(path.stem)] = timeline_of(int(path.stem), path)
            except TimelineError as error:
                print(f"skipped: {error}; run that element again", file=sys.stderr)
    if not timelines:
        sys.exit(
            f"{folder} holds no timeline; the output files of the jobs say why: correct that, and "
            "submit the sweep again"
        )
    table = table_of(timelines)
    with naming_files(fix="name a folder of yours"):
        write_whole(folder / "sweep.md", table)
        write_whole(folder / "sweep.svg", figure_of(timelines).svg)
    print(table, end="")
    return int(bool(not_written))


def timeline_of(m, path):
    """The Timeline of an element with `m` micro-batches; each replica of a job has as many."""
    timeline = read_timeline(path)
    found = len({event.action.microbatch for event in timeline.events})
    if found % m:
        raise TimelineError(f"{path} has {found} micro-batches, and not {m} as its name says")
    return timeline


def table_of(timelines):
    """A row for each number of micro-batches; idle is the share of all ranks' time."""
    rows = ["| micro-batches | step in ms | idle | (p - 1)/(m + p - 1) |", "|---|---|---|---|"]
    for m, timeline in sorted(timelines.items()):
        idle = f"{timeline.makespan:.0f} | {timeline.idle_fraction:.1%}"
        rows.append(f"| {m} | {idle} | {bubble(timeline, m):.1%} |")
    return "\n".join(rows) + "\n"


def bubble(timeline, m):
    replicas = len({event.action.microbatch for event in timeline.events}) // m
    p = timeline.num_ranks // replicas
    return (p - 1) / (m + p - 1)


def figure_of(timelines):
    numbers = sorted(timelines)
    figure, axes = new_plot("micro-batches", "idle, per cent of all ranks' time")
    performed = [100 * timelines[m].idle_fraction for m in numbers]
    theory = [100 * bubble(timelines[m], m) for m in numbers]
    axes.plot(numbers, theory, "--", color="#009E73", label="(p - 1)/(m + p - 1)", linewidth=2)
    axes.plot(numbers, performed, "o-", color="#56B4E9", label="performed", linewidth=2)
    axes.set_ylim(bottom=0)
    axes.legend()
    last = numbers[-1]
    return picture_of(
        figure,
        f"Idle share against micro-batches, performed and theory: from {performed[0]:.0f} % with "
        f"{numbers[0]} to {performed[-1]:.0f} % with {last}.",
    )


if __name__ == "__main__":
    sys.exit(main())
