"""Copies a training script as the start of a program of your own.

    python source_code/copy_template.py gpipe.py my-program        a folder with all that it needs
    python source_code/copy_template.py gpipe.py my_program.py     one file, under 500 lines

The folder has the script with exactly the files of pipeline/ that it imports, its requirements, a
job script for SLURM and a README. The one file has what a training needs and leaves out what only
measures, draws and compares. Both run where they are, and print the losses of the script.
"""

import argparse
import re
import sys
from pathlib import Path

from templates.definitions import CannotCopy
from templates.folder import write_folder
from templates.single_file import write_single_file

SOURCE_CODE = Path(__file__).resolve().parent


def main():
    arguments = parse_arguments()
    try:
        script = script_named(arguments.script)
        destination = Path(arguments.destination)
        write = write_single_file if destination.suffix == ".py" else write_folder
        written = write(script, destination)
    except CannotCopy as reason:
        print(reason, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename}: {error.strerror}; name a place of yours", file=sys.stderr)
        return 2
    print(written)
    return 0


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", metavar="SCRIPT", help="one of the training scripts")
    parser.add_argument(
        "destination", metavar="DEST", help="a folder, or a file whose name ends in .py"
    )
    return parser.parse_args()


def script_named(name):
    """The name of a training script, without .py; `name` may have it, and a path before it."""
    script = Path(name).name.removesuffix(".py")
    scripts = training_scripts()
    if script not in scripts:
        raise CannotCopy(f"{name} is no training script; there are {', '.join(scripts)}")
    return script


def training_scripts():
    """The names of all scripts that train."""
    return sorted(path.stem for path in SOURCE_CODE.glob("*.py") if trains(path))


def trains(path):
    """Whether a script takes part in a job and updates weights; the broken ones are no start."""
    text = path.read_text()
    joins = re.search(r"^from pipeline.job import .*leave_job", text, re.MULTILINE)
    return bool(joins) and "optimizer" in text and not path.name.startswith("broken_")


if __name__ == "__main__":
    sys.exit(main())
