# SPDX-License-Identifier: Apache-2.0
"""The stages of a long training run: the parts that are updated, and the parts that compute.

They are the same modules, or the second are copies in 16 bits (see mixed_precision.py).
"""

from functools import partial

from extensions.optimization.mixed_precision import computing_copy, hand_over_deferred, refresh
from extensions.pretraining.cut_by_time import cut_model
from extensions.pretraining.packing import keep_documents_apart
from extensions.recompute import recomputing
from pipeline.split_stage import stage_class_for


def build_stages(arguments, job, schedule, build_model_part, loss_function):
    """Return, by stage, the parts that are updated and the stages that compute. All ranks call it.

    `build_model_part(arguments, first, last, device)` returns layers `first` to `last` - 1 as they
    are updated. `loss_function` is a ShareOfLoss. With --cut auto the ranks measure the cut first.
    """
    build = partial(part_and_copy, arguments, build_model_part, job.device)
    cut = cut_model(arguments, job, schedule.num_stages, build, loss_function)
    masters, stages = {}, {}
    stage_class = stage_class_for(schedule)
    for index in schedule.stages_of(job.rank):
        masters[index], part = build(*cut[index])
        stage = stage_class(part, index, schedule.num_stages, loss_function)
        stages[index] = recomputing(stage, arguments.recompute)
        hand_over_deferred(stages[index], masters[index])
        if arguments.packed:
            keep_documents_apart(stages[index])
    return masters, stages


def part_and_copy(arguments, build_model_part, device, first, last):
    """Layers `first` to `last` - 1 as they are updated, and as they compute: the same, or a copy."""
    master = build_model_part(arguments, first, last, device)
    return master, computing_copy(master, arguments.torch_dtype)


def update_copies(stages, masters):
    """Round the updated weights into the copies that compute. Call it after each update."""
    for index, stage in stages.items():
        refresh(stage.part, masters[index])
