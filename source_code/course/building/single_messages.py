# SPDX-License-Identifier: Apache-2.0
"""GPipe and 1F1B as a reader first writes them: each message travels on its own (lessons 02, 03).

That is enough for gloo. At the end of lesson 03 messages become batches, as in small/pipeline.py:
NCCL needs that, and then no handle keeps a sent tensor until the end of the step.
"""

import torch
import torch.distributed as dist

from small.pipeline import DIM, loss_of


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
