"""The shortest script of a rank: import torch, join the process group, wait for all, leave.

benchmark.py starts it to compare the cold start of gpipe.py with it.
"""

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
