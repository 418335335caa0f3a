"""Run a lesson again until the machine was quiet, or say that it was not.

    python tools/quiet_run.py notebooks/02_gpipe.ipynb                 # at most five times
    python tools/quiet_run.py notebooks/02_gpipe.ipynb --tries 9 --over 10

Other programs only add time to a step. So the machine counts as quiet if no step of the lesson with
--pace took more than --over per cent longer than predicted. Only such a run is stored.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "source_code"))

from guard.one_sentence import in_one_sentence  # noqa: E402
from pipeline.command_line import Parser, positive_integer, positive_number  # noqa: E402

STEP = r"^step ([\d.]+) ms \(predicted ([\d.]+) ms\)"


@in_one_sentence()
def main():
    parser = Parser(__doc__)
    parser.add_argument("notebook", metavar="NOTEBOOK")
    parser.add_argument("--tries", type=positive_integer, default=5, metavar="N")
    parser.add_argument("--over", type=positive_number, default=15.0, metavar="X", help="per cent")
    arguments = parser.parse_args()
    if not os.path.isfile(arguments.notebook):
        raise SystemExit(f"{arguments.notebook} is not a file; give a lesson in notebooks")
    run = ROOT / "build" / "quiet" / Path(arguments.notebook).name
    run.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(1, arguments.tries + 1):
        shutil.copy(arguments.notebook, run)
        subprocess.run(["make", "notebooks", f"ONLY={run.relative_to(ROOT)}"], cwd=ROOT, check=True)
        over = longest_over(run)
        print(f"run {attempt}: at most {over:.0f} % longer than predicted", flush=True)
        if over <= arguments.over:
            shutil.copy(run, arguments.notebook)
            return 0
    print(f"the machine was not quiet; {arguments.notebook} is as it was", file=sys.stderr)
    return 1


def longest_over(path):
    """By how many per cent the slowest step with --pace took longer than predicted; 0 without any."""
    over = [0.0]
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if "--pace" in "".join(cell["source"]):
            text = "".join("".join(output.get("text", "")) for output in cell.get("outputs", []))
            steps = re.findall(STEP, text, re.MULTILINE)
            over += [100 * (float(took) / float(predicted) - 1) for took, predicted in steps]
    return max(over)


if __name__ == "__main__":
    sys.exit(main())
