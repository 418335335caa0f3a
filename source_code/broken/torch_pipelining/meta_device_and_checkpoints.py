# SPDX-License-Identifier: Apache-2.0
"""Traps of lesson 08: weights and buffers (section "The meta device and checkpoints")."""

import shutil
import tempfile

import torch
import torch.distributed as dist
from torch import nn

from broken.torch_pipelining import small_pipeline as small
from pipeline.collectives import gather, share


class LayerWithTable(nn.Module):
    """A layer with a table that is computed, not learnt, like that of a rotary embedding."""

    def __init__(self, index):
        super().__init__()
        self.part = small.build_layer(index)
        self.register_buffer("table", self.computed(), persistent=False)

    def computed(self):
        return torch.linspace(0, 1, small.WIDTH, dtype=torch.float64)

    def forward(self, x):
        return self.part(x) * self.table


def build_layers_with_tables(stage):
    return nn.Sequential(LayerWithTable(2 * stage), LayerWithTable(2 * stage + 1))


def stale_buffers(job, cured):
    """to_empty() leaves buffers without values, and no checkpoint has them.

    Broken: the buffer keeps what its memory held. Cured: it is computed again.
    """
    with torch.device("meta"):
        part = build_layers_with_tables(job.rank)
    part = part.to_empty(device=job.device)
    state = build_layers_with_tables(job.rank).state_dict()
    assert str(part.load_state_dict(state)) == "<All keys matched successfully>"
    for module in part:
        # The memory may hold anything; NaN makes the trap show every time.
        module.table.fill_(torch.nan)
        if cured:
            module.table.copy_(module.computed())
    schedule, stages = small.build_schedule(job, {job.rank: part})
    losses = small.run_step(schedule, stages, *small.draw_batch())
    if job.rank == 1:
        print(f"loss is a number: {bool(torch.stack(losses).isfinite().all())}", flush=True)


def buffers_left_on_meta(job, cured):
    """load_state_dict(assign=True) leaves a buffer that no checkpoint has on meta.

    Broken: the buffer stays there. Cured: it is computed again.
    """
    with torch.device("meta"):
        part = LayerWithTable(0)
    part.load_state_dict(LayerWithTable(0).state_dict(), assign=True)
    if cured:
        part.table = part.computed()
    output = part(small.draw_batch()[0])
    if job.rank == 0:
        small.print_distance("output", [output], [LayerWithTable(0)(small.draw_batch()[0])])


def moved_from_meta(job, cured):
    """A module on the meta device has no values to copy.

    Broken: .to("cpu"). Cured: .to_empty(device="cpu").
    """
    with torch.device("meta"):
        part = small.build_layer(0)
    part = part.to_empty(device="cpu") if cured else part.to("cpu")
    small.say(job, f"the module is on {next(part.parameters()).device}")


def one_seed_a_stage(job, cured):
    """Equal seeds on all ranks draw equal weights for all stages.

    Broken: each rank draws its stage from the same seed. Cured: each layer has a seed of its own.
    """
    torch.manual_seed(0)
    part = small.build_own_stages(job)[job.rank] if cured else nn.Linear(small.WIDTH, small.WIDTH)
    first = next(part.parameters()).detach().double()
    both = gather(job, first)
    if both:
        print(f"both stages start with equal weights: {torch.equal(*both)}", flush=True)


def part_of_a_checkpoint(job, cured):
    """The state of one rank's stage is not the state of the model.

    Broken: the whole model loads one stage's state. Cured: the states of all ranks, renamed.
    """
    part = small.build_own_stages(job)[job.rank]
    state = part.state_dict()
    if cured:
        states = [None, None]
        dist.all_gather_object(states, state)
        state = {f"{2 * rank + int(name[0])}{name[1:]}": tensor
                 for rank, own in enumerate(states) for name, tensor in own.items()}  # fmt: skip
    small.build_model().load_state_dict(state)
    small.say(job, "the whole model is loaded")


def equal_names_in_a_checkpoint(job, cured):
    """torch.distributed.checkpoint takes equal names on two ranks for copies of one tensor.

    Broken: each rank saves its stage by the names in its own module. Cured: with the stage's number.
    """
    import torch.distributed.checkpoint as dcp

    import extensions.checkpointing.checkpoint_reader  # noqa: F401 - the guard allows its classes

    small.allow_slow_start(job)
    folder = share(job, tempfile.mkdtemp() if job.rank == 0 else None)
    prefix = f"stages.{job.rank}." if cured else ""
    part = small.build_own_stages(job)[job.rank]
    saved = {prefix + name: tensor for name, tensor in part.state_dict().items()}
    wanted = [tensor.clone() for tensor in saved.values()]
    dcp.save(saved, checkpoint_id=folder)
    for tensor in saved.values():
        tensor.zero_()
    dcp.load(saved, checkpoint_id=folder)
    ranks = gather(job, (list(saved.values()), wanted))
    if job.rank == 0:
        shutil.rmtree(folder)
        loaded, wanted = (sum(each, []) for each in zip(*ranks))
        small.print_distance("weight", loaded, wanted)


def token_out_of_range(job, cured):
    """A token without a row in the embedding is a device-side assert on a GPU.

    Broken: the token is the number of rows. Cured: the last row.
    """
    embedding = nn.Embedding(small.WIDTH, small.WIDTH, dtype=torch.float64)
    token = torch.tensor([small.WIDTH - 1 if cured else small.WIDTH])
    embedding(token)
    small.say(job, "the embedding has that row")
