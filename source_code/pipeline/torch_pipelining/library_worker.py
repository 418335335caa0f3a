"""torch.distributed.pipelining in the place of this course's worker, in each of several replicas."""

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from pipeline.model import VOCABULARY
from pipeline.torch_pipelining.library import ONE_STAGE, recorded, watched

# What the library calls a schedule of this course, where it has one.
NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}


class LibraryWorker:
    """Runs the steps of one replica's pipeline on one rank.

    `parts` are the modules of this rank's stages, by index, already inside DDP or FSDP2 where they
    are to be. `shape` and `dtype` are those of one activation, (micro-batch size, length, dim).
    `collect(part)` gathers a part's weights where they lie in shards (see `recorded`).
    """

    def __init__(self, replicas, name, num_stages, parts, shape, dtype, num_microbatches,
                 recorder, loss_function, collect=lambda part: None):  # fmt: skip
        self.job, self.name = replicas.job, NAMES[name]
        self.has_first = 0 in parts
        self.has_last = num_stages - 1 in parts
        # Given its shapes, the library need not run a micro-batch to find them out: that breaks DDP.
        tokens = torch.empty(shape[:2], dtype=torch.int64)
        activation = torch.empty(shape, dtype=dtype, requires_grad=True)
        scores = torch.empty((*shape[:2], VOCABULARY), dtype=dtype, requires_grad=True)
        first_microbatch = replicas.replica * num_microbatches
        stages = []
        for index, part in parts.items():
            stage = PipelineStage(
                part,
                index,
                num_stages,
                self.job.device,
                input_args=tokens if index == 0 else activation,
                output_args=scores if index == num_stages - 1 else activation,
                group=replicas.mesh.get_group("stage"),
            )
            stages.append(recorded(stage, self.job, recorder, first_microbatch, collect))
        self.schedule = get_schedule_class(self.name)(
            stages[0] if self.name in ONE_STAGE else stages,
            num_microbatches,
            loss_fn=loss_function,
            scale_grads=False,  # a loss is a share of the whole batch already
        )

    def run_step(self, inputs, targets):
        """As that of Worker: this replica's share of the loss on its last stage, None elsewhere."""
        inputs, targets = (torch.cat(list(rows.values())) for rows in (inputs, targets))
        losses = [] if self.has_last else None
        with watched(self.job, f"a step of {self.name}"):
            self.schedule.step(
                *([inputs] if self.has_first else []),
                target=targets if self.has_last else None,
                losses=losses,
                return_outputs=False,
            )
        return sum(loss.detach() for loss in losses) if losses else None
