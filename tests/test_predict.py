"""predict.py as it is called: what it prints, what it writes, what it refuses."""

import json
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import predict
import pytest

from lab.simulator import Costs, simulate
from lab.terminal_timeline import in_text
from lab.timeline import to_chrome_trace
from pipeline.schedule import ScheduleError
from pipeline.schedules import SCHEDULES, build_schedule, chunked_schedules, gpipe, naive
from pipeline.schedules.from_flags import schedule_option
from pipeline.schedules.legal import check_legal
from pipeline.schedules.text_form import from_csv, to_csv

PREDICT = Path(__file__).parents[1] / "source_code" / "predict.py"
KEYS = [
    "makespan",
    "ideal",
    "bubble_over_total",
    "bubble_over_ideal",
    "span_per_rank",
    "bubble_by_span",
    "peak_held_per_rank",
    "peak_held_until_weight_per_rank",
    "messages",
]
IN_WORDS = """\
gpipe: 4 ranks, 4 stages, 8 micro-batches
makespan            33 units of time (forward 1, backward 2 per stage)
ideal               24 units of time (the largest busy time of a rank)
bubble over total   0.2727  (idle / makespan)
bubble over ideal   0.3750  (idle / busy)
peak held per rank  8 8 8 8 activations (stage x micro-batch)
messages            48 per step
"""


def call(*words):
    """`python predict.py` with these words, in a process of its own."""
    return subprocess.run(
        [sys.executable, PREDICT, *map(str, words)], capture_output=True, text=True, timeout=60
    )


def printed(*words):
    called = call(*words)
    assert (called.returncode, called.stderr) == (0, "")
    return called.stdout


# The same without the second of processor time that a new process takes to import torch


def call_in_this_process(capsys, *words):
    with mock.patch.object(sys, "argv", ["predict.py", *map(str, words)]):
        try:
            status = predict.main()
        except SystemExit as left:
            status = left.code
    return status, *capsys.readouterr()


def printed_in_this_process(capsys, *words):
    status, out, err = call_in_this_process(capsys, *words)
    assert (status, err) == (0, "")
    return out


# What it prints


def test_gpipe_of_4_ranks_and_8_microbatches_in_words():
    assert printed("gpipe", "--ranks", 4, "--microbatches", 8) == IN_WORDS


def test_the_default_is_4_ranks_8_microbatches_and_a_backward_of_2_forwards():
    assert json.loads(printed("gpipe", "--json")) == {
        "makespan": 33,
        "ideal": 24,
        "bubble_over_total": pytest.approx(3 / 11, abs=1e-15),
        "bubble_over_ideal": 0.375,
        "span_per_rank": [33, 30, 27, 24],
        "bubble_by_span": pytest.approx(3 / 11, abs=1e-15),
        "peak_held_per_rank": [8, 8, 8, 8],
        "peak_held_until_weight_per_rank": [8, 8, 8, 8],
        "messages": 48,
    }


def test_costs_and_sizes_are_taken_as_given(capsys):
    words = "naive --ranks 3 --microbatches 2 --forward 2 --backward 3 --transfer 0.5 --json"
    figures = json.loads(printed_in_this_process(capsys, *words.split()))
    assert list(figures) == KEYS
    assert figures["makespan"] == 2 * (3 * 5 + 4 * 0.5)
    assert figures["ideal"] == 10
    assert figures["bubble_over_total"] == pytest.approx(24 / 34)
    assert figures["bubble_over_ideal"] == pytest.approx(2.4)
    # A rank starts a forward and a transfer later than the one before it, and ends a backward and
    # a transfer earlier: 2.5 and 3.5.
    assert figures["span_per_rank"] == [34, 28, 22]
    assert figures["bubble_by_span"] == pytest.approx(24 / 34)
    assert figures["peak_held_per_rank"] == [1, 1, 1]
    assert figures["messages"] == 8


def test_a_link_that_is_occupied_makes_gpipe_wait_where_a_latency_does_not(capsys):
    words = "gpipe --ranks 2 --forward 10 --backward 20 --json".split()
    far = json.loads(printed_in_this_process(capsys, *words, "--transfer", 30))
    narrow = json.loads(printed_in_this_process(capsys, *words, "--occupancy", 30))
    assert far["makespan"] == 9 * 30 + 2 * 30
    assert narrow["makespan"] == 2 * 30 + 2 * 30 + 7 * (30 + 30)


