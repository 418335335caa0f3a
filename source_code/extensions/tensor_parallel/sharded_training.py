# SPDX-License-Identifier: Apache-2.0
"""A training run with sharded parameters, which a checkpoint stores as DTensors.

A DTensor records which part of a whole tensor a rank has. So torch.distributed.checkpoint writes
whole tensors, and a run on another mesh reads its own parts from the same files.
"""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from extensions.checkpointing.checkpoint import Training
from extensions.optimization.learning_rate import ConstantRate
from extensions.tensor_parallel.sharded_part import split_dimension
from pipeline.collectives import Summing
from pipeline.one_process import build_optimizer


@dataclass
class ShardedTraining(Training):
    """A Training over the ranks of `mesh`, the one dimension of a tensor group."""

    mesh: DeviceMesh = None

    def in_file(self, name, tensor):
        """Return a part of the parameter `name`, or of its optimizer state, in saved form."""
        dimension = split_dimension(name)
        if dimension is None or tensor.shape != self.parameters[name].shape:
            return tensor
        return DTensor.from_local(tensor, self.mesh, [Shard(dimension)], run_check=False)

    def from_file(self, tensor):
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def build_training(arguments, stages, mesh):
    """Return the Training of this rank, with parameters by their names in the whole model."""
    a = arguments
    parameters = dict(pair for stage in stages.values() for pair in stage.part.named_parameters())
    optimizer = build_optimizer(a.optimizer, parameters.values(), a.learning_rate)
    return ShardedTraining(
        parameters, optimizer, ConstantRate(), a.configuration, a.seed, mesh=mesh["tensor"]
    )


def sum_whole_gradients(job, group, parameters):
    """Add up the gradients of the norms, which are whole on every rank, over the tensor group.

    If the sequence is split, each rank has the gradient of its part of the sequence. Otherwise all
    ranks already have the same gradient.
    """
    if group.splits_sequence:
        whole = [p.grad for name, p in parameters.items() if split_dimension(name) is None]
        if whole:
            Summing(job, whole, group.ranks, "its gradients of the norms").wait()


def named_for_norm(parameters, group):
    """Return the parameters by name; parts of one matrix get different names on each rank."""
    return [
        (name if split_dimension(name) is None else f"{name}, part {group.index}", parameter)
        for name, parameter in parameters.items()
    ]
