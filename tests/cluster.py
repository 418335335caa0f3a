"""A real SLURM cluster for tests: started from nothing, stopped by recorded process id."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
LOCAL_CLUSTER = ROOT / "slurm" / "local_cluster.sh"
PROGRAMS = ["slurmctld", "slurmd", "srun", "sbatch", "munged"]
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
MISSING = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
SMALL = "--dim 16 --heads 2 --kv-heads 2 --seq-len 8".split()


class Cluster:
    """One cluster in `folder`; `flags` are those of slurm/local_cluster.sh."""

    def __init__(self, folder, *flags):
        self.folder = folder
        self.flags = ["--folder", str(folder / "cluster"), *flags]
        self.jobs = folder / "jobs"
        self.jobs.mkdir()
        self.place, self.identity = ROOT, []  # where commands are called, and as whom
        self.environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SLURM_", "SBATCH_", "SALLOC_", "COURSE_", "MASTER_"))
        }
        self.use_site()

    def use_site(self, **values):
        """Let the job scripts read site.env with other values; the Python is that of the tests."""
        text = (ROOT / "slurm" / "site.env").read_text()
        for name, value in {"COURSE_PYTHON": sys.executable, **values}.items():
            text, count = re.subn(rf"^{name}=.*$", f"{name}={value}", text, flags=re.MULTILINE)
            assert count == 1, name
        site = self.folder / "site.env"
        site.write_text(text)
        self.environment["COURSE_SITE"] = str(site)

    def start(self):
        self.call("start", limit=30)
        for line in self.call("env").splitlines():
            name, value = line.removeprefix("export ").split("  #")[0].split("=", 1)
            self.environment[name] = value

    def stop(self):
        self.call("stop", limit=60)

    def call(self, command, limit=10):
        ended = subprocess.run(
            [LOCAL_CLUSTER, command, *self.flags],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=limit,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def daemons(self):
        """The processes of the cluster itself, by recorded process id."""
        files = (self.folder / "cluster" / "run").glob("*.pid")
        return [psutil.Process(int(file.read_text())) for file in files]

    def processes(self, word=""):
        """Everything that was started in this cluster's environment: daemons, jobs, ranks.

        Only those with `word` in their command, the oldest first: a new child has its parent's
        command for a moment.
        """
        found = []
        for process in psutil.process_iter():
            try:
                words, place = process.cmdline(), process.environ().get("SLURM_CONF", "")
            except psutil.Error:
                continue
            own = any(str(self.folder) in each for each in [*words, place])
            if own and word in " ".join(words) and process.pid != os.getpid():
                found.append(process)
        return sorted(found, key=psutil.Process.create_time)

    def run(self, *words, limit=60, **options):
        """Run one of SLURM's commands, such as squeue, and return how it ended."""
        return subprocess.run(
            [*self.identity, *map(str, words)],
            cwd=self.place,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit,
            **options,
        )

    def submit(self, *words):
        """Submit a job script of the course; returns the job's number."""
        ended = self.run("sbatch", "--parsable", f"--output={self.jobs}/%A.out", *words, limit=30)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    def output(self, job):
        file = self.jobs / f"{job}.out"
        return file.read_text() if file.exists() else ""

    def state(self, job):
        shown = self.run("scontrol", "show", "job", job).stdout
        return re.search(r"JobState=(\w+)", shown)[1]

    def wait_for(self, job, sign, limit=60):
        """Wait until the job has printed `sign`; return its output."""
        return self._until(job, lambda: sign in self.output(job), f"no {sign!r}", limit)

    def wait_for_end(self, job, limit=90):
        """Wait until the job has ended; return its output."""
        words = ["squeue", "--noheader", "--job", job]
        return self._until(job, lambda: not self.run(*words).stdout, "no end", limit)

    def wait_for_server(self, job, port, limit=60):
        """Wait until a process listens on `port` of this machine."""

        def listens():
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        return self._until(job, listens, f"nobody listens on port {port}", limit)

    def _until(self, job, condition, what, limit):
        end = time.monotonic() + limit
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"{what} of job {job} in {limit} s: {self.output(job)}")
            time.sleep(0.1)
        return self.output(job)


def assert_gone(cluster, limit=20):
    end = time.monotonic() + limit
    while left := [process for process in cluster.processes() if runs(process)]:
        assert time.monotonic() < end, f"still there: {[process.cmdline() for process in left]}"
        time.sleep(0.05)


def runs(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def losses_of(output):
    """The printed losses of a job, {step: text}, whatever srun or torchrun put before the lines."""
    return dict(re.findall(r"\bstep (\d+)  loss (\S+)$", output, re.MULTILINE))


def free_ports(count):
    """The first of `count` consecutive ports that no process uses; parallel tests get others.

    They are above those at which ranks and jobs meet, and below those that the system assigns.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for first in range(30_000 + 500 * worker, 32_700, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")
