# SPDX-License-Identifier: Apache-2.0
"""One layer cut over two ranks by torch's own tensor parallelism, DTensor (lesson 10b).

torchrun --standalone --nproc-per-node 2 source_code/course/building/dtensor_layer.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from pipeline.model import FeedForward, ModelConfig, materialise

CONFIG = ModelConfig(dim=32)


def cut_by_torch(layer):
    """Cut a feed-forward network over all ranks: torch adds the collectives."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(layer, mesh, plan)


def build_layer():
    with torch.device("meta"):
        layer = FeedForward(CONFIG)
    return materialise(layer, CONFIG)


def main():
    """Compare forward and backward with the whole layer, and count the collectives."""
    dist.init_process_group("gloo")
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x.requires_grad_()
    whole, cut = build_layer(), cut_by_torch(build_layer())
    with CommDebugMode() as forward:
        ours = cut(x)
    with CommDebugMode() as backward:
        ours.sum().backward()
    gradient, x.grad = x.grad, None
    theirs = whole(x)
    theirs.sum().backward()
    same = torch.allclose(ours, theirs, 1e-12) and torch.allclose(gradient, x.grad, 1e-12)
    if dist.get_rank() == 0:
        print("a rank's part of up:", tuple(cut.up.weight.to_local().shape))
        print("collectives forward:", forward.get_total_counts())
        print("collectives backward:", backward.get_total_counts())
        print("the whole layer's output and gradient:", same)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
