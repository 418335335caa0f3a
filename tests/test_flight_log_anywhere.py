"""The flight log of programs that are not the course's: eight faults by their first difference."""

import json
import runpy
import shutil
import sys
from types import SimpleNamespace
from unittest import mock

import compare_logs
import plain_program as program
import pytest
import torch
from further import first_of
from ranks import run_on_ranks
from torch import nn

from course import launch
from course.debugging.time_machine import time_machine
from course.failed_run import RunFailed
from lab.flight_log_anywhere import NotRecorded, record
from lab.flight_log_comparing import _factor_of_all, compare
from lab.flight_log_reader import Fingerprint, RecordingError, read_recording
from pipeline.schedule import Action

ORDERS = "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3", "1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Runs a program of two ranks once; returns its folder."""
    made = {}

    def run(*arguments, function=program.train):
        if (function, arguments) not in made:
            folder = tmp_path_factory.mktemp("log") / "run"
            try:
                run_on_ranks(function, 2, str(folder), *arguments, timeout=40)
            except RunFailed:
                assert arguments == ("receives in the wrong order",)
            made[function, arguments] = folder
        return made[function, arguments]

    return run


def first_difference(one, other):
    found = compare(read_recording(one), read_recording(other))
    return found and (found.step, found.ranks, str(found.event and found.event.action)), found


@pytest.mark.processes
def test_the_log_has_the_order_of_each_rank_and_every_tensor_arrives_as_it_was_made(recorded):
    recording = read_recording(recorded())
    assert recording.seen and len(recording.steps) == program.STEPS
    assert tuple(",".join(map(str, order)) for order in recording.schedule.orders) == ORDERS
    for number, step in enumerate(recording.steps):
        assert step.ended == {0, 1} and {entry.version for entry in step.entries} == {number}
        for k in range(program.MICROBATCHES):
            forward, backward = step.by_action[0, "F", k], step.by_action[1, "B", k]
            assert forward.made == step.by_action[1, "F", k].used
            assert backward.made == step.by_action[0, "B", k].used
        held = {rank: [e.held for e in step.entries if e.event.rank == rank] for rank in (0, 1)}
        assert max(held[0]) > held[0][0] and max(held[1]) == held[1][0] > 0
        assert held[0][-1] == held[1][-1] == 0


@pytest.mark.processes
def test_two_ranks_and_one_process_are_laid_side_by_side(recorded, tmp_path):
    program.train_in_one_process(tmp_path / "whole")
    whole = read_recording(tmp_path / "whole")
    assert whole.schedule.num_ranks == 1
    assert compare(read_recording(recorded()), whole) is None
    assert compare(whole, read_recording(recorded())) is None
    place, found = first_difference(recorded("swapped messages"), tmp_path / "whole")
    assert place == (0, (1,), "1F0")
    assert "; what it used here is the activation of micro-batch 1 from stage 0" in found.sentence
    machine = time_machine(recorded("swapped messages"), compare=tmp_path / "whole")
    assert "1F0" in machine.view.table and "of the loss" not in machine.view.table


@pytest.mark.processes
@pytest.mark.parametrize(
    ("broken", "healthy", "place", "words"),
    first_of(
        [
            (
                ["swapped messages"],
                [],
                (0, (1,), "1F0"),
                "the activation of micro-batch 1 from stage 0",
            ),
            (["scale forgotten"], [], (0, (1,), "1B0"), "1B0 on rank 1: used "),
            (["buffer used twice"], ["one later"], (0, (1,), "1B0"), "1B0 on rank 1: has gathered"),
            (
                ["receives in the wrong order"],
                [],
                (0, (1,), "None"),
                "rank 1 never came to the backward of micro-batch 0 on stage 1",
            ),
            (
                ["clipping by stage"],
                ["clipping of all"],
                (0, (0, 1), "None"),
                "every action of step 0 is the same, and the update after it is not",
            ),
            (
                ["tied weights drift", True],
                [None, True],
                (0, (0, 1), "None"),
                "the update after it",
            ),
            (
                ["micro-batch lost"],
                [],
                (0, (0,), "None"),
                "rank 0 never came to the backward of micro-batch 1 on stage 0",
            ),
        ],
        3,
    ),
)
def test_a_fault_is_found_by_its_first_difference(recorded, broken, healthy, place, words):
    found_place, found = first_difference(recorded(*broken), recorded(*healthy))
    assert found_place == place and words in found.sentence


@pytest.mark.processes
def test_a_loss_that_is_not_divided_is_named_by_its_one_factor(recorded):
    _, found = first_difference(recorded("scale forgotten"), recorded())
    assert f"is {program.MICROBATCHES} times that of the other, as if one of" in found.sentence
    _, found = first_difference(recorded(), recorded("scale forgotten"))
    assert f"is {1 / program.MICROBATCHES:.6g} times that of the other" in found.sentence
    _, found = first_difference(recorded("swapped messages"), recorded())
    assert "times that of the other" not in found.sentence


