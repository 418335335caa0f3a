# SPDX-License-Identifier: Apache-2.0
"""A training with torch.distributed.pipelining and nothing else: clip, evaluate, save (lesson 08).

torchrun --standalone --nproc-per-node 2 library_training.py FOLDER STEPS CHUNKS

Trains until STEPS, from the newest checkpoint in FOLDER if there is one, with CHUNKS stages per
rank: 1F1B with one, interleaved 1F1B with two.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("steps", type=int)
parser.add_argument("chunks", type=int, choices=(1, 2))
given = parser.parse_args()
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)


def build_module(index, num_stages):
    """Stage `index`. A layer has its number in its name, however the model is cut."""
    module = nn.Sequential()
    for k in range(8 * index // num_stages, 8 * (index + 1) // num_stages):
        torch.manual_seed(k)
        layer = nn.Sequential(nn.Linear(16, 16, dtype=torch.float64), nn.Tanh())
        module.add_module(f"layer {k}", layer)
    return module


def run_batch(call, number):
    """The mean loss of a batch by `call`, which is step or eval, on the rank of the last stage."""
    torch.manual_seed(number)  # the same batch on every rank
    inputs, losses = torch.rand(16, 16, dtype=torch.float64), []
    arguments = [inputs] if stages[0].is_first else []
    keywords = {"target": inputs.flip(1), "losses": losses} if stages[-1].is_last else {}
    call(*arguments, **keywords)
    return torch.stack(losses).mean().item() if losses else None


def clip(largest_norm):
    """Scale all gradients by one factor, so that their norm over all ranks is at most this."""
    gradients = [weight.grad for module in modules for weight in module.parameters()]
    squares = sum(gradient.square().sum() for gradient in gradients)
    dist.all_reduce(squares)
    for gradient in gradients:
        gradient.mul_((largest_norm / squares.sqrt()).clamp(max=1))


def state_of_rank(step):
    """(this rank's part of a checkpoint, [the state of each chunk]); no two chunks share a name."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)  # by name of the weight
    chunks = [get_state_dict(*pair, options=flat) for pair in zip(modules, optimizers)]
    weights = {name: value for chunk, _ in chunks for name, value in chunk.items()}
    updates = {name: value for _, chunk in chunks for name, value in chunk.items()}
    return {"model": weights, "optimizer": updates, "step": step}, chunks


def restore():
    """Load the newest whole checkpoint, if there is one; return the number of steps before it."""
    whole = sorted(given.folder.glob("step-*/.metadata"))  # written when all ranks have written
    if not whole:
        return 0
    state, chunks = state_of_rank(0)
    dcp.load(state, checkpoint_id=whole[-1].parent)
    for module, optimizer, (weights, updates) in zip(modules, optimizers, chunks):
        set_state_dict(
            module,
            optimizer,
            model_state_dict={name: state["model"][name] for name in weights},
            optim_state_dict={name: state["optimizer"][name] for name in updates},
            options=StateDictOptions(flatten_optimizer_state_dict=True),
        )
    return state["step"]


num_stages = ranks * given.chunks
places = range(rank, num_stages, ranks)  # a loop: after the last rank comes rank 0 again
modules = [build_module(index, num_stages) for index in places]
device, loss_of = torch.device("cpu"), nn.functional.mse_loss
stages = [PipelineStage(m, index, num_stages, device) for m, index in zip(modules, places)]
if given.chunks == 1:
    schedule = Schedule1F1B(stages[0], n_microbatches=4, loss_fn=loss_of)
else:
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=loss_of)
optimizers = [torch.optim.AdamW(module.parameters(), lr=0.01) for module in modules]

first = restore()
for step in range(first, given.steps):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = run_batch(schedule.step, step)
    clip(0.1)
    for optimizer in optimizers:
        optimizer.step()
    if loss is not None:
        print(f"step {step}  loss {loss:.6f}", flush=True)
with torch.no_grad():  # without this, eval() keeps what a backward would need
    loss = run_batch(schedule.eval, 1000)
if loss is not None:
    print(f"held out  loss {loss:.6f}", flush=True)
if first < given.steps:  # never into a folder that has a checkpoint
    dcp.save(state_of_rank(given.steps)[0], checkpoint_id=given.folder / f"step-{given.steps:06}")
dist.destroy_process_group()
