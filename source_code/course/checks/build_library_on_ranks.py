# SPDX-License-Identifier: Apache-2.0
"""Runs a reader's whole program on this rank; build_library.py reads what it prints.

One argument: a JSON file with the text of the program. The text is not changed. Only the timeout of
the process group is shorter than torch's 30 minutes, unless the program sets one. At the end, each
rank reports the numbers of micro-batches of its schedules and how often it called `eval`.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.pipelining.schedules import _PipelineSchedule as Schedule

import extensions.torch_pipelining.library  # noqa: F401 - allows what its stages tell each other
from course.building import ANSWER
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
    used = note_schedules()
    exec(compile(text, f"{YOURS}{name}>", "exec"), names)  # the reader's own program
    print(f"{ANSWER}{json.dumps(used)}", flush=True)


def note_schedules():
    """A dict that is filled as the program uses the library: "microbatches", a list with one number
    per schedule, and "evaluations", how often `eval` was called."""
    used = {"microbatches": [], "evaluations": 0}
    create, evaluate = Schedule.__init__, Schedule.eval

    def __init__(self, n_microbatches, *arguments, **options):
        used["microbatches"].append(n_microbatches)
        create(self, n_microbatches, *arguments, **options)

    def eval(self, *arguments, **options):
        used["evaluations"] += 1
        return evaluate(self, *arguments, **options)

    Schedule.__init__, Schedule.eval = __init__, eval
    return used


if __name__ == "__main__":
    with errors_told(seconds=10):  # a program also imports what it needs
        main()
