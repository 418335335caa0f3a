# SPDX-License-Identifier: Apache-2.0
"""Runs a reader's functions on real ranks, through a script of course/building."""

import inspect
import json
import re
import tempfile
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten

from course.building import ANSWER, RAISED
from course.checks.answer import NotAttempted, WrongAnswer
from course.checks.build_text import collect, holes
from course.failed_run import RunFailed
from course.launch import run

LIMIT = 30  # seconds of a whole run


@contextmanager
def one_thread():
    """A context in which torch uses one thread, which makes small matrix products faster."""
    import torch

    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def request_of(functions, places=1, **more):
    """The request with which request.py defines the reader's functions and all that they use.

    Raises NotAttempted while every function still has its `...`, at `places` places each, and
    WrongAnswer if only some are left.
    """
    sources, imports = {}, []
    for function in functions:
        if not inspect.isfunction(function) or function.__name__ == "<lambda>":
            raise WrongAnswer("this exercise asks for a function, written with def in a cell")
        texts, lines = collect(function)
        sources |= dict(texts)
        imports += [line for line in lines if line not in imports]
    names = [function.__name__ for function in functions]
    if all(len(holes(sources[name])) >= places for name in names):
        raise NotAttempted
    for name, text in sources.items():
        if holes(text):
            raise WrongAnswer(f"line {holes(text)[0]} of {name} still has its ...")
    return {"functions": names, "sources": list(sources.items()), "imports": imports, **more}


def perform(script, request, num_ranks, limit=LIMIT):
    """Run `script` with a request; return all reports. Raises WrongAnswer with the error."""
    with requested(request) as file:
        return answers_of(
            run_script(f"{script} {file}", num_ranks, dict(request["sources"]), limit)
        )


@contextmanager
def requested(request):
    """A context that yields the path of a temporary file with the request."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "request.json"
        file.write_text(json.dumps(request))
        yield file


def answers_of(output):
    lines = [line for line in output.splitlines() if line.startswith(ANSWER)]
    return [json.loads(line.removeprefix(ANSWER)) for line in lines]


def run_script(command, num_ranks, sources=None, limit=LIMIT):
    """Run a script of course/building on warm ranks; return its output. Raises WrongAnswer."""
    try:
        return run(command, num_ranks, warm=True, show=False, limit=limit).output
    except RunFailed as failed:
        raise WrongAnswer(what_failed(str(failed), sources or {})) from None


def what_failed(said, sources=None):
    """The reader's own error with its line, or the sentence about a wait that timed out."""
    told = errors_in(said)
    if told:
        rank, name, number, error = own_error(said) or told[0]
        text = sources[name].splitlines()[number - 1].split("  #")[0].strip()
        at = f"line {number} of {name} (`{text}`)"
        if is_late(error):
            return (
                f"rank {rank} waited in vain for another rank at {at}: does every rank get there?"
            )
        return f"{at} raised {shorten(error, 140, placeholder=' ...')}"
    waits = re.findall(r"rank \d+ waited .*?(?=rank \d+ waited|\(rank|\n|$)", said)
    if waits:
        return f"the ranks did not come to an end: {with_who_left(max(waits, key=len).strip())}"
    if is_late(said):
        return "one of the ranks waited in vain for another; does each of them come to its end?"
    return in_one_line(said)


def in_one_line(said):
    """The different lines of an output, in which every rank may say the same; at most 300 letters."""
    lines = dict.fromkeys(" ".join(line.split()) for line in said.splitlines())
    told = [line for line in lines if not re.match(r"\(rank \d+ ended with", line)]
    return " ".join(told or lines).strip()[-300:]


def with_who_left(chain):
    """A chain of waits, and the rank in it whose function returned before it had received all."""
    # Whichever rank reports first begins the chain, so the one that has left can also begin it.
    first = re.match(r"rank (\d+) waited \d+ s for the end of", chain)
    numbers = r"\d+(?=, which waits for the end of)" + (rf"|{first[1]}\b(?!,)" if first else "")
    left = re.search(rf"the receipt of ((?:(?! from rank ).)*) from rank ({numbers})", chain)
    if not left:
        return chain
    return f"{chain}; rank {left[2]} has returned, but has not received all of {left[1]}"


def errors_in(said):
    """[rank, function, line, error] for each error in the reader's own code."""
    raised = re.findall(rf"^{RAISED}(.*)$", said, re.MULTILINE)
    return [json.loads(line) for line in raised]


def own_error(said):
    """The first error that is not merely the loss or the absence of another rank, or None."""
    return next((one for one in errors_in(said) if not is_late(one[-1])), None)


def is_late(error):
    """Whether an error is merely the absence or the loss of another rank."""
    return "Timed out waiting" in error or "by peer" in error
