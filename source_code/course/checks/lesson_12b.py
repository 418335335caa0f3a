# SPDX-License-Identifier: Apache-2.0
"""Checks of lesson 12b: the fault and its ranks, and whether the repair gives the right losses."""

import functools
import math
import re
import shutil
import tempfile
from numbers import Integral
from pathlib import Path

from course import launch
from course.building import WAITING
from course.building.cells import names_of
from course.checks.answer import WrongAnswer, call, checked, close, many, whole_numbers_in
from course.checks.build_text import request_of
from course.debugging.cases import BEFORE_UPDATES, CASES, FAULTS, IN_UPDATES
from course.failed_run import RunFailed
from course.source import source_of
from lab.flight_log_comparing import compare
from lab.flight_log_reader import RecordingError, read_recording
from pipeline.schedules import one_f_one_b

SCRIPT = "broken_pipelines.py"
FAULTY_CODE = "broken/pipelines/faults.py"
RANKS = 4
UNKNOWN = 9  # the case of UNKNOWN_SCRIPT: two ranks, compared with one process
UNKNOWN_SCRIPT = "broken_unknown_program.py"
NO_END = "with your piece the run does not end: does a loop of yours end?"
CALLED_ON_BOTH = "each of the two ranks has to call `schedule.step` once"
HEAD = (
    "from __future__ import annotations",  # no hint is looked up
    "import math",
    "import torch",
    "from small.pipeline import *",
)  # whose names `collect` leaves out
asked = {}  # case -> number of hints shown
wrong = {}  # case -> the different wrong diagnoses so far


def faults():
    """Print the faults to choose from, in alphabetical order. One of them never occurs."""
    print("\n".join(sorted(FAULTS)))


def hint(case):
    """Print the next hint on a case, with its number and the number of hints."""
    try:
        hints = _case(case).hints
    except WrongAnswer as error:
        print(error)
        return
    number = asked.get(case, 0)
    if number == len(hints):
        print(f"Case {case} has no further hint; you have had {number}.")
        return
    asked[case] = number + 1
    print(f"Hint {number + 1} of {len(hints)} on case {case}: {hints[number]}")


def diagnosis(case, fault, ranks):
    """Check a diagnosis. `fault` is one of those that faults() prints; `ranks` is the rank that has
    it, a list of several ranks, or "all"."""
    checked(lambda *_: f"{CASES[case].found}{_tally(case)}", "diagnosis")(_check_diagnosis)(
        case, fault, ranks
    )


def repair(case, function):
    """Check a repair: the ranks train with `function` in place of the broken piece of that name."""
    checked(lambda *_: CASES[case].cured, "repair")(_check_repair)(case, function)


def broken_piece(case, fault, ranks):
    """The Source of the broken code once the diagnosis is right; otherwise None."""
    try:
        found = not any(each is None or each is ... for each in (fault, ranks))
        if found and _complaint_on(case, fault, ranks) is None:
            piece = CASES[case].piece
            if case == UNKNOWN:
                return source_of(UNKNOWN_SCRIPT, piece)
            return source_of(FAULTY_CODE, f"Broken.{piece}")
    except WrongAnswer:
        pass
    print("The broken code is shown here once the diagnosis is right.")
    return None


def _case(number):
    if number not in list(CASES):
        raise WrongAnswer(f"there is no case {number!r}; they are 1 to {len(CASES)}")
    return CASES[number]


def _tally(case):
    """The number of hints and wrong diagnoses before the right one, as a sentence, or ""."""
    taken = []
    if asked.get(case):
        taken.append(many(asked[case], "hint"))
    if wrong.get(case):
        count = len(wrong[case])
        taken.append(f"{count} wrong diagnos{'is' if count == 1 else 'es'}")
    return f" (It took {' and '.join(taken)}.)" if taken else ""


def _check_diagnosis(number, fault, ranks):
    """None for a right diagnosis, a question for the first wrong one, evidence for later ones."""
    complaint = _complaint_on(number, fault, ranks)
    if complaint is None:
        return None
    answers = wrong.setdefault(number, [])
    answer = fault, _as_ranks(ranks)
    if answer not in answers:
        answers.append(answer)
    if answer != answers[0]:
        return complaint
    return (
        f"'{fault}' would show {FAULTS[fault]}. Which action, or which number of the run, shows you "
        "that, and on which ranks? Look again; your next answer is answered with evidence"
    )


