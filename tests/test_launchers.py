"""Whatever a launcher says in the environment, a rank takes its place or is rejected in a sentence.

The environments are drawn with seeds: FUZZ_INPUTS of them, which is 200 unless set.
"""

import contextlib
import io
import json
import os
import random
import re
import socket
import sys
from unittest import mock

import pytest

from guard import one_sentence
from guard.launcher import LauncherError, meeting_point, read_ranks
from guard.one_sentence import in_one_sentence
from guard.printing import keep_running_unheard
from guard.siblings import launcher_lives

INPUTS = int(os.environ.get("FUZZ_INPUTS", "200"))
COUNTS = ["1", "2", "4", "7", "16"]
NUMBERS = ["0", "0", "1", "1", "2", "3", "7", " 2 ", "29500"]
NONSENSE = [
    "",
    " ",
    "-1",
    "+1",
    "1.5",
    "1e3",
    "0x4",
    "two",
    "٣",
    "²",
    "None",
    "True",
    "9" * 30,
    "a b",
]
NONSENSE += ["\udc80", "1\n", "65536", "99999999999", "4(x2),3", "(x2)", ",", "[", "][", "pp[0-1]"]
NODES = ["pp0", "pp[0-1]", "pp[003-010,012],gpu1", "rack[2-3]node[5,9]-ib"]
ADDRESSES = ["127.0.0.1", "10.0.0.7", "::1", "localhost", "x" * 70, "a..b", "nowhere.invalid"]
TORCHRUN = {
    "RANK": NUMBERS,
    "WORLD_SIZE": COUNTS,
    "LOCAL_RANK": NUMBERS,
    "LOCAL_WORLD_SIZE": COUNTS,
    "GROUP_RANK": NUMBERS,
    "GROUP_WORLD_SIZE": COUNTS,
    "MASTER_ADDR": ADDRESSES,
    "MASTER_PORT": ["29500", "1", "65535"],
    "TORCHELASTIC_USE_AGENT_STORE": ["True", "False"],
    "PIPELINE_LAUNCHER": ["0", str(os.getpid()), "4194305", "2147483647"],
}
SLURM = {
    "SLURM_JOB_ID": ["17", "4294967295"],
    "SLURM_STEP_ID": ["0", "4294967290"],
    "SLURM_STEP_NODELIST": NODES,
    "SLURM_STEP_NUM_TASKS": COUNTS,
    "SLURM_STEP_NUM_NODES": COUNTS,
    "SLURM_STEP_TASKS_PER_NODE": ["1", "4,3", "4(x2),3", "2(x2)"],
    "SLURM_PROCID": NUMBERS,
    "SLURM_LOCALID": NUMBERS,
    "SLURM_NODEID": NUMBERS,
}


def drawn_environment(seed):
    """What torchrun or srun or both set, of which something may be missing or nonsense."""
    generator = random.Random(seed)
    kinds = generator.choice([TORCHRUN, SLURM, {**TORCHRUN, **SLURM}])
    damage = generator.choice([0, 0.1, 0.4])
    drawn = {}
    for name, usual in kinds.items():
        if generator.random() >= damage:
            drawn[name] = generator.choice(usual)
        elif generator.random() < 0.6:
            drawn[name] = generator.choice(NONSENSE)
    return drawn


@pytest.fixture
def environment(monkeypatch):
    """A function that replaces all that launchers have set. Names are looked up nowhere."""

    def look_up(name, *_, **__):
        name.encode("idna")
        if name.endswith(".invalid"):
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(one_sentence, "WAIT", 0.0)

    def replace(variables):
        for name in {*TORCHRUN, *SLURM}:
            os.environ.pop(name, None)
        os.environ.update(variables)

    with mock.patch.dict(os.environ):  # what the code sets itself goes away with the test, too
        yield replace


def place_of():
    """(ranks, meeting point) that a rank takes, or None: then one sentence has said why not."""
    errors = io.StringIO()  # takes any character, as standard error does
    try:
        with contextlib.redirect_stderr(errors), in_one_sentence():
            try:
                ranks = read_ranks()
                return ranks, meeting_point() if ranks[1] > 1 else None
            except LauncherError as error:
                raise SystemExit(str(error)) from None
    except SystemExit as end:
        said = errors.getvalue()
        assert end.code == 2
        assert said.count("\n") == 1 and len(said) > 20, said
        return None


@pytest.mark.parametrize("tenth", range(10))
def test_a_rank_takes_a_place_that_there_is_or_says_in_one_sentence_why_not(environment, tenth):
    taken = 0
    for seed in range(tenth * INPUTS // 10, (tenth + 1) * INPUTS // 10):
        drawn = drawn_environment(seed)
        environment(drawn)
        launcher_lives(os.getppid())
        place = place_of()
        if place is None:
            continue
        taken += 1
        (rank, num_ranks, local_rank, local_ranks), meeting = place
        assert 0 <= rank < num_ranks and 0 <= local_rank < num_ranks, drawn
        assert 1 <= local_ranks <= num_ranks, drawn
        if meeting is not None:
            assert meeting[0] and 1 <= meeting[1] <= 65535, drawn
    assert taken


WHOLE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
WHOLE |= {"LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"RANK": "2"}, "RANK is '2', and has to be a whole number from 0 to 1"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"RANK": "one"}, "RANK is 'one'"),
        ({"RANK": None}, "RANK is not set"),
        ({"RANK": None, "WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "2147483647"}, "from 1 to 1000000"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"LOCAL_RANK": "first"}, "LOCAL_RANK is 'first'"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({"MASTER_PORT": "70000"}, "from 1 to 65535"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is '0'"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"MASTER_ADDR": "a..b"}, "MASTER_ADDR is 'a..b', which"),
    ],
)
def test_what_is_missing_or_nonsense_is_named(environment, changed, sentence):
    variables = {**WHOLE, **changed}
    environment({name: value for name, value in variables.items() if value is not None})
    with pytest.raises(LauncherError) as error:
        read_ranks()
        meeting_point()
    assert sentence in str(error.value)


def test_a_whole_environment_is_taken(environment):
    environment(WHOLE)
    assert (read_ranks(), meeting_point()) == ((1, 2, 0, 1), ("127.0.0.1", 29500))


def test_a_script_says_it_before_the_first_message_and_without_a_traceback(
    environment, capsys, monkeypatch
):
    import gpipe

    for changed in ({"RANK": "5"}, {"MASTER_ADDR": ""}):
        environment({**WHOLE, "LOCAL_RANK": "0", **changed})
        monkeypatch.setattr(sys, "argv", ["gpipe.py", "--device", "cpu"])
        with pytest.raises(SystemExit) as ended:
            gpipe.main()
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert re.fullmatch(r"(RANK|MASTER_ADDR) .*\n", said), said


def test_a_pipe_for_torchrun_s_reason_is_not_waited_for(tmp_path, monkeypatch, capsys):
    reason, pipe = tmp_path / "error.json", tmp_path / "pipe"
    os.mkfifo(pipe)
    for file in (reason, pipe):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        with pytest.raises(SystemExit), in_one_sentence():
            raise SystemExit("--steps is wrong")
    assert json.loads(reason.read_text())["message"]["message"] == "--steps is wrong"
    assert capsys.readouterr().err == "--steps is wrong\n" * 2


def test_an_interrupt_prints_one_word_and_any_other_exception_its_traceback(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    keep_running_unheard()
    for error in (KeyboardInterrupt(), ValueError("a fault")):
        sys.excepthook(type(error), error, None)
    assert capsys.readouterr().err == "interrupted\nValueError: a fault\n"