def test_a_file_with_a_split_backward_is_predicted_with_its_own_sizes(tmp_path, capsys):
    # Rank 1 runs 1-2, 2-4, 4-5, 5-7, 7-8, 8-9; rank 0 gets gradients at 4 and 7 and ends at 11.
    path = tmp_path / "split.csv"
    path.write_text("0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n")
    words = [path, "--backward", 3, "--backward-weight", 1, "--json"]
    assert json.loads(printed_in_this_process(capsys, *words)) == {
        "makespan": 11,
        "ideal": 8,
        "bubble_over_total": pytest.approx(3 / 11),
        "bubble_over_ideal": pytest.approx(3 / 8),
        "span_per_rank": [11, 8],
        "bubble_by_span": pytest.approx(3 / 11),
        "peak_held_per_rank": [2, 1],
        "peak_held_until_weight_per_rank": [2, 2],
        "messages": 4,
    }


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_predicted_and_comes_back_the_same_from_its_file(name, tmp_path, capsys):
    words = ["--ranks", 3, "--microbatches", 6, "--transfer", 0.25, "--backward-weight", 0.5]
    path = tmp_path / "again.csv"
    figures = printed_in_this_process(capsys, name, *words, "--json", "--csv", path)
    assert list(json.loads(figures)) == KEYS
    assert printed_in_this_process(capsys, path, *words, "--json") == figures
    assert from_csv(path.read_text(), name) == build_schedule(name, 3, 6)


def test_chunks_multiply_the_stages_and_a_cost_is_that_of_a_chunk(capsys):
    words = ["interleaved-1f1b", "--chunks", 4]
    assert printed_in_this_process(capsys, *words).splitlines() == [
        "interleaved-1f1b: 4 ranks, 16 stages, 8 micro-batches",
        "makespan            105 units of time (forward 1, backward 2 per stage)",
        "ideal               96 units of time (the largest busy time of a rank)",
        "bubble over total   0.0857  (idle / makespan)",
        "bubble over ideal   0.0938  (idle / busy)",
        "peak held per rank  19 17 15 13 activations (stage x micro-batch)",
        "messages            240 per step",
    ]


@pytest.mark.further
def test_a_schedule_of_262144_actions_is_predicted_with_its_known_figures():
    words = "interleaved-1f1b --ranks 64 --microbatches 512 --chunks 4 --json"
    figures = json.loads(printed(*words.split()))
    assert figures["ideal"] == 512 * 4 * 3
    assert figures["makespan"] == 512 * 4 * 3 + 63 * 3
    assert figures["messages"] == 2 * 512 * (64 * 4 - 1)
    assert figures["peak_held_per_rank"] == [3 * 64 + 2 * (63 - rank) + 1 for rank in range(64)]


# What it writes


def test_csv_on_standard_output_is_the_schedule_and_nothing_else():
    text = printed("gpipe", "--ranks", 3, "--microbatches", 5, "--csv", "-")
    assert text == to_csv(gpipe(3, 5))
    assert check_legal(from_csv(text)).orders == gpipe(3, 5).orders


def test_a_written_schedule_predicts_the_same_under_its_own_name(tmp_path, capsys):
    path = tmp_path / "mine.csv"
    assert printed_in_this_process(capsys, "gpipe", "--csv", path) == IN_WORDS
    assert path.read_text() == to_csv(gpipe(4, 8))
    assert printed_in_this_process(capsys, path) == IN_WORDS.replace("gpipe", "mine", 1)
    assert list(tmp_path.iterdir()) == [path]  # no half-written file is left beside it


def test_the_drawing_shows_the_prediction_above_what_was_performed(tmp_path, capsys):
    performed = tmp_path / "performed.json"
    performed.write_text(to_chrome_trace(simulate(naive(2, 3), Costs(2, 4))))
    path = tmp_path / "both.svg"
    words = ["gpipe", "--ranks", 2, "--microbatches", 3, "--svg", path, "--performed", performed]
    assert "makespan            12 ms" in printed_in_this_process(capsys, *words)
    root = ElementTree.fromstring(path.read_text())
    label = root.get("aria-label")
    assert label.startswith("predicted: gpipe, 2 ranks, 12 ") and "performed: naive, 2" in label
    rects = root.iter("{http://www.w3.org/2000/svg}rect")
    stories = [rect for rect in rects if len(rect)]
    assert len(stories) == 2 * 2 * 2 * 3


# What it refuses: one sentence on standard error, nothing on standard output, exit status 2


