# SPDX-License-Identifier: Apache-2.0
"""Uses torch.distributed.pipelining instead of the course's worker, in each of several replicas."""

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from extensions.torch_pipelining.library import ONE_STAGE
from pipeline.model import ModelConfig

# The library's names of this course's schedules, if it has them.
LIBRARY_NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}


class LibraryWorker:
    """Runs the steps of one replica's pipeline on one rank.

    `parts` are the modules of this rank's stages, by index, as `reduction` has wrapped them in DDP
    or FSDP2. `stages` has the library's stages, by index.
    """

    def __init__(
        self, replicas, name, num_stages, parts, num_microbatches, loss_function, reduction
    ):
        self.job, self.name, self.reduction = replicas.job, LIBRARY_NAMES[name], reduction
        self.has_first, self.has_last = 0 in parts, num_stages - 1 in parts
        shape, dtype = self.job.shape, self.job.dtype
        # Without given shapes the library would run a micro-batch to infer them, which breaks DDP.
        tokens = torch.empty(shape[:2], dtype=torch.int64)
        activation = torch.empty(shape, dtype=dtype, requires_grad=True)
        vocabulary = ModelConfig.vocabulary
        scores = torch.empty((*shape[:2], vocabulary), dtype=dtype, requires_grad=True)
        self.stages = {}
        for index, part in parts.items():
            self.stages[index] = PipelineStage(
                part,
                index,
                num_stages,
                self.job.device,
                input_args=tokens if index == 0 else activation,
                output_args=scores if index == num_stages - 1 else activation,
                group=replicas.mesh.get_group("stage"),
            )
            self.stages[index].first_microbatch = replicas.replica * num_microbatches
        stages = list(self.stages.values())
        self.schedule = get_schedule_class(self.name)(
            stages[0] if self.name in ONE_STAGE else stages,
            num_microbatches,
            loss_fn=loss_function,
            scale_grads=False,  # a loss is a share of the whole batch already
        )

    def run_step(self, inputs, targets):
        """Return this replica's share of the loss on its last stage, None elsewhere, as Worker."""
        inputs, targets = (torch.cat(list(rows.values())) for rows in (inputs, targets))
        losses = [] if self.has_last else None
        with self.job.waiting_for_all(f"a step of {self.name}"):
            self.schedule.step(
                *([inputs] if self.has_first else []),
                target=targets if self.has_last else None,
                losses=losses,
                return_outputs=False,
            )
        self.reduction.finish()
        self.job.complete_sends()
        return sum(loss.detach() for loss in losses) if losses else None
