"""torch's flight recorder records unless it is told not to, and of gloo the collectives only."""

import json
import os

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks

from course import launch
from course.failed_run import RunFailed
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


@pytest.mark.processes
def test_the_pending_operation_of_one_rank_leads_to_the_rank_that_left_a_sum_out(tmp_path):
    with pytest.raises(RunFailed):
        launch.run(f"broken_skipped_sum.py --recorder {tmp_path}", warm=True, show=False)
    records = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)]
    last = [
        [(e["profiling_name"], e["process_group"][1], e["collective_seq_id"], e["retired"])
         for e in record["entries"]]
        for record in records
    ]  # fmt: skip
    pending = [[entry[:3] for entry in entries if not entry[3]] for entries in last]
    barrier = [("gloo:barrier", "default_pg", 3)]
    assert pending == [barrier, [("gloo:all_reduce", "replicas of stage 1", 2)], barrier, barrier]
    sums = [[e[2] for e in entries if e[1] == "replicas of stage 1"] for entries in last]
    assert sums == [[], [1, 2], [], [1]]  # rank 3 never came to the second


@pytest.mark.processes
def test_a_record_follows_no_link_and_the_rank_ends_all_the_same(tmp_path):
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "rank2.json").symlink_to("precious")
    with pytest.raises(RunFailed, match="rank2.json cannot be written"):
        launch.run(f"broken_skipped_sum.py --recorder {tmp_path}", warm=True, show=False, limit=60)
    assert (tmp_path / "precious").read_text() == "kept" and (tmp_path / "rank1.json").is_file()


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_is_rejected(tmp_path, ranks):
    with pytest.raises(RunFailed, match="start it with --nproc-per-node 4"):
        launch.run(f"broken_skipped_sum.py --recorder {tmp_path}", ranks, warm=True, show=False)
