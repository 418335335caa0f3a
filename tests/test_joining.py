"""Ranks that join a job: who differs is rejected, who stops is named, and nobody outside can join.

The limits on waiting are part of what is promised; they are the only times that tests assert.
"""

import argparse
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from further import first_of
from ranks import run_on_ranks
from saved_models import write_model

from course.failed_run import RunFailed
from course.followed_run import follow
from course.launch import ROOT, SCRIPTS, WarmRanks, _wait_for_fork_server
from guard import agreement, meeting, presence
from guard.agreement import Disagreement, Missing, agree, checksum_of, settings_of, version
from guard.around_main import attached
from guard.free_port import free_port
from guard.meeting import find_store, is_loopback
from guard.presence import guarded_meeting
from pipeline.job import GRACE, SLOW_START, Job, join_job, of_this_attempt
from pipeline.training import parse_arguments, training_parser

SMALL = "--layers 4 --dim 16 --heads 2 --kv-heads 1 --seq-len 8 --batch-size 8 --device cpu"
TIMEOUT = 4  # seconds, of --timeout
LONG = 1000  # steps: minutes, if nobody ends it
SCRIPTS_AND_FLAGS = [
    "activation_checkpointing.py --microbatches 4",
    "distributed_checkpointing.py --microbatches 4",
    "gpipe.py",
    "interleaved_1f1b.py --microbatches 4",
    "naive_model_parallelism.py --microbatches 4",
    "one_f_one_b.py --microbatches 4",
    "pipedream.py",
    "pipeline_with_data_parallel.py --microbatches 4 --replicas 2",
    "pretrain_llama.py --microbatches 4 --dtype float64",
    "tensor_parallel.py --microbatches 4 --replicas 1 --tensor 1",
    "torch_pipelining.py --microbatches 4",
    "train.py --microbatches 4 --schedule 1f1b",
    "zero_bubble.py --microbatches 4",
]


# What ranks agree on


OWN_COMMAND = """
import os, runpy, sys
flags, variables = {ends}[int(os.environ["RANK"])]
os.environ.update(variables)
sys.argv = ["{script}", *flags.split()]
sys.path.insert(0, os.path.dirname("{script}"))
runpy.run_path("{script}", run_name="__main__")
"""


def end_of_ranks(folder, *ends):
    """Exit statuses, and what was said, of ranks of gpipe.py: each has flags and variables of its own.

    Nobody ends the other ranks when the first has ended.
    """
    script = folder / "own_command.py"
    script.write_text(OWN_COMMAND.format(ends=ends, script=SCRIPTS / "gpipe.py"))
    _wait_for_fork_server()
    ranks = WarmRanks(script, [], len(ends))
    reaper = threading.Timer(90, ranks.end)
    reaper.start()
    try:
        said = ranks.streams["stderr"].read()  # until all have ended
        for process in ranks.ranks:
            process.join(10)
    finally:
        reaper.cancel()
        ranks.end()
    return [process.exitcode for process in ranks.ranks], said


def assert_rejected(ended, *words):
    """All ranks end with status 2, and each, since no launcher has ended it, with one sentence."""
    statuses, text = ended
    assert set(statuses) == {2}, ended
    said = text.splitlines()
    assert len(said) == len(statuses) and len(set(said)) == 1 and "Traceback" not in text, text
    for word in words:
        assert word in text


def test_a_rank_with_other_flags_is_rejected_by_name_with_both_values(tmp_path):
    same, other = f"{SMALL} --seed 4", f"{SMALL} --seed 5 --learning-rate 0.5"
    ended = end_of_ranks(tmp_path, (same, {}), (same, {}), (other, {}))
    assert_rejected(ended, "rank 2 ", "--seed is 5 there and 4 here", "--learning-rate is 0.5")


def test_ranks_that_were_told_another_number_of_ranks_are_rejected(tmp_path):
    ended = end_of_ranks(tmp_path, (SMALL, {}), (SMALL, {"WORLD_SIZE": "3"}))
    assert_rejected(ended, "rank 1 ", "the number of ranks is 3 there and 2 here")


