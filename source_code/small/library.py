# SPDX-License-Identifier: Apache-2.0
"""A complete training with torch.distributed.pipelining and nothing else (lesson 08).

torchrun --standalone --nproc-per-node 4 library.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)

layers = []
for k in range(8 * rank // ranks, 8 * (rank + 1) // ranks):
    torch.manual_seed(k)  # the weights of layer k do not depend on the cut
    layers += [nn.Linear(16, 16, dtype=torch.float64), nn.Tanh()]
module = nn.Sequential(*layers)
stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(module.parameters(), lr=0.5)

for step in range(5):
    torch.manual_seed(step)  # the same batch on every rank
    inputs = torch.rand(16, 16, dtype=torch.float64)
    losses = []
    optimizer.zero_grad()
    if stage.is_first:
        schedule.step(inputs)
    elif stage.is_last:
        schedule.step(target=inputs.flip(1), losses=losses)
    else:
        schedule.step()
    optimizer.step()
    if stage.is_last:
        print(f"step {step}  loss {torch.stack(losses).mean():.6f}", flush=True)

dist.destroy_process_group()
