"""How often FSDP2 gathers the weights of a stage."""

import runpy
import sys
from unittest import mock

import pytest
from ranks import PRELOAD, run_on_ranks

from course.launch import SCRIPTS
from extensions.pretraining.weight_count import count_weights
from pipeline.model import ModelConfig, cut_evenly
from pipeline.schedules import build_schedule

PRELOAD.extend(["torch.distributed.fsdp", "torch.distributed.device_mesh"])
SIZES = "--layers 4 --dim 16 --heads 4 --kv-heads 2 --seq-len 8 --steps 2 --batch-size 8"
CONFIG = ModelConfig(4, 16, 4, 2, 8)


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
@pytest.mark.parametrize("name", ["gpipe", "interleaved-1f1b", "zb-h1"])
def test_each_weight_is_gathered_once_per_step_and_no_digit_moves(name):
    """Two replicas of two ranks; --verify compares with one process to 1e-12."""
    flags = f"{SIZES} --replicas 2 --microbatches 2 --reduce fsdp2 --verify --device cpu"
    found = run_on_ranks(train_and_count, 4, f"{flags} --schedule {name}", timeout=90)
    schedule = build_schedule(name, 2, 2)
    cut = cut_evenly(CONFIG.layers, schedule.num_stages)
    for rank, (counted, code) in enumerate(found):
        weights = sum(count_weights(CONFIG, *cut[s])[0] for s in schedule.stages_of(rank % 2))
        assert (counted, code) == (2 * 8 * weights, 0), f"rank {rank}"  # two steps
