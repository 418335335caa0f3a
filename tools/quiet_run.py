"""Run a lesson again until the machine was quiet, or say that it was not.

    python tools/quiet_run.py notebooks/02_gpipe.ipynb                 # at most five times
    python tools/quiet_run.py notebooks/02_gpipe.ipynb --tries 9 --over 10

Other programs only add time to a step. So the machine counts as quiet if no step of the lesson with
--pace took more than --over per cent longer than predicted. Only such a run is stored.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "source_code"))

from exercises import notebook_of  # noqa: E402

from files.inputs import read_bytes  # noqa: E402
from files.outputs import replace_file  # noqa: E402
from guard.one_sentence import in_one_sentence, naming_files  # noqa: E402
from pipeline.command_line import Parser, positive_integer, positive_number  # noqa: E402

STEP = r"^step (\d+\.\d+) ms \(predicted (\d+\.\d+) ms\)"


@in_one_sentence()
def main():
    parser = Parser(__doc__)
    parser.add_argument("notebook", metavar="NOTEBOOK")
    parser.add_argument("--tries", type=positive_integer, default=5, metavar="N")
    parser.add_argument("--over", type=positive_number, default=15.0, metavar="X", help="per cent")
    arguments = parser.parse_args()
    if not os.path.isfile(arguments.notebook):
        raise SystemExit(f"{arguments.notebook} is not a file; give a lesson in notebooks")
    with naming_files(fix="mend that, or give another lesson"):
        (ROOT / "build").mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="quiet-", dir=ROOT / "build") as folder:
            return run_until_quiet(arguments, Path(folder) / "lesson.ipynb")


def run_until_quiet(arguments, run):
    """Run a copy until the machine was quiet, and store it. Returns the exit status.

    The copy has a folder and a name of its own: others may run at the same time, and make gives
    the name to a shell.
    """
    before = read_bytes(arguments.notebook)
    longest_over(arguments.notebook)
    command = ["make", "notebooks", f"ONLY={run.relative_to(ROOT)}"]
    for attempt in range(1, arguments.tries + 1):
        run.write_bytes(before)
        try:
            subprocess.run(command, cwd=ROOT, check=True)
        except subprocess.CalledProcessError:
            raise SystemExit(
                f"{arguments.notebook} did not run to its end, as said above"
            ) from None
        over = longest_over(run)
        print(f"run {attempt}: at most {over:.0f} % longer than predicted", flush=True)
        if over > arguments.over:
            continue
        if read_bytes(arguments.notebook) != before:
            raise SystemExit(f"{arguments.notebook} was changed during the run; run it again")
        replace_file(arguments.notebook, lambda partial: partial.write_bytes(run.read_bytes()))
        return 0
    print(f"the machine was not quiet; {arguments.notebook} is as it was", file=sys.stderr)
    return 1


def longest_over(path):
    """By how many per cent the slowest step with --pace took longer than predicted; 0 without any."""
    over = [0.0]
    for cell in notebook_of(path).cells:
        if "--pace" in cell.source:
            text = "".join(output.get("text", "") for output in cell.get("outputs", []))
            steps = re.findall(STEP, text, re.MULTILINE)
            timed = [(float(took), float(predicted)) for took, predicted in steps]
            over += [100 * (took / predicted - 1) for took, predicted in timed if predicted]
    return max(over)


if __name__ == "__main__":
    sys.exit(main())