def test_only_a_factor_of_all_micro_batches_is_a_hint():
    def made(*factors):
        prints = [Fingerprint("a", factor * (k + 1.5), factor * (k - 7)) for k, factor in factors]
        entries = [SimpleNamespace(used=None, made=each) for each in prints]
        return {Action(1, "F", k): entry for (k, _), entry in zip(factors, entries)}

    def hint(*factors):
        return _factor_of_all(made(*factors), made((0, 1), (1, 1), (2, 1)), Action(1, "F", 0))

    assert "what stage 1 made is 4 times" in hint((0, 4), (1, 4), (2, 4))
    assert hint((0, 4), (1, 4), (2, 1)) == hint((0, 1), (1, 1), (2, 1)) == hint((0, 4)) == ""


@pytest.mark.processes
def test_the_command_compares_two_folders_and_says_so_in_its_status(recorded, tmp_path, capsys):
    healthy, broken = recorded(), recorded("scale forgotten")
    shutil.copytree(healthy, tmp_path / "again")

    def status_of(*words):
        with mock.patch.object(sys, "argv", ["compare_logs.py", *map(str, words)]):
            try:
                return compare_logs.main()
            except SystemExit as end:
                return end.code

    assert status_of(healthy, tmp_path / "again") == 0
    assert f"no difference in {program.STEPS} steps of 2 stages" in capsys.readouterr().out
    assert status_of(healthy, broken) == 1
    assert "1B0 on rank 1: used " in capsys.readouterr().out
    assert status_of(healthy, broken, "--tolerance", "1e-9") == 1
    assert status_of(healthy, tmp_path / "again", "--tolerance", "0") == 0
    capsys.readouterr()
    assert status_of(healthy, tmp_path / "missing") == 2
    said = capsys.readouterr().err
    assert "missing" in said and "Traceback" not in said


@pytest.mark.processes
def test_a_fault_behind_a_frozen_stage_is_found(recorded, tmp_path):
    """The frozen rank's backwards, which one process does not have, are not the difference."""
    program.train_in_one_process(tmp_path / "whole", frozen=True)
    healthy = recorded(None, False, 2, True)
    assert compare(read_recording(healthy), read_recording(tmp_path / "whole")) is None
    assert compare(read_recording(tmp_path / "whole"), read_recording(healthy)) is None
    broken = recorded("scale forgotten", False, 2, True)
    place, found = first_difference(broken, tmp_path / "whole")
    assert place == (0, (1,), "1B0") and "1B0 on rank 1: used " in found.sentence


@pytest.mark.processes
def test_without_a_stash_the_backward_is_found_with_another_version_of_the_weights(recorded):
    folders = [recorded(*fault, function=program.train_without_flush) for fault in [["x"], []]]
    place, found = first_difference(*folders)
    assert place == (0, (0,), "0B1")
    assert "used version 1 of the weights, and 0 in the other" in found.sentence
    recording = read_recording(folders[1])
    versions = [recording.entry(f"0{kind}{k}").version for k in range(4) for kind in "FB"]
    assert versions == [0, 0, 0, 0, 1, 1, 2, 2]


@pytest.mark.processes
def test_an_uneven_cut_is_named_with_its_weights(recorded):
    uneven = read_recording(recorded(None, False, 1))
    with pytest.raises(RecordingError, match="stage 0 has weights 0.weight here and weights 0.wei"):
        compare(uneven, read_recording(recorded()))


# What a program may do, and what is refused


def log_of(folder, part, run):
    log = record(folder, {0: part})
    run(log)
    return read_recording(folder)


def test_an_evaluation_and_a_forward_that_runs_again_are_no_actions(tmp_path):
    inner = nn.Linear(4, 4)

    class Outer(nn.Module):
        def forward(self, rows):
            return torch.utils.checkpoint.checkpoint(inner, rows, use_reentrant=False)

    outer = Outer()

    def run(log):
        with torch.no_grad():
            inner(torch.ones(2, 4))
        outer(torch.ones(2, 4)).sum().backward()
        log.end_step()

    recording = log_of(tmp_path / "log", inner, run)
    assert [str(entry.event.action) for entry in recording.steps[0].entries] == ["0F0", "0B0"]


def test_a_step_that_is_not_ended_is_named_with_the_line_that_is_missing(tmp_path):
    part = nn.Linear(4, 4)

    def run(log):
        for _ in range(2):
            log.modules[0].count = 0  # as if a new step had begun
            part(torch.ones(2, 4)).sum().backward()

    with pytest.raises(
        RecordingError, match=r"has 0F0 twice; call end_step\(\) before each update"
    ):
        log_of(tmp_path / "log", part, run)


@pytest.mark.parametrize("stages", [[nn.Linear(1, 1)], {"a": nn.Linear(1, 1)}, {0: 3}, {}])
def test_what_is_no_stage_is_refused(tmp_path, stages):
    with pytest.raises(NotRecorded, match="record (takes nn.Modules by the index|needs at least)"):
        record(tmp_path, stages)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_a_log_is_refused(tmp_path):
    record(tmp_path, {0: nn.Linear(1, 1)}).close()
    with pytest.raises(NotRecorded, match="has a flight log of rank 0; name a new folder"):
        record(tmp_path, {0: nn.Linear(1, 1)})
    (tmp_path / "file").touch()
    with pytest.raises(NotRecorded, match="is a file"):
        record(tmp_path / "file", {0: nn.Linear(1, 1)})


