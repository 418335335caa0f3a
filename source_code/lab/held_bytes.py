# SPDX-License-Identifier: Apache-2.0
"""How many bytes each rank of a training run holds: weights, gradients, optimizer, activations."""

from dataclasses import dataclass

from pipeline.collectives import gather


def print_held_bytes(job, stages, masters, optimizer, activations):
    """Print a table of what each rank holds, see `measure_memory`. All ranks call it."""
    own = measure_memory(stages, masters, optimizer, activations)
    rows = gather(job, vars(own))  # ranks exchange plain data, no objects: see unpickling.py
    if job.rank == 0:
        print(memory_table({"measured": [RankMemory(**row) for row in rows]}))


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank, at the peak of its activations.

    `optimizer` has the optimizer's states and any float32 copies of the weights.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self):
        return self.weights + self.gradients + self.optimizer + self.activations


def measure_memory(stages, masters, optimizer, activations):
    """The RankMemory of this rank, counted from its tensors; call it before gradients are freed.

    `stages` are those that compute, and `masters` the parts that are updated, which may be the same.
    `activations` is the peak of an ActivationMemory, in bytes.
    """

    def bytes_of(tensors):
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    computing = [weight for stage in stages for weight in stage.part.parameters()]
    updated = [weight for part in masters for weight in part.parameters()]
    both = {id(weight): weight for weight in computing + updated}.values()
    apart = list(both)[len(computing) :]
    gradients = [weight.grad for weight in both if weight.grad is not None]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return RankMemory(
        bytes_of(computing), bytes_of(gradients), bytes_of(states) + bytes_of(apart), activations
    )


def memory_table(memories):
    """A table in MiB, as text. `memories` maps titles to lists with a RankMemory per rank."""
    columns = ["weights", "gradients", "optimizer", "activations", "total"]
    lines = ["MiB" + " " * 16 + "".join(f"{name:>12}" for name in columns)]
    for rank, of_rank in enumerate(zip(*memories.values())):
        for title, memory in zip(memories, of_rank):
            numbers = "".join(f"{getattr(memory, name) / 2**20:12.3f}" for name in columns)
            lines.append(f"rank {rank:<3} {title:10}" + numbers)
    return "\n".join(lines)
