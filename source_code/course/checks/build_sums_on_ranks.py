# SPDX-License-Identifier: Apache-2.0
"""Runs a reader's hook that starts the gradient sums on four ranks; build_sums.py reads the report.

Two pipelines of two ranks, with two stages per rank, perform a step of an interleaved schedule.
"""

from contextlib import contextmanager

import torch
from torch.nn.functional import cross_entropy

from course.building import WAITING
from course.building.messages import tell
from extensions.data_parallel.replicas import (
    AllReduce,
    DataParallelWorker,
    form_replicas,
    replicate,
)
from pipeline.job import join_job
from pipeline.model import ModelConfig, build_part, cut_evenly
from pipeline.schedules import interleaved_1f1b
from pipeline.stage import Stage

CONFIG = ModelConfig(layers=4, dim=16, heads=2, kv_heads=2, seq_len=8)
REPLICAS, RANKS, CHUNKS, MICROBATCHES, SIZE = 2, 2, 2, 4, 1


def main(_, after):
    """Perform a step and report, for each stage of this rank, how its sums compare."""
    schedule = replicate(interleaved_1f1b(RANKS, MICROBATCHES, CHUNKS), REPLICAS)
    shape = SIZE, CONFIG.seq_len, CONFIG.dim
    job = join_job("cpu", WAITING, schedule.pairs, shape, torch.float64)
    sums = HookedSums(form_replicas(job, REPLICAS), schedule, after)
    cut = cut_evenly(CONFIG.layers, schedule.num_stages)
    stages = {
        index: Stage(
            sums.wrap(build_part(CONFIG, *cut[index]), index), index, len(cut), share_of_loss
        )
        for index in schedule.stages_of(job.rank)
    }
    worker = DataParallelWorker(job, schedule, stages, sums)
    tokens, targets = batch_of_all()
    worker.run_step(tokens, targets)
    tell("report", value={index: factor_of(index, stage) for index, stage in stages.items()})


class HookedSums(AllReduce):
    """Sums that the reader's hook starts."""

    def __init__(self, replicas, schedule, after):
        super().__init__(replicas, schedule)
        self.order, self.after = schedule.orders[replicas.job.rank], after

    @contextmanager
    def around(self, action):
        """A context for each action, after which the hook is called."""
        yield
        self.after(action, self.order, lambda stage: self.start(stage))


def share_of_loss(scores, targets):
    """A micro-batch's share of the mean loss over the micro-batches of both replicas."""
    whole = REPLICAS * MICROBATCHES * targets.numel()
    return cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum") / whole


def batch_of_all():
    """Tokens and targets of all micro-batches, by their number in the replicated schedule."""
    draw = torch.Generator().manual_seed(0)
    count = REPLICAS * MICROBATCHES
    text = torch.randint(256, (count, SIZE, CONFIG.seq_len + 1), generator=draw)
    return tuple(dict(enumerate(part)) for part in (text[..., :-1], text[..., 1:]))


def factor_of(index, stage):
    """The ratio of a stage's summed gradient to that of one process; None if it is not constant."""
    whole = build_part(CONFIG, 0, CONFIG.layers)
    tokens, targets = batch_of_all()
    for k in tokens:
        share_of_loss(whole(tokens[k]), targets[k]).backward()
    gradients = {name: weight.grad for name, weight in whole.named_parameters()}
    names = [name for name, _ in stage.part.named_parameters()]
    right = torch.cat([gradients[name].flatten() for name in names])
    found = torch.cat([weight.grad.flatten() for weight in stage.part.parameters()])
    factor = (found @ right / (right @ right)).item()
    return round(factor, 9) if (found - factor * right).abs().max() < 1e-12 else None
