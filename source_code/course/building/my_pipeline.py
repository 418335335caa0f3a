"""The pipeline that lessons 01, 02, 03 and 05 build. It needs torch and nothing else.

    torchrun --standalone --nproc-per-node 4 my_pipeline.py 1f1b
    python my_pipeline.py naive

The second line is one process with the whole model. All print the same losses.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

LAYERS, DIM, LENGTH, BATCH, MICROBATCHES, CHUNKS = 8, 16, 8, 16, 8, 2
TEXT = b"""A barge does not wait for the river to be empty. It enters the lock when the one before has
left it, and the next barge waits at the gate. The lock is the slowest place on the river, and the
river is as fast as its slowest lock; whoever digs elsewhere moves earth and no barge."""


class Layer(nn.Module):
    """Takes and returns an activation of shape (sequences, LENGTH, DIM)."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (
            nn.Linear(DIM, 4 * DIM, bias=False),
            nn.Linear(4 * DIM, DIM, bias=False),
        )

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def build_stage(index, num_stages):
    """Stage `index`: its layers, on the first the embedding and on the last the scores.

    `previous` and `following` are the ranks that have the stages before and after it, or None.
    """
    parts = []
    for layer in range(LAYERS * index // num_stages, LAYERS * (index + 1) // num_stages):
        torch.manual_seed(layer)  # a layer's weights do not depend on where the model is cut
        parts += [nn.Embedding(128, DIM)] if layer == 0 else []
        parts += [Layer()]
        parts += [nn.Linear(DIM, 128, bias=False)] if layer == LAYERS - 1 else []
    stage = nn.Sequential(*parts).to(torch.float64)
    stage.previous = (index - 1) % dist.get_world_size() if index > 0 else None
    stage.following = (index + 1) % dist.get_world_size() if index < num_stages - 1 else None
    return stage


def batch(step, size=BATCH):
    """`size` sequences of the text, and for each position the byte that follows: the targets."""
    text = torch.tensor(list(TEXT))
    starts = [(step * size + i) * LENGTH % (len(text) - LENGTH - 1) for i in range(size)]
    return (torch.stack([text[at + more : at + more + LENGTH] for at in starts]) for more in (0, 1))


def loss_of(scores, targets):
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


# Lesson 01: one batch, down and up again.


def naive_step(stage, tokens, targets):
    """Forward and backward of a batch. Returns the loss on the last rank, None elsewhere."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    inputs = tokens
    if rank > 0:
        inputs = torch.empty(*tokens.shape, DIM, dtype=torch.float64)
        dist.irecv(inputs, rank - 1).wait()
        inputs.requires_grad_()
    output = stage(inputs)
    if rank == last:
        loss = loss_of(output, targets)
        loss.backward()
    else:
        dist.isend(output.detach(), rank + 1).wait()
        gradient = torch.empty_like(output)
        dist.irecv(gradient, rank + 1).wait()
        output.backward(gradient)
    if rank > 0:
        dist.isend(inputs.grad, rank - 1).wait()
    return loss.item() if rank == last else None


# Lesson 02: a batch in micro-batches, all forwards, all backwards.


def forward(stage, k, inputs, targets, held, sends):
    """Forward of micro-batch `k`. Returns its share of the loss on the last stage, else None."""
    activation, share = inputs[k], None
    if stage.previous is not None:
        activation = torch.empty(*inputs[k].shape, DIM, dtype=torch.float64)
        dist.irecv(activation, stage.previous).wait()
        activation.requires_grad_()
    output = stage(activation)
    if stage.following is None:
        output = loss_of(output, targets[k]) / len(inputs)
        share = output.item()
    else:
        sends.append(dist.isend(output.detach(), stage.following))
    held[k] = activation, output
    return share


def backward(stage, k, held, sends):
    """Backward of micro-batch `k`: adds to the gradients of the stage's weights."""
    activation, output = held.pop(k)
    gradient = None
    if stage.following is not None:
        gradient = torch.empty_like(output)
        dist.irecv(gradient, stage.following).wait()
    output.backward(gradient)
    if stage.previous is not None:
        sends.append(dist.isend(activation.grad, stage.previous))


def gpipe_step(stage, inputs, targets):
    """One step of this rank. Returns the loss on the last rank, None elsewhere."""
    held, sends, shares = {}, [], []
    for k in range(len(inputs)):
        shares.append(forward(stage, k, inputs, targets, held, sends))
    for k in range(len(inputs)):
        backward(stage, k, held, sends)
    for send in sends:
        send.wait()
    return sum(shares) if stage.following is None else None


# Lesson 03: the same forwards and backwards in another order.


def one_f_one_b_step(stage, inputs, targets):
    """One step of this rank. Returns the loss on the last rank, None elsewhere."""
    held, sends, shares = {}, [], []
    warm_up = min(len(inputs), dist.get_world_size() - 1 - dist.get_rank())
    for k in range(warm_up):
        shares.append(forward(stage, k, inputs, targets, held, sends))
    for k in range(len(inputs) - warm_up):
        shares.append(forward(stage, warm_up + k, inputs, targets, held, sends))
        backward(stage, k, held, sends)
    for k in range(len(inputs) - warm_up, len(inputs)):
        backward(stage, k, held, sends)
    for send in sends:
        send.wait()
    return sum(shares) if stage.following is None else None


# Lesson 05: several stages per rank.


def interleaved_step(stages, inputs, targets):
    """One step of this rank. Returns the loss on the last rank, None elsewhere."""
    p, v, m = dist.get_world_size(), len(stages), len(inputs)
    held, sends, shares = [{} for _ in stages], [], []

    def chunk_and_microbatch(passage):
        group, within = divmod(passage, p * v)
        return within // p, group * p + within % p

    def forward_passage(passage):
        c, k = chunk_and_microbatch(passage)
        shares.append(forward(stages[c], k, inputs, targets, held[c], sends))

    def backward_passage(passage):
        c, k = chunk_and_microbatch(passage)
        backward(stages[v - 1 - c], k, held[v - 1 - c], sends)

    warm_up = min(v * m, (v - 1) * p + 2 * (p - 1 - dist.get_rank()))
    for passage in range(warm_up):
        forward_passage(passage)
    for passage in range(v * m - warm_up):
        forward_passage(warm_up + passage)
        backward_passage(passage)
    for passage in range(v * m - warm_up, v * m):
        backward_passage(passage)
    for send in sends:
        send.wait()
    return sum(filter(None, shares)) if stages[-1].following is None else None


# What each rank runs.

STEPS = {"gpipe": "gpipe_step", "1f1b": "one_f_one_b_step", "interleaved": "interleaved_step"}


def main(name, steps=4):
    """Train with the step of that name, and print the loss of each step."""
    if "RANK" in os.environ:  # torchrun has said how the ranks meet
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    rank, p = dist.get_rank(), dist.get_world_size()
    if name not in ["naive", *STEPS]:
        sys.exit(f"there is no step '{name}'; choose from naive, {', '.join(STEPS)}")
    if name == "interleaved" and (p == 1 or MICROBATCHES % p):
        sys.exit(f"interleaved needs 2 ranks or more that divide {MICROBATCHES}, not {p}")
    chunks = CHUNKS if name == "interleaved" else 1
    stages = [build_stage(rank + c * p, p * chunks) for c in range(chunks)]
    for step in range(steps):
        tokens, targets = batch(step)
        if name == "naive":
            loss = naive_step(stages[0], tokens, targets)
        else:
            stage = stages if name == "interleaved" else stages[0]
            parts = tokens.chunk(MICROBATCHES), targets.chunk(MICROBATCHES)
            loss = globals()[STEPS[name]](stage, *parts)
        for weight in [weight for stage in stages for weight in stage.parameters()]:
            weight.data -= 0.5 * weight.grad
            weight.grad = None
        if loss is not None:
            print(f"step {step}  loss {loss:.6f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "gpipe")
