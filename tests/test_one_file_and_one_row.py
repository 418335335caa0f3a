"""A new schedule is one file and one row of SCHEDULES: everything that lists schedules has it."""

import importlib
import json
import sys

import predict
import pytest
from test_equals_one_process import SGD
from test_every_schedule import largest_difference, train

from course.views.explorer import Panel, explore
from lab.simulator import Costs, simulate
from pipeline import schedules
from pipeline.schedule import Action, Schedule
from pipeline.schedules import SCHEDULES, Generator, build_schedule, synchronous_schedules
from pipeline.schedules.legal import check_legal
from pipeline.schedules.text_form import read_csv

FILE = '''
from pipeline.schedule import Action, Schedule
from pipeline.schedules.order import require_positive


def in_groups(num_ranks, num_microbatches, group=2):
    """GPipe of one group of micro-batches after the other, without an update in between."""
    require_positive(num_ranks, num_microbatches)
    orders = []
    for rank in range(num_ranks):
        order = []
        for first in range(0, num_microbatches, group):
            members = range(first, min(first + group, num_microbatches))
            order += [Action(rank, "F", microbatch) for microbatch in members]
            order += [Action(rank, "B", microbatch) for microbatch in members]
        orders.append(tuple(order))
    return Schedule("in-groups", tuple(orders))
'''


@pytest.fixture(autouse=True)
def one_file_and_one_row(tmp_path, monkeypatch):
    (tmp_path / "in_groups.py").write_text(FILE)
    monkeypatch.setattr(schedules, "__path__", [*schedules.__path__, str(tmp_path)])
    in_groups = importlib.import_module("pipeline.schedules.in_groups").in_groups
    monkeypatch.setitem(SCHEDULES, "in-groups", Generator(in_groups, options=("group",)))
    yield
    del sys.modules["pipeline.schedules.in_groups"]


def call_predict(flags, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["predict.py", *flags.split()])
    return predict.main()


def test_it_is_listed_as_synchronous_and_legal_in_every_size():
    assert "in-groups" in synchronous_schedules()
    for ranks in range(1, 5):
        for microbatches in range(1, 9):
            for group in range(1, 5):
                schedule = build_schedule("in-groups", ranks, microbatches, group=group)
                assert check_legal(schedule) is schedule


def test_predict_plays_it_with_its_option_and_writes_its_csv(tmp_path, monkeypatch, capsys):
    flags = f"in-groups --ranks 3 --microbatches 6 --option group=3 --csv {tmp_path}/a.csv --json"
    assert call_predict(flags, monkeypatch) == 0
    schedule = build_schedule("in-groups", 3, 6, group=3)
    figures = json.loads(capsys.readouterr().out)
    assert figures["makespan"] == simulate(schedule, Costs(1, 2)).makespan
    assert figures["peak_held_per_rank"] == [3, 3, 3]
    assert read_csv(tmp_path / "a.csv").orders == schedule.orders


def test_predict_names_it_and_its_options_in_help_and_refusals(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")  # so that no name is broken at its hyphen
    for flags in ("--help", "in-groups --option depth=2", "gpip"):
        with pytest.raises(SystemExit):
            call_predict(flags, monkeypatch)
    said = capsys.readouterr()
    assert "in-groups: group" in " ".join(said.out.split())
    no_option, no_schedule = said.err.splitlines()
    assert no_option.endswith("in-groups has no option 'depth'; it has group")
    assert "in-groups" in no_schedule


def test_predict_names_the_rank_and_the_step_of_an_illegal_one(monkeypatch, capsys):
    backward_first = Schedule("in-groups", ((Action(0, "B", 0), Action(0, "F", 0)),))
    monkeypatch.setitem(SCHEDULES, "in-groups", Generator(lambda *sizes: backward_first))
    with pytest.raises(SystemExit):
        call_predict("in-groups --ranks 1 --microbatches 1", monkeypatch)
    assert (
        "rank 0 runs the backward of micro-batch 0 on stage 0 at step 0" in capsys.readouterr().err
    )


def test_the_explorer_offers_and_draws_it():
    panel = Panel(explore("gpipe").settings)
    assert "in-groups" in panel.controls["schedule"].options
    panel.controls["schedule"].value = "in-groups"
    [prediction] = panel.view.predictions
    assert prediction.schedule == build_schedule("in-groups", 4, 8)
    assert "in-groups" in panel.view.picture


def test_real_ranks_perform_its_csv_and_take_the_step_of_one_process(tmp_path, monkeypatch):
    file = tmp_path / "in_groups.csv"
    call_predict(f"in-groups --ranks 2 --microbatches 4 --csv {file}", monkeypatch)
    losses, orders = train(f"train.py {file}", 2, SGD, tmp_path)
    assert largest_difference(losses, f"{SGD} --microbatches 4") <= 1e-12
    assert orders == build_schedule("in-groups", 2, 4).orders
