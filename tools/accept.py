"""The acceptance: run on 2 to 8 GPUs, on one or two nodes, what was never run on several GPUs.

    python tools/accept.py --out build/accept.json
    sbatch slurm/accept.sbatch

It takes under 30 minutes. Each part has its own time limit: if one fails or runs out of time, this
is noted, and the others go on. The file is written after every part.
`make measurements FROM=FILE` puts it into docs/measurements.md. On CPUs in place of GPUs, with the
smallest sizes:

    python tools/accept.py --device cpu --small --ranks 2
"""

import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "source_code"))

import torch  # noqa: E402
from accept_parts import PARTS  # noqa: E402
from accept_runs import Machine, OutOfTime, Part, find_nodes  # noqa: E402
from this_machine import describe  # noqa: E402

from course import launch  # noqa: E402
from files.outputs import not_written, to_json, write_output  # noqa: E402
from guard.one_sentence import in_one_sentence, naming_files  # noqa: E402
from guard.paths import check_file  # noqa: E402
from pipeline.command_line import Parser, positive_integer, positive_number  # noqa: E402

MOST_PATIENCE = 1000  # some weeks


@in_one_sentence()
def main():
    arguments = parse_arguments()
    with naming_files():
        Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
    check_file("--out", arguments.out)
    nodes = find_nodes()
    ranks = arguments.ranks or nodes * torch.cuda.device_count()
    if not 2 <= ranks <= 8:
        raise SystemExit(
            f"--ranks {ranks}: the acceptance is for 2 to 8 ranks; give --ranks a number of them"
        )
    device = "cpu" if arguments.device == "cpu" or not torch.cuda.is_available() else "cuda"
    machine = Machine(ranks, nodes, device, arguments.small)
    found = {"machine": describe() | machine._asdict(), "parts": []}
    launch.PRELOAD.extend(["torch.distributed.pipelining", "torch.distributed.checkpoint"])
    for title, function, minutes in PARTS:
        if arguments.only and function.__name__ not in arguments.only:
            continue
        seconds = 60 * minutes * arguments.patience
        found["parts"].append(performed(title, function, seconds, machine))
        write_output("--out", arguments.out, to_json(found) + "\n")
        print(line_about(found["parts"][-1]), flush=True)
    failed = [part["title"] for part in found["parts"] if part["status"] != "passed"]
    if not not_written:
        print(f"written to {arguments.out}")
    if failed:
        print(f"not passed: {', '.join(failed)}")
    return int(bool(failed or not_written))


def parse_arguments():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--out", default="build/accept.json", metavar="FILE", help="what was found, as JSON")
    add("--ranks", type=positive_integer, metavar="N", help="else one for each GPU of the job")
    add("--device", choices=["auto", "cpu"], default="auto", help="cpu: CPUs stand in for GPUs")
    add("--small", action="store_true", help="the smallest sizes, to try this program itself")
    names = [function.__name__ for _, function, _ in PARTS]
    add("--only", nargs="+", choices=names, metavar="PART", help=f"of {', '.join(names)}")
    add("--patience", type=positive_number, default=1.0, metavar="X", help="times the minutes")
    arguments = parser.parse_args()
    if arguments.patience > MOST_PATIENCE:
        raise SystemExit(f"--patience {arguments.patience:g}: {MOST_PATIENCE:,} is the most")
    return arguments


def performed(title, function, seconds, machine):
    """Run one part for at most `seconds`; return its result as plain data for JSON."""
    part = Part(machine, seconds)
    status = "passed"
    try:
        function(part, machine)
    except OutOfTime:
        status = "out of time"
    except Exception:  # noqa: BLE001  whatever it is, the other parts go on
        part.fail(title, traceback.format_exc()[-1000:])
    return {
        "title": title,
        "status": "failed" if part.failures else status,
        "about": " ".join((function.__doc__ or "").split("\n\n")[0].split()),
        "seconds": round(time.monotonic() - part.began, 1),
        "limit": round(seconds),
        "runs": part.runs,
        "columns": part.columns,
        "rows": part.rows,
        "failures": part.failures,
    }


def line_about(part):
    text = f"{part['title']}: {part['status']}, {part['runs']} runs in {part['seconds']} s"
    return text + "".join(f"\n  {each['command']}\n    {each['said']}" for each in part["failures"])


if __name__ == "__main__":
    sys.exit(main())