class Meeting:
    """Two ranks at a store in this process: what each is told."""

    def __init__(self, *settings, versions=(None, None)):
        self.store, self.told = dist.HashStore(), {}
        for rank in (1, 0):
            thread = threading.Thread(target=self.join, args=(rank, settings[rank]))
            if versions[rank]:
                agreement.version = lambda own=versions[rank]: own
            thread.start()
            time.sleep(0.1)
        thread.join(20)

    def join(self, rank, settings):
        try:
            self.told[rank] = agree(self.store, rank, 2, settings, 20)
        except Disagreement as error:
            self.told[rank] = str(error)


def test_ranks_with_the_same_settings_learn_each_other_s_process():
    assert Meeting({"--steps": 3}, {"--steps": 3}).told[0] == {0: os.getpid(), 1: os.getpid()}


def test_another_copy_of_the_course_or_another_torch_is_rejected(monkeypatch):
    monkeypatch.setattr(agreement, "version", version)
    told = Meeting({}, {}, versions=("0123", "4567")).told
    assert "rank 1 " in told[0] and "the code is 4567 there and 0123 here" in told[0]
    own = json.dumps(["elsewhere", 1, {"the number of ranks": 2, "torch": "1.0", "the code": "x"}])
    store = dist.HashStore()
    store.set("settings/1", own)
    with pytest.raises(
        Disagreement, match=re.escape(f"torch is 1.0 there and {torch.__version__}")
    ):
        agree(store, 0, 2, {}, 20)


def test_ranks_that_differ_wait_for_rank_0_which_the_sentence_compares_them_with():
    store = dist.HashStore()
    store.set("settings/2", json.dumps(["elsewhere", 1, {"the number of ranks": 4}]))
    with pytest.raises(Missing) as lost:
        agree(store, 1, 3, {}, 0.2)
    assert lost.value.ranks == [0]


def test_all_flags_count_but_the_device_and_where_the_text_lies(monkeypatch, tmp_path):
    text = tmp_path / "text"
    text.write_text("a text of one's own, " * 50)
    monkeypatch.setattr(sys, "argv", ["x", "--data", str(text)])
    arguments = parse_arguments(training_parser(""))
    settings = settings_of(arguments)
    flags = {action.option_strings[-1] for action in training_parser("")._actions}
    assert flags - set(settings) == {"--device", "--data", "--help"}
    changed = arguments.text.training.clone()
    changed[7] += 1
    other = type(arguments.text)(changed, arguments.text.held_out)
    assert settings["the text"] == checksum_of(arguments.text) != checksum_of(other)


def test_another_checkpoint_is_a_difference_that_names_the_flag_of_its_folder():
    here, there = ({"from_checkpoint": step, "checkpoints": "x"} for step in ("a", "b"))
    told = Meeting(read_by(**here), read_by(**there)).told[0]
    assert "the newest checkpoint in --checkpoints is b there and a here" in told


READ = {"FILE.csv": "file", "--model": "model_folder", "--tokenizer": "tokenizer"}


def read_by(**named):
    return settings_of(argparse.Namespace(**named), READ)


@pytest.mark.parametrize("flag, name", READ.items())
def test_a_file_that_is_another_on_one_node_is_a_difference(tmp_path, flag, name):
    file = tmp_path / "file"
    file.write_bytes(bytes(3_000_000))
    whole = read_by(**{name: str(file)})
    assert read_by(**{name: str(file)}) == whole
    for content in (bytes(2_999_999), bytes(2_999_999) + b"1", b"1" + bytes(2_999_999)):
        file.write_bytes(content)
        changed = read_by(**{name: str(file)})
        assert [n for n in whole if whole[n] != changed[n]] == [f"the content of {flag}"]
    told = Meeting(whole, changed).told
    assert f"the content of {flag} is" in told[0]


