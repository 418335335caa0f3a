# SPDX-License-Identifier: Apache-2.0
"""A Plan: how the GPUs of a machine are used, and in which node each rank is."""

from dataclasses import dataclass
from functools import lru_cache

from pipeline.model import cut_evenly

V_SHAPED = ("zb-v", "v-half", "v-min", "dualpipe-v")


@dataclass(frozen=True)
class Plan:
    """`tensor` x `ranks` x `replicas` GPUs, each pipeline with `schedule`.

    `tensor` GPUs share every layer and are neighbours in a node. `neighbours` says what fills the
    rest of a node: the "stages" of one pipeline, or the "replicas" of one stage, as Megatron-LM
    orders them. `recompute` is "none", "selective" (attention's scores), "operator" (attention's
    result and every second matrix product are stored, the rest is recomputed) or "full".

    `sharding` over the replicas: "none", "optimizer" (ZeRO-1: its state), "gradients" (ZeRO-2: also
    the gradients, scattered after each backward), "full" (FSDP2: weights, gradients and state;
    weights are gathered for each forward and each backward, gradients scattered after each
    backward), or "hybrid": full within a node, copies of that between nodes. Without `reshard` the
    weights are gathered once per update and kept. `scatters` says that ZeRO-1 sums its gradients by
    a reduce-scatter (Megatron's distributed optimizer), not by an all-reduce as in this course.

    `cut` has the layers of each stage; without it they are cut evenly. `gradient_bytes` is 2 where
    gradients are summed in 16 bits, as Megatron-LM did in 2021: then a weight costs 16 bytes with
    AdamW. With sums in 32 bits, as in this course's own training runs, it costs 18.
    `gathered_bytes` is the size of a weight in a gather of FSDP.

    `kernels` says what a layer stores: the tensors of "plain" torch, or those of "fused" kernels,
    which store no intermediate of a norm or of a gate. If not `loss_in_pieces`, the loss has all
    scores at once, in 16 and in 32 bits, and their gradients. With `precision` "fp8" the products of
    the layers run at the machine's rate for FP8; attention and the head stay in 16 bits. With
    `flash_2` fused attention is FlashAttention 2, and not the newest kernel of the GPU. With
    `overlapped_tensor` the sums over a tensor group overlap with the products beside them.
    """

    schedule: str = "1f1b"
    ranks: int = 1
    chunks: int = 1
    replicas: int = 1
    tensor: int = 1
    microbatch: int = 1
    recompute: str = "none"
    sharding: str = "none"
    neighbours: str = "stages"
    cut: tuple = ()
    fused_attention: bool = True
    flash_2: bool = False
    sequence_parallel: bool = True  # where tensor > 1
    overlapped_tensor: bool = False  # asynchronous tensor parallelism
    overlap: bool = True  # sums of gradients run beside the last backward
    gradient_bytes: int = 4  # of a summed gradient
    gathered_bytes: int = 2
    reshard: bool = True
    scatters: bool = False
    kernels: str = "plain"
    loss_in_pieces: bool = True
    precision: str = "bf16"

    @property
    def gpus(self):
        return self.tensor * self.ranks * self.replicas

    @property
    def stages(self):
        return self.ranks * self.chunks

    def rank_of(self, stage):
        """The rank of a stage: stages go round the ranks in loops, or there and back in a V."""
        turn = stage // self.ranks % 2 == 1 and self.schedule in V_SHAPED
        return self.ranks - 1 - stage % self.ranks if turn else stage % self.ranks

    def stages_of(self, rank):
        """The stages of a rank, by index."""
        chunks = range(self.chunks)
        if self.schedule not in V_SHAPED:
            return [chunk * self.ranks + rank for chunk in chunks]
        there = (rank, self.ranks - 1 - rank)
        return [chunk * self.ranks + there[chunk % 2] for chunk in chunks]

    def microbatches(self, model):
        """The number of micro-batches per update of one replica."""
        return model.batch // (self.replicas * self.microbatch)

    def layers_of(self, model):
        """How many layers each stage has, by index."""
        if self.cut:
            return list(self.cut)
        return list(even_cut(model.layers, self.stages))

    def replicas_in_node(self, machine):
        """How many replicas of one stage share a node."""
        groups = max(machine.gpus_per_node // self.tensor, 1)
        if self.neighbours == "stages":
            groups //= self.ranks
        return min(max(groups, 1), self.replicas)

    def is_far(self, machine, source, destination):
        """Whether two ranks of a pipeline are in different nodes, for the first replica."""
        step = self.tensor * (1 if self.neighbours == "stages" else self.replicas)
        nodes = [rank * step // machine.gpus_per_node for rank in (source, destination)]
        return nodes[0] != nodes[1]

    def senders(self, machine):
        """How many GPUs of a node send to another node when stages send an activation."""
        if self.neighbours == "stages":
            return self.tensor
        return min(machine.gpus_per_node, self.tensor * self.replicas)


@lru_cache(maxsize=10_000)
def even_cut(layers, stages):
    """The number of layers of each stage, as even as they go: a tuple."""
    return tuple(last - first for first, last in cut_evenly(layers, stages))


@lru_cache(maxsize=10_000)
def balanced_cut(model, stages):
    """The number of layers of each stage that minimizes the time of the slowest: a tuple."""
    return model.balanced_cut(stages)
