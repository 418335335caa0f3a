"""Runs a reader's whole program on this rank; build_library.py reads what it prints.

One argument: a JSON file with the text of the program. The text is not changed. Only the timeout of
the process group is shorter than torch's 30 minutes, unless the program sets one.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import extensions.torch_pipelining.library  # noqa: F401 - allows what its stages tell each other
from course.building.request import YOURS, errors_told

LONGEST_WAIT = timedelta(seconds=4)


def main():
    """Run the program as `python FILE` would."""
    request = json.loads(Path(sys.argv[1]).read_text())
    begin = dist.init_process_group

    def init_process_group(*arguments, **options):
        options.setdefault("timeout", LONGEST_WAIT)
        return begin(*arguments, **options)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
    ((name, text),) = request["sources"]
    names = {"__name__": "__main__", "__file__": name}
    exec(compile(text, f"{YOURS}{name}>", "exec"), names)  # the reader's own program


if __name__ == "__main__":
    with errors_told(seconds=10):  # a program also imports what it needs
        main()