def test_a_saved_model_that_has_other_weights_on_one_node_is_a_difference(tmp_path):
    folder = write_model(tmp_path / "model")
    (folder / "below").mkdir()
    os.mkfifo(folder / "pipe")  # which is not read
    whole, weights = read_by(model_folder=str(folder)), folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    for place in range(len(content) - 1000, len(content), 100):  # another training changes many
        content[place] ^= 1
    weights.write_bytes(content)
    assert read_by(model_folder=str(folder)) != whole
    (folder / "config.json").rename(folder / "other.json")
    assert read_by(model_folder=str(folder)) != read_by(model_folder=None)


# Ranks that stop while they join

STEPS = {  # where a rank stops: with what it is told apart
    "process group": (dist, "init_process_group"),
    "channels": (dist, "new_group"),
    "first message": (Job, "send"),
}


def stop_at(rank, victim, step):
    if rank == victim:
        place, name = STEPS[step]
        setattr(place, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP))
    with attached():
        join_job("cpu", timeout=TIMEOUT)
    time.sleep(60)  # who needs nothing from the one that stops


@pytest.mark.further
@pytest.mark.parametrize(
    ("victim", "step"),
    [(0, "process group"), (1, "channels"), (2, "first message")],
)
def test_a_rank_that_stops_while_it_joins_is_named_soon(victim, step):
    _wait_for_fork_server()
    began = time.monotonic()
    with pytest.raises(RunFailed) as failed:
        run_on_ranks(stop_at, 3, victim, step, timeout=60)
    message = str(failed.value)
    assert time.monotonic() - began < TIMEOUT + GRACE + 40  # of which the start is a part
    assert re.search(rf"rank \d (waited {TIMEOUT} s for|could not join) rank {victim} ", message)
    assert "Traceback" not in message


def stop_before_joining(rank, victim):
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    with attached():
        join_job("cpu", timeout=TIMEOUT)


@pytest.mark.parametrize("victim", first_of([0, 1], 1))  # the first keeps the store
def test_a_rank_that_stops_before_it_joins_is_named_soon(victim):
    _wait_for_fork_server()
    began = time.monotonic()
    with pytest.raises(RunFailed) as failed:
        run_on_ranks(stop_before_joining, 3, victim, timeout=60)
    assert time.monotonic() - began < TIMEOUT + GRACE + 40
    named = rf"rank \d waited {TIMEOUT} s for rank {victim} to start: process \d+ is stopped"
    assert re.search(named, str(failed.value))


class GoneStore:
    def clone(self):
        raise RuntimeError("Connection was likely closed.")


def test_a_store_that_is_gone_before_the_first_sign_of_life_ends_the_rank_in_one_sentence(
    monkeypatch,
):
    monkeypatch.setattr(presence, "find_store", lambda job: GoneStore())
    monkeypatch.setattr(presence, "end_process", lambda sentence, *_: sys.exit(sentence))
    with pytest.raises(SystemExit, match="rank 1 could not join rank 0 .*closed"):
        with guarded_meeting(Job(1, 2, torch.device("cpu"), "gloo", TIMEOUT)):
            pass


def test_a_rank_that_fails_to_join_without_the_fault_of_another_says_where_to_look(monkeypatch):
    monkeypatch.setattr(presence, "end_process", lambda sentence, *_: sys.exit(sentence))
    monkeypatch.setattr(presence.Presence, "find_silent", lambda self: [])
    alone = presence.Presence(1, 2, TIMEOUT)
    with pytest.raises(SystemExit, match=r"the other ranks \(unsupported\); look at .*GLOO_"):
        alone.explain_failure(RuntimeError("[x.cpp:1] unsupported"))


@pytest.mark.parametrize(
    ("error", "end", "said"),
    [
        ("[x.cc:212] Unable to find interface for: [127.0.0.1]", SystemExit, "a connection .*find"),
        ("can't start new thread", RuntimeError, "thread"),
    ],
)
def test_one_process_that_cannot_connect_says_where_to_look_unless_it_lacks_threads(
    monkeypatch, error, end, said
):
    monkeypatch.setattr(presence, "end_process", lambda sentence, *_: sys.exit(sentence))
    with pytest.raises(end, match=said):
        with guarded_meeting(Job(0, 1, torch.device("cpu"), "gloo", TIMEOUT)):
            raise RuntimeError(error)


