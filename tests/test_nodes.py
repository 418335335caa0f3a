"""What a job on several nodes needs: names, a place to meet, an order, and a network to pretend."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
import torch.distributed as dist

from course.failed_run import RunFailed
from course.followed_run import follow
from course.launch import ROOT, WarmRanks, launch_words, run
from guard import free_port as free_ports
from guard import one_sentence
from guard.free_port import free_port
from guard.launcher import meeting_point, read_ranks
from guard.meeting import find_store
from guard.one_sentence import in_one_sentence
from guard.slurm import first_node
from lab import slow_network, variables
from pipeline.job import Job

SMALL = "--layers 4 --dim 16 --heads 2 --kv-heads 2 --seq-len 8"
SLURM_VARIABLES = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


@pytest.fixture
def environment(monkeypatch):
    """A function that sets variables, in an environment without those of launchers."""
    for name in [*os.environ]:
        if name.startswith(("SLURM", "MASTER_", "TORCHELASTIC_", "GROUP_", "LOCAL_")) or name in (
            "RANK",
            "WORLD_SIZE",
        ):
            monkeypatch.delenv(name)
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # what the code sets itself goes away with the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return lambda **variables: [monkeypatch.setenv(*pair) for pair in variables.items()]


@pytest.mark.parametrize(
    ("short_form", "first"),
    [
        ("pp0", "pp0"),
        ("pp[0-1]", "pp0"),
        ("pp[003-010,012],gpu1", "pp003"),
        ("gpu7,pp[3-4]", "gpu7"),
        ("rack[2-3]node[5,9]-ib", "rack2node5-ib"),
    ],
)
def test_the_first_node_of_a_list(short_form, first):
    assert first_node(short_form) == first


def test_under_srun_alone_the_ranks_of_an_uneven_job_find_their_numbers(environment):
    environment(**SLURM_VARIABLES)
    assert read_ranks() == (5, 7, 1, 4)  # the fullest node has four
    environment(SLURM_STEP_TASKS_PER_NODE="4(x2),3")
    assert read_ranks()[3] == 4


def test_under_srun_alone_ranks_meet_on_the_first_node_at_a_port_of_the_job(environment):
    environment(**SLURM_VARIABLES)
    ports = set()
    for job, step in [("17", "0"), ("18", "0"), ("17", "1")]:
        environment(SLURM_JOB_ID=job, SLURM_STEP_ID=step)
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        address, port = meeting_point()
        assert address == "localhost"
        ports.add(port)
    assert len(ports) == 3 and all(10_000 <= port < 30_000 for port in ports)


def test_what_torchrun_or_the_learner_has_set_stays(environment):
    environment(**SLURM_VARIABLES, MASTER_ADDR="10.0.0.7", MASTER_PORT="4321")
    assert meeting_point() == ("10.0.0.7", 4321)


def test_a_port_is_held_until_the_rank_listens_and_no_other_program_gets_it():
    with free_ports.hold_free_port() as holder, socket.socket() as other:
        port = holder.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        assert store.port == port


def test_a_free_port_is_none_that_is_taken_and_none_that_the_system_hands_out(monkeypatch):
    port = free_port()
    assert 10_000 <= port < 30_000
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        draws = iter([port - free_ports.FIRST_PORT] * 3 + [free_port() - free_ports.FIRST_PORT])
        monkeypatch.setattr(free_ports.secrets, "randbelow", lambda count: next(draws))
        assert free_port() != port and next(draws, None) is None
        monkeypatch.setattr(
            free_ports.secrets, "randbelow", lambda count: port - free_ports.FIRST_PORT
        )
        with pytest.raises(OSError, match="in use"):
            free_port()


def test_a_node_name_that_leads_nowhere_is_named_with_the_cure(environment, monkeypatch, capsys):
    environment(**{**SLURM_VARIABLES, "SLURM_STEP_NODELIST": "nowhere.invalid"})
    monkeypatch.setattr(one_sentence, "WAIT", 0.0)
    for local_rank in ("0", "1"):
        environment(SLURM_LOCALID=local_rank)
        with pytest.raises(SystemExit) as ended, in_one_sentence():
            find_store(Job(0, 4, "cpu", "gloo", 1))
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert said.count("\n") == said.count("on node nowhere.invalid") == 1
        assert said.count("export MASTER_ADDR") == 1


TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


@pytest.mark.parametrize(
    ("changed", "rank"),
    [
        ({}, 2),  # torchrun's first node is SLURM's second
        ({"SLURM_NODEID": "0", "LOCAL_RANK": "1"}, 1),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}, 0),  # another torchrun
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, 0),  # rank 0 keeps the store
    ],
)
def test_stages_follow_slurm_s_order_of_the_nodes_where_torchrun_s_differs(
    environment, changed, rank
):
    step = {**SLURM_VARIABLES, "SLURM_STEP_NUM_TASKS": "2"}
    environment(**{**step, **TORCHRUN, **changed})
    assert read_ranks()[0] == rank


def test_an_allocation_without_a_compute_node_below_starts_no_warm_ranks(environment, capsys):
    environment(SLURM_JOB_ID="17", PATH="")  # after salloc on a login node
    with pytest.raises(FileNotFoundError, match="srun"):
        run("gpipe.py --steps 1", warm=True)
    assert capsys.readouterr().out.startswith("$ srun --overlap --nodes=1 --ntasks=1 torchrun ")
    assert launch_words("gpipe.py", [], 2)[0] == "srun"


def test_without_a_watch_a_hang_takes_half_an_hour_with_gloo_and_ten_minutes_with_nccl():
    from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

    assert default_pg_timeout.total_seconds() == 30 * 60
    # A build of torch without NCCL does not say.
    assert default_pg_nccl_timeout is None or default_pg_nccl_timeout.total_seconds() == 10 * 60


# A slow network.


def test_a_delay_between_nodes_is_in_the_timeline_and_not_in_the_losses(monkeypatch):
    command = f"gpipe.py {SMALL} --steps 2 --microbatches 2 --timeline build/tests/delay.json"
    plain = run(command, warm=True, show=False)
    monkeypatch.setenv(variables.PRETENDED_VARIABLE, "2")
    monkeypatch.setenv(variables.DELAY_VARIABLE, "400")
    slow = run(command, warm=True, show=False)
    assert slow.losses == plain.losses
    assert "4 ranks on cpu of nodes node0 node0 node1 node1" in slow.output
    events = {(str(e.action)): e for e in slow.timeline.events}
    for sent, used in [("1F0", "2F0"), ("1F1", "2F1"), ("2B0", "1B0"), ("2B1", "1B1")]:
        assert events[used].start - events[sent].end >= 390  # ms; clocks are aligned to less
    # The sender is not held up: both of its messages are under way at once.
    assert events["1F1"].start < events["2F0"].start


@pytest.mark.further
def test_a_narrow_link_between_nodes_lets_one_message_through_after_the_other():
    command = f"gpipe.py {SMALL} --steps 2 --microbatches 2 --timeline build/tests/narrow.json"
    plain = run(command, warm=True, show=False)
    with variables.pretended_nodes(2, occupancy=400):
        narrow = run(command, warm=True, show=False)
    assert narrow.losses == plain.losses
    events = {(str(e.action)): e for e in narrow.timeline.events}
    for end, first, second in [("1F0", "2F0", "2F1"), ("2B0", "1B0", "1B1")]:
        assert events[first].start - events[end].end >= 390
        # The second was made long before the link had served the first, and waits for it. The
        # distance of the two starts would say less: on a busy machine the first may start late.
        assert events[second].start - events[end].end >= 790
    assert events["1F1"].end < events["2F0"].start


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        (variables.DELAY_VARIABLE, "fast", "PIPELINE_NODE_DELAY must be 0 to 60000 milliseconds"),
        (variables.DELAY_VARIABLE, "-1", "PIPELINE_NODE_DELAY must be 0 to 60000 milliseconds"),
        (variables.OCCUPANCY_VARIABLE, "-1", "PIPELINE_NODE_OCCUPANCY must be 0 to 60000"),
        (variables.PRETENDED_VARIABLE, "0", "PIPELINE_RANKS_PER_NODE must be a whole number"),
        (variables.PRETENDED_VARIABLE, "²", "PIPELINE_RANKS_PER_NODE must be a whole number"),
    ],
)
def test_a_network_that_cannot_be_pretended_is_refused(monkeypatch, name, value, sentence):
    monkeypatch.setenv(name, value)
    with pytest.raises(RunFailed, match=sentence):
        run(f"gpipe.py {SMALL} --steps 1", ranks=2, warm=True, show=False)


def test_the_longest_delay_that_the_refusal_names_is_taken(monkeypatch):
    monkeypatch.setenv(variables.DELAY_VARIABLE, "60000")
    assert slow_network.seconds_in(variables.DELAY_VARIABLE) == 60


# A look into a running rank.


@pytest.mark.further
def test_a_rank_says_where_it_is_when_asked_and_goes_on(capsys):
    script = ROOT / "source_code" / "broken_mutual_wait.py"
    [line] = [
        n for n, text in enumerate(script.read_text().splitlines(), 1) if "job.receive" in text
    ]
    ranks = WarmRanks(script, ["--timeout", "8", *SMALL.split()], 2)
    try:
        time.sleep(2)
        for process in ranks.ranks:
            os.kill(process.pid, signal.SIGUSR2)
            time.sleep(1)  # both write to one pipe, in many pieces
        with pytest.raises(RunFailed) as failed:
            follow(ranks, show=False, limit=60)
    finally:
        ranks.end()
    text = str(failed.value)
    assert len(re.findall(r'broken_mutual_wait\.py", line \d+ in main', text)) == 2
    assert "a deadlock, each of these ranks waits for the next" in text


def test_what_is_pretended_ends_with_its_block(monkeypatch):
    slow = variables.DELAY_VARIABLE, variables.OCCUPANCY_VARIABLE
    monkeypatch.setenv(variables.DELAY_VARIABLE, "7")
    monkeypatch.delenv(variables.PRETENDED_VARIABLE, raising=False)
    with pytest.raises(KeyError), variables.pretended_nodes(2, 30):
        assert (slow_network.node_name(1), slow_network.node_name(2)) == ("node0", "node1")
        assert [slow_network.seconds_in(variable) for variable in slow] == [0.030, 0]
        raise KeyError
    assert slow_network.seconds_in(variables.DELAY_VARIABLE) == 0.007
    assert variables.PRETENDED_VARIABLE not in os.environ
    with variables.pretended_nodes(2, 0):
        assert variables.PRETENDED_VARIABLE not in os.environ
    with variables.pretended_nodes(2, occupancy=30):
        assert [slow_network.seconds_in(variable) for variable in slow] == [0, 0.030]


def start_launchers(folder, flags, numbered):
    """Two launchers of torchrun, as on two machines without SLURM; returns their processes.

    Without numbers of nodes, the first launcher has the store through which both meet.
    """
    port, started = free_port(), []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for node in range(2):
        meeting = f"--rdzv-backend c10d --rdzv-id monday --rdzv-conf is_host={1 - node}"
        how = f"--node-rank {node}" if numbered else meeting
        words = f"--nnodes 2 --nproc-per-node 2 {how} --rdzv-endpoint localhost:{port}"
        command = [sys.executable, "-m", "torch.distributed.run", *words.split()]
        command += [ROOT / "source_code" / "gpipe.py", *SMALL.split(), *flags.split()]
        with open(folder / f"{node}.txt", "w") as out:
            options = {"stdout": out, "stderr": out, "env": environment, "start_new_session": True}
            started.append(subprocess.Popen(command, **options))
    return started


def end_launchers(launchers):
    for launcher in launchers:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait(20)


@pytest.mark.further
@pytest.mark.parametrize("numbered", [False, True], ids=["c10d", "node ranks"])
def test_two_launchers_without_slurm_train_one_pipeline(numbered, tmp_path):
    launchers = start_launchers(tmp_path, "--steps 2 --verify", numbered)
    try:
        ends = [launcher.wait(100) for launcher in launchers]
    finally:
        end_launchers(launchers)
    said = (tmp_path / "0.txt").read_text() + (tmp_path / "1.txt").read_text()
    assert ends == [0, 0], said
    assert "4 ranks on cpu" in said and "as promised" in said


@pytest.mark.further
def test_if_one_machine_is_lost_the_other_launcher_ends_and_names_a_rank(tmp_path):
    launchers = start_launchers(tmp_path, "--steps 100000", numbered=False)
    try:
        limit = time.monotonic() + 100
        while "step 3 " not in "".join(path.read_text() for path in tmp_path.glob("*.txt")):
            assert time.monotonic() < limit and all(one.poll() is None for one in launchers)
            time.sleep(0.2)
        # The second one: with the first, torchrun's store is lost, and it may end the ranks first.
        for process in psutil.Process(launchers[1].pid).children(recursive=True):
            process.kill()
        launchers[1].kill()
        other = launchers[0].wait(100)
    finally:
        end_launchers(launchers)
    said = (tmp_path / "0.txt").read_text()
    assert other != 0 and re.search(r"rank \d lost rank \d|rank \d was killed", said), said
