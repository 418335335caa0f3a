"""A training whose parameters are parts: a checkpoint has them as DTensors, torch's sharded tensors.

A DTensor says which part of a whole tensor a rank has. So torch.distributed.checkpoint writes whole
tensors, and another mesh, with other parts, reads from the same files.
"""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from extensions.checkpointing.checkpoint import Training
from extensions.tensor_parallel.sharded_part import split_dimension


@dataclass
class ShardedTraining(Training):
    """A Training over the ranks of `mesh`, the one dimension of a tensor group."""

    mesh: DeviceMesh = None

    def in_file(self, name, tensor):
        """A part of the parameter `name`, or of its optimizer's state, as what is saved of it."""
        dimension = split_dimension(name)
        if dimension is None or tensor.shape != self.parameters[name].shape:
            return tensor
        return DTensor.from_local(tensor, self.mesh, [Shard(dimension)], run_check=False)

    def from_file(self, tensor):
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor
