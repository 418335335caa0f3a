"""Lesson 11's access to a SLURM cluster: a real one, one on this machine, or a transcript.

Inside a cluster, that cluster is used. On a machine with SLURM's programs, slurm/local_cluster.sh
starts one, which ends with the notebook. Elsewhere nothing is run: the transcripts of such a
cluster in slurm/transcripts are shown, and a line of output says so.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lab.timeline import from_chrome_trace

ROOT = Path(__file__).resolve().parents[2]
LOCAL_CLUSTER = ROOT / "slurm" / "local_cluster.sh"
TRANSCRIPTS = ROOT / "slurm" / "transcripts"
RECORD_VARIABLE = "PIPELINE_RECORD"  # 1: write the transcripts anew
REPLAY_VARIABLE = "PIPELINE_REPLAY"  # 1: show the transcripts, even if there is a cluster
PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch")
INSTALL = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
SEARCHED = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


class ClusterFailed(RuntimeError):
    """A command of the cluster that failed, or took too long; the text is its output."""


@dataclass(frozen=True)
class Answer:
    """The output of a command or a job; `state` is the state of a job in SLURM's terms."""

    output: str
    state: str = ""

    @property
    def losses(self):
        """The losses in a job's output, whatever was put before the lines."""
        return [float(loss) for loss in re.findall(r"\bstep \d+  loss (\S+)$", self.output, re.M)]


def open_cluster():
    """The Cluster there is, started if need be; one line says which."""
    environment = dict(os.environ)
    if os.environ.get(REPLAY_VARIABLE) == "1":
        print("You see what a cluster of two pretended nodes has said elsewhere.")
        return Cluster(None)
    if "SLURM_CONF" not in environment and not _answers(environment):
        if any(shutil.which(program, path=SEARCHED) is None for program in PROGRAMS):
            print(
                "SLURM is not on this machine: you see what a cluster of two pretended nodes has "
                f"said elsewhere.\nTo have your own, on Debian or Ubuntu, as root: {INSTALL}"
            )
            return Cluster(None)
        environment |= _start_local()
        print("This machine is now a cluster of two pretended nodes, until the notebook ends.")
        print('In a terminal:  eval "$(slurm/local_cluster.sh env)"')
    else:
        print("The cluster around this notebook.")
    return Cluster(environment)


def _answers(environment):
    """Whether there is a cluster without our doing."""
    with suppress(OSError, subprocess.TimeoutExpired):
        return not subprocess.run(
            ["sinfo"], env=environment, capture_output=True, timeout=10
        ).returncode
    return False


