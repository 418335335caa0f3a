"""What a recording holds: every message as it was sent and received, versions, and an end.

The panel that shows it is driven in a browser by test_browser.py.
"""

import json
import re
import shutil
from xml.etree import ElementTree

import pytest
import torch
from further import first_of

from course import launch
from course.debugging.time_machine import TimePanel, time_machine
from course.failed_run import RunFailed
from course.launch import ROOT
from extensions.asynchronous.weight_stash import forward_version
from lab.flight_log import fingerprint
from lab.flight_log_comparing import compare
from lab.flight_log_reader import (
    RecordingError,
    describe_unanswered_waits,
    maker_of,
    read_recording,
)
from pipeline.schedule import Action
from pipeline.schedules import gpipe

TINY = "--dim 16 --heads 2 --kv-heads 2 --seq-len 8 --steps 2"
SCRIPTS = {
    "gpipe": f"train.py --schedule gpipe {TINY}",
    "by hand": f"gpipe.py {TINY}",
    "1f1b": f"one_f_one_b.py {TINY}",
    "pipedream": f"pipedream.py {TINY} --steps 10",
    "replicas": f"pipedream.py {TINY} --steps 12 --replicas 2-1-1",
    "zb-h1": f"zero_bubble.py {TINY} --schedule zb-h1",
    "zb-v": f"train.py --schedule zb-v {TINY}",
    "recomputed": f"activation_checkpointing.py {TINY} --recompute stage",
    "interleaved": f"interleaved_1f1b.py {TINY}",
    "data parallel": f"pipeline_with_data_parallel.py {TINY} --replicas 1",
}


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """Runs a script with --record and returns its folder, once for each name and number."""
    made = {}

    def run(name, number=0, more=""):
        key = name, number, more
        if key not in made:
            folder = tmp_path_factory.mktemp("recordings") / "run"
            launch.run(f"{SCRIPTS[name]} {more} --record {folder}", warm=True, show=False, limit=60)
            made[key] = folder
        return made[key]

    return run


@pytest.mark.further
@pytest.mark.parametrize("name", first_of(SCRIPTS, 4))
def test_every_message_arrives_as_it_was_sent_and_is_what_was_made_and_what_is_used(record, name):
    recording = read_recording(record(name))
    schedule = recording.schedule
    assert recording.unanswered == {}
    for step in recording.steps:
        assert step.ended == set(range(4))
        for message, source, destination, consumer_stage in schedule.messages:
            producer = maker_of(message)
            sender = step.by_result[producer]
            receiver = step.by_result[producer._replace(stage=consumer_stage)]
            assert sender.sent.peer == destination
            assert receiver.received.peer == source
            assert sender.made == sender.sent.what == receiver.received.what == receiver.used
        performed = [
            tuple(e.event.action for e in step.entries if e.event.rank == r) for r in range(4)
        ]
        assert performed == list(schedule.orders)


def test_the_losses_and_the_order_are_those_of_the_run_that_is_not_recorded(tmp_path):
    plain = launch.run(f"gpipe.py {TINY} --losses {tmp_path / 'a'}", warm=True, show=False)
    folder, other = tmp_path / "run", tmp_path / "b"
    launch.run(f"gpipe.py {TINY} --losses {other} --record {folder}", warm=True, show=False)
    assert (tmp_path / "a").read_text() == other.read_text()
    entries = [read_recording(folder).entry(f"3F{k}", step=1) for k in range(8)]
    assert sum(entry.made.norm for entry in entries) == pytest.approx(plain.losses[1], abs=1e-6)


@pytest.mark.further
@pytest.mark.parametrize("name", ["1f1b", "pipedream", "zb-v"])
def test_two_runs_of_the_same_cut_have_the_same_recording(record, name):
    one, other = read_recording(record(name)), read_recording(record(name, 1))
    assert compare(one, other) is None
    assert [e.held for e in one.steps[0].entries] == [e.held for e in other.steps[0].entries]


@pytest.mark.further
def test_another_order_of_the_same_cut_differs_in_no_message(record):
    one, other = read_recording(record("gpipe")), read_recording(record("1f1b"))
    assert compare(one, other, tolerance=1e-12) is None
    by_hand = read_recording(record("by hand"))
    assert compare(one, by_hand) is None


def test_another_seed_differs_from_the_weights_on(record):
    one, other = read_recording(record("gpipe")), read_recording(record("gpipe", 0, "--seed 1"))
    found = compare(one, other)
    assert (found.step, found.ranks, found.event) == (0, (0,), None)
    assert "step 0 begins with another" in found.sentence


def test_a_recording_that_ends_before_its_last_step_has_ended_is_another(record, tmp_path):
    folder = shutil.copytree(record("1f1b"), tmp_path / "cut")
    lines = (folder / "rank1.jsonl").read_text().splitlines(keepends=True)
    (folder / "rank1.jsonl").write_text("".join(lines[:-2]))
    found = compare(read_recording(record("1f1b")), read_recording(folder))
    assert found.sentence == "the second recording ends before rank 1 has ended step 1"


def test_recordings_of_different_cuts_are_not_compared(record):
    one, other = (
        read_recording(record("gpipe")),
        read_recording(record("gpipe", 0, "--cut 1,3,2,2")),
    )
    with pytest.raises(
        RecordingError, match="stage 0 has layers 0, 1 here and layers 0 in the oth"
    ):
        compare(one, other)
    with pytest.raises(RecordingError, match="put other stages or micro-batches on their ranks"):
        compare(one, read_recording(record("zb-v")))


# Versions


def test_a_synchronous_pipeline_uses_the_version_of_its_step(record):
    recording = read_recording(record("1f1b"))
    for number, step in enumerate(recording.steps):
        assert {entry.version for entry in step.entries} == {number}


@pytest.mark.parametrize(("name", "replicas"), [("pipedream", [1] * 4), ("replicas", [2, 1, 1])])
def test_recorded_versions_are_those_of_the_papers_rule(record, name, replicas):
    # PipeDream, section 3.3: the backward of a mini-batch uses the weights of its forward.
    [step] = read_recording(record(name)).steps
    for entry in step.entries:
        stage, kind, minibatch = entry.event.action
        expected = forward_version("stashed", minibatch, stage, replicas)
        if kind in "FB":
            assert entry.version == expected
        else:
            assert entry.version == minibatch // replicas[stage] + 1
    by_action = step.by_action
    assert [by_action[Action(0, "F", k)].version for k in range(6)] == (
        [0, 0, 0, 0, 1, 2] if name == "pipedream" else [0, 0, 0, 0, 1, 1]
    )


def test_without_a_stash_the_backward_is_recorded_with_the_version_that_it_found(record):
    [step] = read_recording(record("pipedream", 0, "--weights latest")).steps
    versions = [(step.by_action[Action(0, kind, 5)].version) for kind in "FB"]
    assert versions == [2, 5]


# A planted bit


def flip_a_bit(folder, rank, line_of, field):
    """Change the fingerprint of one tensor as its last bit would: another digest, the same norm."""
    path = folder / f"rank{rank}.jsonl"
    lines = path.read_text().splitlines()
    for number, line in enumerate(map(json.loads, lines)):
        if all(line.get(key) == value for key, value in line_of.items()) and line.get(field):
            digest, norm, weighted = line[field]
            line[field] = ["0" * 8, norm * (1 + 2e-16), weighted]
            lines[number] = json.dumps(line)
            path.write_text("\n".join(lines) + "\n")
            return
    raise LookupError(line_of)


