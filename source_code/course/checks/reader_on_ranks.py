"""Runs a function of the reader's on real ranks, through a script of course/building."""

import inspect
import json
import re
import tempfile
from pathlib import Path

from course.checks.answer import NotAttempted, WrongAnswer
from course.failed_run import RunFailed
from course.launch import run

ANSWER = "answer "  # how the line begins in which rank 0 reports


def source_of_function(function):
    """Its text. Raises NotAttempted where it still has the `...` of the stub."""
    if not inspect.isfunction(function):
        raise WrongAnswer("this exercise asks for a function")
    source = inspect.cleandoc("\n" + inspect.getsource(function))
    if re.search(r"(?:^|:)\s+\.\.\.\s*$", source, re.MULTILINE):
        raise NotAttempted
    return source


def on_ranks(script, function, num_ranks, **more):
    """What rank 0 reports of the reader's function. Raises WrongAnswer with what went wrong."""
    request = {"source": source_of_function(function), "function": function.__name__, **more}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "request.json"
        file.write_text(json.dumps(request))
        try:
            output = run(f"{script} {file}", num_ranks, warm=True, show=False, limit=30).output
        except RunFailed as failed:
            raise WrongAnswer(what_failed(str(failed))) from None
    line = next(line for line in output.splitlines() if line.startswith(ANSWER))
    return json.loads(line.removeprefix(ANSWER))


def what_failed(said):
    """The sentence about a wait in vain, or the reader's own error with its line."""
    waits = re.findall(r"rank \d+ waited .*?(?=rank \d+ waited|\(rank|\n|$)", said)
    line = re.findall(r'File "your cell", line (\d+)', said)
    error = re.findall(r"^(?:\[rank\d+\]: )?(\w+(?:Error|Exception): .*)$", said, re.MULTILINE)
    if line and error:
        return f"line {line[-1]} of your function raised {error[-1]}"
    if waits:
        return f"the ranks did not come to an end: {max(waits, key=len).strip()}"
    return " ".join(said.split())[-300:]
