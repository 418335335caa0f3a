"""A rank that dies or stops answering ends the job soon, and the message names it.

The limits on waiting are part of what is promised; they are the only times that tests assert.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from further import first_of, further

from course.failed_run import RunFailed
from course.followed_run import follow
from course.launch import (
    SCRIPTS,
    LaunchedRanks,
    WarmRanks,
    _wait_for_fork_server,
    launch_words,
)
from guard import ending
from guard.free_port import free_port
from guard.watch import Wait, Watch
from pipeline import job as jobs
from pipeline.job import GRACE
from pipeline.message import Message

ROOT = Path(__file__).resolve().parents[1]
LONG = ["--steps", "1000", "--pace", "10", "20"]  # minutes, if nobody ends it
REQUESTS = "--requests 300 --tokens 200 --seq-len 256".split()  # minutes, too
TIMEOUT = 4  # seconds, of --timeout
WITHIN = 15  # seconds, for all that follows


class Job:
    """Ranks of gpipe.py, four or torchrun's two, one of which gets a signal after the first step.

    With another `script`, `begin` is how the line begins after which it gets the signal.
    """

    def __init__(self, number, rank, torchrun=False, script="gpipe.py", flags=LONG, begin="step 0"):
        self.begin, flags = begin, [*flags, "--timeout", str(TIMEOUT)]
        if torchrun:
            self.ranks = LaunchedRanks(launch_words(script, flags, 2))
        else:
            self.ranks = WarmRanks(SCRIPTS / script, flags, 4)
        self.number, self.rank, self.count = number, rank, 2 if torchrun else 4
        self.processes = []
        self.ranks.streams["stdout"] = self.signalled_after_a_step(self.ranks.streams["stdout"])

    def signalled_after_a_step(self, lines):
        for line in lines:
            if line.startswith(self.begin):
                self.processes = self.find_processes()
                os.kill(self.processes[self.rank].pid, self.number)
                self.signalled = time.monotonic()
            yield line

    def find_processes(self):
        """One process a rank, in order."""
        if isinstance(self.ranks, WarmRanks):
            return [psutil.Process(process.pid) for process in self.ranks.ranks]
        children = psutil.Process(self.ranks.process.pid).children(recursive=True)
        by_rank = {int(child.environ()["RANK"]): child for child in children}
        return [by_rank[rank] for rank in range(self.count)]

    def end(self):
        """What the job said at its end; seconds from the signal to it. All ranks have ended."""
        try:
            with pytest.raises(RunFailed) as failed:
                follow(self.ranks, show=False, limit=120)
            took = time.monotonic() - self.signalled
        finally:
            self.ranks.end()
        _, alive = psutil.wait_procs(self.processes, timeout=20)
        assert len(self.processes) == self.count and not alive
        return str(failed.value), took


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_rank_ends_the_job_and_is_named(rank):
    message, took = Job(signal.SIGKILL, rank).end()
    assert message.endswith(f"(rank {rank} was ended by SIGKILL)")
    assert took < WITHIN


def test_a_killed_rank_ends_the_job_under_torchrun_and_is_named():
    message, took = Job(signal.SIGKILL, 1, torchrun=True).end()
    assert message.endswith("(rank 1 was ended by SIGKILL)")
    assert "Traceback" not in message
    assert took < WITHIN


@pytest.mark.parametrize("rank", first_of([0, 3], 1))
def test_a_killed_rank_of_inference_ends_the_job_and_is_named(rank):
    served = {"script": "inference.py", "flags": REQUESTS, "begin": "inference: 4 ranks"}
    message, took = Job(signal.SIGKILL, rank, **served).end()
    assert message.endswith(f"(rank {rank} was ended by SIGKILL)")
    assert took < WITHIN


@pytest.mark.parametrize(
    "rank", first_of([0, 2, 3], 2)
)  # rank 0 keeps the store through which ranks meet
def test_a_stopped_rank_ends_the_job_after_the_timeout_and_is_named(rank):
    message, took = Job(signal.SIGSTOP, rank).end()
    check_silence(message, rank)
    assert TIMEOUT - 1 < took < TIMEOUT + WITHIN


@further
def test_a_stopped_rank_ends_the_job_under_torchrun_and_is_named():
    # A stopped process does not heed torchrun's request to end, for which it waits 30 s.
    message, took = Job(signal.SIGSTOP, 1, torchrun=True).end()
    check_silence(message, 1)
    assert TIMEOUT - 1 < took < TIMEOUT + WITHIN


def check_silence(message, rank):
    """Whoever timed out says for what it waited, and blames `rank`; nobody blames another."""
    silences = [line for line in message.splitlines() if f" waited {TIMEOUT} s for " in line]
    assert silences, message
    for line in silences:
        assert " of micro-batch " in line and " from rank " in line
        assert line.startswith("rank ") and not line.startswith(f"rank {rank} ")
        blamed = line.rsplit(": ", 1)[1]
        assert blamed.startswith(f"rank {rank}") and blamed.endswith("has stopped answering")
    assert "Traceback" not in message and "TCPStore.cpp" not in message


def test_ranks_that_wait_for_one_that_never_starts_say_so():
    # As rank 0. A job has a minute for slow starts.
    program = (
        "import sys; sys.path.insert(0, 'source_code')\n"
        "from guard import presence\n"
        "from pipeline.job import Job\n"
        "presence.SLOW_START = 1.0\n"
        "with presence.guarded_meeting(Job(0, 2, 'cpu', 'gloo', 1.0)):\n"
        "    pass\n"
    )
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    variables["MASTER_PORT"] = str(free_port())
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    sentence = ended.stderr.splitlines()[-1]
    assert sentence == "rank 0 waited 1 s for rank 1 to start; look at what was printed there"
    assert "Traceback" not in ended.stderr


# Without lab and guard, and without a launcher that would end the others.


class BareJob:
    """Four ranks of gpipe.py without lab and guard: their five lines are left out.

    What a rank says of a failure goes to a file of its own.
    """

    def __init__(self, folder):
        lines = (SCRIPTS / "gpipe.py").read_text().splitlines(keepends=True)
        script = [line for line in lines if "attach" not in line and "guarded" not in line]
        assert len(lines) - len(script) == 5 and "lab" not in "".join(script).split()
        own = f"import os\nos.dup2(os.open('{folder}/' + os.environ['RANK'], os.O_CREAT | os.O_WRONLY), 2)\n"
        (folder / "gpipe.py").write_text(own + "".join(script))
        self.folder = folder
        _wait_for_fork_server()
        flags = ["--steps", "1000000", "--timeout", str(TIMEOUT)]
        self.ranks = WarmRanks(folder / "gpipe.py", flags, 4)
        self.reaper = threading.Timer(120, self.ranks.end)  # of what hangs
        self.reaper.start()

    def send(self, number, rank):
        """Send a signal to a rank within a step; what all others say, and after how long."""
        output = self.ranks.streams["stdout"]
        assert output.readline().startswith("4 ranks on cpu")
        assert output.readline().startswith("step 0")
        threading.Thread(target=output.read, daemon=True).start()  # a full pipe would hold them up
        os.kill(self.ranks.process_of(rank), number)
        began, said = time.monotonic(), {}
        for other in [r for r in range(4) if r != rank]:
            process = self.ranks.ranks[other]
            process.join(60)
            assert process.exitcode == 1
            said[other] = (self.folder / str(other)).read_text()
        return said, time.monotonic() - began

    def end(self):
        self.reaper.cancel()
        self.ranks.end()


@pytest.fixture
def bare_job(tmp_path):
    job = BareJob(tmp_path)
    yield job
    job.end()


@pytest.mark.parametrize("rank", [0, 2])
def test_without_lab_and_guard_a_killed_rank_ends_the_others_by_torch_s_own_error(bare_job, rank):
    said, took = bare_job.send(signal.SIGKILL, rank)
    assert took < WITHIN
    check_errors(said)


@pytest.mark.parametrize("rank", first_of([2, 0], 1))
def test_without_lab_and_guard_a_stopped_rank_ends_the_others_by_torch_s_own_error(bare_job, rank):
    said, took = bare_job.send(signal.SIGSTOP, rank)
    assert TIMEOUT - 1 < took < TIMEOUT + GRACE + WITHIN
    check_errors(said)


def check_errors(said):
    """Each of the others ends with the traceback of an error of the transport."""
    for text in said.values():
        assert "Traceback" in text and " lost rank " not in text
        assert re.search(r"(closed by peer|reset by peer|Timed out)", text), text


# The sentences themselves, without processes.


def announce(store, rank, peer, what):
    Watch(rank, 60, store).announce(Wait(peer, what, 0.0))


def test_two_ranks_that_wait_for_each_other_are_called_a_deadlock():
    store = dist.HashStore()
    announce(store, 1, 0, "gradient 0")
    sentence, silent = Watch(0, 60, store).explain_silence(Wait(1, "activation 0", 0.0))
    assert sentence == (
        "rank 0 waited 60 s for activation 0 from rank 1, which waits for gradient 0 from rank 0: "
        "a deadlock, each of these ranks waits for the next"
    )
    assert silent is None


def test_a_deadlock_of_others_is_found_by_a_rank_that_waits_for_one_of_them():
    store = dist.HashStore()
    announce(store, 1, 2, "b")
    announce(store, 2, 3, "c")
    announce(store, 3, 1, "d")
    sentence, silent = Watch(0, 60, store).explain_silence(Wait(1, "a", 0.0))
    assert sentence.endswith("from rank 1: a deadlock, each of these ranks waits for the next")
    assert silent is None


def test_the_end_of_a_chain_of_waits_is_blamed():
    store = dist.HashStore()
    announce(store, 1, 2, "the gradient of micro-batch 3")
    sentence, silent = Watch(0, 1.5, store).explain_silence(Wait(1, "gradient 2", 0.0))
    assert sentence == (
        "rank 0 waited 1.5 s for gradient 2 from rank 1, which waits for the gradient of "
        "micro-batch 3 from rank 2: rank 2 has stopped answering"
    )
    assert silent == 2


def test_a_rank_without_news_of_its_peer_blames_the_peer():
    for store in (dist.HashStore(), None):
        sentence, silent = Watch(2, 60, store).explain_silence(Wait(1, "activation 0", 0.0))
        assert sentence == "rank 2 waited 60 s for activation 0 from rank 1: " + (
            "rank 1 has stopped answering"
        )
        assert silent == 1


def test_a_store_that_does_not_answer_is_blamed_on_the_rank_that_keeps_it(monkeypatch):
    class StoreOfAStoppedProcess:
        def check(self, keys):
            time.sleep(30)

    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    watch = Watch(2, 60, StoreOfAStoppedProcess())
    began = time.monotonic()
    sentence, silent = watch.explain_silence(Wait(1, "activation 0", 0.0))
    assert sentence.endswith("rank 0, which keeps the common store, has stopped answering")
    assert silent == 0
    assert time.monotonic() - began < WITHIN
    # torchrun keeps it in its own process: then the peer is all that is known.
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert watch.explain_silence(Wait(1, "activation 0", 0.0))[1] == 1


def test_a_wait_that_is_over_is_taken_back(monkeypatch):
    store = dist.HashStore()
    watch, other = Watch(1, 2.0, store), Watch(0, 60, store)
    monkeypatch.setattr(watch, "end_job", lambda wait: None)  # it would end this process
    watch.start()
    try:
        with watch.waiting(0, "activation 7"):
            until(lambda: other.announced_by(1) == (0, "activation 7"))
        until(lambda: other.announced_by(1) is None)
    finally:
        watch.stop()
        watch.join(10)


@pytest.mark.parametrize(
    "error, stays", [("Connection closed by peer", True), ("shape mismatch", False)]
)
def test_only_a_wait_that_ends_with_a_lost_rank_stays_announced(monkeypatch, error, stays):
    # Its rank is about to end: who waits for that rank should look further, to the lost one.
    store = dist.HashStore()
    watch, other = Watch(1, 2.0, store), Watch(0, 60, store)
    monkeypatch.setattr(watch, "end_job", lambda wait: None)  # it would end this process
    watch.start()
    try:
        with pytest.raises(RuntimeError, match=error), watch.waiting(2, "activation 7"):
            until(lambda: other.announced_by(1))
            raise RuntimeError(error)
        assert (watch.longest_wait() is not None) == stays
        if not stays:
            until(lambda: other.announced_by(1) is None)
    finally:
        watch.stop()
        watch.join(10)
    assert other.announced_by(1) == ((2, "activation 7") if stays else None)


def test_an_announcement_is_tried_again_after_the_store_failed(monkeypatch):
    store = dist.HashStore()
    watch = Watch(1, 60, store)

    def fail(*_):
        raise RuntimeError("timed out")

    wait = Wait(2, "activation 7", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(watch, "announce", fail)
        watch.tell_others(wait)
    watch.tell_others(wait)
    assert Watch(0, 60, store).announced_by(1) == (2, "activation 7")


def until(condition):
    give_up = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def test_a_lost_connection_is_explained_without_the_transport_s_own_source_lines():
    error = RuntimeError(
        "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5000. This "
        "is typically caused by a remote worker crashing."
    )
    store = dist.HashStore()
    assert Watch(1, 60, store).explain_loss(2, "gradient 0", error) == (
        "rank 1 lost rank 2 while waiting for gradient 0 (Connection closed by peer "
        "[127.0.0.1]:5000)"
    )
    # The rank after it reads what the first one left behind, and looks further.
    assert Watch(0, 60, store).explain_loss(1, "gradient 0", error) == (
        "rank 0 lost rank 1 while waiting for gradient 0 (rank 1 itself had been waiting for "
        "rank 2)"
    )


def test_a_rank_whose_send_cannot_begin_waits_for_the_receipt(monkeypatch):
    # And not for its own gradient: the message names what the lost rank should have done.
    def start(peers, begin):
        raise RuntimeError("Connection reset by peer")

    said = []
    monkeypatch.setattr(ending, "end_process", said.append)
    job = jobs.Job(3, 4, torch.device("cpu"), "gloo", 1.0, channels={(3, 2): None})
    ending.name_losses(job)
    monkeypatch.setattr(job, "start", start)
    job.send(torch.zeros(1), 2, Message("gradient", 3, 1))
    assert said == [
        "rank 3 lost rank 2 while waiting for the receipt of the gradient of micro-batch 1 "
        "from stage 3 (Connection reset by peer)"
    ]


def test_a_watch_ends_only_processes_with_the_same_parent():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        watch = Watch(0, 60)
        watch.processes = {1: child.pid, 2: 2**22 + 1}  # a child, not a sibling; and nobody
        for rank in (1, 2, 3):
            watch.end_rank(rank)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait(10)


def test_no_rank_of_a_checkpointed_job_outlives_torchrun():
    """Its own parent is the shell that the job script starts, which SIGKILL of torchrun leaves."""
    job_script = (ROOT / "slurm" / "checkpointed.sbatch").read_text()
    shell = re.search("^rank='(.*)'$", job_script, re.MULTILINE)[1]
    program = (
        "import os, sys, time; sys.path.insert(0, 'source_code')\n"
        "from guard.presence import Presence\n"
        "Presence(0, 2, 60).start(); print(os.getpid(), flush=True); time.sleep(60)\n"
    )
    words = ["bash", "-c", shell, "rank", sys.executable, "-c", program]
    torchrun = f"import subprocess; subprocess.run({words!r})"
    launcher = subprocess.Popen([sys.executable, "-c", torchrun], cwd=ROOT, stdout=subprocess.PIPE)
    reaper = threading.Timer(60, launcher.kill)
    reaper.start()
    rank = None
    try:
        rank = psutil.Process(int(launcher.stdout.readline()))
        launcher.kill()
        launcher.wait(10)
        rank.wait(WITHIN)
    finally:
        reaper.cancel()
        launcher.kill()
        launcher.stdout.close()
        if rank and rank.is_running():
            rank.kill()


def test_a_rank_outlives_no_launcher():
    program = (
        "import sys, time; sys.path.insert(0, 'source_code')\n"
        "from guard.presence import Presence\n"
        "Presence(0, 2, 60).start(); print('there', flush=True); time.sleep(60)\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    rank = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PIPELINE_LAUNCHER": str(launcher.pid)},
        stdout=subprocess.PIPE,
    )
    reaper = threading.Timer(60, rank.kill)
    reaper.start()
    try:
        assert rank.stdout.readline() == b"there\n"
        launcher.kill()
        launcher.wait(10)
        assert rank.wait(WITHIN) == 1
    finally:
        reaper.cancel()
        rank.kill()
        launcher.kill()
        rank.stdout.close()
