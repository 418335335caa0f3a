# SPDX-License-Identifier: Apache-2.0
"""PipeDream: training without a flush, with a stash of the weights that are in use (lesson 04).

    torchrun --standalone --nproc-per-node 4 weight_stash.py --verify

Weight stashing: Narayanan et al. 2019, section 3.3. The program needs torch and nothing else, and
runs on CPU cores.
"""

import math
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

LAYERS, DIM, WORDS, LENGTH, BATCH, MINIBATCHES, RATE = 8, 16, 32, 8, 4, 12, 0.5


def build_stage(index, num_stages):
    """Stage `index`; `previous` and `following` are the ranks that have its neighbours, or None."""
    parts = []
    for layer in range(LAYERS * index // num_stages, LAYERS * (index + 1) // num_stages):
        torch.manual_seed(layer)  # a layer's weights do not depend on where the model is cut
        parts += [nn.Embedding(WORDS, DIM)] if layer == 0 else []
        parts += [nn.Linear(DIM, DIM), nn.Tanh()]
        parts += [nn.Linear(DIM, WORDS)] if layer == LAYERS - 1 else []
    stage = nn.Sequential(*parts).to(torch.float64)
    stage.previous = index - 1 if index > 0 else None
    stage.following = index + 1 if index < num_stages - 1 else None
    return stage


def batch(k):
    """Mini-batch `k`: tokens and targets of shape (BATCH, LENGTH). Each word has one successor."""
    tokens = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) * (k + 1) % WORDS
    return tokens, (5 * tokens + 3) % WORDS


def loss_of(scores, targets):
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def first_weights(stage):
    """Version 0 of the weights of a stage, by name."""
    return {name: weight.detach().requires_grad_() for name, weight in stage.named_parameters()}


def forward_with(weights, stage, k, inputs, targets, held):
    """Forward of mini-batch `k` with these `weights`. Returns its loss on the last stage, else None."""
    activation, loss, send = inputs[k], None, None
    if stage.previous is not None:
        activation = torch.empty(*inputs[k].shape, DIM, dtype=torch.float64)
        dist.irecv(activation, stage.previous).wait()
        activation.requires_grad_()
    output = functional_call(stage, weights, (activation,))
    if stage.following is None:
        output = loss_of(output, targets[k])
        loss = output.item()
    else:
        send = dist.isend(output.detach(), stage.following)
    held[k] = activation, output, send
    return loss


def backward_with(weights, stage, k, held, sends):
    """Backward of mini-batch `k`, whose forward used these `weights`. Returns their gradients, by name.

    A handle keeps its tensor in memory, so each is waited for as soon as its message has arrived.
    """
    activation, output, send = held.pop(k)
    gradient = None
    if stage.following is not None:
        gradient = torch.empty_like(output)
        dist.irecv(gradient, stage.following).wait()
        send.wait()  # the gradient was made from this activation
    wanted = [*weights.values(), *([] if stage.previous is None else [activation])]
    found = torch.autograd.grad(output, wanted, gradient)
    if stage.previous is not None:
        sends.append(dist.isend(found[-1], stage.previous))
        if len(sends) > 2:  # the rank before takes a gradient before its next forward
            sends.pop(0).wait()
    return dict(zip(weights, found))


def pipedream_run(stage, inputs, targets, rate):
    """Train on all mini-batches without a flush. Returns the newest weights, and the losses."""
    held, sends, losses, stash = {}, [], [], {}
    newest = first_weights(stage)

    def forward(k):
        stash[k] = newest
        losses.append(forward_with(newest, stage, k, inputs, targets, held))

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


def run_of_one_process(num_stages, inputs, targets, rate):
    """The same rule in one process. Returns the newest weights of each stage, and the losses.

    Stage s has made max(0, k - (num_stages - 1 - s)) updates when mini-batch k arrives.
    """
    stages = [build_stage(s, num_stages) for s in range(num_stages)]
    versions, losses = [[first_weights(stage)] for stage in stages], []
    for k, (activation, wanted) in enumerate(zip(inputs, targets)):
        used = [versions[s][max(0, k - (num_stages - 1 - s))] for s in range(num_stages)]
        for stage, weights in zip(stages, used):
            activation = functional_call(stage, weights, (activation,))
        loss = loss_of(activation, wanted)
        losses.append(loss.item())
        found = iter(torch.autograd.grad(loss, [w for weights in used for w in weights.values()]))
        for made in versions:
            newest = {
                name: (weight - rate * next(found)).detach().requires_grad_()
                for name, weight in made[-1].items()
            }
            made.append(newest)
    return [made[-1] for made in versions], losses


def main():
    """Train on this rank, and compare with one process if --verify asks for it."""
    torch.set_num_threads(1)
    rank, p = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if not 0 <= rank < p:  # torch would wait for a minute
        sys.exit(f"RANK is {rank}, and WORLD_SIZE is {p}; start the ranks with torchrun")
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, use_libuv=False)  # also on Windows
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    rank, p = dist.get_rank(), dist.get_world_size()
    if p > LAYERS:
        sys.exit(f"{LAYERS} layers can be cut into at most {LAYERS} stages, not {p}")
    inputs, targets = zip(*map(batch, range(MINIBATCHES)))
    newest, losses = pipedream_run(build_stage(rank, p), inputs, targets, RATE)
    for k, loss in enumerate(losses) if rank == p - 1 else ():
        print(f"mini-batch {k:2}  loss {loss:.6f}", flush=True)
    if "--verify" in sys.argv:
        expected, wanted = run_of_one_process(p, inputs, targets, RATE)
        differences = [(newest[n] - w).abs().max().item() for n, w in expected[rank].items()]
        differences += [abs(a - b) for a, b in zip(losses, wanted)] if rank == p - 1 else []
        # A NaN differs from everything, and max() would drop it.
        largest = torch.tensor(differences, dtype=torch.float64).nan_to_num(nan=math.inf).max()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        if rank == p - 1:
            print(f"largest difference from one process: {largest.item():.1e}", flush=True)
        if largest > 1e-12:
            sys.exit("the difference should be at most 1e-12")
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--verify"]):
        sys.exit("weight_stash.py has the flag --verify and no other; leave the rest out")
    main()
