# SPDX-License-Identifier: Apache-2.0
"""One rank of an examination: runs a lesson's program, to which it gives the reader's functions.

`examining.py` starts it on each rank with the path of a request, a JSON file. `program` in it names
a function, such as "course.checks.build_sums_on_ranks.main", which is called with the request and
the reader's functions. `seconds` limits its processor time, and `strict` chooses the rule by which
messages start (messages.py). The program sends what the check needs as "report" events.
"""

from __future__ import annotations  # compile() does the same: no hint of a reader's is looked up

import importlib
import json
import sys
import time
import types
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))  # torchrun knows this folder only

from course.building import YOURS  # noqa: E402
from course.building.endless_loops import endless_loops_ended  # noqa: E402
from course.building.messages import described, tell, watch_messages  # noqa: E402
from small import pipeline as my_pipeline  # noqa: E402


def main():
    """Run the request as one rank, then stay: other ranks may still need its messages."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    module, _, name = request["program"].rpartition(".")
    program = getattr(importlib.import_module(module), name)
    torch.set_num_threads(1)
    watch_messages(request.get("strict"))
    try:
        with endless_loops_ended(request.get("seconds")):
            program(request, *functions_of(request))
        say_done()
    except SystemExit as end:
        if end.code:
            raise
        if request["functions"]:  # a function returns; only a program may end like this
            tell("raised", **described(end))
        else:
            say_done()
    except Exception as error:
        tell("raised", **described(error))
    time.sleep(60)


def functions_of(request):
    """The reader's functions, defined in a module with the names of small/pipeline.py.

    They can also use what the reader's imports and other definitions in the request define.
    """
    if not request["functions"]:  # the source is a program
        return []
    module = sys.modules["yours"] = types.ModuleType("yours")  # where a dataclass looks for itself
    names = vars(module)
    names.update(vars(my_pipeline), __name__="yours", display=print)  # Jupyter has a `display`
    exec("\n".join(request["imports"]), names)
    for name, text in request["sources"]:
        exec(compile(text, f"{YOURS}{name}>", "exec"), names)  # the reader's own program
    return [names[name] for name in request["functions"]]


def say_done():
    sys.stdout.flush()  # what the reader has printed
    tell("done")


if __name__ == "__main__":
    main()
