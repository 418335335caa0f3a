# SPDX-License-Identifier: Apache-2.0
"""Runs a reader's whole program on this rank; build_library.py reads what it prints.

The text of the program is not changed. At the end, each rank reports the numbers of micro-batches of
its schedules and how often it called `step` and `eval`.
"""

import torch._dynamo  # noqa: F401 - else the first optimizer imports it in the reader's own time
from torch.distributed.pipelining.schedules import _PipelineSchedule as Schedule

import extensions.torch_pipelining.library  # noqa: F401 - allows what its stages tell each other
from course.building import YOURS
from course.building.messages import tell


def main(request):
    """Run the program as `python FILE` would."""
    ((name, text),) = request["sources"]
    names = {"__name__": "__main__", "__file__": name}
    used = note_schedules()
    try:
        exec(compile(text, f"{YOURS}{name}>", "exec"), names)  # the reader's own program
    finally:  # a program may end with sys.exit()
        tell("report", value=used)


def note_schedules():
    """A dict that is filled as the program uses the library: "microbatches", a list with one number
    per schedule, and "steps" and "evaluations", how often `step` and `eval` were called."""
    used = {"microbatches": [], "steps": 0, "evaluations": 0}
    create, evaluate = Schedule.__init__, Schedule.eval

    def __init__(self, n_microbatches, *arguments, **options):
        used["microbatches"].append(n_microbatches)
        create(self, n_microbatches, *arguments, **options)
        run = self.step

        def step(*arguments, **options):
            used["steps"] += self._has_backward  # eval() runs step() without a backward
            return run(*arguments, **options)

        self.step = step

    def eval(self, *arguments, **options):
        used["evaluations"] += 1
        return evaluate(self, *arguments, **options)

    Schedule.__init__, Schedule.eval = __init__, eval
    return used