def sentence_of(status, out, err):
    assert (status, out) == (2, "")
    assert err.endswith("\n") and err.count("\n") == 1
    return err.strip()


def refusal(capsys, *words):
    return sentence_of(*call_in_this_process(capsys, *words))


def test_a_schedule_that_does_not_exist_is_refused_with_those_that_do():
    called = call("gpip")
    assert sentence_of(called.returncode, called.stdout, called.stderr) == (
        f"'gpip' is neither a schedule ({', '.join(SCHEDULES)}) nor a CSV file that can be read"
    )


REFUSED_SIZES = {
    "gpipe --chunks 2": "gpipe --ranks 4 --microbatches 8 --chunks 2: gpipe has one stage per rank, not 2 chunks; use one of "
    "interleaved-1f1b, looped-bfs, zb-v, v-half, v-min, dualpipe-v for several",
    "dualpipe-v --microbatches 7": "dualpipe-v --ranks 4 --microbatches 7: dualpipe-v needs at least two micro-batches per "
    "rank, 8 for 4 ranks, not 7; use more micro-batches or fewer ranks",
    "looped-bfs --chunks 0": "--chunks: must be a whole number of at least 1, not '0'; --help "
    "lists the flags",
}


@pytest.mark.parametrize("words", REFUSED_SIZES)
def test_sizes_that_a_schedule_does_not_allow_are_refused_with_the_fix(capsys, words):
    assert refusal(capsys, *words.split()) == REFUSED_SIZES[words]


def test_chunks_beside_a_file_are_refused(tmp_path, capsys):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0\n")
    assert refusal(capsys, path, "--chunks", 2) == (
        f"--chunks is for {', '.join(chunked_schedules())}; a file says itself where its stages are"
    )


ILLEGAL = {
    "no action": (
        "0F0,0B0\n1F0,1X0\n",
        "rank 1, step 1: '1X0' is not an action; write stage, kind (F, B, I, W or U) and "
        "micro-batch, as in 0F3",
    ),
    "order": (
        "0F0,0B0\n1B0,1F0\n",
        "rank 1 runs the backward of micro-batch 0 on stage 1 at step 0, but the forward of "
        "micro-batch 0 on stage 1 comes at step 1",
    ),
}


@pytest.mark.parametrize("what", ILLEGAL)
def test_an_illegal_file_is_refused_with_its_rank_and_step(tmp_path, capsys, what):
    text, sentence = ILLEGAL[what]
    path = tmp_path / "mine.csv"
    path.write_text(text)
    assert refusal(capsys, path) == f"{path}: {sentence}; mend that row"


@pytest.mark.parametrize("text", ["\n", ",,\n", " \n\n"])
def test_a_file_without_actions_has_no_row_to_mend(tmp_path, capsys, text):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    said = refusal(capsys, path)
    assert "no actions; name a CSV file" in said and "that row" not in said


def test_a_stage_that_no_row_has_is_no_row_to_mend(tmp_path, capsys):
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0\n2F0,2B0\n")
    said = refusal(capsys, path)
    assert "stage 1 belongs to no rank; add its actions to a row" in said and "that row" not in said


@pytest.mark.parametrize("flag", ["--ranks", "--microbatches"])
@pytest.mark.parametrize("value", ["0", "-4", "2.5", "four", ""])
def test_a_number_of_ranks_or_microbatches_that_is_no_positive_whole_number(capsys, flag, value):
    assert refusal(capsys, "gpipe", f"{flag}={value}") == (
        f"{flag}: must be a whole number of at least 1, not '{value}'; --help lists the flags"
    )


@pytest.mark.parametrize("flag", ["--forward", "--backward", "--backward-weight"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "long"])
def test_a_cost_that_is_no_positive_number(capsys, flag, value):
    assert refusal(capsys, "gpipe", f"{flag}={value}") == (
        f"{flag}: must be a positive number, not '{value}'; --help lists the flags"
    )


@pytest.mark.parametrize("flag", ["--transfer", "--occupancy"])
@pytest.mark.parametrize("value", ["-1", "-0.001", "nan", "inf", "long"])
def test_a_message_that_takes_a_negative_time_or_no_number(capsys, flag, value):
    assert refusal(capsys, "gpipe", f"{flag}={value}") == (
        f"{flag}: must be a number of at least 0, not '{value}'; --help lists the flags"
    )


