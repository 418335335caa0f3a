"""Every synchronous schedule is performed by real processes and takes the step of one process.

Several stages per rank, loops and V's, backwards in halves: the losses and gradients are those of the
whole model, and the ranks take exactly the actions of the schedule.
"""

import json

import pytest
from further import first_of
from test_equals_one_process import ADAMW, SGD, one_process

from course.failed_run import RunFailed
from course.launch import run
from lab.simulator import Costs, simulate
from pipeline.schedule import Action
from pipeline.schedules import build_schedule, synchronous_schedules, zb_h1
from pipeline.schedules.text_form import to_csv

ANY = "train.py"  # by the worker; the others are the loop of one schedule, by hand
INTERLEAVED, ZERO = "interleaved_1f1b.py", "zero_bubble.py"
TWELVE = "--layers 12"
OTHER_SIZES = [  # script, schedule, ranks, micro-batches, chunks, further flags
    (INTERLEAVED, "interleaved-1f1b", 2, 6, 3, ""),
    (ZERO, "zb-h1", 3, 2, None, ""),
    (INTERLEAVED, "interleaved-1f1b", 1, 4, 2, ""),
    (INTERLEAVED, "interleaved-1f1b", 3, 3, 4, TWELVE),
    (INTERLEAVED, "interleaved-1f1b", 4, 8, 2, ""),
    (ANY, "interleaved-1f1b", 2, 6, 3, ""),
    (ANY, "interleaved-1f1b", 3, 3, 4, TWELVE),
    (ANY, "looped-bfs", 4, 3, 2, ""),
    (ANY, "looped-bfs", 2, 8, 4, ""),
    (ZERO, "zb-h1", 4, 8, None, ""),
    (ZERO, "zb-h2", 2, 1, None, ""),
    (ZERO, "zb-h2", 4, 8, None, ""),
    (ANY, "zb-h1", 3, 2, None, ""),
    (ANY, "zb-h2", 2, 1, None, ""),
    (ANY, "zb-v", 2, 2, 2, ""),
    (ANY, "dualpipe-v", 3, 6, 2, ""),
]


def train(script, ranks, flags, folder):
    """Losses in full precision, and the order of actions that each rank took."""
    run(
        f"{script} {flags} --losses {folder}/losses --timeline {folder}/timeline",
        ranks=ranks,
        warm=True,
        show=False,
        limit=60,
    )
    rows = [json.loads(row) for row in (folder / "losses").read_text().splitlines()]
    events = json.loads((folder / "timeline").read_text())["traceEvents"]
    orders = [[] for _ in range(ranks)]
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda event: event["ts"]):
        orders[event["pid"]].append(Action(**event["args"]))
    return [row["loss"] for row in rows], tuple(map(tuple, orders))


def largest_difference(losses, flags):
    reference = one_process(flags)["losses"]
    assert len(losses) == len(reference) == 3
    return max(abs(ours - theirs) for ours, theirs in zip(losses, reference))


@pytest.mark.parametrize("ranks", first_of([4, 2], 1))
@pytest.mark.parametrize("name", synchronous_schedules())
def test_losses_are_those_of_one_process_and_actions_those_of_the_schedule(name, ranks, tmp_path):
    flags = f"{SGD} --microbatches {2 * ranks}"
    losses, orders = train(f"{ANY} --schedule {name}", ranks, flags, tmp_path)
    assert largest_difference(losses, flags) <= 1e-12
    assert orders == build_schedule(name, ranks, 2 * ranks).orders


@pytest.mark.parametrize(
    ("script", "name", "ranks", "microbatches", "chunks", "more"), first_of(OTHER_SIZES, 2)
)
def test_so_are_they_for_other_numbers_of_microbatches_and_chunks(
    script, name, ranks, microbatches, chunks, more, tmp_path
):
    flags = f"{SGD} {more} --microbatches {microbatches}"
    own = "" if script == INTERLEAVED else f"--schedule {name}"
    own += f" --chunks {chunks}" if chunks else ""
    losses, orders = train(script, ranks, f"{flags} {own}", tmp_path)
    assert largest_difference(losses, flags) <= 1e-12
    schedule = build_schedule(name, ranks, microbatches, chunks)
    assert orders == schedule.orders


@pytest.mark.parametrize(
    ("script", "name"), first_of([(ANY, "zb-v"), (ZERO, "zb-h1"), (ANY, "zb-h1")], 1)
)
def test_adamw_takes_the_gradients_of_both_halves(script, name, tmp_path):
    flags = f"{ADAMW} --microbatches 8"
    losses, _ = train(script, 4, f"{flags} --schedule {name}", tmp_path)
    assert largest_difference(losses, flags) <= 1e-12


