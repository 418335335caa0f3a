"""A rank that leaves its job takes the threads of all process groups with it.

A thread of gloo that still lets go of a tensor while Python shuts down aborts the process, after
all of its work was right. The last thing that a rank here does, before that, is to name its threads,
and to count the objects that Python will not search for garbage when it shuts down.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from further import further

from course.launch import ROOT, SCRIPTS
from guard.free_port import free_port

TINY = "--dim 16 --heads 2 --kv-heads 2 --seq-len 8 --steps 1".split()
NAMES_ITS_THREADS = """
import atexit, gc, pathlib, runpy, sys

def say(threads):
    text = ", ".join(sorted({file.read_text().strip() for file in threads.glob("*/comm")}))
    sys.stdout.write(f"at the end: {text}; {gc.get_freeze_count()} objects\\n")
    sys.stdout.flush()

atexit.register(say, pathlib.Path("/proc/self/task"))  # comes last: all others register later
del sys.argv[0]
sys.path[0] = str(pathlib.Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="only Linux tells the names of a process's threads"
)


@pytest.mark.further
@pytest.mark.parametrize(
    "script, flags",
    [
        # The first AdamW loads torch's compiler, and that functions which keep the default group.
        ("pipeline_with_data_parallel.py", "--replicas 2 --reduce ddp --optimizer adamw"),
        ("pretrain_llama.py", ""),  # its mesh of ranks is part of a cycle
    ],
)
def test_nothing_of_a_script_refers_to_a_process_group_at_its_end(tmp_path, script, flags):
    check_end(tmp_path, SCRIPTS / script, flags)


@further
def test_nothing_of_a_one_file_copy_refers_to_a_process_group_at_its_end(tmp_path):
    copy = tmp_path / "program.py"
    words = [sys.executable, SCRIPTS / "copy_template.py", "gpipe.py", copy]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    check_end(tmp_path, copy, "--optimizer adamw")


def check_end(tmp_path, script, flags):
    """Two ranks, without torchrun: what ends here is a rank's own Python."""
    wrapper = tmp_path / "names_its_threads.py"
    wrapper.write_text(NAMES_ITS_THREADS)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, wrapper, script, *TINY, *flags.split()],
            cwd=ROOT,
            env={
                **os.environ,
                **meeting,
                "RANK": rank,
                "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": "2",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        said = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    for output, _ in said:
        ((names, left_out),) = re.findall(r"at the end: (.*); (\d+) objects", output)
        assert "gloo" not in names
        assert int(left_out) > 100_000  # what has been imported
