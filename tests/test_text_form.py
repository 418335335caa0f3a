"""The text form travels both ways: torch's runtime performs our files, our worker torch's orders.

On real ranks, with the losses of one process training the whole model.
"""

import json

import pytest
from further import first_of
from test_equals_one_process import SGD, one_process
from torch_orders import torch_order

from course.launch import PRELOAD, run
from pipeline.schedules import build_schedule
from pipeline.schedules.text_form import from_csv, to_csv

PRELOAD.append("torch.distributed.pipelining")  # else every rank spends seconds on importing it

OURS = [  # schedule, ranks, micro-batches, chunks
    ("gpipe", 4, 8, None),
    ("1f1b", 4, 8, None),
    ("interleaved-1f1b", 4, 8, 2),
    ("looped-bfs", 2, 4, 3),
    ("zb-h1", 4, 8, None),
    ("zb-h2", 4, 8, None),
    ("zb-v", 4, 8, 2),
    ("zb-v", 2, 2, 2),
    ("dualpipe-v", 4, 8, 2),
    ("dualpipe-v", 2, 4, 2),
]
THEIRS = [  # torch's class, ranks, micro-batches, chunks
    ("GPipe", 4, 8, 1),
    ("Interleaved1F1B", 4, 8, 2),
    ("LoopedBFS", 2, 4, 3),
    ("InterleavedZeroBubble", 4, 8, 2),
    ("ZBVZeroBubble", 4, 8, 2),
    ("DualPipeV", 4, 8, 2),
]


def train(script, path, ranks, folder):
    """The losses of three steps, in full precision."""
    run(f"{script} {path} {SGD} --losses {folder}/losses", ranks, warm=True, show=False, limit=60)
    return [json.loads(row)["loss"] for row in (folder / "losses").read_text().splitlines()]


def largest_difference(losses, microbatches):
    reference = one_process(f"{SGD} --microbatches {microbatches}")["losses"]
    assert len(losses) == len(reference) == 3
    return max(abs(ours - theirs) for ours, theirs in zip(losses, reference))


@pytest.mark.further
@pytest.mark.parametrize("name, ranks, microbatches, chunks", first_of(OURS, 4))
def test_torchs_runtime_performs_our_file_and_takes_the_step_of_one_process(
    name, ranks, microbatches, chunks, tmp_path
):
    path = tmp_path / "ours.csv"
    path.write_text(to_csv(build_schedule(name, ranks, microbatches, chunks)))
    losses = train("../tests/torch_runtime.py", path, ranks, tmp_path)
    assert largest_difference(losses, microbatches) <= 1e-12


@pytest.mark.further
@pytest.mark.parametrize("name, ranks, microbatches, chunks", first_of(THEIRS, 3))
def test_our_worker_performs_torchs_order_and_takes_the_step_of_one_process(
    name, ranks, microbatches, chunks, tmp_path
):
    path = tmp_path / "theirs.csv"
    path.write_text(torch_order(name, ranks, microbatches, chunks))
    losses = train("train.py", path, ranks, tmp_path)
    assert largest_difference(losses, microbatches) <= 1e-12


def test_torchs_cells_of_two_actions_are_read_as_one_after_the_other():
    text = torch_order("DualPipeV", 2, 4, 2)
    assert "(0F3;3B1)OVERLAP_F_B" in text
    assert "0F3,3B1" in to_csv(from_csv(text))
    assert from_csv("0F0,( 0F1 ; 0B0 )OVERLAP_F_B,0B1").orders == from_csv("0F0,0F1,0B0,0B1").orders


def test_a_cell_of_two_actions_counts_as_two_steps_in_what_is_refused():
    with pytest.raises(ValueError, match="^rank 0, step 3: '0X1' is not an action"):
        from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0X1")