def test_fingerprints_see_one_bit_a_swap_of_two_rows_and_the_shape():
    torch.manual_seed(0)
    tensor = torch.randn(4, 3, 2, dtype=torch.float64)
    changed = tensor.clone()
    changed[1, 2, 0] = torch.nextafter(changed[1, 2, 0], torch.tensor(9.0, dtype=torch.float64))
    digest, norm, weighted = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == [digest, norm, weighted]
    assert fingerprint(changed)[0] != digest
    assert fingerprint(changed)[1] == pytest.approx(norm, rel=1e-15)
    swapped = fingerprint(tensor[[1, 0, 2, 3]])
    assert swapped[1] == pytest.approx(norm, rel=1e-15) and abs(swapped[2] - weighted) > 1e-3
    assert fingerprint(tensor.reshape(4, 6))[0] != digest
    large = torch.randn(40, 2048, dtype=torch.float64)  # longer than what is read at once
    assert fingerprint(large.roll(16, 0))[2] != pytest.approx(fingerprint(large)[2], rel=1e-3)
    assert fingerprint(large)[1] == pytest.approx(large.norm().item(), rel=1e-14)
    once = fingerprint(torch.ones(81_920))[2]  # at most the norm of what it looks at
    assert once < 81_920**0.5
    assert fingerprint(tensor.bfloat16())[0] != fingerprint(tensor.half())[0]
    assert fingerprint(torch.tensor([[3, 4]]))[1] == 5.0  # tokens are whole numbers
    moved = fingerprint(tensor + 1e-9)
    length = 1e-9 * 24**0.5
    assert abs(moved[1] - norm) <= length and abs(moved[2] - weighted) <= length * (1 + 1e-6)


@pytest.mark.parametrize(
    ("rank", "line_of", "field", "action", "verb"),
    first_of(
        [
            (1, {"did": "1F3"}, "made", "1F3", "made"),
            (2, {"received": "1F3"}, "is", "2F3", "received"),
            (2, {"sent": "2I4"}, "is", "2B4", "sent"),
            (0, {"did": "0B7"}, "used", "0B7", "used"),
        ],
        2,
    ),
)
def test_a_change_of_one_bit_is_found_at_exactly_its_action(
    record, tmp_path, rank, line_of, field, action, verb
):
    shutil.copytree(record("1f1b"), tmp_path / "copy")
    flip_a_bit(tmp_path / "copy", rank, line_of, field)
    found = compare(read_recording(record("1f1b")), read_recording(tmp_path / "copy"))
    assert (found.step, found.ranks, str(found.event.action)) == (0, (rank,), action)
    assert f"{action} on rank {rank}: {verb} " in found.sentence
    assert "nearly the same" in found.sentence
    near = compare(read_recording(record("1f1b")), read_recording(tmp_path / "copy"), 1e-12)
    assert near is None


def test_of_all_that_differs_the_cause_is_found_and_not_what_follows(record):
    # With another learning rate everything after the first update differs.
    one, other = (
        read_recording(record("1f1b", 0, f"--learning-rate {rate}")) for rate in (0.2, 0.1)
    )
    found = compare(one, other)
    assert (found.step, found.event) == (1, None) and "begins with another" in found.sentence


def test_the_cause_is_found_when_the_clocks_of_the_ranks_disagree(record, tmp_path):
    for name in ("broken", "healthy"):
        flag = " --cured" if name == "healthy" else ""
        folder = tmp_path / name
        launch.run(f"broken_pipelines.py --case 1{flag} --record {folder}", warm=True, show=False)
    broken, healthy = (read_recording(tmp_path / name) for name in ("broken", "healthy"))
    for entry in broken.steps[0].entries:  # the ranks after the cause, by a clock that is behind
        if entry.event.rank > 1:
            event = entry.event
            entry.event = event._replace(start=event.start - 1e5, end=event.end - 1e5)
    assert str(compare(broken, healthy).event.action) == "1F0"


# Runs that end before their time