def stop_before_watch(rank, victim):
    import gpipe

    if rank == victim:
        gpipe.build_stage = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
    sys.argv = ["gpipe.py", *SMALL.split(), "--timeout", str(TIMEOUT)]
    return gpipe.main()


@pytest.mark.further
def test_a_rank_that_stops_after_it_has_joined_and_before_the_first_step_is_named_soon():
    _wait_for_fork_server()
    began = time.monotonic()
    with pytest.raises(RunFailed) as failed:
        run_on_ranks(stop_before_watch, 3, 1, timeout=60)
    assert time.monotonic() - began < TIMEOUT + GRACE + 40
    message = str(failed.value)
    assert re.search(rf"rank \d waited {TIMEOUT} s for .*: rank 1 has stopped answering", message)
    assert "Traceback" not in message


def test_a_rank_that_another_program_answers_ends_with_one_sentence():
    """A connection is accepted by the system, and then nobody says a word."""
    program = (
        "import torch; from guard import meeting; from pipeline.job import Job\n"
        "meeting.SLOW_START = meeting.GRACE = 1\n"
        "meeting.find_store(Job(1, 2, torch.device('cpu'), 'gloo', 1))"
    )
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "1", "WORLD_SIZE": "2"}
        ended = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **told, "PYTHONPATH": str(SCRIPTS)},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert f"rank 1 has no answer from rank 0 at 127.0.0.1:{port}" in ended.stderr


