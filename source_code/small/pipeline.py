# SPDX-License-Identifier: Apache-2.0
"""A pipeline in one file: naive, GPipe, 1F1B and interleaved 1F1B. It needs torch and nothing else.

    torchrun --standalone --nproc-per-node 4 pipeline.py 1f1b --verify
    python pipeline.py naive

The second line is one process with the whole model. All print the same losses. Each rank has a GPU
and NCCL if there are enough GPUs, else a CPU core and gloo. Copy the file; put your own model in
place of `Layer` and your own data in place of `batch`.
"""

import argparse
import math
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

LAYERS, DIM, LENGTH, BATCH, MICROBATCHES, CHUNKS = 8, 16, 8, 16, 8, 2
RATE = 0.5
TEXT = b"""A barge does not wait for the river to be empty. It enters the lock when the one before has
left it, and the next barge waits at the gate. The lock is the slowest place on the river, and the
river is as fast as its slowest lock; whoever digs elsewhere moves earth and no barge."""


class Layer(nn.Module):
    """Takes and returns an activation of shape (sequences, LENGTH, DIM)."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(DIM, 4 * DIM, bias=False)
        self.down = nn.Linear(4 * DIM, DIM, bias=False)

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
    """`size` sequences of the text, and for each position the byte that follows: the targets.

    Every rank makes the batch. The first stage takes the tokens, the last one the targets.
    """
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
        inputs = torch.empty(*tokens.shape, DIM, dtype=torch.float64, device=tokens.device)
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


# Lessons 02 and 03: micro-batches. A message leaves together with the next receive.


def exchange(outbox, tokens=None, sources=()):
    """Send what is in `outbox`, pairs of (tensor, rank), and receive a tensor from each source.

    Returns the received tensors, with None for a source that is None. `tokens` is a micro-batch.
    The messages are one batch, which NCCL starts as a whole: so two ranks that send to each other
    do not wait for each other. When it has ended, all tensors have arrived, and `outbox` is empty.
    """
    messages = [dist.P2POp(dist.isend, tensor, rank) for tensor, rank in outbox]
    arrived = [None] * len(sources)
    for number, source in enumerate(sources):
        if source is not None:
            room = torch.empty(*tokens.shape, DIM, dtype=torch.float64, device=tokens.device)
            messages.append(dist.P2POp(dist.irecv, room, source))
            arrived[number] = room
    for work in dist.batch_isend_irecv(messages) if messages else ():
        work.wait()
    outbox.clear()
    return arrived


def run_forward(stage, k, activation, targets, held, outbox):
    """Forward of micro-batch `k`. Returns its share of the loss on the last stage, else None."""
    if stage.previous is not None:
        activation.requires_grad_()  # the stage before needs its gradient
    output = stage(activation)
    if stage.following is None:
        output = loss_of(output, targets[k]) / len(targets)
    else:
        outbox.append((output.detach(), stage.following))
    held[k] = activation, output  # until the backward
    return output.item() if stage.following is None else None


def run_backward(stage, k, gradient, held, outbox):
    """Backward of micro-batch `k`: adds to the gradients of the stage's weights."""
    activation, output = held.pop(k)
    output.backward(gradient)  # on the last stage, `output` is the loss and `gradient` is None
    if stage.previous is not None:
        outbox.append((activation.grad, stage.previous))


def forward(stage, k, inputs, targets, held, outbox):
    """Receive and run the forward of micro-batch `k`. Returns what `run_forward` returns."""
    [activation] = exchange(outbox, inputs[k], [stage.previous])
    activation = inputs[k] if activation is None else activation
    return run_forward(stage, k, activation, targets, held, outbox)


def backward(stage, k, inputs, held, outbox):
    """Receive and run the backward of micro-batch `k`."""
    [gradient] = exchange(outbox, inputs[k], [stage.following])
    run_backward(stage, k, gradient, held, outbox)


def gpipe_step(stage, inputs, targets):
    """All forwards, all backwards. Returns the loss on the last rank, None elsewhere."""
    held, outbox, shares = {}, [], []
    for k in range(len(inputs)):
        shares.append(forward(stage, k, inputs, targets, held, outbox))
    for k in range(len(inputs)):
        backward(stage, k, inputs, held, outbox)
    exchange(outbox)  # the last gradient
    return sum(shares) if stage.following is None else None


def one_f_one_b_step(stage, inputs, targets):
    """The same forwards and backwards in another order, in which rank r holds at most p - r."""
    held, outbox, shares = {}, [], []
    warm_up = min(len(inputs), dist.get_world_size() - 1 - dist.get_rank())
    for k in range(warm_up):
        shares.append(forward(stage, k, inputs, targets, held, outbox))
    for k in range(len(inputs) - warm_up):
        shares.append(forward(stage, warm_up + k, inputs, targets, held, outbox))
        backward(stage, k, inputs, held, outbox)
    for k in range(len(inputs) - warm_up, len(inputs)):
        backward(stage, k, inputs, held, outbox)
    exchange(outbox)
    return sum(shares) if stage.following is None else None


# Lesson 05: several stages per rank.