def test_a_killed_run_is_readable_up_to_its_last_moment(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(RunFailed):
        launch.run(
            f"one_f_one_b.py {TINY} --steps 500 --pace 5 10 --timeout 8 --record {folder}",
            warm=True,
            show=False,
            limit=60,
            send=("SIGKILL", 2, "step 1"),
        )
    recording = read_recording(folder)
    assert len(recording.steps) >= 2 and recording.steps[0].ended == set(range(4))
    assert recording.steps[-1].ended != set(range(4))
    waited_for = {rank: wait.source for rank, wait in recording.unanswered.items()}
    assert 2 in waited_for.values(), "a neighbour of the rank that was killed"
    TimePanel({"recorded": recording}, len(recording.steps) - 1, None, "")


@pytest.mark.further
def test_a_deadlock_can_be_read(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(RunFailed, match="a deadlock, each of these ranks waits for the next"):
        launch.run(
            f"broken_pipelines.py --case 5 --timeout 8 --record {folder}", warm=True, show=False
        )
    recording = read_recording(folder)
    assert describe_unanswered_waits(recording) == [
        "rank 0 waits for the gradient of micro-batch 0 from stage 1, from rank 1",
        "rank 1 waits for the gradient of micro-batch 0 from stage 2, from rank 2",
        "rank 2 waits for the activation of micro-batch 3 from stage 1, from rank 1",
        "rank 3 waits for the activation of micro-batch 2 from stage 2, from rank 2",
    ]
    view = time_machine(folder).view
    rows = rows_of(view.moment(view.times[-1]))
    assert rows[3][1].endswith(
        "waits for the activation of micro-batch 3 from stage 1, from rank 1; here its recording ends"
    )


def test_a_line_cut_off_in_the_middle_is_left_out(record, tmp_path):
    shutil.copytree(record("gpipe"), tmp_path / "copy")
    path = tmp_path / "copy" / "rank1.jsonl"
    text = path.read_text()
    path.write_text(text[: text.rfind("\n{") + 9])
    assert read_recording(tmp_path / "copy").steps[-1].ended == {0, 2, 3}
    (tmp_path / "copy" / "rank3.jsonl").unlink()
    assert len(read_recording(tmp_path / "copy").steps) == 2


@pytest.mark.parametrize("line", ["null", "7", "[]", "[{}]", '"did"', "{}"])
def test_a_line_that_no_recording_has_is_named(record, tmp_path, line):
    shutil.copytree(record("gpipe"), tmp_path / "copy")
    with open(tmp_path / "copy" / "rank1.jsonl", "a") as file:
        file.write(line + "\n")
    with pytest.raises(RecordingError, match="is not a line of a recording; record anew"):
        read_recording(tmp_path / "copy")


def test_a_folder_without_a_recording_is_named(tmp_path):
    with pytest.raises(RecordingError, match=re.escape(f"{tmp_path} holds no recording")):
        read_recording(tmp_path)


# Held bytes and gradients


def test_held_bytes_are_counted_in_every_step_and_end_at_none(record):
    recording = read_recording(record("1f1b"))
    for step in recording.steps:
        held = {rank: [e.held for e in step.entries if e.event.rank == rank] for rank in range(4)}
        one = held[3][0]
        assert [max(each) // held[rank][0] for rank, each in held.items()] == [4, 3, 2, 1]
        assert one > 0 and all(each[-1] == 0 for each in held.values())


def test_what_the_backwards_gather_is_what_the_update_takes_unless_it_is_clipped(record, tmp_path):
    for gathered, taken in read_recording(record("1f1b")).updates(0).values():
        assert gathered == taken > 0
    folder = tmp_path / "run"
    launch.run(f"broken_pipelines.py --case 6 --cured --record {folder}", warm=True, show=False)
    ratios = [taken / gathered for gathered, taken in read_recording(folder).updates(0).values()]
    assert ratios[0] < 1 and ratios == pytest.approx([ratios[0]] * 4, rel=1e-12)


# The library, and refusals


@pytest.mark.further
def test_the_library_is_recorded_without_its_messages(tmp_path):
    folder = tmp_path / "run"
    launch.run(f"torch_pipelining.py {TINY} --record {folder}", warm=True, show=False)
    recording = read_recording(folder)
    assert len(recording.steps) == 2
    ours = tmp_path / "ours"
    launch.run(f"one_f_one_b.py {TINY} --record {ours}", warm=True, show=False)
    # The library adds the gradients of whole micro-batches up and divides them once, at the end.
    found = compare(recording, read_recording(ours), tolerance=1e-12)
    assert str(found.event.action) == "3B0" and "has gathered" in found.sentence
    first, wanted = (
        each.entry("3B0", step=0).gradient for each in (recording, read_recording(ours))
    )
    assert first == pytest.approx(8 * wanted, rel=1e-12)
    taken = [norms[1] for norms in recording.updates(0).values()]
    expected = [norms[1] for norms in read_recording(ours).updates(0).values()]
    assert taken == pytest.approx(expected, rel=1e-12)


# What the time machine says


def rows_of(html):
    root = ElementTree.fromstring(f"<page>{html}</page>")
    return [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]


def test_a_block_says_what_it_waited_for_and_which_version_it_used(record):
    view = time_machine(record("pipedream")).view
    told = dict(
        zip((str(e.action) for e in view.timelines["recorded"].events), view.stories("recorded"))
    )
    assert told["0F5"][1].endswith("; uses version 2")
    assert told["0U5"][1].endswith("; makes version 6")
    waiting = [row[1] for time in view.times for row in rows_of(view.moment(time))[1:]]
    # Rank 0 has four micro-batches under way before its first update; for which of their gradients
    # it has to wait depends on the machine, and it waits for one.
    pattern = (
        r"waits for the gradient of micro-batch ([0-3]) from rank 1, until [\d.]+ ms; "
        r"then 0B\1 uses version 0"
    )
    assert any(re.fullmatch(pattern, text) for text in waiting)


def test_the_table_has_every_action_with_what_it_took_and_gave(record):
    view = time_machine(record("gpipe")).view
    heads, *rows = rows_of(view.table)
    assert len(rows) == len([a for order in gpipe(4, 8).orders for a in order])
    by_action = {row[1]: row for row in rows}
    assert by_action["1F2"][5].endswith(", as rank 0 sent it")
    assert by_action["1F2"][6].endswith(", to rank 2")
    assert re.fullmatch(r"0\.\d{6} of the loss", by_action["3F2"][6])
    assert by_action["0B0"][6] == "no message" and by_action["0B0"][8].startswith("norm ")
    ElementTree.fromstring(view.picture)


def test_the_panel_goes_to_the_first_difference(record, tmp_path):
    shutil.copytree(record("1f1b"), tmp_path / "copy")
    flip_a_bit(tmp_path / "copy", 1, {"did": "1F3"}, "made")
    machine = time_machine(record("1f1b"), compare=tmp_path / "copy")
    panel = machine.make_panel()
    assert "First difference: step 0, 1F3 on rank 1: made" in panel.verdict.value
    panel.jump.click()
    event = next(e for e in panel.view.timelines["recorded"].events if str(e.action) == "1F3")
    assert panel.time == pytest.approx(event.start)
    assert "\u2260" in panel.line.value
    panel.chosen.value = 1
    assert "\u2260" not in panel.line.value and "step 1" in panel.moment.value


def test_equal_recordings_say_so_and_the_jump_is_off(record):
    panel = time_machine(record("1f1b"), compare=record("1f1b", 1)).make_panel()
    assert "No message, no weight and no gradient differs." in panel.verdict.value
    assert panel.jump.disabled


@pytest.mark.parametrize("odd", [-1, 99, "many", [0], float("nan")])
def test_a_step_or_a_tolerance_that_is_none_is_refused_without_a_traceback(record, odd):
    with pytest.raises(RecordingError, match="^step is a whole number from 0 to 1, not") as refused:
        time_machine(record("1f1b"), step=odd)
    assert refused.value._render_traceback_() == [str(refused.value)]
    with pytest.raises(RecordingError, match="is not a folder; name one"):
        time_machine([odd])
    if odd != 99:
        words = time_machine(record("1f1b"), record("1f1b"), tolerance=odd).words
        assert "tolerance is a number of at least 0" in words


def test_the_script_refuses_a_folder_that_has_something_in_it(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(RunFailed, match=r"--record .* there is something in it; name a new folder"):
        launch.run(f"gpipe.py {TINY} --record {tmp_path}", warm=True, show=False)
    assert ROOT.is_dir() and list(tmp_path.iterdir()) == [tmp_path / "run.json"]