def test_a_rank_0_that_is_told_another_machine_s_address_ends_in_seconds(monkeypatch):
    address = "198.51.100.1"  # of no machine: RFC 5737
    told = {"MASTER_ADDR": address, "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(meeting, "GRACE", 1)
    monkeypatch.setattr(meeting, "open_store", lambda *_: pytest.fail("it tries for a minute"))
    monkeypatch.setattr(meeting, "end_process", lambda sentence, *_: sys.exit(sentence))
    with pytest.raises(SystemExit, match=f"rank 0 cannot listen at {address}.*; set MASTER_ADDR"):
        find_store(Job(0, 2, torch.device("cpu"), "gloo", TIMEOUT))


def test_a_rank_0_behind_a_translated_address_is_reached(monkeypatch):
    """No interface has the address, and connections to it come back."""
    connect = socket.create_connection
    monkeypatch.setattr(
        socket, "create_connection", lambda place, **more: connect(("127.0.0.1", place[1]), **more)
    )
    meeting.check_reaches_itself("198.51.100.1", free_port())


def test_a_torchrun_on_a_loaded_machine_may_answer_as_late_as_a_rank_may_start(monkeypatch):
    """In a full room it once took more than GRACE: every rank asks the resolver before it connects."""
    torchrun = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "RANK": "0"}
    told |= {"MASTER_PORT": str(torchrun.port), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in {**told, "NCCL_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    store = find_store(Job(0, 2, torch.device("cpu"), "gloo", TIMEOUT))
    assert store.timeout.total_seconds() == SLOW_START > GRACE


def test_restarted_ranks_find_nothing_of_the_attempt_before_in_torchrun_s_store(monkeypatch):
    kept = dist.HashStore()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for restarts in "01":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        store = of_this_attempt(kept)
        assert not store.check(["settings/0"])
        store.set("settings/0", "")


# Ports


def listening(process_ids):
    """The addresses at which these processes listen, as /proc/net has them."""
    inodes = set()
    for process_id in process_ids:
        for descriptor in Path(f"/proc/{process_id}/fd").iterdir():
            with suppress(OSError):
                inodes.add(os.readlink(descriptor))
    rows = [
        line.split()
        for file in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(file).read_text().splitlines()[1:]
    ]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}


def listening_of_job(rank):
    with attached():
        join_job("cpu", timeout=20)
    return listening([os.getpid()])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists sockets in /proc")
def test_nothing_listens_beyond_loopback_when_the_ranks_meet_there():
    store, other = run_on_ranks(listening_of_job, 2)
    assert len(store) > len(other) > 0
    local = "0100007F:", "0000000000000000FFFF00000100007F:", "00000000000000000000000001000000:"
    assert all(address.startswith(local) for address in store | other)


@pytest.mark.parametrize(
    ("address", "local"), [("127.0.0.1", True), ("::1", True), ("192.0.2.1", False)]
)
def test_what_is_loopback(address, local):
    assert is_loopback(address) == local


# Launchers


@pytest.mark.further
def test_a_launcher_that_dies_at_any_moment_takes_its_ranks_along():
    # So early that no rank has a use for torch yet; and while they import, meet or train.
    assert_gone_with_launcher(0.02, preload=False)
    assert_gone_with_launcher(random.Random(25).uniform(0.03, 2), preload=True)


PROGRAM = """
import sys
sys.path.insert(0, "source_code")
from course.launch import PRELOAD, SCRIPTS, WarmRanks, _wait_for_fork_server
PRELOAD[:] = PRELOAD if sys.argv[1] == "True" else []
_wait_for_fork_server()
print("ready", flush=True)
ranks = WarmRanks(SCRIPTS / "gpipe.py", ["--steps", "1000", "--pace", "2000"], 3)  # whose first word comes late
print("started", flush=True)
sys.stdin.read()
"""


def assert_gone_with_launcher(moment, preload):
    """A process that starts warm ranks is killed `moment` seconds later; then nothing is left."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(preload)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    reaper = threading.Timer(60, launcher.kill)
    reaper.start()
    try:
        assert launcher.stdout.readline() == b"ready\n"
        time.sleep(moment)
        started = psutil.Process(launcher.pid).children(recursive=True)
        assert started
    finally:
        reaper.cancel()
        launcher.kill()
        launcher.wait(10)
        launcher.stdin.close()
        launcher.stdout.close()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


# Random kills and stops over every training script, joining included


def attack(command, generator, *numbers):
    """Send one of two ranks a signal at a random moment of a run: it ends, and leaves nothing."""
    number = generator.choice(numbers)
    moment = generator.uniform(0, 4)
    script, *flags = command.split()
    flags += [*SMALL.split(), "--steps", str(LONG), "--timeout", str(TIMEOUT)]
    ranks = WarmRanks(SCRIPTS / script, flags, 2)
    victim = generator.randrange(2)
    timer = threading.Timer(moment, lambda: os.kill(ranks.process_of(victim), number))
    timer.start()
    try:
        with pytest.raises(RunFailed) as failed:
            follow(ranks, show=False, limit=120)
    finally:
        timer.cancel()
        ranks.end()
    message = f"{command}, {number.name} to rank {victim} after {moment:.2f} s: {failed.value}"
    assert "took longer than" not in message and "Traceback" not in message, message
    if victim:  # without the store of rank 0, torch itself prints where its C++ noticed
        assert "frame #" not in message, message
    assert f"rank {victim}" in str(failed.value), message
    assert not any(process.is_alive() for process in ranks.ranks), message


@pytest.mark.further
@pytest.mark.parametrize("command", SCRIPTS_AND_FLAGS[2::5])
def test_a_kill_at_a_random_moment_ends_a_training_and_names_the_rank(command):
    attack(command, random.Random(command), signal.SIGKILL)


@pytest.mark.soak
@pytest.mark.parametrize("command", SCRIPTS_AND_FLAGS)
@pytest.mark.parametrize("seed", range(10))
def test_so_do_many_kills_and_stops_over_every_training_script(command, seed):
    attack(command, random.Random(f"{command} {seed}"), signal.SIGKILL, signal.SIGSTOP)