def _complaint_on(number, fault, ranks):
    """The evidence in the recording against a diagnosis; None if the diagnosis is right."""
    case = _case(number)
    if fault not in list(FAULTS):
        raise WrongAnswer(f"choose the fault from those that faults() prints; not {fault!r}")
    named = _as_ranks(ranks)
    if fault != case.fault:
        sentence = f"'{fault}' would show {FAULTS[fault]}. Here {_against(number, fault)}"
        if named == case.ranks:
            sentence += ". The ranks are right"
        return sentence
    wrong, missing = sorted(set(named) - set(case.ranks)), sorted(set(case.ranks) - set(named))
    if wrong:
        beyond = number == UNKNOWN and wrong[0] > 1
        reason = "this program has only ranks 0 and 1" if beyond else case.elsewhere
        return f"the fault is right, and rank {wrong[0]} does not commit it: {reason}"
    if missing:
        return (
            f"the fault is right, and rank {named[0]} is one that commits it, but not alone: "
            f"{case.elsewhere}"
        )
    return None


def _as_ranks(ranks):
    ranks = ranks.tolist() if hasattr(ranks, "tolist") else ranks  # of numpy or torch
    if ranks == "all":
        return tuple(range(RANKS))
    try:
        named = (ranks,) if isinstance(ranks, Integral) else tuple(sorted(set(ranks)))
    except TypeError:
        named = ()
    if not named or not all(isinstance(rank, Integral) and 0 <= rank < RANKS for rank in named):
        raise WrongAnswer(
            f'name a rank from 0 to {RANKS - 1}, a list of them or "all"; not {ranks!r}'
        )
    return named


def _against(number, fault):
    """The evidence in the recording of a case against a fault, as the end of a sentence."""
    case = CASES[number]
    if number in (5, UNKNOWN):
        return case.shows
    if fault == "receives in the wrong order":
        return "every rank comes to the end of its recording"
    if number == 3:
        return case.shows
    if fault == "uneven cut":
        return "the losses are wrong, and an uneven cut costs time but no digit"
    if case.fault in IN_UPDATES and fault not in IN_UPDATES:
        return f"{case.shows}; look at the table of what was gathered and what was taken"
    if case.fault in BEFORE_UPDATES and fault in IN_UPDATES:
        return f"{case.shows}: it comes before any update"
    return case.shows


def _check_repair(number, function):
    case = _case(number)
    file = _write_piece(case.piece, function)
    complaint = {2: _unscaled, 3: _uneven}.get(number, lambda _: None)(function)
    if complaint:
        return complaint
    if number == UNKNOWN:
        return _explain_unknown(file)
    folder = file.with_name(f"repaired_{number}")
    try:
        _run(
            f"--case {number} --repair {file} --verify --timeout {WAITING:g} --record {folder}",
            folder,
        )
    except RunFailed as failed:
        return _explain(number, folder, failed)
    return _out_of_order(function) if number == 5 else None


def _write_piece(name, function):
    """Write the learner's function, and what it uses, into a file for the ranks; return its path."""
    if not callable(function):
        raise WrongAnswer(f"this exercise asks for a function, not for {function!r}")
    if name not in names_of(function):
        raise WrongAnswer(f"write it with def and call it {name}, as the broken one is called")
    request = request_of(function)
    file = Path(_own_folder().name) / f"{name}.py"
    lines = [*HEAD, *request["imports"], *(text for _, text in request["sources"])]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


@functools.cache
def _own_folder():
    """A folder of this process alone: two notebooks of one clone may repair the same piece."""
    build = launch.ROOT / "build"
    build.mkdir(exist_ok=True)
    return tempfile.TemporaryDirectory(prefix="12b_", dir=build, ignore_cleanup_errors=True)


def _run(flags, folder):
    shutil.rmtree(folder, ignore_errors=True)
    return launch.run(f"{SCRIPT} {flags}", ranks=RANKS, warm=True, show=False, limit=60)


def _uneven(function):
    """The error in a cut, found without training; None if no stage is too large."""
    for num_layers, num_stages in [(11, 4), (8, 4), (10, 4), (7, 2), (9, 8)]:
        answer = call(function, num_layers, num_stages)
        try:
            layers = whole_numbers_in(answer)
        except TypeError:
            layers = []
        case = f"{num_layers} layers on {num_stages} stages: you cut {layers or answer}"
        if not layers:
            return f"{case}; return a list with a whole number for each stage"
        total, count, least, most = sum(layers), len(layers), min(layers), max(layers)
        if (total, count) != (num_layers, num_stages):
            return f"{case}, which is {count} stages with {total} layers in all"
        if least < 0:
            return f"{case}; stage {layers.index(least)} has {least}"
        if most > math.ceil(num_layers / num_stages):  # the slowest stage limits the step
            stage = layers.index(most)
            return f"{case}; all others wait for stage {stage}, which has {most}"
    return None


