"""Saves a training, whole or not at all, and continues it, also on another number of ranks."""

import os
import shutil
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as by_name

FLAT = by_name.StateDictOptions(flatten_optimizer_state_dict=True)  # memory by name


class Checkpoints:
    """FOLDER/step-N is a whole checkpoint, because it has this name. All ranks make all calls."""

    def __init__(self, job, folder, part, optimizer):
        self.job, self.folder, self.owners = job, Path(folder), (part, optimizer)

    def state(self, step):
        """Weights and the optimizer's memory, by their names in the whole model."""
        model, memory = by_name.get_state_dict(*self.owners, options=FLAT)
        return {"model_state_dict": model, "optim_state_dict": memory, "step": step}

    def restore(self):
        """Continue from the newest checkpoint; returns how many steps it has, 0 if there is none."""
        found = sorted(self.folder.glob("step-*"))
        if not found:
            return 0
        state = self.state(0)
        dcp.load(state, checkpoint_id=found[-1])
        step = state.pop("step")
        by_name.set_state_dict(*self.owners, **state, options=FLAT)
        if self.job.rank == 0:
            print(f"continues after {step} steps, from {found[-1]}", flush=True)
        return step

    def save(self, step):
        """Write under a name that nobody looks for; then one rename makes it exist."""
        writing, name = self.folder / ".writing", self.folder / f"step-{step:08}"
        if self.job.rank == 0:
            shutil.rmtree(writing, ignore_errors=True)  # of a crash
        dist.barrier()
        dcp.save(self.state(step), storage_writer=dcp.FileSystemWriter(writing, sync_files=True))
        if self.job.rank == 0:
            os.rename(writing, name)
        dist.barrier()