def _start_local():
    """Start the cluster on this machine and let it end with this process; its environment."""
    running = subprocess.run([LOCAL_CLUSTER, "status"], capture_output=True).returncode == 0
    started = subprocess.run([LOCAL_CLUSTER, "start"], capture_output=True, text=True, timeout=60)
    if started.returncode:
        raise ClusterFailed(started.stderr)
    if not running:
        # A kernel that is killed cannot stop the cluster, and one that ends normally ends its
        # children first. So this process must not be a child: setsid --fork detaches it.
        waiting = 'tail --pid="$1" -f /dev/null; exec "$2" stop'
        words = ["bash", "-c", waiting, "end_with", str(os.getpid()), str(LOCAL_CLUSTER)]
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
    """A cluster. `environment` is that of its commands, or None where transcripts are shown."""

    def __init__(self, environment):
        self.environment = environment
        if environment is not None:
            site = _site_with_this_python()
            self.environment = {**environment, "COURSE_SITE": str(site)}

    @property
    def is_real(self):
        return self.environment is not None

    def ask(self, name, command, may_fail=False, show=True, limit=60):
        """Run a line of shell in the course's folder and return the Answer.

        `name` is that of the transcript. Raises ClusterFailed unless `may_fail`.
        """
        if show:
            print("$ " + command)
        if not self.is_real:
            answer = self._recorded(name)
        else:
            try:
                ended = subprocess.run(
                    ["bash", "-c", command],
                    cwd=ROOT,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=limit,
                )
            except subprocess.TimeoutExpired:
                raise ClusterFailed(f"no answer within {limit} s: {command}") from None
            if ended.returncode and not may_fail:
                raise ClusterFailed(ended.stdout)
            answer = Answer(ended.stdout)
            self._record(name, answer)
        if show:
            print(answer.output, end="")
        return answer

    def submit(self, name, words, files=(), meanwhile=None, may_fail=False, show=True, limit=120):
        """Submit a job, watch it until it ends, and return its Answer with its whole output.

        `words` are what follows sbatch. `files` are what the job writes, for the transcript.
        `meanwhile` is (what the job prints, a line of shell): once the job has printed the one,
        the other is run, with $JOB for its number.
        """
        print("$ sbatch " + words)
        if not self.is_real:
            answer = self._recorded(name, files)
            print(f"(recorded) the job ended: {answer.state}")
        else:
            for file in files:
                (ROOT / file).parent.mkdir(exist_ok=True)
                (ROOT / file).unlink(missing_ok=True)
            answer = self._follow(words, meanwhile, limit)
            if answer.state != "COMPLETED" and not may_fail:
                raise ClusterFailed(answer.output)
            self._record(name, answer, files)
        if show:
            print(answer.output, end="")
        return answer

    def _follow(self, words, meanwhile, limit):
        """Submit and watch: a line for each change of state."""
        log = ROOT / "build" / "11_job.out"
        log.parent.mkdir(exist_ok=True)
        log.unlink(missing_ok=True)
        command = f"sbatch --parsable --output={shlex.quote(str(log))} {words}"
        job = self.ask("", command, show=False).output.strip()
        begun, before = time.monotonic(), ""
        try:
            while True:
                shown = self.ask("", f"squeue --noheader --job={job} --format='%T %R'", True, False)
                now = shown.output.strip() if "nvalid job" not in shown.output else ""
                if now != before:
                    print(f"{time.monotonic() - begun:5.1f} s  job {job}  {now or 'has ended'}")
                    before = now
                if not now:
                    break
                if time.monotonic() - begun > limit:
                    raise ClusterFailed(f"job {job} has not ended within {limit} s")
                if meanwhile and log.exists() and meanwhile[0] in log.read_text():
                    print("$ " + meanwhile[1])
                    self.ask("", f"JOB={job}; {meanwhile[1]}", show=False)
                    meanwhile = None
                time.sleep(0.2)
        except BaseException:  # an interrupt, too
            self.ask("", f"scancel {job}", may_fail=True, show=False)
            raise
        state = self.ask("", f"scontrol show job {job}", show=False).output
        output = log.read_text() if log.exists() else ""
        return Answer(_without_paths(output), re.search(r"JobState=(\w+)", state)[1])

    def timeline(self, file):
        """The timeline that a job has written to `file`, or that of the transcript."""
        folder = ROOT if self.is_real else TRANSCRIPTS
        return from_chrome_trace((folder / (file if self.is_real else Path(file).name)).read_text())

    def _recorded(self, name, files=()):
        record = json.loads((TRANSCRIPTS / f"{name}.json").read_text())
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


def _site_with_this_python():
    """A copy of the site's values in which jobs run with the notebook's own Python if none is named."""
    site = Path(os.environ.get("COURSE_SITE", ROOT / "slurm" / "site.env"))
    text = re.sub(
        r"^COURSE_PYTHON=$", f"COURSE_PYTHON={sys.executable}", site.read_text(), flags=re.M
    )
    copy = ROOT / "build" / "11_site.env"
    copy.parent.mkdir(exist_ok=True)
    copy.write_text(text)
    return copy


def _without_paths(text):
    """A job's output with file names relative to the repository, or to Python's installation."""
    text = text.replace(f"{ROOT}/", "")
    return re.sub(r"(?<![\w.~-])/[\w./-]*/(?=lib/python|bin/python)", "", text)


def stacks_of(output):
    """The course's own lines in the stack dumps of a job's ranks, {rank's prefix: [line]}.

    Each rank that was sent SIGUSR2 has printed where its threads are, the innermost call first;
    the frames of the main thread are those that end in its script.
    """
    stacks = {}
    for prefix, text in re.findall(r"^\[(\S+)\]: *File (.*)$", output, re.MULTILINE):
        if "source_code/" in text and "/watch.py" not in text and "/slow_network.py" not in text:
            stacks.setdefault(prefix, []).append(text.replace('"', ""))
    return stacks
