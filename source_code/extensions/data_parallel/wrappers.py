# SPDX-License-Identifier: Apache-2.0
"""DDP and FSDP2 around the stages of a pipeline, told which backward is a stage's last.

Both were made for a model that runs one forward and one backward per step. In a pipeline a stage
runs forward and backward for every micro-batch, and its gradients are complete only after the last
backward, so both must wait until then. torch.distributed.pipelining takes the same steps inside its
stages; this module shows them.

DDP and FSDP2 average gradients by default. Here a micro-batch's loss is its share of the whole
batch over all replicas, so both are configured to sum instead.
"""

from contextlib import contextmanager, nullcontext

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from extensions.data_parallel.replicas import last_backwards


def add_up(group, bucket):
    """DDP's communication hook: the sum of a bucket of gradients over `group`."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def awaiting_peers(replicas, what):
    """Return the context of work in which DDP or FSDP2 waits for the ranks with the same stages."""
    following = replicas.peers[(replicas.replica + 1) % replicas.count]
    return replicas.job.waiting(following, what)


class WithDDP:
    """Sums gradients by DistributedDataParallel, in buckets, within a stage's last backward.

    DDP counts gradients by hooks on autograd's accumulation. A split backward accumulates weight
    gradients without autograd, so no hook runs: reject such a schedule beforehand.
    """

    def __init__(self, replicas, schedule):
        self.replicas = replicas
        self.last = last_backwards(schedule, replicas.job.rank)
        self.parts = {}

    def wrap(self, part, index):
        """Return `part` inside DDP, which gives its parameters' names the prefix `module.`."""
        group = self.replicas.mesh.get_group("replica")
        if not any(weight.requires_grad for weight in part.parameters()):
            return part  # DDP rejects a module without gradients
        self.parts[index] = DistributedDataParallel(part, process_group=group)
        self.parts[index].register_comm_hook(group, add_up)
        return self.parts[index]

    @contextmanager
    def around(self, action):
        """Return the context of each action of the worker."""
        part = self.parts.get(action.stage)
        if part is None or action not in self.last:
            with part.no_sync() if part else nullcontext():
                yield
            return
        # A forward outside of no_sync would make DDP take the next backward for the last, and with
        # several micro-batches in flight it is not. So this line makes the call that such a forward
        # would make, right before the last backward; the call has no public name.
        part.reducer.prepare_for_backward([])
        with awaiting_peers(self.replicas, f"its gradients of stage {action.stage}"):
            yield

    def finish(self):
        """Nothing to wait for: the last backward has waited for the sums."""


NEEDS_WEIGHTS = "FBI"  # W needs no weights, only what I has kept


class WithFSDP2:
    """Shards weights, gradients and the optimizer's state over the replicas, by `fully_shard`.

    Each rank keeps 1 / replicas of its stages between steps. Within a step, a stage's weights are
    gathered once and stay whole until its last backward.
    """

    def __init__(self, replicas, schedule):
        self.replicas = replicas
        self.last = last_backwards(schedule, replicas.job.rank)
        self.parts = {}

    def wrap(self, part, index):
        """Return `part` itself, whose parameters are now sharded and keep their names."""
        mesh = self.replicas.mesh["replica"]
        for module in [*part.layers.values(), part]:
            fully_shard(module, mesh=mesh, reshard_after_forward=False)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo rejects other factors in float32
        self.parts[index] = part
        return part

    @contextmanager
    def around(self, action):
        """Return the context of each action of the worker."""
        part = self.parts[action.stage]
        is_last = action in self.last
        if action.kind in NEEDS_WEIGHTS:
            self.collect(part)  # does nothing if they are whole
        if action.kind in "BI":
            part.set_is_last_backward(is_last)
            part.set_reshard_after_backward(is_last)
            part.set_requires_gradient_sync(is_last)
        if not is_last:
            yield
            return
        with awaiting_peers(self.replicas, f"its gradients of stage {action.stage}"):
            yield
            if action.kind == "W":
                reduce_now(part)

    def collect(self, part):
        """Gather the whole weights of a part from the replicas by all-gather."""
        with awaiting_peers(self.replicas, "its shards of the weights"):
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()

    def finish(self):
        """Nothing to wait for: the last backward has waited for the sums."""


def reduce_now(part):
    """Run FSDP2's reduction after the last backward, for gradients that autograd did not add.

    After a split backward no autograd hook starts the reduction. The names are private;
    torch.distributed.pipelining uses them in the same way (PipelineStage.perform_reduce_grad).
    """
    part.set_is_last_backward(True)
    part.set_reshard_after_backward(True)
    part.set_requires_gradient_sync(True)
    state = fully_shard.state(part)
    for each in state._state_ctx.all_states:
        several = hasattr(each, "_fsdp_param_groups")  # torch 2.11 has one, or None
        for group in each._fsdp_param_groups if several else [each._fsdp_param_group]:
            if group is not None:
                group.post_backward()
    state._root_post_backward_final_callback()
