"""The least that a rank can do: import torch, join the process group, meet the others, leave.

What gpipe.py's cold start is compared with. Started by benchmark.py.
"""

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
