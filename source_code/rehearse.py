# SPDX-License-Identifier: Apache-2.0
"""Runs a program of your own by NCCL's rules, on CPU ranks (lesson 03).

    torchrun --standalone --nproc-per-node 4 source_code/rehearse.py strict source_code/small/pipeline.py 1f1b

The first argument is a mode of lab/rehearsal.py: lazy, warmed, eager or strict. The others are the
program and its arguments. The program meets the other ranks by `init_process_group` and sends CPU
tensors. If no operation of a rank ends for 5 seconds, the rank prints what is under way and ends.
"""

import os
import runpy
import sys
import threading
import time

from files.inputs import InputError, read_bytes
from guard.launcher import LauncherError, meeting_point, read_ranks
from guard.one_sentence import in_one_sentence
from lab import rehearsal

STUCK = 5.0  # seconds without an ended operation
GRACE = 2.0  # seconds in which the other ranks print their operations
PACKAGES = {
    "pipeline",
    "files",
    "guard",
    "extensions",
    "lab",
}  # of the course, which a copy has, too


def main():
    with in_one_sentence():
        mode, program = mode_and_program()
    rehearsal.begin(mode)
    threading.Thread(target=end_when_stuck, daemon=True).start()
    sys.argv = sys.argv[2:]
    import_from_folder_of(program)
    try:
        runpy.run_path(program, run_name="__main__")
    except ValueError as error:
        if "env://" not in str(error):
            raise
        sys.exit(f"rehearse.py: {error}; start it with torchrun, which sets it for each rank")


def import_from_folder_of(program):
    """Let a program import what lies beside it, as Python does; a copy has a pipeline/ of its own."""
    folder = os.path.dirname(os.path.abspath(program))
    if not os.path.samefile(folder, os.path.dirname(os.path.abspath(__file__))):
        beside = {name for name in PACKAGES if os.path.lexists(os.path.join(folder, name))}
        for name in [name for name in sys.modules if name.partition(".")[0] in beside]:
            del sys.modules[name]
    sys.path.insert(0, folder)


def mode_and_program():
    """Return the mode and the path of the program, or reject them."""
    if len(sys.argv) < 3 or sys.argv[1] not in rehearsal.MODES:
        modes = ", ".join(rehearsal.MODES)
        sys.exit(f"rehearse.py needs a mode ({modes}) and a program, such as strict my_pipeline.py")
    if not os.path.isfile(sys.argv[2]):
        sys.exit(f"rehearse.py: there is no program {sys.argv[2]}; give its path from this folder")
    try:
        compile(read_bytes(sys.argv[2]), sys.argv[2], "exec")
        if read_ranks()[1] > 1:
            meeting_point()
    except (InputError, LauncherError) as error:
        sys.exit(f"rehearse.py: {error}")
    except (SyntaxError, ValueError, RecursionError) as error:
        sys.exit(f"rehearse.py: {sys.argv[2]} is not a program in Python ({error})")
    return sys.argv[1:3]


def end_when_stuck():
    """End this process when the same operations have been pending for STUCK seconds."""
    seen, since = None, time.monotonic()
    while True:
        time.sleep(0.2)
        now = [id(operation) for operation in rehearsal.pending]
        if now != seen or not now:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > STUCK:
            rank = os.environ.get("RANK", "0")
            sys.stderr.write(f"rank {rank} is stuck; {rehearsal.pending_text()}\n")
            sys.stderr.flush()
            time.sleep(GRACE)
            os._exit(1)


if __name__ == "__main__":
    main()
