# SPDX-License-Identifier: Apache-2.0
"""Runs a reader's whole program on this rank; build_library.py reads what it prints.

The text of the program is not changed. Each rank reports each stage that it makes, as [index, number
of stages]. At the end, it reports how it used its schedules (see `note_schedules`), and whether it
called a `batch` in which the check has replaced some batches.
"""

import sys

import torch._dynamo  # noqa: F401 - the first optimizer would import it in the reader's own time
from torch.distributed.pipelining.schedules import _PipelineSchedule as Schedule
from torch.distributed.pipelining.stage import _PipelineStageBase as Stage

import extensions.torch_pipelining.library  # noqa: F401 - allows what its stages tell each other
from course.building import YOURS
from course.building.messages import tell
from small import pipeline as my_pipeline


def main(request):
    """Run the program as `python FILE` would."""
    ((name, text),) = request["sources"]
    names = {"__name__": "__main__", "__file__": name}
    sys.argv[:] = [name]  # a program may read its arguments, and gets none
    note_stages()
    used = note_schedules()
    replace_batches(dict(request["replaced"]), used)
    try:
        exec(compile(text, f"{YOURS}{name}>", "exec"), names)  # the reader's own program
    finally:  # a program may end with sys.exit()
        tell("report", value=used)


def note_stages():
    """Report each stage when it is made: the ranks may never reach the end of the program."""
    create = Stage.__init__

    def __init__(self, submodule, stage_index, num_stages, *arguments, **options):
        tell("report", value={"stage": [stage_index, num_stages]})
        create(self, submodule, stage_index, num_stages, *arguments, **options)

    Stage.__init__ = __init__


def note_schedules():
    """A dict that is filled as the program uses the library: "schedules", how many it made,
    "microbatches", those of each training step, "steps" and "evaluations", how often `step` and `eval`
    were called, and "losses", the mean loss of each step on the rank of the last stage."""
    used = {"schedules": 0, "microbatches": [], "steps": 0, "evaluations": 0, "losses": []}
    create, evaluate, update = Schedule.__init__, Schedule.eval, Schedule._update_losses

    def __init__(self, n_microbatches, *arguments, **options):
        used["schedules"] += 1
        create(self, n_microbatches, *arguments, **options)
        run = self.step

        def step(*arguments, **options):
            if self._has_backward:  # False in eval(), which also calls step()
                used["steps"] += 1
                used["microbatches"].append(n_microbatches)
            return run(*arguments, **options)

        self.step = step

    def eval(self, *arguments, **options):
        used["evaluations"] += 1
        return evaluate(self, *arguments, **options)

    def _update_losses(self, stages, losses):
        found = [loss.item() for loss in self._internal_losses]
        if found and self._has_backward:
            used["losses"].append(sum(found) / len(found))
        update(self, stages, losses)

    Schedule.__init__, Schedule.eval, Schedule._update_losses = __init__, eval, _update_losses
    return used


def replace_batches(numbers, used):
    """Let the model's `batch(a)` return the batch `numbers[a]`, and note in `used` if it is called.

    A program may instead make its batches itself.
    """
    batch, used["replaced"] = my_pipeline.batch, False

    def other_batch(step, *more, **named):
        used["replaced"] = bool(numbers)
        return batch(numbers.get(step, step), *more, **named)

    my_pipeline.batch = other_batch
