"""How often FSDP2 gathers the weights of a stage, predicted from the schedule and counted."""

import runpy
import sys
from unittest import mock

import pytest
from ranks import PRELOAD, run_on_ranks

from course.launch import SCRIPTS
from extensions.planning.bytes_sent import weight_gathers
from extensions.planning.footprint import count_weights
from pipeline.model import ModelConfig, cut_evenly
from pipeline.schedules import build_schedule

PRELOAD.extend(["torch.distributed.fsdp", "torch.distributed.device_mesh"])
SIZES = "--layers 4 --dim 16 --heads 4 --kv-heads 2 --seq-len 8 --steps 2 --batch-size 8"
CONFIG = ModelConfig(4, 16, 4, 2, 8)


def gathers(name, ranks, m, gathered):
    order = build_schedule(name, ranks, m).orders[0]
    return list(weight_gathers(order, gathered).values())


@pytest.mark.parametrize(
    ("name", "turn", "action"),
    [
        ("gpipe", [1], [16]),
        ("1f1b", [1], [16]),
        ("zb-h1", [1], [16]),
        ("looped-bfs", [2, 1], [16, 16]),
        ("interleaved-1f1b", [6, 5], [16, 16]),
    ],
)
def test_gathers_of_rank_0_of_4_with_8_micro_batches(name, turn, action):
    assert gathers(name, 4, 8, "step") == [1] * len(turn)
    assert gathers(name, 4, 8, "turn") == turn
    assert gathers(name, 4, 8, "action") == action


def train_and_count(rank, flags):
    """(bytes that FSDP2 gathered on this rank, what it trained to) of a run of the script."""
    import torch.distributed as dist

    gathered = []
    original = dist.all_gather_single

    def counting(output, *rest, **options):
        gathered.append(output.numel() * output.element_size())
        return original(output, *rest, **options)

    sys.path.insert(0, str(SCRIPTS))
    sys.argv = ["pipeline_with_data_parallel.py", *flags.split()]
    with mock.patch.object(dist, "all_gather_single", counting):
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPTS / "pipeline_with_data_parallel.py"), run_name="__main__")
    return sum(gathered), ended.value.code


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "gathered"),
    [
        ("gpipe", "turn"),
        ("1f1b", "action"),
        ("interleaved-1f1b", "turn"),
        ("looped-bfs", "turn"),
        ("zb-h1", "action"),
    ],
)
def test_the_bytes_of_gathered_weights_are_counted_as_predicted_and_no_digit_moves(name, gathered):
    """Two replicas of two ranks; --verify compares with one process to 1e-12."""
    flags = f"{SIZES} --replicas 2 --microbatches 2 --reduce fsdp2 --verify --device cpu"
    flags += f" --schedule {name} --gathered {gathered}"
    found = run_on_ranks(train_and_count, 4, flags, timeout=90)
    schedule = build_schedule(name, 2, 2)
    cut = cut_evenly(CONFIG.layers, schedule.num_stages)
    for rank, (counted, code) in enumerate(found):
        times = weight_gathers(schedule.orders[rank % 2], gathered)
        weights = {stage: count_weights(CONFIG, *cut[stage])[0] for stage in times}
        predicted = 2 * 8 * sum(times[stage] * weights[stage] for stage in times)  # two steps
        assert (counted, code) == (predicted, 0), f"rank {rank}"
