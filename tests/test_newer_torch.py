"""What torch 2.14 and 2.15 added to the library, as the page of errors says it, each under its version.

The small pipeline is that of the traps: four layers, float64, gradients beside one process.
"""

from inspect import signature
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import PRELOAD, run_on_ranks
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from broken.torch_pipelining import small_pipeline as small
from extensions.torch_pipelining.library import (
    LOOPS,
    V_SHAPED,
    schedule_as_data,
    stages_of_rank,
)
from lab.simulator import Costs, simulate
from pipeline.job import join_job

PRELOAD.extend(["torch.distributed.pipelining", "extensions.torch_pipelining.library"])
SINCE_2_14, SINCE_2_15 = torch.__version__ >= (2, 14), torch.__version__ >= (2, 15)
REDUCE = "reduce_scatter_single" if torch.__version__ >= (2, 13) else "reduce_scatter_tensor"
STEP = signature(pipelining.ScheduleGPipe.step).parameters


def join():
    return join_job("cpu", timeout=30, pairs=[])


def cut_by_the_caller(rank, rows):
    """Step over micro-batches of `rows` each; how far gradients are off, or the last error."""
    job = join()
    parts = small.build_own_stages(job)
    schedule, stages = small.build_schedule(job, parts, microbatches=len(rows))
    inputs, targets = (tensor[: sum(rows)].split(rows) for tensor in small.draw_batch())
    own = {"arg_mbs": [(each,) for each in inputs]} if rank == 0 else {"target_mbs": list(targets)}
    problem = None
    try:
        schedule.step(**own, return_outputs=False)
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        problem = str(error)
    job.leave()
    wanted = small.compute_reference_gradients()[4 * rank : 4 * rank + 4]
    return problem or largest_difference(parts[rank].parameters(), wanted)


def largest_difference(parameters, wanted):
    return max((mine.grad - one).abs().max().item() for mine, one in zip(parameters, wanted))


def test_since_2_14_the_caller_may_cut_the_micro_batches_and_they_must_be_equal():
    assert ("arg_mbs" in STEP) == SINCE_2_14
    if SINCE_2_14:
        assert max(run_on_ranks(cut_by_the_caller, 2, [2, 2, 2, 2])) < 1e-12
        errors = run_on_ranks(cut_by_the_caller, 2, [2, 2, 2, 1])
        assert "Mismatch in shape" in errors[0]


def two_steps_for_one_update(rank, first_step):
    """Two steps of 2 stages x 2 replicas with FSDP; the difference, and how often one reduces."""
    job = join()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    replica, stage = mesh.get_coordinate()
    pipe = SimpleNamespace(rank=stage, num_ranks=2, device=job.device)
    parts = small.build_own_stages(pipe)
    fully_shard(parts[stage], mesh=mesh["replica"])
    group = mesh.get_group("stage")
    schedule, stages = small.build_schedule(pipe, parts, microbatches=2, rows=4, group=group)
    with mock.patch.object(dist, REDUCE, side_effect=getattr(dist, REDUCE)) as reductions:
        for seed in range(2):
            own = (rows.chunk(2)[replica] for rows in small.draw_batch(seed=seed))
            small.run_step(schedule, stages, *own, **(first_step if seed == 0 else {}))
    wanted = small.compute_reference_gradients(batches=2)[4 * stage : 4 * stage + 4]
    whole = [parameter.grad.full_tensor() for parameter in parts[stage].parameters()]
    difference = max((mine - one).abs().max().item() for mine, one in zip(whole, wanted))
    job.leave()
    return difference, reductions.call_count


def test_since_2_15_fsdp_reduces_once_for_several_steps_and_divides_once():
    assert ("finalize_gradients" in STEP) == SINCE_2_15
    for difference, reductions in run_on_ranks(two_steps_for_one_update, 4, {}):
        assert difference > 1e-3, "the trap accumulation, with FSDP, too"
        assert reductions == 2
    if SINCE_2_15:
        later = {"finalize_gradients": False}
        for difference, reductions in run_on_ranks(two_steps_for_one_update, 4, later):
            assert difference < 1e-12
            assert reductions == 1


def slots(rank, name):
    """How many activations each of 4 ranks holds at once, by the library's own analysis."""
    job = join()
    parts = {index: torch.nn.Identity() for index in stages_of_rank(name, rank, 4, 2)}
    schedule, _ = small.build_schedule(job, parts, name, microbatches=8)
    job.leave()
    return [
        pipelining.analyze_pipeline_activation_liveness(
            schedule,
            pp_rank=one,
            stage_indices=stages_of_rank(name, one, 4, 2),
            granularity="stage_microbatch",
        ).num_slots
        for one in range(4)
    ]


@pytest.mark.parametrize("name", LOOPS + V_SHAPED)
def test_since_2_15_the_library_counts_what_a_rank_holds_as_the_simulator_does(name):
    assert hasattr(pipelining, "analyze_pipeline_activation_liveness") == SINCE_2_15
    if SINCE_2_15:
        timeline = simulate(schedule_as_data(name, 4, 8, 2), Costs(10, 20))
        counted = run_on_ranks(slots, 4, name)
        assert counted == [list(timeline.peak_held_until_weight_per_rank)] * 4


def on_own_communicators(rank):
    """As TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P=1 sets it; the pairs, and the difference."""
    torch.distributed.config.pipeline_per_edge_p2p = True
    job = join()
    parts = small.build_own_stages(job)
    schedule, stages = small.build_schedule(job, parts, "1F1B")
    small.run_step(schedule, stages, *small.draw_batch())
    wanted = small.compute_reference_gradients()[4 * rank : 4 * rank + 4]
    pairs = sorted(stages[0]._p2p_edge_groups)
    job.leave()
    return pairs, largest_difference(parts[rank].parameters(), wanted)


def test_since_2_15_there_may_be_one_communicator_per_ordered_pair():
    assert hasattr(torch.distributed.config, "pipeline_per_edge_p2p") == SINCE_2_15
    if SINCE_2_15:
        for pairs, difference in run_on_ranks(on_own_communicators, 2):
            assert pairs == [(0, 1), (1, 0)]
            assert difference < 1e-12