def interleaved_step(stages, inputs, targets):
    """One step of this rank. Returns the loss on the last rank, None elsewhere.

    A passage is one micro-batch through one of this rank's stages. All ranks move in lockstep: in
    each tick a rank runs a forward passage, a backward passage or both, and between two ticks it
    exchanges up to four messages in one batch, with both neighbours of the ring. Rank r + 1 is one
    tick behind rank r, so the batches fit together. That relies on a transport
    which starts all messages of a batch together, as NCCL and gloo do.
    """
    rank, p, v, m = dist.get_rank(), dist.get_world_size(), len(stages), len(inputs)
    held, outbox, shares = [{} for _ in stages], [], []
    warm_up = (v - 1) * p + 2 * (p - 1 - rank)  # ticks before the first backward passage

    def chunk_and_microbatch(passage):
        group, within = divmod(passage, p * v)
        return within // p, group * p + within % p

    for tick in range(warm_up + v * m):
        sources = [None, None]
        if runs_forward := tick < v * m:
            c, k = chunk_and_microbatch(tick)
            sources[0] = stages[c].previous
        if runs_backward := tick >= warm_up:
            d, j = chunk_and_microbatch(tick - warm_up)
            d = v - 1 - d  # backward passages go through the stages in reverse
            sources[1] = stages[d].following
        activation, gradient = exchange(outbox, inputs[0], sources)
        if runs_forward:
            activation = inputs[k] if activation is None else activation
            shares.append(run_forward(stages[c], k, activation, targets, held[c], outbox))
        if runs_backward:
            run_backward(stages[d], j, gradient, held[d], outbox)
    exchange(outbox)
    return sum(filter(None, shares)) if stages[-1].following is None else None


# What each rank runs.

STEPS = {
    "naive": naive_step,
    "gpipe": gpipe_step,
    "1f1b": one_f_one_b_step,
    "interleaved": interleaved_step,
}


def join():
    """Meet the other ranks. Returns this rank's device."""
    torch.set_num_threads(1)
    device, backend, more = torch.device("cpu"), "gloo", {}
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), "nccl"
        torch.cuda.set_device(device)  # before anything is allocated, or all share GPU 0
        more["device_id"] = device
    if "RANK" not in os.environ:  # plain python: one process, which meets nobody
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, use_libuv=False)  # also on Windows
        more |= {"store": store, "rank": 0, "world_size": 1}
    limit = timedelta(seconds=60)  # a rank that waits longer raises an error
    dist.init_process_group(backend, timeout=limit, **more)
    return device


def train(name, steps, device):
    """Train with the step of that name. Returns this rank's stages and the losses it has."""
    rank, p = dist.get_rank(), dist.get_world_size()
    chunks = CHUNKS if name == "interleaved" else 1
    stages = [build_stage(rank + c * p, p * chunks).to(device) for c in range(chunks)]
    optimizer = torch.optim.SGD([w for stage in stages for w in stage.parameters()], lr=RATE)
    losses = []
    for step in range(steps):
        tokens, targets = (half.to(device) for half in batch(step))
        if name != "naive":
            tokens, targets = tokens.chunk(MICROBATCHES), targets.chunk(MICROBATCHES)
        optimizer.zero_grad()
        loss = STEPS[name](stages if name == "interleaved" else stages[0], tokens, targets)
        optimizer.step()
        if loss is not None:
            losses.append(loss)
            print(f"step {step}  loss {loss:.6f}", flush=True)
    return stages, losses


def difference_from_one_process(stages, losses, steps, device):
    """The largest difference of a loss or a weight from a plain training of the whole model."""
    rank, p, chunks = dist.get_rank(), dist.get_world_size(), len(stages)
    whole = nn.Sequential(*[build_stage(s, p * chunks) for s in range(p * chunks)]).to(device)
    optimizer = torch.optim.SGD(whole.parameters(), lr=RATE)
    expected = []
    for step in range(steps):
        tokens, targets = (half.to(device) for half in batch(step))
        optimizer.zero_grad()
        loss = loss_of(whole(tokens), targets)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    differences = [abs(a - b) for a, b in zip(losses, expected)]
    for c, stage in enumerate(stages):
        pairs = zip(stage.parameters(), whole[rank + c * p].parameters())
        differences += [(a - b).abs().max().item() for a, b in pairs]
    # A NaN differs from everything, and max() would drop it.
    differences = torch.tensor(differences, dtype=torch.float64).nan_to_num(nan=math.inf)
    largest = differences.max().to(device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def main(arguments=None):
    """Train on this rank, and compare with one process if --verify asks for it."""
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=STEPS, default="1f1b")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--verify", action="store_true", help="compare with one process")
    a = parser.parse_args(arguments)
    rank, p = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if not 0 <= rank < p:  # torch would wait for a minute
        sys.exit(f"RANK is {rank}, and WORLD_SIZE is {p}; start the ranks with torchrun")
    if a.name == "interleaved" and (p == 1 or MICROBATCHES % p or CHUNKS * p > LAYERS):
        sys.exit(
            f"interleaved needs 2 to {LAYERS // CHUNKS} ranks that divide {MICROBATCHES}, not {p}"
        )
    if p > LAYERS:
        sys.exit(f"{LAYERS} layers can be cut into at most {LAYERS} stages, not {p}")
    device = join()
    stages, losses = train(a.name, a.steps, device)
    if a.verify:
        largest = difference_from_one_process(stages, losses, a.steps, device)
        if stages[-1].following is None:
            print(f"largest difference from one process: {largest:.1e}", flush=True)
        if largest > 1e-12:
            sys.exit("the difference should be at most 1e-12")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
