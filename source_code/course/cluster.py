# SPDX-License-Identifier: Apache-2.0
"""Lesson 11's access to a SLURM cluster: a real one, one on this machine, or a transcript.

Inside a cluster, the lesson uses that cluster. If the notebook is itself a job there, the lesson's
jobs get their own allocations. On a machine with SLURM's programs, slurm/local_cluster.sh starts a
cluster, which ends with the notebook. Elsewhere nothing is run: the lesson shows the output that
was recorded on such a cluster, in slurm/transcripts, and prints a line that says so.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from course.job_queue import QueueWatch
from lab.timeline import from_chrome_trace

ROOT = Path(__file__).resolve().parents[2]
LOCAL_CLUSTER = ROOT / "slurm" / "local_cluster.sh"
TRANSCRIPTS = ROOT / "slurm" / "transcripts"
USERS = ROOT / "build" / "11_cluster"  # a file for each notebook that uses a cluster started here
RECORD_VARIABLE = "PIPELINE_RECORD"  # 1: write the transcripts anew
REPLAY_VARIABLE = "PIPELINE_REPLAY"  # 1: show the transcripts, even if there is a cluster
PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch")
INSTALL = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
# The variables that SLURM sets in a job. With them, srun would start a step of the notebook's job.
OF_A_JOB = ("SLURM", "SRUN_", "SBATCH_", "SALLOC_", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
SEARCHED = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


class ClusterFailed(RuntimeError):
    """A command of the cluster failed or took too long; the text is its output."""


@dataclass(frozen=True)
class Answer:
    """The output of a command or a job; `state` is the final state of a job, in SLURM's terms."""

    output: str
    state: str = ""

    @property
    def losses(self):
        """The losses in a job's output; its lines may have a prefix."""
        return [float(loss) for loss in re.findall(r"\bstep \d+  loss (\S+)$", self.output, re.M)]


def open_cluster():
    """Find or start a cluster and return the Cluster; prints a line that says which it is."""
    environment = without_job(os.environ)
    if os.environ.get(REPLAY_VARIABLE) == "1":
        print("You see what a cluster of two pretend nodes has said elsewhere.")
        return Cluster(None)
    if "SLURM_CONF" not in environment and not _answers(environment):
        if any(shutil.which(program, path=SEARCHED) is None for program in PROGRAMS):
            print(
                "SLURM is not on this machine: you see what a cluster of two pretend nodes has "
                f"said elsewhere.\nTo have your own, on Debian or Ubuntu, as root: {INSTALL}"
            )
            return Cluster(None)
        environment |= _start_local()
        print("This machine is now a cluster of two pretend nodes, until the notebook ends.")
        print('In a terminal:  eval "$(slurm/local_cluster.sh env)"')
    else:
        print("The cluster around this notebook.")
        if "SLURM_JOB_ID" in os.environ:
            print("This notebook is a job; what it submits gets nodes of its own, beside it.")
    return Cluster(environment)


def without_job(environment):
    """`environment` without the variables of its job; SLURM_CONF, the cluster's, is kept."""
    if "SLURM_JOB_ID" not in environment:
        return dict(environment)
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(OF_A_JOB) or name.startswith("SLURM_CONF")
    }


def _answers(environment):
    """Whether a cluster that the course has not started answers to sinfo."""
    with suppress(OSError, subprocess.TimeoutExpired):
        return not subprocess.run(
            ["sinfo"], env=environment, capture_output=True, timeout=10
        ).returncode
    return False


def _notebooks_that_use_it():
    """The files of the notebooks that still run, after all other files are removed."""
    USERS.mkdir(parents=True, exist_ok=True)
    for user in USERS.iterdir():
        is_one = re.fullmatch("[1-9][0-9]{0,8}", user.name)  # not a file browser's own
        if not (is_one and psutil.pid_exists(int(user.name))):
            user.unlink(missing_ok=True)
    return list(USERS.iterdir())