def _out_of_order(function):
    """The first message that rank 2 awaits earlier than its actions need it, or None."""
    actions = one_f_one_b(RANKS, 8).orders[2]
    awaited = [action for action in call(function, list(actions)) if action.kind in "FB"]
    for needed, action in zip(actions, awaited):
        if action != needed:
            return (
                f"every rank comes to its end, but rank 2 waits for the message of {action} before "
                f"that of {needed}, which its actions need first"
            )
    return None


def _unscaled(function):
    """The error in a share of the loss, tried with other numbers of micro-batches, or None."""
    import torch

    for count in (8, 4, 5):
        weight = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
        mean_loss = 2 * weight
        answer = call(function, mean_loss, count)
        if mean_loss != 6.0:
            return (
                "your piece changes `mean_loss` itself, which the run prints; return a new number"
            )
        if getattr(answer, "grad_fn", None) is None:
            return (
                f"a mean loss of 6 gives {answer!r}, and a backward from it does not reach the "
                "weights: compute with `mean_loss` itself, not with its number"
            )
        if not close(answer.item(), 6.0 / count):
            return (
                f"{count} micro-batches with a mean loss of 6: you go back from {answer.item():g}, "
                "and the shares of all have to add up to the mean of the batch"
            )
    return None


def _explain_unknown(file):
    """The remaining error of the repaired UNKNOWN_SCRIPT, compared with one process, or None."""
    folder, healthy = file.with_name("repaired_9"), file.with_name("healthy_9")
    for each in (folder, healthy):
        shutil.rmtree(each, ignore_errors=True)
    try:
        run = launch.run(
            f"{UNKNOWN_SCRIPT} --record {folder} --repair {file}",
            2,
            warm=True,
            show=False,
            limit=60,
        )
    except RunFailed as failed:
        if "the run took longer" in str(failed):
            return NO_END
        if "Timed out waiting" in str(failed):
            return f"with your piece one rank waits for the other in vain: {CALLED_ON_BOTH}"
        raised = re.findall(r"^(\w*(?:Error|Exception): \S.*)$", str(failed), re.MULTILINE)
        # The other rank only finds its connection closed.
        raised = [line for line in raised if "Connection " not in line] or raised
        return f"with your piece a rank ended with {raised[-1] if raised else str(failed)}"
    whole = launch.run(f"{UNKNOWN_SCRIPT} --record {healthy}", 1, warm=True, show=False, limit=60)
    try:
        first = compare(read_recording(folder), read_recording(healthy))
    except RecordingError:
        return f"your piece does not run one whole step: {CALLED_ON_BOTH}"
    if first:
        return f"the first difference from one process: {first.sentence}"
    if run.losses != whole.losses:
        return (
            "every action is right, and the losses are not printed: hand `losses` to step, or "
            "append them to `losses`"
        )
    return None


def _explain(number, folder, failed):
    """The remaining error of the repaired pipeline, from its output and its recording."""
    text = str(failed)
    refused = re.search(r"^--repair.*: (\w+(?:\(.*\))? returned .*)", text, re.MULTILINE)
    raised = re.findall(r"(?:^|\braised )(\w*(?:Error|Exception)\b.*)$", text, re.MULTILINE)
    if refused:
        return refused[1]
    if raised and "MORE THAN PROMISED" not in failed.output:
        return f"with your piece a rank ended with {raised[-1]}"
    if "the run took longer" in text:
        return NO_END
    if "deadlock" in text or "waited" in text:
        return f"with your piece the ranks still wait: {text.splitlines()[0]}"
    apart = re.search(r"largest difference from one process: (\S+),", failed.output)
    if apart is None:
        return f"with your piece the run ended early: {text.splitlines()[0]}"
    sentence = f"with your piece the losses still differ from those of one process, by {apart[1]}"
    healthy = folder.with_name(f"healthy_{number}")
    _run(f"--case {number} --cured --record {healthy}", healthy)
    try:
        first = compare(read_recording(folder), read_recording(healthy))
    except RecordingError:
        return sentence
    return (
        f"{sentence}. The first difference from a healthy run: {first.sentence}"
        if first
        else sentence
    )
