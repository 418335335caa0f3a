# SPDX-License-Identifier: Apache-2.0
"""A training run on torch.distributed.pipelining that is not the course's own, with one fault (lesson 12b).

    torchrun --standalone --nproc-per-node 2 source_code/broken_unknown_program.py
    python source_code/broken_unknown_program.py

With two ranks the library trains two stages; as one process the program trains both itself.
From the course it has only the flight log's lines. To find the fault, do not read `run_schedule`.
"""

import argparse
import os
import runpy
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from lab.flight_log_anywhere import record

WORDS, WIDTH, LENGTH, ROWS, MICROBATCHES, STEPS, RATE = 64, 16, 24, 8, 4, 3, 0.5


class Block(nn.Module):
    """Attention and a linear layer; `mask` (rows, length, length) is True where it may attend."""

    def __init__(self):
        super().__init__()
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden, mask=None):
        if mask is None:
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        queries, keys, values = self.mix(hidden).chunk(3, dim=-1)
        seen = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return hidden + torch.tanh(self.out(seen))


class FirstHalf(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.block = nn.Embedding(WORDS, WIDTH), Block()

    def forward(self, tokens, mask=None):
        return self.block(self.embedding(tokens), mask)


class SecondHalf(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, WORDS)

    def forward(self, hidden, mask=None):
        return self.head(self.block(hidden, mask))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", metavar="FOLDER", help="write a flight log")
    parser.add_argument("--repair", metavar="FILE", help="take run_schedule from FILE")
    arguments = parser.parse_args()
    rank, num_ranks = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if arguments.record == "" or os.path.exists(arguments.record or ""):
        parser.error("argument --record: name a folder that does not exist yet")
    is_alone = (rank, num_ranks) == ("0", "1") and arguments.repair is None
    if not is_alone and (rank, num_ranks) not in [("0", "2"), ("1", "2")]:
        parser.error("the model has two stages; start two ranks, or one without --repair")
    if arguments.repair is not None and not os.path.isfile(arguments.repair):
        parser.error("argument --repair: name a file with run_schedule")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    halves = [FirstHalf(), SecondHalf()]
    if num_ranks == "1":
        return train_whole(halves, arguments.record)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    defined = runpy.run_path(arguments.repair) if arguments.repair else globals()
    train_stage(halves[int(rank)], int(rank), defined["run_schedule"], arguments.record)
    dist.barrier()
    dist.destroy_process_group()


def train_stage(half, rank, step_of, folder):
    """Train one half with the library; the last rank prints the losses."""
    tokens = torch.zeros(ROWS // MICROBATCHES, LENGTH, dtype=torch.long)
    between = torch.zeros(*tokens.shape, WIDTH, requires_grad=True)
    shapes = (
        ((tokens,), between)
        if rank == 0
        else ((between,), torch.zeros(*tokens.shape, WORDS, requires_grad=True))
    )
    stage = PipelineStage(half, rank, 2, torch.device("cpu"), *shapes)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    log = record(folder, [stage]) if folder else None
    optimizer = torch.optim.SGD(half.parameters(), RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        step_of(schedule, rank, *batch(step), losses)
        if log:
            log.end_step()
        optimizer.step()
        if losses:
            print(f"step {step}  loss {sum(losses).item() / MICROBATCHES:.6f}", flush=True)


def run_schedule(schedule, rank, tokens, targets, mask, losses):
    """Run one step of the library; the last rank appends each micro-batch's loss to `losses`."""
    if rank == 0:
        schedule.step(tokens, mask=mask)
    else:
        schedule.step(target=targets, losses=losses)


def train_whole(halves, folder):
    """Train both stages in one process; gradients are also summed and divided once."""
    log = record(folder, dict(enumerate(halves))) if folder else None
    weights = [weight for half in halves for weight in half.parameters()]
    optimizer = torch.optim.SGD(weights, RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for tokens, targets, mask in zip(*(each.chunk(MICROBATCHES) for each in batch(step))):
            losses.append(loss_of(halves[1](halves[0](tokens, mask), mask), targets))
            losses[-1].backward()
        for weight in weights:
            weight.grad /= MICROBATCHES
        if log:
            log.end_step()
        optimizer.step()
        print(f"step {step}  loss {sum(losses).item() / MICROBATCHES:.6f}", flush=True)


def batch(step):
    """Tokens and targets (rows, length), and the mask: a row holds two texts that do not mix."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, WORDS, (ROWS, LENGTH + 1), generator=generator)
    starts = torch.randint(4, LENGTH - 4, (ROWS, 1), generator=generator)
    text = torch.arange(LENGTH) >= starts
    same = text[:, :, None] == text[:, None, :]
    return tokens[:, :-1], tokens[:, 1:], same & torch.ones(LENGTH, LENGTH).tril().bool()


def loss_of(scores, targets):
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


if __name__ == "__main__":
    main()