@pytest.mark.parametrize("value", ["0", "0.0", "0.00", "0e0"])
def test_a_transfer_of_nothing_can_be_written_in_any_way(capsys, value):
    assert printed_in_this_process(capsys, "gpipe", "--transfer", value) == IN_WORDS


@pytest.mark.parametrize(
    "words, sentence",
    [
        (
            "--backward 2 --backward-weight 2",
            "--backward-weight must be less than --backward, of which it is a part",
        ),
        (
            "--performed x.json",
            "--performed only adds to a drawing; name one with --svg, or take --terminal",
        ),
        ("--rank 4", "unrecognized arguments: --rank 4; --help lists the flags"),
    ],
)
def test_flags_that_do_not_fit_together_or_do_not_exist(capsys, words, sentence):
    assert refusal(capsys, "gpipe", *words.split()) == sentence


def test_a_file_that_cannot_be_written_ends_in_a_sentence_and_leaves_nothing(tmp_path, capsys):
    path = tmp_path / "missing" / "drawing.svg"
    status, _, err = call_in_this_process(capsys, "gpipe", "--svg", path)
    sentence = f"--svg {path}: the folder {path.parent} does not exist; make it first\n"
    assert (status, err) == (2, sentence)
    assert list(tmp_path.iterdir()) == []


def test_a_performed_timeline_that_is_none_is_named(tmp_path, capsys):
    path = tmp_path / "notes.json"
    path.write_text('{"a": 1}')
    words = ["gpipe", "--svg", tmp_path / "drawing.svg", "--performed", path]
    status, _, err = call_in_this_process(capsys, *words)
    sentence = f"--performed {path}: it is not a timeline of this course; name another file\n"
    assert (status, err) == (2, sentence)
    assert list(tmp_path.iterdir()) == [path]


def test_recompute_adds_a_forward_to_every_backward(capsys):
    words = printed_in_this_process(
        capsys, "1f1b", "--forward", "10", "--backward", "20", "--recompute", "10"
    )
    assert "makespan            440" in words
    assert "bubble over total   0.2727" in words


# The timeline in a terminal


def test_the_terminal_shows_a_row_per_rank_at_most_78_columns_wide(capsys):
    shown = printed_in_this_process(capsys, "gpipe", "--ranks", 4, "--terminal")
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 78 and "\x1b" not in shown, "not a terminal"
    rows = [line[8:] for line in lines if line.startswith("rank ")]
    assert len(rows) == 4 and {len(row) for row in rows} == {70}
    # 33 units on 70 cells: a rank waits in 9 of the 33.
    assert all(abs(row.count(".") - 70 * 9 / 33) <= 2 for row in rows)
    for row in rows:
        assert re.sub(r"[.<>]", "", row) == "0123456701234567"


def test_in_a_narrow_terminal_no_line_is_wider_than_it_and_the_legend_is_whole():
    timeline = simulate(gpipe(2, 4), Costs(10, 20))
    wide, narrow = (in_text({"predicted": timeline}, columns=columns) for columns in (78, 44))
    assert max(map(len, narrow)) == 44 and [len(row) for row in narrow[1:3]] == [44, 44]
    assert " ".join(narrow[4:]).split() == wide[4].split(), "the legend"


def test_colours_repeat_the_signs_and_both_timelines_share_a_scale():
    timeline = simulate(gpipe(2, 2), Costs(10, 20))
    half = simulate(gpipe(2, 1), Costs(10, 20))
    plain = in_text({"predicted": timeline, "performed": half})
    coloured = in_text({"predicted": timeline, "performed": half}, colours=True)
    assert [re.sub(r"\x1b\[[\d;]*m", "", line) for line in coloured] == plain
    assert sum("\x1b[48;5;74" in line for line in coloured) == 4
    first, second = (len(plain[i][8:].rstrip(".")) for i in (1, 5))
    assert (first, second) == (70, round(70 * 60 / 90))


@pytest.mark.parametrize("other", [["--json"], ["--csv", "-"]])
def test_the_terminal_and_a_program_that_reads_the_output_exclude_each_other(capsys, other):
    status, _, said = call_in_this_process(capsys, "gpipe", "--terminal", *other)
    assert status == 2 and said.startswith("--terminal ") and said.count("\n") == 1


def test_an_option_may_be_zero_where_its_schedule_takes_that():
    assert schedule_option("ahead=0") == ("ahead", 0)
    with pytest.raises(ScheduleError, match="at least 1 micro-batch, not 0"):
        build_schedule("pipedream", 4, 8, microbatches_per_update=0)
