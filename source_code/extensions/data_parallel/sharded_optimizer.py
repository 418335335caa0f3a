# SPDX-License-Identifier: Apache-2.0
"""An optimizer whose state lies in shards over the replicas: ZeRO's first stage.

AdamW keeps two numbers for each weight, and without sharding all replicas keep the same numbers.
Here each replica keeps them for its own rows of every weight and updates only those rows. Then all
replicas exchange the updated rows (Rajbhandari et al. 2020, arXiv 1910.02054, section 5.1). The
paper also scatters the sums of the gradients. Here every replica has all sums, because gradient
clipping and tied ends need them whole; the exchange of weights adds half as many bytes again.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from extensions.checkpointing.checkpoint import Training
from pipeline.one_process import build_optimizer


def add_sharding_flag(parser):
    """Add --sharding, with the names of plan.py."""
    what = "optimizer: each replica keeps the optimizer's state for its share of the weights"
    parser.add_argument("--sharding", choices=["none", "optimizer"], default="none", help=what)


def check_sharding(arguments):
    """Reject a sharding without optimizer state to shard, or with shards already."""
    if arguments.sharding == "none":
        return
    if arguments.replicas == 1:
        raise SystemExit(
            "--sharding optimizer needs replicas to share it; use --replicas 2 or more"
        )
    if arguments.reduce == "fsdp2":
        raise SystemExit(
            "--sharding optimizer with --reduce fsdp2, which has shards of its own; leave it out"
        )
    if arguments.optimizer == "sgd":
        raise SystemExit(
            "--sharding optimizer: --optimizer sgd keeps nothing; use momentum or adamw"
        )


def own_rows(tensor, replicas):
    """Return a view of this replica's rows of a tensor, maybe none; a scalar is not sharded."""
    if tensor.dim() == 0:
        return tensor
    size = -(-len(tensor) // replicas.count)  # as torch.chunk and a DTensor divide it
    return tensor[size * replicas.replica :][:size]


class ShardedOptimizer:
    """An optimizer of `build_optimizer` over this replica's rows of `parameters`, by name.

    Every replica calls `step`. `state` is keyed by `shards`, which share the parameters' memory.
    """

    def __init__(self, replicas, name, parameters, learning_rate, **options):
        self.replicas, self.parameters = replicas, dict(parameters)
        self.shards = {
            key: nn.Parameter(own_rows(weight.detach(), replicas))
            for key, weight in self.parameters.items()
        }
        self.optimizer = build_optimizer(name, self.shards.values(), learning_rate, **options)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        self.defaults = getattr(self.optimizer, "defaults", {})

    def zero_grad(self):
        for weight in self.parameters.values():
            weight.grad = None

    @torch.no_grad()
    def step(self):
        """Update this replica's rows, and copy in the rows that other replicas updated."""
        for key, weight in self.parameters.items():
            gradient = weight.grad
            self.shards[key].grad = None if gradient is None else own_rows(gradient, self.replicas)
        self.optimizer.step()
        for shard in self.shards.values():
            shard.grad = None
        self.exchange()

    def exchange(self):
        """Replace all other rows by those of the replicas that updated them, in one collective."""
        weights = [weight for weight in self.parameters.values() if weight.dim()]
        if not weights:
            return
        replicas = self.replicas
        job, count = replicas.job, replicas.count
        rows = [-(-len(weight) // count) for weight in weights]
        room = [size * weight[0].numel() for size, weight in zip(rows, weights)]
        own = torch.zeros(sum(room), dtype=weights[0].dtype, device=job.wire)
        for part, weight in zip(own.split(room), weights):
            mine = own_rows(weight, replicas).flatten()
            part[: len(mine)] = mine
        everyone = [torch.empty_like(own) for _ in range(count)]
        following = replicas.peers[(replicas.replica + 1) % count]
        with job.waiting(following, "its rows of the weights"):
            dist.all_gather(everyone, own, group=job.groups[replicas.peers])
        for replica, theirs in enumerate(everyone):
            for part, weight, size in zip(theirs.split(room), weights, rows):
                place = weight[size * replica :][:size]
                place.copy_(part[: place.numel()].view_as(place))


class TrainingInShards(Training):
    """A Training with a ShardedOptimizer. A checkpoint stores its state for whole parameters, so
    a run can continue with any number of replicas, or without shards."""

    def updated(self, name):
        return self.optimizer.shards[name]

    def state_in_file(self, name, tensor):
        """Return a shard as a DTensor, which torch.distributed.checkpoint joins to the whole."""
        whole = self.parameters[name]
        if tensor.dim() == 0:
            return tensor
        mesh = self.optimizer.replicas.mesh["replica"]
        shape = {"shape": whole.shape, "stride": whole.stride()}
        return DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False, **shape)

    def from_file(self, tensor):
        """Return this replica's rows of a DTensor, or of a whole tensor."""
        if isinstance(tensor, DTensor):
            return tensor.to_local()
        return own_rows(tensor, self.optimizer.replicas).clone()
