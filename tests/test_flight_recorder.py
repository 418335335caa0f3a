"""torch's flight recorder records unless it is told not to, and of gloo the collectives only."""

import json
import os

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks

from pipeline.job import join_job


def recorded(rank, size):
    """What the flight recorder has after a message and a barrier, with TORCH_FR_BUFFER_SIZE."""
    from torch._C._distributed_c10d import _dump_fr_trace_json

    if size is not None:
        os.environ["TORCH_FR_BUFFER_SIZE"] = size
    job = join_job("cpu", timeout=20, pairs=[(0, 1)])
    (dist.send if rank == 0 else dist.recv)(torch.ones(2), 1 - rank)
    dist.barrier()
    names = [
        each["profiling_name"] for each in json.loads(_dump_fr_trace_json()).get("entries", [])
    ]
    job.leave()
    return names


@pytest.mark.processes
def test_it_records_without_a_variable_and_knows_no_message_of_gloo():
    for names in run_on_ranks(recorded, 2, None):
        assert "gloo:barrier" in names
        assert not any("send" in name or "recv" in name for name in names)


@pytest.mark.processes
def test_it_records_nothing_with_a_buffer_of_size_0():
    assert run_on_ranks(recorded, 2, "0") == [[], []]
