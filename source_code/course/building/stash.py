"""PipeDream on one rank, with a stash of the weights that are in use (lesson 04).

Weight stashing: Narayanan et al. 2019, section 3.3.
"""

import torch
import torch.distributed as dist
from torch.func import functional_call

from course.building.my_pipeline import DIM, loss_of


def first_weights(stage):
    """Version 0 of the weights of a stage, by name."""
    return {name: weight.detach().requires_grad_() for name, weight in stage.named_parameters()}


def forward_with(weights, stage, k, inputs, targets, held, sends):
    """Forward of mini-batch `k` with these `weights`. Returns its loss on the last stage, else None."""
    activation, loss = inputs[k], None
    if stage.previous is not None:
        activation = torch.empty(*inputs[k].shape, DIM, dtype=torch.float64)
        dist.irecv(activation, stage.previous).wait()
        activation.requires_grad_()
    output = functional_call(stage, weights, (activation,))
    if stage.following is None:
        output = loss_of(output, targets[k])
        loss = output.item()
    else:
        sends.append(dist.isend(output.detach(), stage.following))
    held[k] = activation, output
    return loss


def backward_with(weights, stage, k, held, sends):
    """Backward of mini-batch `k`, whose forward used these `weights`. Returns their gradients, by name."""
    activation, output = held.pop(k)
    gradient = None
    if stage.following is not None:
        gradient = torch.empty_like(output)
        dist.irecv(gradient, stage.following).wait()
    wanted = [*weights.values(), *([] if stage.previous is None else [activation])]
    found = torch.autograd.grad(output, wanted, gradient)
    if stage.previous is not None:
        sends.append(dist.isend(found[-1], stage.previous))
    return dict(zip(weights, found))


def pipedream_run(stage, inputs, targets, rate):
    """Train on all mini-batches without a flush. Returns the newest weights, and the losses."""
    held, sends, losses, stash = {}, [], [], {}
    newest = first_weights(stage)

    def forward(k):
        stash[k] = newest
        losses.append(forward_with(newest, stage, k, inputs, targets, held, sends))

    def backward(k):
        gradients = backward_with(stash.pop(k), stage, k, held, sends)
        return {
            name: (weight - rate * gradients[name]).detach().requires_grad_()
            for name, weight in newest.items()
        }

    warm_up = min(len(inputs), dist.get_world_size() - 1 - dist.get_rank())
    for k in range(warm_up):
        forward(k)
    for k in range(len(inputs) - warm_up):
        forward(warm_up + k)
        newest = backward(k)
    for k in range(len(inputs) - warm_up, len(inputs)):
        newest = backward(k)
    for send in sends:
        send.wait()
    return newest, losses
