"""Programs that use nothing of this course except the three lines that attach a flight log.

Two ranks train four layers, or one process does. `fault` plants a mistake of a kind that lesson 12b
has.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from lab.flight_log_anywhere import record

WIDTH, ROWS, MICROBATCHES, STEPS, RATE = 8, 6, 4, 3, 0.1


UNDER_WAY = []  # (what waits for a message to leave, its tensor)


def send(tensor, other):
    tensor = tensor.contiguous()
    UNDER_WAY.append((dist.isend(tensor, other), tensor))


def leave():
    for sending, _ in UNDER_WAY:
        sending.wait()
    dist.barrier()
    dist.destroy_process_group()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / WIDTH**0.5)

    def forward(self, rows):
        return torch.tanh(rows @ self.weight)


class WithGradient(nn.Module):
    """Lets the rank's backward run, although no weight before it is trained."""

    def forward(self, rows):
        return rows.requires_grad_()


def build_parts(first=2):
    torch.manual_seed(0)
    layers = [Layer() for _ in range(4)]
    return nn.Sequential(*layers[:first]), nn.Sequential(*layers[first:])


def batch(step):
    torch.manual_seed(100 + step)
    rows = torch.randn(MICROBATCHES, ROWS, WIDTH, dtype=torch.float64)
    return rows, rows.roll(1, 2)


def train_in_one_process(folder, frozen=False):
    parts = build_parts()
    parts[0].requires_grad_(not frozen)
    log = record(folder, dict(enumerate(parts)))
    optimizer = torch.optim.SGD([*parts[0].parameters(), *parts[1].parameters()], RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rows, targets in zip(*batch(step)):
            loss = (parts[1](parts[0](rows)) - targets).square().mean()
            (loss / MICROBATCHES).backward()
        log.end_step()
        optimizer.step()


def train(rank, folder, fault=None, tied=False, first=2, frozen=False):
    """1F1B by hand on two ranks; with `tied` the first and the last matrix are to be one.

    With `frozen` the first rank's weights are not trained, and its backwards run all the same.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    part = build_parts(first)[rank]
    if frozen and rank == 0:
        part.requires_grad_(False)
        part.append(WithGradient())
    if tied and rank == 1:
        part[-1].weight.data.copy_(build_parts()[0][0].weight.data)
    log = record(folder, {rank: part})
    optimizer = torch.optim.SGD(part.parameters(), RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        (first_rank if rank == 0 else last_rank)(part, *batch(step), fault)
        if tied:
            add_other_gradient(part[0] if rank == 0 else part[-1], 1 - rank, fault)
        if fault == "clipping by stage":
            nn.utils.clip_grad_norm_(part.parameters(), 0.01)
        if fault == "clipping of all":
            clip_together(part, 0.01)
        log.end_step()
        optimizer.step()
    leave()


def first_rank(part, rows, targets, fault):
    """F0 F1 B0 F2 B1 F3 B2 B3; `fault` may swap messages or leave a backward out."""
    outputs, to_send = [], []
    for k in range(len(rows) + 1):
        if k < len(rows):
            outputs.append(part(rows[k]))
            to_send.append(outputs[-1].detach())
            if fault != "swapped messages":
                send(to_send.pop(), 1)
            elif len(to_send) == 2:
                send(to_send.pop(), 1)
                send(to_send.pop(), 1)
        if k > 0:
            gradient = torch.empty_like(outputs[k - 1])
            dist.recv(gradient, 1)
            if (fault, k) != ("micro-batch lost", 2):
                outputs[k - 1].backward(gradient)


def last_rank(part, rows, targets, fault):
    """F0 B0 F1 B1 and so on; `fault` may use a buffer twice or delay the backwards."""
    buffer, waiting = torch.empty_like(targets[0]), []
    for k in range(len(targets)):
        if fault != "buffer used twice":
            buffer = torch.empty_like(targets[k])
        dist.recv(buffer.data, 0)
        received = buffer.data.requires_grad_()
        waiting.append((received, part(received), targets[k]))
        late = 1 if fault in ("buffer used twice", "one later") else 0
        if fault == "receives in the wrong order":
            late = 2
        if len(waiting) > late:
            go_back(*waiting.pop(0), fault)
    for one in waiting:
        go_back(*one, fault)


def go_back(received, output, target, fault):
    loss = (output - target).square().mean()
    (loss if fault == "scale forgotten" else loss / MICROBATCHES).backward()
    send(received.grad, 0)


def add_other_gradient(layer, other, fault):
    theirs = torch.empty_like(layer.weight.grad)
    send(layer.weight.grad.clone(), other)
    dist.recv(theirs, other)
    if fault != "tied weights drift":
        layer.weight.grad += theirs


def clip_together(part, most):
    square = sum(weight.grad.square().sum() for weight in part.parameters())
    dist.all_reduce(square)
    for weight in part.parameters():
        weight.grad *= min(1.0, most / square.sqrt().item())


def train_without_flush(rank, folder, fault=None):
    """An update after each backward; rank 0 puts back the weights that the forward used."""
    dist.init_process_group("gloo")
    part = build_parts()[rank]
    log = record(folder, {rank: part})
    weights = list(part.parameters())
    rows, targets = batch(0)
    kept = []
    for k in range(MICROBATCHES + (rank == 0)):
        if k < MICROBATCHES:
            received = rows[k].clone()
            if rank == 1:
                dist.recv(received, 0)
                received.requires_grad_()
            output = part(received)
            kept.append((received, output, [weight.data.clone() for weight in weights]))
            if rank == 0:
                send(output.detach(), 1)
        if rank == 0 and k == 0:
            continue  # one more forward is under way than on rank 1
        received, output, older = kept.pop(0)
        newest = [weight.data.clone() for weight in weights]
        if rank == 0 and fault is None:
            put_into(weights, older)
        for weight in weights:
            weight.grad = None
        if rank == 1:
            (output - targets[k]).square().mean().backward()
            send(received.grad, 0)
        else:
            gradient = torch.empty_like(output)
            dist.recv(gradient, 1)
            output.backward(gradient)
        put_into(weights, [new - RATE * weight.grad for new, weight in zip(newest, weights)])
    log.end_step()
    leave()


def put_into(weights, values):
    """Change the weights without autograd noticing, so that a graph still allows its backward."""
    for weight, value in zip(weights, values):
        weight.data.copy_(value)