def test_an_option_of_the_generator_changes_the_order_and_no_digit_that_is_promised(tmp_path):
    flags = f"{SGD} --microbatches 8"
    losses, orders = train(f"{ANY} --schedule 1f1b --option depth=2", 4, flags, tmp_path)
    assert largest_difference(losses, flags) <= 1e-12
    assert orders == build_schedule("1f1b", 4, 8, depth=2).orders
    assert orders != build_schedule("1f1b", 4, 8).orders


def test_a_schedule_from_a_file_is_performed(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text(to_csv(zb_h1(4, 8)))
    flags = f"{SGD} --microbatches 8"
    losses, orders = train(f"train.py {file}", 4, SGD, tmp_path)
    assert largest_difference(losses, flags) <= 1e-12
    assert orders == zb_h1(4, 8).orders


def test_a_file_may_place_stages_and_mix_whole_and_halved_backwards_as_it_likes(tmp_path):
    file = tmp_path / "mine.csv"
    # Rank 1 has the two stages in the middle, rank 0 both ends.
    file.write_text("0F0,0F1,3F0,3I0,3F1,3B1,3W0,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1I0,2B1,1B1,1W0\n")
    flags = f"{SGD} --microbatches 2"
    losses, _ = train(f"train.py {file}", 2, SGD, tmp_path)
    assert largest_difference(losses, flags) <= 1e-12


@pytest.mark.parametrize(
    ("text", "flags", "sentence"),
    first_of(
        [
            (
                "0F0,0B0\n",
                "",
                "mine.csv is for 1 ranks, one per row, and this job has 2; start it with",
            ),
            ("0F0,0B0\n1F0\n", "", "rank 1 never runs the backward of micro-batch 0 on stage 1"),
            (
                "0F0,0B0\n1B0,1F0\n",
                "",
                "rank 1 runs the backward of micro-batch 0 on stage 1 at step",
            ),
            ("0F0,0X0\n1F0,1B0\n", "", "'0X0' is not an action"),
            ("0F0,0B0,0U0\n1F0,1B0,1U0\n", "", "has updates (U) in the middle of the step"),
            ("0F0,0B0\n1F0,1B0\n", "--microbatches 8", "--microbatches 8 contradicts"),
            (
                "0F0,0B0\n1F0,1B0\n",
                "--schedule gpipe",
                "mine.csv has its own schedule; leave out --schedule",
            ),
            (
                "0F0,0B0\n1F0,1B0\n",
                "--cut 5,4",
                "--cut 5,4 must name 2 stages with 8 layers in all",
            ),
            (None, "", "mine.csv cannot be read"),
        ],
        4,
    ),
)
def test_a_file_that_cannot_be_performed_is_refused_before_the_first_message(
    text, flags, sentence, tmp_path
):
    file = tmp_path / "mine.csv"
    if text is not None:
        file.write_text(text)
    with pytest.raises(RunFailed) as failure:
        run(f"train.py {file} {flags}", ranks=2, warm=True, show=False)
    assert sentence in str(failure.value)
    assert "Traceback" not in str(failure.value)


@pytest.mark.parametrize(
    ("call", "sentence"),
    first_of(
        [
            (f"{ANY} --schedule interleaved-1f1b --microbatches 9 --batch-size 9", "micro-batches"),
            (f"{ANY} --schedule interleaved-1f1b --chunks 1", "at least 2 chunks"),
            (
                f"{INTERLEAVED} --microbatches 9 --batch-size 9",
                "--microbatches 9 do not divide into 2",
            ),
            (f"{INTERLEAVED} --chunks 1", "--chunks 1: interleaving needs at least 2"),
            (f"{INTERLEAVED} --chunks 3", "--layers 8 is too few for 12 stages"),
            (f"{ANY} --schedule dualpipe-v --microbatches 4", "dualpipe-v needs at least two"),
            (f"{ANY} --schedule zb-v --layers 4", "--layers 4 is too few for 8 stages"),
            (f"{ANY} --schedule gpipe --option depth=2", "gpipe has no option 'depth'"),
            (f"{ANY} --schedule pipedream", "--schedule: invalid choice: 'pipedream'"),
            (f"{ZERO} --schedule gpipe", "--schedule: invalid choice: 'gpipe'"),
        ],
        4,
    ),
)
def test_sizes_that_a_schedule_does_not_allow_are_refused(call, sentence):
    with pytest.raises(RunFailed) as failure:
        run(call, warm=True, show=False)
    assert sentence in str(failure.value)
    assert "Traceback" not in str(failure.value)


def test_four_chunks_are_predicted_and_paced_by_the_schedule_with_four():
    sizes = "--layers 8 --dim 16 --heads 2 --kv-heads 2 --seq-len 8 --steps 2 --microbatches 4"
    told = run(
        f"{INTERLEAVED} --chunks 4 {sizes} --pace 5 10 --pace-per-layer", 2, warm=True, show=False
    ).output
    length = simulate(build_schedule("interleaved-1f1b", 2, 4, 4), Costs(5, 10)).makespan
    assert f"(predicted {length:.1f} ms" in told, told
