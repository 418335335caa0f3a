"""Checks of lesson 12b: which fault on which ranks, and whether the repair gives the right losses."""

import ast
import inspect
import math
import re
import shutil
import textwrap

from course import launch
from course.checks.answer import NotAttempted, WrongAnswer, call, checked
from course.debugging.comparing import compare
from course.source import source_of
from lab.flight_log_reader import RecordingError, read_recording

SCRIPT = "broken_pipelines.py"
FAULTY_CODE = "broken/pipelines/faults.py"
RANKS = 4
# What each fault would show, for those who name it where it is not.
FAULTS = {
    "swapped messages": "a rank that sends what it made of another micro-batch",
    "scale forgotten": "on the last rank a share of the loss that is too large by a whole factor",
    "uneven cut": "the right losses, and a rank that works while all others wait for it",
    "buffer used twice": "a forward that is right in all it used and made, and a backward of the "
    "same micro-batch that is wrong although it received the right gradient",
    "receives in the wrong order": "a recording that ends in the middle, with ranks that wait",
    "clipping by stage": "actions that are right, and updates that take another fraction of what "
    "was gathered on each stage",
    "no stash": "a backward that used another version of the weights than its forward",
    "tied weights drift": "actions that are right, and an update that takes another gradient on "
    "the two ranks that share a matrix, and only there",
    "micro-batch lost": "a rank that has gathered nothing new after one of its backwards",
}


class Case:
    """One broken pipeline: what is wrong where, what a recording shows of it, what it teaches."""

    def __init__(self, piece, fault, ranks, shows, elsewhere, found, cured):
        self.piece, self.fault, self.ranks = piece, fault, ranks
        self.shows = shows  # of the first difference, without naming the fault
        self.elsewhere = elsewhere  # said to whom names another rank
        self.found, self.cured = found, cured


CASES = {
    1: Case(
        "next_to_send",
        "swapped messages",
        (1,),
        "the first difference is 1F0, which used and made what it should",
        "rank 1 already put the wrong tensor on the wire; what differs on other ranks came in with it",
        "rank 1 sends what it made of micro-batch 1 as if it were that of micro-batch 0.",
        "first in, first out: a receiver knows messages by their order alone.",
    ),
    2: Case(
        "loss_to_go_back_from",
        "scale forgotten",
        (3,),
        "the first difference is 3F0, which used what it should, and what it made is exactly eight "
        "times as large",
        "its gradients are eight times too large as they arrive; follow the messages back to where "
        "they begin",
        "every gradient begins at the loss, on the last rank, and there the eighth is missing. That "
        "the loss falls faster is no comfort: it is a step of eight times the length.",
        "the sum over micro-batches is the gradient of the batch's mean again.",
    ),
    3: Case(
        "layers_of_stages",
        "uneven cut",
        (3,),
        "all losses are those of one process; nothing is computed wrongly, it takes too long",
        "look at who waits: that rank does, in every round, and for whom?",
        "rank 3 has five of eleven layers, and a pipeline is as fast as its slowest stage.",
        "no stage has more than one layer beyond any other.",
    ),
    4: Case(
        "keep_activation",
        "buffer used twice",
        (2,),
        "the first difference is 2B0, which received the right gradient; its forward used and made "
        "what it should",
        "what differs on that rank came with a gradient; go back to the first action that received "
        "what it should and made something else",
        "by the time of 2B0 the memory that 2F0 had used holds the activation of another micro-batch.",
        "what a backward will need belongs to it until then.",
    ),
    5: Case(
        "order_of_receives",
        "receives in the wrong order",
        (2,),
        "the recording ends in the middle, and up to there nothing differs",
        "that rank waits for what its next action needs, as it should; one rank waits for something "
        "that its next action does not need",
        "rank 2 has its next backward before it and waits for the activation of a later forward.",
        "a rank waits for its messages in the order in which its actions need them.",
    ),
    6: Case(
        "norm_to_clip_by",
        "clipping by stage",
        (0, 1, 2, 3),
        "every action of the first step is the same, and then every update takes another gradient",
        "compare what was gathered with what the update took, rank by rank",
        "each rank shortened its gradient by a factor of its own, so that the direction changed.",
        "one norm of the whole model, one factor for all.",
    ),
    7: Case(
        "before_update",
        "no stash",
        (1,),
        "the first difference is 1B1, which received the right gradient and used version 1 of the "
        "weights; 1F1 used version 0",
        "its backwards use the version of their forwards; look for the rank where they do not",
        "on rank 1 the update changed the weights in place while mini-batches were under way.",
        "who still needs the old version keeps its memory, and the update writes into new.",
    ),
    8: Case(
        "tied_gradient",
        "tied weights drift",
        (0, 3),
        "every action of the first step is the same, and the update takes another gradient on "
        "ranks 0 and 3, while on ranks 1 and 2 it takes the right one",
        "its update took what it should; the two that did not share something",
        "the embedding and the head began as one matrix, and after the first update they are two.",
        "both add the gradients of both, and so both stay one matrix.",
    ),
}
IN_ACTIONS = ("swapped messages", "scale forgotten", "buffer used twice", "no stash")
IN_UPDATES = ("clipping by stage", "tied weights drift")


def diagnosis(case, fault, ranks):
    """`fault` is one of FAULTS; `ranks` is the rank that commits it, a list of several, or "all"."""
    checked(lambda *_: CASES[case].found, "diagnosis")(_check_diagnosis)(case, fault, ranks)


