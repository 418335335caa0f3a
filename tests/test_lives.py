"""How long a rank holds a micro-batch, and what that says of the memory that it needs."""

import math

import pytest
from lives import draw_lives, lives_of

from lab.simulator import Costs, simulate
from pipeline.schedules import build_schedule

WHOLE, HALVED = Costs(20, 40, 20), Costs(10, 20, 10)
MANY = 40  # micro-batches, so that those in the middle are in the steady phase


def timeline_of(name, num_ranks=4):
    costs = HALVED if name.startswith(("zb-v", "v-")) else WHOLE
    return simulate(build_schedule(name, num_ranks, MANY), costs)


@pytest.mark.parametrize(
    ("name", "lives"),
    [
        ("1f1b", [[240], [180], [120], [60]]),
        ("zb-h1", [[240], [240], [240], [240]]),
        ("zb-v", [[450, 30], [390, 90], [330, 150], [270, 210]]),
        ("v-half", [[280, 60], [240, 90], [220, 140], [180, 150]]),
        ("v-min", [[180, 40], [160, 60], [140, 80], [120, 100]]),
    ],
)
def test_of_4_ranks_each_stage_holds_a_microbatch_that_long(name, lives):
    assert lives_of(timeline_of(name), 20) == lives
    assert lives_of(timeline_of(name), 24) == lives


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min"])
def test_the_time_held_over_the_time_between_microbatches_is_what_is_held_on_average(name):
    for num_ranks in range(2, 7):
        timeline = timeline_of(name, num_ranks)
        average = [sum(times) / 60 for times in lives_of(timeline, 20)]
        peaks = timeline.peak_held_until_weight_per_rank
        assert all(held <= peak for held, peak in zip(average, peaks)), num_ranks
        if num_ranks == 4:  # lesson 09: the average, rounded up
            assert peaks == [math.ceil(held) for held in average]


def test_the_picture_has_each_stage_once_and_says_the_sums_in_words():
    picture = draw_lives({"1F1B": timeline_of("1f1b"), "V-Min": timeline_of("v-min")}, 20)
    assert picture.alt == (
        "One micro-batch, and how long ranks 0, 1 and so on hold it. "
        "1F1B: held for 240, 180, 120, 60 ms; "
        "V-Min: held for 180+40 = 220, 160+60 = 220, 140+80 = 220, 120+100 = 220 ms"
    )
    assert picture.svg.count("<title>forward of micro-batch 0 on stage") == 4 + 8
    for stage in range(8):
        assert f"backward for the weights of micro-batch 0 on stage {stage}, rank" in picture.svg
    for words in ("120+100 = 220", "not held", "held; darker: by both stages of the rank"):
        assert f">{words}</text>" in picture.svg