def _start_local():
    """Start a cluster that ends with the last notebook, if none runs; return its environment."""
    running = subprocess.run([LOCAL_CLUSTER, "status"], capture_output=True).returncode == 0
    started = subprocess.run([LOCAL_CLUSTER, "start"], capture_output=True, text=True, timeout=60)
    if started.returncode:
        raise ClusterFailed(started.stderr)
    if _notebooks_that_use_it() or not running:  # otherwise it was started by hand
        (USERS / str(os.getpid())).touch()
        # A kernel that is killed cannot stop the cluster, and one that ends normally ends its
        # children first. So a process that is not a child has to stop it: setsid --fork starts one.
        waiting = 'tail --pid="$1" -f /dev/null; rm -f "$3/$1"; rmdir "$3" && exec "$2" stop'
        words = ["bash", "-c", waiting, "end_with", str(os.getpid()), str(LOCAL_CLUSTER), USERS]
        subprocess.run(
            ["setsid", "--fork", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
    said = subprocess.run([LOCAL_CLUSTER, "env"], capture_output=True, text=True, check=True)
    return dict(re.findall(r"^export (\w+)=(\S+)", said.stdout, re.MULTILINE))


class Cluster:
    """A cluster. `environment` is that of its commands, or None if transcripts are shown."""

    def __init__(self, environment):
        self.environment = environment and _with_site(environment)

    @property
    def is_real(self):
        return self.environment is not None

    def ask(self, name, command, may_fail=False, show=True, limit=60):
        """Run a line of shell in the course's folder and return the Answer.

        `name` is the name of the transcript. Raises ClusterFailed for a failure unless `may_fail`.
        `limit` is in seconds; for srun it counts from the moment at which srun has its nodes.
        """
        if show:
            print("$ " + command)
        if self.is_real:
            answer = self._run(name, command, may_fail, limit)
        else:
            answer = self._recorded(name)
        if show:
            print(answer.output, end="")
        return answer

    def _run(self, name, command, may_fail, limit):
        environment, watch = dict(self.environment), None
        if "srun" in command.split():
            environment["SLURM_JOB_NAME"] = f"lesson-{os.getpid()}-{time.monotonic_ns()}"
            own = ["--me", f"--name={environment['SLURM_JOB_NAME']}"]
            watch = QueueWatch(partial(self._queued, own), limit, "of srun", quiet=5.0)
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output = _output_of(process, watch, limit, command)
        except BaseException as problem:  # an interrupt, too
            _end_session(process)
            if isinstance(problem, KeyboardInterrupt) and watch and watch.is_waiting:
                return self._instead_of_waiting(name)
            raise
        if process.returncode and not may_fail:
            raise ClusterFailed(output)
        answer = Answer(output)
        self._record(name, answer)
        return answer

    def submit(self, name, words, files=(), meanwhile=None, may_fail=False, show=True, limit=120):
        """Submit a job, watch it until it ends, and return its Answer with its whole output.

        `words` are the arguments of sbatch. `files` are the files that the job writes, for the
        transcript. `meanwhile` is (text, a line of shell): once the job has printed the text, the
        line is run, with the job's number in $JOB. `limit` is in seconds from the start of the job;
        time in the queue does not count. An interrupt ends the job; if the job had not yet started,
        the transcript is shown instead.
        """
        print("$ sbatch " + words)
        if not self.is_real:
            answer = self._recorded(name, files)
            print(f"(recorded) the job ended: {answer.state}")
        else:
            for file in files:
                (ROOT / file).parent.mkdir(exist_ok=True)
                (ROOT / file).unlink(missing_ok=True)
            answer = self._follow(name, words, files, meanwhile, limit)
            if answer.state != "COMPLETED" and not may_fail:
                raise ClusterFailed(answer.output)
        if show:
            print(answer.output, end="")
        return answer

    def _follow(self, name, words, files, meanwhile, limit):
        """Submit a job and watch it; prints a line for each change of state."""
        log = ROOT / "build" / f"11_job_{os.getpid()}.out"
        log.parent.mkdir(exist_ok=True)
        log.unlink(missing_ok=True)
        command = f"sbatch --parsable --output={shlex.quote(str(log))} {words}"
        job = self.ask("", command, show=False).output.strip().split(";")[0]
        watch = QueueWatch(partial(self._queued, [f"--job={job}"]), limit, job)
        try:
            while watch.look():
                if meanwhile and log.exists() and meanwhile[0] in log.read_text(encoding="utf-8"):
                    print("$ " + meanwhile[1])
                    self.ask("", f"JOB={job}; {meanwhile[1]}", show=False)
                    meanwhile = None
                time.sleep(0.2)
        except BaseException as problem:  # an interrupt, too
            self.ask("", f"scancel {job}", may_fail=True, show=False)
            if isinstance(problem, KeyboardInterrupt) and watch.is_waiting:
                return self._instead_of_waiting(name, files)
            if isinstance(problem, TimeoutError):
                raise ClusterFailed(str(problem)) from None
            raise
        state = self.ask("", f"scontrol show job {job}", show=False).output
        output = log.read_text(encoding="utf-8") if log.exists() else ""
        answer = Answer(_without_paths(output), re.search(r"JobState=(\w+)", state)[1])
        self._record(name, answer, files)
        return answer

    def _queued(self, words):
        """The state of a job, with its nodes or the reason why it waits; "" after its end."""
        shown = subprocess.run(
            ["squeue", "--noheader", "--format=%T %R", *words],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if shown.returncode and "nvalid job" not in shown.stderr:
            raise ClusterFailed(shown.stderr)
        return shown.stdout.strip()

    def _instead_of_waiting(self, name, files=()):
        print("You did not wait; this is what a cluster of two pretend nodes has said elsewhere.")
        return self._recorded(name, files)

    def timeline(self, file):
        """The Timeline that a job has written to `file`, or the one of the transcript."""
        folder = ROOT if self.is_real else TRANSCRIPTS
        path = folder / (file if self.is_real else Path(file).name)
        return from_chrome_trace(path.read_text(encoding="utf-8"))

    def _recorded(self, name, files=()):
        record = json.loads((TRANSCRIPTS / f"{name}.json").read_text(encoding="utf-8"))
        for file in files:
            (ROOT / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(TRANSCRIPTS / Path(file).name, ROOT / file)
        return Answer(record["output"], record["state"])

    def _record(self, name, answer, files=()):
        if name and os.environ.get(RECORD_VARIABLE) == "1":
            TRANSCRIPTS.mkdir(exist_ok=True)
            record = {"output": answer.output, "state": answer.state}
            (TRANSCRIPTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
            for file in files:
                shutil.copy(ROOT / file, TRANSCRIPTS / Path(file).name)


def _output_of(process, watch, limit, command):
    """The output of a process, once it has ended. Raises ClusterFailed if that takes too long."""
    begun = time.monotonic()
    while True:
        try:
            return process.communicate(timeout=1)[0]
        except subprocess.TimeoutExpired:
            pass
        try:
            if watch:
                watch.look()
            if not (watch and watch.last) and time.monotonic() - begun > limit:
                raise TimeoutError(f"no answer within {limit} s")
        except TimeoutError as problem:
            raise ClusterFailed(f"{problem}: {command}") from None


def _end_session(process):
    """End a shell and all its children; srun then releases its nodes, or leaves the queue."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def _with_site(environment):
    """`environment` with the values of slurm/site.env, as `source` sets them in a shell.

    If the site names neither a Python nor a container, jobs run with the notebook's Python.
    """
    site = Path(os.environ.get("COURSE_SITE", ROOT / "slurm" / "site.env"))
    text = site.read_text(encoding="utf-8")
    # As in slurm/prepare.sh: an apostrophe in a later comment may close the quote.
    if unclosed := re.search(r"^COURSE_[A-Z_]*=[^'\"#\n]*(\"[^\"\n]*|'[^'\n]*)$", text, re.M):
        raise ClusterFailed(f"{site} cannot be read ({unclosed[0]}); close each quote")
    if re.search(r"^COURSE_CONTAINER=(\"\")?$", text, re.M):
        text = re.sub(r"^COURSE_PYTHON=$", f"COURSE_PYTHON={sys.executable}", text, flags=re.M)
    copy = ROOT / "build" / "11_site.env"
    copy.parent.mkdir(exist_ok=True)
    copy.write_text(text, encoding="utf-8")
    read = '. "$COURSE_SITE" && env -0'
    shown = subprocess.run(
        ["bash", "-c", read],
        cwd=ROOT,
        env={**environment, "COURSE_SITE": str(copy)},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    values = dict(pair.split("=", 1) for pair in shown.stdout.split("\0") if pair)
    if "SBATCH_CONSTRAINT" in values:  # the lesson calls srun outside of a job
        values["SLURM_CONSTRAINT"] = values["SBATCH_CONSTRAINT"]
    return values


def _without_paths(text):
    """A job's output with file names relative to the repository, or to Python's installation."""
    text = text.replace(f"{ROOT}/", "")
    return re.sub(r"(?<![\w.~-])/[\w./-]*/(?=lib/python|bin/python)", "", text)


def stacks_of(output):
    """{prefix of a rank: [line]}: the lines of the course's code in the stack dumps of a job.

    A rank that receives SIGUSR2 prints the stack of each of its threads, the innermost call first.
    The last frames of the main thread are in the rank's script. Frames in the guard's files and in
    slow_network.py are left out.
    """
    stacks = {}
    for prefix, text in re.findall(r"^\[(\S+)\]: *File (.*)$", output, re.MULTILINE):
        of_course = "source_code/" in text and "source_code/guard/" not in text
        if of_course and "/slow_network.py" not in text:
            stacks.setdefault(prefix, []).append(text.replace('"', ""))
    return stacks