@pytest.mark.parametrize(
    ("flags", "ranks", "advice"),
    [
        ("--repair x", "1", "or one without --repair"),  # there is no second rank
        ("--repair x", "2", "--repair: name a file"),
        ("", "x", "start two ranks"),
        ("--record=", "1", "--record: name a folder"),
        ("--record .", "1", "--record: name a folder"),
        ("--repair=", "1", "one without --repair"),
        ("--repair=", "2", "--repair: name a file with run_schedule"),
    ],
)
def test_a_flag_that_cannot_be_used_ends_a_program_that_is_not_the_courses(
    monkeypatch, tmp_path, capsys, flags, ranks, advice
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", ranks)
    script = str(launch.SCRIPTS / "broken_unknown_program.py")
    monkeypatch.setattr(sys, "argv", [script, *flags.split()])
    with pytest.raises(SystemExit):
        runpy.run_path(script, run_name="__main__")
    assert advice in capsys.readouterr().err


# torch.distributed.pipelining


@pytest.fixture(scope="module")
def unknown(tmp_path_factory):
    """The recordings of broken_unknown_program.py: two ranks, one process, two ranks repaired."""
    folder = tmp_path_factory.mktemp("unknown")
    (folder / "repair.py").write_text(
        "def run_schedule(schedule, rank, tokens, targets, mask, losses):\n"
        "    further = {'target': targets, 'losses': losses} if rank else {}\n"
        "    schedule.step(*([tokens] if rank == 0 else []), mask=mask, **further)\n"
    )
    recordings, losses = {}, {}
    for name, ranks, flags in (
        ("broken", 2, ""),
        ("whole", 1, ""),
        ("repaired", 2, f"--repair {folder / 'repair.py'}"),
    ):
        call = f"broken_unknown_program.py --record {folder / name} {flags}"
        losses[name] = launch.run(call, ranks, warm=True, show=False, limit=60).losses
        recordings[name] = read_recording(folder / name)
    return recordings, losses


@pytest.mark.processes
def test_the_library_on_two_ranks_and_one_process_record_the_same_bits(unknown):
    recordings, losses = unknown
    assert losses["repaired"] == losses["whole"] and len(losses["whole"]) == 3
    assert compare(recordings["repaired"], recordings["whole"]) is None
    assert tuple(",".join(map(str, o)) for o in recordings["repaired"].schedule.orders) == ORDERS
    for entry in recordings["repaired"].steps[0].entries:
        stage, kind, _ = entry.event.action
        assert entry.used is not None
        assert (entry.made is None) == ((stage, kind) == (0, "B"))


@pytest.mark.processes
def test_a_stage_of_the_library_that_lacks_an_argument_is_found_at_its_first_forward(unknown):
    recordings, losses = unknown
    assert all(a != b for a, b in zip(losses["broken"], losses["whole"]))
    found = compare(recordings["broken"], recordings["whole"])
    assert (found.step, found.ranks, str(found.event.action)) == (0, (1,), "1F0")
    assert found.sentence.startswith("step 0, 1F0 on rank 1: made ")


def recording_of(folder, *steps, before=(), after=()):
    """The Recording of one rank that took these actions in each step, as "0F0 0F1"."""
    folder.mkdir()
    (folder / "run.json").write_text('{"name": "mine", "ranks": 1}')
    rest = {"start": 0, "end": 1, "recompute": 0, "used": None, "made": None, "version": 0}
    rest |= {"held": 0, "gradient": None}
    lines = list(before)
    for actions in steps:
        lines += [{"did": action, **rest} for action in actions.split()] + [*after, {"ended": 0}]
    (folder / "rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_recording(folder)


def test_a_step_with_passages_that_the_longest_has_not_is_compared(tmp_path):
    one = recording_of(tmp_path / "one", "0F0 0F1", "0F0")
    other = recording_of(tmp_path / "other", "0F0 0F1", "0F0 3F5")
    found = compare(one, other)
    assert found.step == 1 and found.sentence.startswith("step 1: rank 0 never came to")


def test_weights_and_updates_of_a_stage_without_an_action_are_compared(tmp_path):
    def weights(digest):
        return [{"weights": {"a": [digest * 8, 1, 1]}, "stage": 5, "version": 0}]

    one = recording_of(tmp_path / "one", "0F0", before=weights("0"))
    other = recording_of(tmp_path / "other", "0F0", before=weights("1"))
    assert "step 0 begins with another a on stage 5" in compare(one, other).sentence
    one, other = (
        recording_of(tmp_path / f"{norm}", "0F0", after=[{"updated": 7, "gradient": norm}])
        for norm in (1, 2)
    )
    assert "1 on stage 7 (in the other 2)" in compare(one, other).sentence
