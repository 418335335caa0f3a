"""Every broken pipeline breaks as the lesson says, and its repair restores the losses.

The checks of lesson 12b answer wrong diagnoses and wrong repairs in sentences.
"""

import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap

import numpy
import pytest
from further import first_of

from broken.pipelines.faults import PIECES, Broken, Cured
from course import launch
from course.checks import lesson_12b as check
from course.checks.answer import NOT_ATTEMPTED
from course.failed_run import RunFailed
from lab.flight_log_comparing import compare
from lab.flight_log_reader import read_recording

# What is the first difference from a healthy run: step, ranks, action.
FIRST = {
    1: (0, (1,), "1F0"),
    2: (0, (3,), "3F0"),
    4: (0, (2,), "2B0"),
    5: (0, (2,), "None"),
    6: (0, (0, 1, 2, 3), "None"),
    7: (0, (1,), "1B1"),
    8: (0, (0, 3), "None"),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Runs a case once, with the given flags; returns its recording, its losses and its failure."""
    made = {}

    def run(case, flags=""):
        if (case, flags) not in made:
            folder = tmp_path_factory.mktemp("case") / "run"
            timeout = "8" if case == 5 and not flags else "30"
            command = f"broken_pipelines.py --case {case} {flags} --timeout {timeout}"
            try:
                losses = launch.run(
                    f"{command} --record {folder}", warm=True, show=False, limit=60
                ).losses
                failure = ""
            except RunFailed as failed:
                losses, failure = [], str(failed)
            made[case, flags] = read_recording(folder), losses, failure
        return made[case, flags]

    return run


@pytest.mark.further
@pytest.mark.parametrize("case", [1, 2, 4, 6, 7, 8])
def test_the_broken_pipeline_trains_with_other_losses_and_differs_first_where_the_fault_is(
    recorded, case
):
    broken, losses, _ = recorded(case)
    healthy, right, _ = recorded(case, "--cured")
    assert len(losses) == len(right) and losses != right
    found = compare(broken, healthy)
    assert (found.step, found.ranks, str(found.event and found.event.action)) == FIRST[case]
    assert found.ranks == check.CASES[case].ranks


def test_without_the_scale_the_first_loss_is_right_and_each_share_eight_times_too_large(recorded):
    broken, losses, _ = recorded(2)
    healthy, right, _ = recorded(2, "--cured")
    assert losses[0] == right[0]
    for k in range(8):
        shares = [each.entry(f"3F{k}", step=0).made.norm for each in (broken, healthy)]
        assert shares[0] == pytest.approx(8 * shares[1], rel=1e-12)


def test_the_uneven_cut_has_the_right_losses_and_one_rank_with_five_of_eleven_layers(recorded):
    broken, losses, _ = recorded(3)
    _, right, _ = recorded(3, "--cured")
    assert losses == right
    layers = [
        len({name.split(".")[1] for name in prints if name.startswith("layers.")})
        for _, prints in sorted(broken.steps[0].weights.items())
    ]
    assert layers == [2, 2, 2, 5]


def test_a_buffer_used_twice_leaves_every_forward_of_the_first_step_right(recorded):
    broken, healthy = recorded(4)[0], recorded(4, "--cured")[0]
    for action, entry in broken.steps[0].by_action.items():
        if action.kind == "F":
            assert entry.made == healthy.steps[0].by_action[action].made


@pytest.mark.further
def test_the_receives_in_the_wrong_order_end_in_a_deadlock_that_the_recording_shows(recorded):
    broken, _, failure = recorded(5)
    assert "a deadlock, each of these ranks waits for the next" in failure
    assert (broken.unanswered[2].producer, broken.unanswered[2].source) == ("1F3", 1)
    found = compare(broken, recorded(5, "--cured")[0])
    assert (found.step, found.ranks, str(found.event)) == FIRST[5]
    assert "rank 2 never came to the backward of micro-batch 0 on stage 2" in found.sentence


@pytest.mark.further
def test_clipped_by_its_own_norm_each_stage_takes_another_fraction(recorded):
    for flags, equal in (("", False), ("--cured", True)):
        norms = recorded(6, flags)[0].updates(0).values()
        ratios = [taken / gathered for gathered, taken in norms]
        assert all(ratio < 1 for ratio in ratios)
        assert (max(ratios) - min(ratios) < 1e-12) == equal


def test_without_a_stash_the_backwards_of_rank_1_use_other_versions_than_its_forwards(recorded):
    for flags, same in (("", {0, 2, 3}), ("--cured", {0, 1, 2, 3})):
        actions = recorded(7, flags)[0].steps[0].by_action
        agreeing = {
            stage
            for stage in range(4)
            if all(
                actions[stage, "F", k].version == actions[stage, "B", k].version for k in range(10)
            )
        }
        assert agreeing == same


@pytest.mark.further
def test_the_tied_matrix_stays_one_only_when_both_gradients_are_added(recorded):
    for flags, tied in (("", [True, False, False]), ("--cured", [True, True, True])):
        recording = recorded(8, flags)[0]
        same = [
            recording.weight("embedding.weight", step) == recording.weight("head.weight", step)
            for step in range(3)
        ]
        assert same == tied


# Diagnoses


def answer_to(capsys, ask, *answers):
    ask(*answers)
    return capsys.readouterr().out.strip()


@pytest.fixture(autouse=True)
def nothing_asked():
    check.asked.clear()
    check.wrong.clear()


def second_answer_to(capsys, case, *answer):
    """What is said of a diagnosis that is not the first wrong one of its case."""
    check.wrong[case] = [("another", ())]
    return answer_to(capsys, check.diagnosis, case, *answer)


def test_the_checks_know_the_pieces_of_the_scripts():
    assert {number: case.piece for number, case in check.CASES.items()} == {
        **PIECES,
        check.UNKNOWN: "run_schedule",
    }
    named = {case.fault for case in check.CASES.values()}
    assert named == set(check.FAULTS) - {"micro-batch lost"}  # which nobody commits


@pytest.mark.parametrize("case", check.CASES)
def test_a_diagnosis_is_not_attempted_right_or_explained(capsys, case):
    right = check.CASES[case]
    assert answer_to(capsys, check.diagnosis, case, ..., ...) == NOT_ATTEMPTED
    answer = answer_to(capsys, check.diagnosis, case, right.fault, list(right.ranks))
    assert answer == f"Right: {right.found}"
    for fault in check.FAULTS:
        if fault != right.fault:
            answer = second_answer_to(capsys, case, fault, right.ranks)
            assert answer.startswith(f"Not yet: '{fault}' would show ") and ". Here " in answer
            assert answer.endswith("The ranks are right")
            assert right.fault not in answer  # a colleague does not tell
    for rank in set(range(4)) - set(right.ranks):
        answer = second_answer_to(capsys, case, right.fault, rank)
        assert answer.startswith(f"Not yet: the fault is right, and rank {rank} does not commit it")


@pytest.mark.parametrize(
    ("case", "fault", "ranks", "sentence"),
    [
        (1, "swapped messages", 2, "rank 1 already put the wrong tensor on the wire"),
        (1, "scale forgotten", 1, "1F0, which used and made what it should"),
        (3, "scale forgotten", 3, "nothing is computed wrongly, it takes too long"),
        (4, "uneven cut", 2, "an uneven cut costs time but no digit"),
        (4, "receives in the wrong order", 2, "every rank comes to the end of its recording"),
        (5, "no stash", 2, "the recording ends in the middle"),
        (6, "clipping by stage", 2, "rank 2 is one that commits it, but not alone"),
        (7, "clipping by stage", 1, "weights; 1F1 used version 0. The ranks are right"),
        (8, "swapped messages", [0, 3], "look at the table of what was gathered"),
        (
            8,
            "tied weights drift",
            "all",
            "rank 1 does not commit it: compare what each update took",
        ),
        (8, "tied weights drift", 0, "but not alone: compare what each update took, rank by rank"),
        (2, "the loss", 3, "choose the fault from those that faults() prints; not 'the loss'"),
        (2, "scale forgotten", 4, 'name a rank from 0 to 3, a list of them or "all"; not 4'),
        (2, "scale forgotten", "rank 3", "name a rank from 0 to 3"),
        (2, ["scale forgotten"], 3, "choose the fault from those that faults() prints"),
        (9, "swapped messages", 0, "the first difference is 1F0, which used the right input"),
        (9, "argument left out", 0, "what differs there came from rank 1"),
        (9, "argument left out", 2, "this program has only ranks 0 and 1"),
        (10, "scale forgotten", 3, "there is no case 10; they are 1 to 9"),
    ],
)
def test_diagnosis_explains(capsys, case, fault, ranks, sentence):
    answer = second_answer_to(capsys, case, fault, ranks)
    assert answer.startswith("Not yet: ") and sentence in answer


@pytest.mark.parametrize("case", list(check.CASES)[1:])
def test_the_first_wrong_diagnosis_is_answered_with_a_question_that_tells_nothing(capsys, case):
    right = check.CASES[case]
    wrong_rank = next(rank for rank in range(4) if (rank,) != right.ranks)
    for fault, ranks in [("micro-batch lost", right.ranks), (right.fault, wrong_rank)]:
        check.wrong.clear()
        first = answer_to(capsys, check.diagnosis, case, fault, ranks)
        assert first.startswith(f"Not yet: '{fault}' would show ") and "on which ranks? " in first
        assert not any(told in first for told in (right.shows, right.elsewhere, "The ranks are"))
        assert (
            answer_to(capsys, check.diagnosis, case, fault, ranks) == first
        )  # not by asking twice
    assert answer_to(capsys, check.diagnosis, case, "micro-batch lost", "all") != first
    answer = answer_to(capsys, check.diagnosis, case, right.fault, right.ranks)
    assert answer == f"Right: {right.found} (It took 2 wrong diagnoses.)"


@pytest.mark.parametrize("case", list(check.CASES)[1:])
def test_hints_come_one_by_one_are_counted_and_name_no_fault(capsys, case):
    told = [answer_to(capsys, check.hint, case) for _ in range(4)]
    for number, line in enumerate(told[:3], 1):
        assert line.startswith(f"Hint {number} of 3 on case {case}: ")
        assert not any(fault in line for fault in check.FAULTS)
    assert told[3] == f"Case {case} has no further hint; you have had 3."
    right = check.CASES[case]
    answer = answer_to(capsys, check.diagnosis, case, right.fault, right.ranks)
    assert answer == f"Right: {right.found} (It took 3 hints.)"


def test_the_lesson_names_no_case_by_its_fault_its_piece_or_its_hints():
    cells = json.loads((launch.ROOT / "notebooks" / "12b_find_the_fault.ipynb").read_text())[
        "cells"
    ]
    texts = ["".join(cell["source"]) + str(cell.get("outputs", "")) for cell in cells]
    exercises = texts[next(i for i, text in enumerate(texts) if "## Exercises" in text) :]
    for number, case in list(check.CASES.items())[1:]:
        assert not any(case.piece in text for text in texts), number
        assert not any(hint in text for hint in case.hints for text in texts), number
    for fault in check.FAULTS:
        assert not any(fault in text for text in exercises), fault
    titles = re.findall(r"^\*\*(\d+)\. (.*?)\*\*", "\n".join(exercises), re.MULTILINE)
    assert titles == [(str(number), f"Case {number}") for number in range(2, 10)]


def test_the_list_of_faults_is_printed_when_it_is_asked_for(capsys):
    told = answer_to(capsys, check.faults).splitlines()
    assert sorted(check.FAULTS) == told
    in_order = [case.fault for case in check.CASES.values()]
    assert not any(one == other for one, other in zip(told, in_order))


def test_the_broken_code_is_shown_after_the_diagnosis_only(capsys):
    assert check.broken_piece(2, ..., ...) is None
    assert check.broken_piece(2, "scale forgotten", 0) is None
    assert check.broken_piece(2, "the loss", 0) is None
    assert capsys.readouterr().out.count("once the diagnosis is right") == 3
    assert "return mean_loss" in check.broken_piece(2, "scale forgotten", 3).text


# Repairs: the functions below are those of a learner.


def next_to_send(outputs):
    return outputs.pop(0)


def loss_to_go_back_from(mean_loss, num_microbatches):
    return mean_loss / num_microbatches


def layers_of_stages(num_layers, num_stages):
    return [(num_layers + stage) // num_stages for stage in range(num_stages)]


def keep_activation(received, buffers):
    buffers.append(received.clone())
    return buffers[-1]


def order_of_receives(actions):
    return [action for action in actions if action.kind != "U"]


def norm_to_clip_by(rank, squares_of_ranks):
    squares = [value for part in squares_of_ranks for value in part.values()]
    return sum(squares) ** 0.5


def before_update(weights, users):
    for weight in weights:
        weight.data = weight.data.clone()


def tied_gradient(mine, other):
    return mine + other


def run_schedule(schedule, rank, tokens, targets, mask, losses):
    if rank == 0:
        schedule.step(tokens, mask=mask)
    else:
        schedule.step(target=targets, losses=losses, mask=mask)


def test_a_share_of_the_loss_may_use_what_only_a_tensor_has(capsys, tmp_path):
    def loss_to_go_back_from(mean_loss, num_microbatches):
        return mean_loss.div(num_microbatches)

    answer = answer_to(capsys, check.repair, 2, in_a_cell(loss_to_go_back_from, tmp_path))
    assert answer == f"Right: {check.CASES[2].cured}"


def test_a_repair_may_be_a_partial_of_that_name_with_hints_of_what_no_rank_has(capsys, tmp_path):
    text = """from __future__ import annotations

from functools import partial


def share(of: Nowhere, mean_loss, num_microbatches):
    return of * mean_loss / num_microbatches


loss_to_go_back_from = partial(share, 1)
"""
    answer = answer_to(capsys, check.repair, 2, of_a_cell(text, "loss_to_go_back_from", tmp_path))
    assert answer == f"Right: {check.CASES[2].cured}"


@pytest.mark.parametrize("case", first_of(check.CASES, 3))
def test_a_repair_restores_the_losses_of_one_process(capsys, case):
    piece = globals()[check.CASES[case].piece]
    answer = answer_to(capsys, check.repair, case, piece)
    assert answer == f"Right: {check.CASES[case].cured}"


def in_a_cell(function, folder):
    """The same function as the text of a cell defines it, outside of any other function."""
    return of_a_cell(textwrap.dedent(inspect.getsource(function)), function.__name__, folder)


def of_a_cell(text, name, folder):
    """What the text of a cell defines with that name."""
    path = folder / f"cell_of_{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def wrong(name):
    """Wrong repairs, by name; each stands in a function of its own, since all have one name."""

    def twice():
        def next_to_send(outputs):
            return outputs[0]

        return next_to_send

    def no_memory():
        def keep_activation(received, buffers):
            buffers[:] = [received]
            return buffers[0].data.zero_()

        return keep_activation

    def backwards_first():
        def order_of_receives(actions):
            return sorted(actions, key=lambda action: action.kind)

        return order_of_receives

    def by_microbatch():
        def order_of_receives(actions):
            return sorted(actions, key=lambda action: (action.microbatch, action.kind == "B"))

        return order_of_receives

    def largest():
        def norm_to_clip_by(rank, squares_of_ranks):
            return max(sum(part.values()) for part in squares_of_ranks) ** 0.5

        return norm_to_clip_by

    def mean():
        def tied_gradient(mine, other):
            return (mine + other) / 2

        return tied_gradient

    def too_many():
        def layers_of_stages(num_layers, num_stages):
            return [num_layers // num_stages + 1] * num_stages

        return layers_of_stages

    def wrong_name_of_an_argument():
        def run_schedule(schedule, rank, tokens, targets, mask, losses):
            if rank == 0:
                schedule.step(tokens, mask=mask)
            else:
                schedule.step(targets=targets, losses=losses, mask=mask)

        return run_schedule

    def nothing_kept():
        def before_update(weights, users):
            for weight in weights:
                weight = weight.clone()

        return before_update

    def by_eight():
        def loss_to_go_back_from(mean_loss, num_microbatches):
            return mean_loss / 8

        return loss_to_go_back_from

    def in_place():
        def loss_to_go_back_from(mean_loss, num_microbatches):
            mean_loss /= num_microbatches
            return mean_loss

        return loss_to_go_back_from

    def nothing_collected():
        def run_schedule(schedule, rank, tokens, targets, mask, losses):
            further = {} if rank == 0 else {"target": targets}
            schedule.step(*([tokens] if rank == 0 else []), mask=mask, **further)

        return run_schedule

    def mask_of_words():
        def run_schedule(schedule, rank, tokens, targets, mask, losses):
            if rank == 0:
                schedule.step(tokens, mask=mask)
            else:
                schedule.step(target=targets, losses=losses, mask=mask | ~mask)

        return run_schedule

    def by_ranks():
        def loss_to_go_back_from(mean_loss, num_microbatches):
            return mean_loss / (num_microbatches - 1)

        return loss_to_go_back_from

    def its_number():
        def loss_to_go_back_from(mean_loss, num_microbatches):
            return mean_loss.item() / num_microbatches

        return loss_to_go_back_from

    def not_whole():
        def layers_of_stages(num_layers, num_stages):
            return [num_layers / num_stages] * num_stages

        return layers_of_stages

    def only_kept():
        def keep_activation(received, buffers):
            buffers.append(received)

        return keep_activation

    def evaluated():
        def run_schedule(schedule, rank, tokens, targets, mask, losses):
            if rank == 0:
                schedule.eval(tokens, mask=mask)
            else:
                schedule.eval(target=targets, losses=losses, mask=mask)

        return run_schedule

    def two_steps():
        def run_schedule(schedule, rank, tokens, targets, mask, losses):
            for found in ([], losses):
                if rank == 0:
                    schedule.step(tokens, mask=mask)
                else:
                    schedule.step(target=targets, losses=found, mask=mask)

        return run_schedule

    def raises():
        def tied_gradient(mine, other):
            return mine + missing  # noqa: F821 - the mistake

        return tied_gradient

    return locals()[name]()


@pytest.mark.parametrize(
    ("case", "name", "sentence"),
    first_of(
        [
            (2, "by_ranks", "8 micro-batches with a mean loss of 6: you go back from 0.857143"),
            (
                2,
                "by_eight",
                "4 micro-batches with a mean loss of 6: you go back from 0.75, and the shar",
            ),
            (2, "in_place", "your piece changes `mean_loss` itself"),
            (2, "its_number", "a mean loss of 6 gives 0.75, and a backward from it does not"),
            (3, "not_whole", "you cut [2.75, 2.75, 2.75, 2.75]; return a list with a whole number"),
            (4, "only_kept", "Not yet: keep_activation returned nothing; let it return what"),
            (9, "evaluated", "does not run one whole step: each of the two ranks has to call"),
            (9, "two_steps", "does not run one whole step: each of the two ranks has to call"),
            (
                3,
                "too_many",
                "11 layers on 4 stages: you cut [3, 3, 3, 3], which is 4 stages with 12",
            ),
            (
                4,
                "no_memory",
                "first difference from a healthy run: step 0, 2F0 on rank 2: received",
            ),
            (1, "twice", "with your piece the ranks still wait: rank "),
            (5, "backwards_first", "with your piece the ranks still wait: rank "),
            (5, "by_microbatch", "the message of 2B0 before that of 2F1, which its actions need"),
            (6, "largest", "every action of step 0 is the same, and the update after it is not"),
            (7, "nothing_kept", "1B1 on rank 1: made"),
            (8, "mean", "it took a gradient of norm"),
            (9, "wrong_name_of_an_argument", "got an unexpected keyword argument 'targets'"),
            (9, "nothing_collected", "append them to `losses`"),
            (
                9,
                "mask_of_words",
                "the first difference from one process: step 0, 1F0 on rank 1: made",
            ),
            (
                8,
                "raises",
                "with your piece a rank ended with NameError: name 'missing' is not defined",
            ),
        ],
        4,
    ),
)
def test_repair_explains(capsys, tmp_path, case, name, sentence):
    answer = answer_to(capsys, check.repair, case, in_a_cell(wrong(name), tmp_path))
    assert answer.startswith("Not yet: ") and sentence in answer, answer


@pytest.mark.parametrize(("case", "name"), [(6, "largest"), (9, "nothing_collected")])
def test_a_repair_without_an_end_is_told_so(capsys, monkeypatch, tmp_path, case, name):
    def too_long(*_, **__):
        raise RunFailed("(the run took longer than 60 s)")

    monkeypatch.setattr(check.launch, "run", too_long)
    answer = answer_to(capsys, check.repair, case, in_a_cell(wrong(name), tmp_path))
    assert answer == f"Not yet: {check.NO_END}"


def test_a_repair_in_which_one_rank_waits_in_vain_is_told_so(capsys, monkeypatch, tmp_path):
    def run(*_, **__):
        raise RunFailed("RuntimeError: Timed out waiting 30000ms for send operation to complete")

    monkeypatch.setattr(check.launch, "run", run)
    answer = answer_to(capsys, check.repair, 9, in_a_cell(wrong("evaluated"), tmp_path))
    assert answer.endswith(f"one rank waits for the other in vain: {check.CALLED_ON_BOTH}")


def test_the_broken_pieces_are_no_repairs(capsys):
    for case in (2, 3):
        piece = getattr(Broken, check.CASES[case].piece)
        assert answer_to(capsys, check.repair, case, piece).startswith("Not yet: ")
    assert "all others wait for stage 3, which has 5" in answer_to(
        capsys, check.repair, 3, Broken.layers_of_stages
    )


def test_a_cut_whose_slowest_stage_is_no_slower_is_even_enough():
    def fill_from_the_front(num_layers, num_stages):
        most = -(-num_layers // num_stages)
        return [max(0, min(most, num_layers - most * stage)) for stage in range(num_stages)]

    assert fill_from_the_front(11, 4) == [3, 3, 3, 2] and fill_from_the_front(10, 4) == [3, 3, 3, 1]
    assert check._uneven(fill_from_the_front) is None


def test_no_stage_has_less_than_no_layer():
    def rest_for_the_last(num_layers, num_stages):
        most = -(-num_layers // num_stages)
        return [most] * (num_stages - 1) + [num_layers - most * (num_stages - 1)]

    assert "9 layers on 8 stages" in (said := check._uneven(rest_for_the_last))
    assert said.endswith("; stage 7 has -5")


@pytest.mark.further
def test_the_order_of_receives_may_come_from_a_generator(capsys, tmp_path):
    def order_of_receives(actions):
        yield from (action for action in actions if action.kind in "FB")

    said = answer_to(capsys, check.repair, 5, in_a_cell(order_of_receives, tmp_path))
    assert said.startswith("Right: ")


@pytest.mark.parametrize("kind", [iter, numpy.array])
def test_a_cut_may_be_in_an_array_or_come_from_a_generator(kind):
    assert check._uneven(lambda *sizes: kind(layers_of_stages(*sizes))) is None


@pytest.mark.further
def test_the_ranks_train_with_a_cut_that_is_an_array(capsys, tmp_path):
    def layers_of_stages(num_layers, num_stages):
        import torch

        return torch.arange(num_layers, num_layers + num_stages) // num_stages

    said = answer_to(capsys, check.repair, 3, in_a_cell(layers_of_stages, tmp_path))
    assert said.startswith("Right: ")


def test_ranks_may_be_in_an_array(capsys):
    both = numpy.array([0, 3])
    said = answer_to(capsys, check.diagnosis, 8, "tied weights drift", both)
    assert said.startswith("Right: ")
    assert check.broken_piece(8, "tied weights drift", both) is not None


def test_a_rank_may_be_a_number_of_numpy(capsys):
    said = answer_to(capsys, check.diagnosis, 2, "scale forgotten", numpy.int64(3))
    assert said.startswith("Right: ")


def test_a_repair_may_be_a_lambda_that_also_has_a_name_of_the_notebook(tmp_path):
    path = tmp_path / "cell_of_a_lambda.py"
    path.write_text("repaired_8 = None\ntied_gradient = repaired_8 = lambda a, b: a + b\n")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert "tied_gradient = " in check._write_piece("tied_gradient", module.repaired_8).read_text()


def test_two_processes_repair_the_same_piece_in_two_folders(tmp_path):
    """Two notebooks of one clone, or two workers of pytest."""
    ours = of_a_cell("def tied_gradient(a, b):\n    return a + b\n", "tied_gradient", tmp_path)
    file = check._write_piece("tied_gradient", ours)
    own = "def tied_gradient(a, b):\n    return a - b\n"
    write = "print(lesson_12b._write_piece('tied_gradient', tied_gradient), end='')\n"
    (tmp_path / "other.py").write_text(
        f"from course.checks import lesson_12b\n\n\n{own}\n\n{write}"
    )
    other = subprocess.run(
        [sys.executable, tmp_path / "other.py"],
        env=os.environ | {"PYTHONPATH": str(launch.ROOT / "source_code")},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert other.stdout.endswith("tied_gradient.py") and other.stdout != str(file)
    assert "return a + b" in file.read_text()


def test_a_stub_is_not_attempted_and_another_name_is_refused(capsys, tmp_path):
    def next_to_send(outputs):
        """Words."""
        return ...

    stub = in_a_cell(next_to_send, tmp_path)
    assert answer_to(capsys, check.repair, 1, stub) == NOT_ATTEMPTED
    assert answer_to(capsys, check.repair, 1, ...) == NOT_ATTEMPTED
    assert "call it next_to_send" in answer_to(capsys, check.repair, 1, lambda outputs: 1)
    assert "call it next_to_send" in answer_to(capsys, check.repair, 1, Cured.tied_gradient)
    assert "asks for a function" in answer_to(capsys, check.repair, 1, 3)


# The script's own refusals


@pytest.mark.parametrize(
    ("flags", "ranks", "sentence"),
    first_of(
        [
            ("--case 1", 2, "--case 1 is a pipeline of 4 ranks, and this job has 2; start it with"),
            ("--case 9", 4, "--case: invalid choice: 9"),
            ("--case 1 --cured --repair pyproject.toml", 4, "leave one of the two out"),
            ("--case 1 --repair nowhere.py", 4, "--repair nowhere.py: there is no such file"),
            ("--case 7 --microbatches 2", 4, "--case 7 updates after each batch and cuts none"),
        ],
        2,
    ),
)
def test_what_the_script_refuses(flags, ranks, sentence):
    with pytest.raises(RunFailed, match=re.escape(sentence)):
        launch.run(f"broken_pipelines.py {flags}", ranks, warm=True, show=False, limit=60)


def test_a_file_without_the_piece_is_refused(tmp_path):
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(RunFailed, match="defines no function next_to_send; give it that name"):
        launch.run(
            f"broken_pipelines.py --case 1 --repair {tmp_path / 'empty.py'}", warm=True, show=False
        )
    shutil.rmtree(tmp_path)