def repair(case, function):
    """`function` takes the place of the broken piece, under its name; four ranks train with it."""
    checked(lambda *_: CASES[case].cured, "repair")(_check_repair)(case, function)


def broken_piece(case, fault, ranks):
    """The code with the fault, for those who have found it: what a notebook shows."""
    try:
        found = None not in (fault, ranks) and ... not in (fault, ranks)
        if found and _check_diagnosis(case, fault, ranks) is None:
            return source_of(FAULTY_CODE, f"Broken.{CASES[case].piece}")
    except WrongAnswer:
        pass
    print("The broken code is shown here once the diagnosis is right.")
    return None


def _case(number):
    if number not in list(CASES):
        raise WrongAnswer(f"there is no case {number!r}; they are 1 to {len(CASES)}")
    return CASES[number]


def _check_diagnosis(number, fault, ranks):
    case = _case(number)
    if fault not in list(FAULTS):
        raise WrongAnswer(f"choose the fault from FAULTS: {', '.join(FAULTS)}; not {fault!r}")
    named = _as_ranks(ranks)
    if fault != case.fault:
        sentence = f"'{fault}' would show {FAULTS[fault]}. Here {_against(number, fault)}"
        if named == case.ranks:
            sentence += ". The ranks are right"
        return sentence
    wrong, missing = sorted(set(named) - set(case.ranks)), sorted(set(case.ranks) - set(named))
    if wrong:
        return f"the fault is right, and rank {wrong[0]} does not commit it: {case.elsewhere}"
    if missing:
        return (
            f"the fault is right, and rank {named[0]} is one that commits it, but not alone: "
            f"{case.elsewhere}"
        )
    return None


def _as_ranks(ranks):
    if ranks == "all":
        return tuple(range(RANKS))
    try:
        named = (ranks,) if isinstance(ranks, int) else tuple(sorted(set(ranks)))
    except TypeError:
        named = ()
    if not named or not all(isinstance(rank, int) and 0 <= rank < RANKS for rank in named):
        raise WrongAnswer(
            f'name a rank from 0 to {RANKS - 1}, a list of them or "all"; not {ranks!r}'
        )
    return named


def _against(number, fault):
    """What the recording of a case shows that speaks against a fault."""
    case = CASES[number]
    if number == 5:
        return case.shows
    if fault == "receives in the wrong order":
        return "every rank comes to the end of its recording"
    if number == 3:
        return case.shows
    if fault == "uneven cut":
        return "the losses are wrong, and an uneven cut costs time but no digit"
    if case.fault in IN_UPDATES and fault not in IN_UPDATES:
        return f"{case.shows}; look at the table of what was gathered and what was taken"
    if case.fault in IN_ACTIONS and fault in IN_UPDATES:
        return f"{case.shows}: it comes before any update"
    return case.shows


def _check_repair(number, function):
    case = _case(number)
    file = _write_piece(case.piece, function)
    if number == 3:
        complaint = _uneven(function)
        if complaint:
            return complaint
    folder = file.with_name(f"repaired_{number}")
    try:
        _run(f"--case {number} --repair {file} --verify --timeout 5 --record {folder}", folder)
    except launch.RunFailed as failed:
        return _explain(number, folder, failed)
    return None


def _write_piece(name, function):
    """The learner's function as a file that the ranks can read."""
    if not callable(function):
        raise WrongAnswer(f"this exercise asks for a function, not for {function!r}")
    if getattr(function, "__name__", "") != name:
        raise WrongAnswer(f"write it with def and call it {name}, as the broken one is called")
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise WrongAnswer("its source cannot be read; write it with def in a cell") from None
    if _is_stub(text):
        raise NotAttempted
    file = launch.ROOT / "build" / "lesson_12b" / f"{name}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def _is_stub(text):
    """Whether there is nothing in the function but its words and three dots."""
    body = ast.parse(text).body[0].body
    dots = [
        isinstance(node, (ast.Expr, ast.Return)) and isinstance(node.value, ast.Constant)
        and (node.value.value is ... or isinstance(node.value.value, str))
        for node in body
    ]  # fmt: skip
    return all(dots)


def _run(flags, folder):
    shutil.rmtree(folder, ignore_errors=True)
    return launch.run(f"{SCRIPT} {flags}", ranks=RANKS, warm=True, show=False, limit=60)


def _uneven(function):
    """What is wrong with a cut, without training anything; None if no stage stands out."""
    for num_layers, num_stages in [(11, 4), (8, 4), (10, 4), (7, 2)]:
        layers = call(function, num_layers, num_stages)
        case = f"{num_layers} layers on {num_stages} stages: you cut {layers}"
        try:
            total, count, most = sum(layers), len(layers), max(layers)
        except (TypeError, ValueError):
            raise WrongAnswer(f"{case}; return a list with a number for each stage") from None
        if (total, count) != (num_layers, num_stages):
            return f"{case}, which is {count} stages with {total} layers in all"
        if most > math.ceil(num_layers / num_stages):  # the slowest stage sets the pace
            stage = layers.index(most)
            return f"{case}; all others wait for stage {stage}, which has {most}"
    return None


def _explain(number, folder, failed):
    """Why the repaired pipeline is not right yet, from its output and its recording."""
    text = str(failed)
    refused = re.search(r"^--repair: .*", text, re.MULTILINE)
    raised = re.findall(r"^(\w*(?:Error|Exception)\b.*)$", text, re.MULTILINE)
    if refused:
        return refused[0]
    if raised and "MORE THAN PROMISED" not in failed.output:
        return f"with your piece a rank ended with {raised[-1]}"
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
