"""A room on one SLURM cluster: two people at once, and lesson 11 in the JupyterLab of each."""

import os
import pwd
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import make_handout
import nbformat
import pytest
from cluster import MISSING, ROOT, SMALL, Cluster, assert_gone, free_ports, losses_of

from course import cluster as cluster_of_lesson
from course.cluster import without_job
from course.launch import run

pytestmark = pytest.mark.further  # a cluster

LESSON = "notebooks/11_from_laptop_to_cluster.ipynb"
PACK = (ROOT / "docs" / "instructors.md").read_text()


@pytest.fixture(scope="module")
def one_machine():
    """What the jobs must print: the losses of four ranks on this machine."""
    return losses_of(run(f"gpipe.py --steps 3 {' '.join(SMALL)}", warm=True, show=False).output)


class User(Cluster):
    """An account of this machine in a cluster that runs, with a folder of its own."""

    def __init__(self, cluster, name, python):
        self.cluster, self.account = cluster, pwd.getpwnam(name)
        self.folder = self.jobs = self.place = cluster.folder / name
        self.folder.mkdir()
        ids = [f"--reuid={self.account.pw_uid}", f"--regid={self.account.pw_gid}"]
        self.identity = ["setpriv", *ids, "--clear-groups"]
        self.environment = {**cluster.environment, "HOME": str(self.folder), "USER": name}
        self.environment["COURSE_SITE"] = str(cluster.folder / "site.env")
        cluster.use_site(COURSE_PYTHON=python)

    def owns(self, *paths):
        for path in paths:
            os.chown(path, self.account.pw_uid, self.account.pw_gid, follow_symlinks=False)

    @contextmanager
    def in_a_copy(self):
        """Call commands in a copy of the course that this user may change, as a clone is."""
        place, self.place = self.place, self.folder / "copy"
        try:
            if not self.place.exists():
                shutil.copytree(self.cluster.folder / "shared", self.place)
                self.owns(self.place, *self.place.rglob("*"))
            yield self.place
        finally:
            self.place = place


def for_everybody(folder, path):
    """`path`, or a copy of it in `folder` where others may not reach it, as in root's home."""
    identity = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    if not subprocess.run([*identity, "ls", path], capture_output=True).returncode:
        return path
    copy = folder / Path(path).name
    for links in ("-al", "-a"):  # the same file twice, if it is the same disk
        if not subprocess.run(["cp", links, path, copy], capture_output=True).returncode:
            break
        shutil.rmtree(copy, ignore_errors=True)
    return copy


def shared_python(folder):
    """A Python of the tests' packages that everybody may start, with its torchrun beside it."""
    home = for_everybody(folder, sys.base_prefix)
    packages = for_everybody(folder, sysconfig.get_path("purelib"))
    (folder / "bin").mkdir()
    python, torchrun = (folder / "bin" / name for name in ("python", "torchrun"))
    python.write_text(
        f"#!/bin/sh\nexport PYTHONHOME={home} LD_LIBRARY_PATH={home}/lib PYTHONPATH={packages}\n"
        f'exec {home}/bin/python{sys.version_info[0]}.{sys.version_info[1]} "$@"\n'
    )
    torchrun.write_text(f'#!/bin/sh\nexec {python} -m torch.distributed.run "$@"\n')
    for file in (python, torchrun):
        file.chmod(0o755)
    return python


@pytest.fixture(scope="module")
def two_users():
    """One with links to a checkout that only root may write, one with a copy of their own."""
    if MISSING:
        pytest.skip(f"no SLURM on this machine ({', '.join(MISSING)} missing); .ci/run installs it")
    if os.getuid() != 0:
        pytest.skip("only root may become somebody else")
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    checkout = folder / "shared"
    for name in ("slurm", "source_code"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / "notebooks").mkdir()
    shutil.copy(ROOT / LESSON, checkout / LESSON)
    shutil.copy(ROOT / "requirements.txt", checkout)
    python = shared_python(folder)
    # Cores for two JupyterLabs and for the jobs beside them.
    cluster = Cluster(folder, "--port", str(free_ports(3)), "--cpus", "12")
    try:
        cluster.start()
        reader, owner = (User(cluster, name, python) for name in ("nobody", "daemon"))
        for name in ("slurm", "source_code"):
            (reader.folder / name).symlink_to(checkout / name)
            shutil.copytree(checkout / name, owner.folder / name)
        reader.owns(reader.folder)
        owner.owns(owner.folder, *owner.folder.rglob("*"))
        before = {path: path.stat().st_mtime_ns for path in checkout.rglob("*")}
        yield reader, owner
        assert {path: path.stat().st_mtime_ns for path in checkout.rglob("*")} == before
        left = reader.submit("--wrap=echo started; sleep 600")  # for stop to end
        reader.wait_for(left, "started")
    finally:
        cluster.stop()
        assert_gone(cluster)
        shutil.rmtree(folder)


# What the jobs of a room have in common.


def test_two_clusters_of_one_machine_give_their_jobs_other_ports(two_users, short_path):
    first, other = two_users[0].cluster, Cluster(short_path, "--port", str(free_ports(3)))
    try:
        other.start()
        numbers = [
            int(re.search(r"FirstJobId=(\d+)", Path(one.environment["SLURM_CONF"]).read_text())[1])
            for one in (first, other)
        ]
    finally:
        other.stop()
    assert abs(numbers[0] % 20000 - numbers[1] % 20000) >= 20, "prepare.sh: 10000 + number % 20000"


def test_root_s_cluster_says_how_other_users_reach_it(two_users):
    reader, _ = two_users
    said = reader.cluster.call("start")
    lines = re.findall(r'^  (eval "\$\(slurm/local_cluster.sh env --folder \S+\)")$', said, re.M)
    assert "Other users of this machine" in said
    (line,) = set(lines)
    del reader.environment["SLURM_CONF"]
    try:
        ended = reader.run("sh", "-c", f"{line}; sinfo --noheader --format=%D")
        assert ended.stdout == "2\n", ended.stderr
        refused = reader.run("slurm/local_cluster.sh", "env")
        assert refused.returncode == 2 and "somebody else's with --folder" in refused.stderr
    finally:
        reader.environment["SLURM_CONF"] = reader.cluster.environment["SLURM_CONF"]


def test_a_job_on_pretended_nodes_needs_no_name_server(two_users):
    """torch looks up the name of each address before it connects, and its limits go on meanwhile."""
    reader, _ = two_users
    for address in ("127.0.0.1", "::ffff:127.0.0.1"):
        words = "srun", "--nodes=1", "getent", "--service=files", "hosts", address
        assert "localhost" in reader.run(*words).stdout


def test_the_interactive_lines_of_the_slurm_page_work_for_who_has_only_course_python(two_users):
    reader, _ = two_users
    page = (ROOT / "slurm" / "README.md").read_text()
    block = re.search(r"^```\n(\. slurm/site.env\nsrun .*)\n```", page, re.M)
    lines = block[1].replace("slurm/site.env", "$COURSE_SITE")
    (line,) = set(re.findall(r"^srun .*$", lines, re.MULTILINE))
    assert line == "srun -N 1 --gres=gpu:4 torchrun --nproc-per-node 4 source_code/gpipe.py"
    assert f"`{line.replace(' torchrun', ' --time=3 torchrun')}`" in PACK
    path, reader.environment["PATH"] = reader.environment["PATH"], "/usr/sbin:/usr/bin:/sbin:/bin"
    try:
        ended = reader.run("sh", "-c", f"{lines} --steps 1", limit=90)
    finally:
        reader.environment["PATH"] = path
    assert losses_of(ended.stdout) == {"0": "5.929890"}, ended.stderr


# Jobs that end before their work is done. One meets its time limit after a minute or two, which it
# takes beside the tests below.


@pytest.fixture(scope="module")
def unfinished(two_users):
    """A job that meets its time limit, and one that SLURM starts again from the beginning."""
    _, owner = two_users
    flags = ["--steps", 9999, "--pace", 50, 100, *SMALL]
    owner.environment["SBATCH_SIGNAL"] = "USR1@30"  # as checkpointed.sbatch says it
    limited = owner.submit("--time=2", "--gres=gpu:1", "slurm/checkpointed.sbatch", *flags)
    del owner.environment["SBATCH_SIGNAL"]
    again = owner.submit("--nodes=1", "--gres=gpu:1", "slurm/train.sbatch", "gpipe.py", *flags)
    yield limited, again
    owner.run("scancel", limited, again)


def test_a_checkpointed_job_whose_limit_is_shorter_than_its_lead_says_so(two_users, unfinished):
    _, owner = two_users
    assert "not\nfit" not in owner.wait_for(unfinished[0], "step 1  loss")
    job = owner.submit("--time=2", "--gres=gpu:1", "slurm/checkpointed.sbatch", "--steps", 1)
    try:
        output = owner.wait_for(job, "not\nfit")
        assert re.search(r" 120 s before the end: .*--time=3 or more", output, re.DOTALL), output
    finally:
        owner.run("scancel", job)
    owner.wait_for(unfinished[1], "step 1  loss")
    owner.run("scontrol", "requeue", unfinished[1])


def test_a_job_that_slurm_starts_again_keeps_what_it_has_printed(two_users, unfinished):
    _, owner = two_users
    output = owner.wait_for(unfinished[1], "attempt 2", limit=60)
    assert "step 1  loss" in output.split("attempt 2")[0]
    owner.run("scancel", unfinished[1])


# What two of them do at once.


def test_two_users_train_at_once_and_both_have_the_digits(two_users, one_machine):
    words = ["--gres=gpu:1", "slurm/train.sbatch", "gpipe.py", "--steps", 3, *SMALL]
    jobs = [user.submit(*words) for user in two_users]
    for user, job in zip(two_users, jobs, strict=True):
        output = user.wait_for_end(job)
        assert losses_of(output) == one_machine, output
        assert user.state(job) == "COMPLETED"
        logs = list((user.folder / "build" / "jobs" / job).glob("node*/*/attempt_0/*/stdout.log"))
        assert len(logs) == 2
        assert {path.stat().st_uid for path in logs} == {user.account.pw_uid}
    assert [p.name for p in two_users[0].folder.glob("build/jobs/*")] == jobs[:1]


@pytest.mark.soak
def test_the_signal_and_the_sweep_of_one_user_leave_the_other_s_job_alone(two_users):
    reader, owner = two_users
    flags = ["--save-every", 12, "--pace", 10, 20, *SMALL]
    words = ["--nodes=1", "--gres=gpu:1", "slurm/checkpointed.sbatch", *flags, "--steps"]
    long = [reader.submit(*words, 9999), owner.submit(*words, 24)]
    sweep = reader.submit(
        "--array=0-0", "slurm/sweep.sbatch", "4", "--", "gpipe.py", "--steps", 2, *SMALL
    )
    for user, job in zip(two_users, long, strict=True):
        user.wait_for(job, "step 2  loss")
    refused = owner.run("scancel", "--signal=USR1", f"{long[0]}.0")
    assert refused.returncode != 0 or "denied" in refused.stderr
    reader.run("scancel", "--signal=USR1", f"{long[0]}.0")
    owner.wait_for_end(long[1])
    reader.wait_for_end(sweep)
    assert "stopped by SIGUSR1" in reader.output(long[0])
    assert "stopped" not in owner.output(long[1]) and "attempt 2" not in owner.output(long[1])
    assert len(losses_of(owner.output(long[1]))) == 24
    assert "| 4 | " in (reader.folder / "build" / f"sweep-{sweep}" / "sweep.md").read_text()
    reader.run("scancel", long[0])


def test_the_pack_s_lines_hand_out_the_course_and_the_mail_s_line_signs_in(two_users):
    reader, _ = two_users
    shared = reader.cluster.folder
    (block,) = re.findall(r"^```\n(make handout\n.*?)^```", PACK, re.MULTILINE | re.DOTALL)
    lines = [
        line for line in block.splitlines() if not line.startswith("make ")
    ]  # 2 GB of packages
    block = "\n".join(lines).replace("/shared", str(shared / "disk"))
    (shared / "disk").mkdir()
    copy = shared / "whole" / "build" / "handout" / "course"
    shutil.copytree(shared / "shared", copy)
    make_handout.commit(copy)
    home = {**os.environ, "HOME": str(shared), "GIT_CONFIG_GLOBAL": "/dev/null"}  # no identity
    made = subprocess.run(
        ["sh", "-ec", f"umask 077; chmod 755 {shared}/disk; {block}"],
        cwd=shared / "whole",
        env=home,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert made.returncode == 0, made.stderr
    (line,) = re.findall(r"^> 2\. .*`(git clone [^`]*)`", PACK, re.M)
    ended = reader.run(
        "sh", "-c", line.replace("/shared/", f"{shared}/disk/")
    )  # as useradd gives it
    assert ended.returncode == 0, ended.stderr
    reader.wait_for_end(ended.stdout.split()[-1])
    signed_in = (shared / "disk" / "signed-in" / "nobody.out").read_text()
    assert signed_in.splitlines()[-1].endswith("exit status 0"), signed_in


WAITING = """
import os, signal, sys, threading
sys.path.insert(0, "source_code")
from course.cluster import open_cluster
cluster = open_cluster()
for call in (cluster.ask, cluster.submit):
    what = "train", "--nodes=2 --cpus-per-task=12 --gres=none slurm/train.sbatch gpipe.py"
    if call == cluster.ask:
        what = "block", "srun --nodes=2 --cpus-per-task=12 true"
    threading.Timer(4, os.kill, [os.getpid(), signal.SIGINT]).start()
    call(*what)
left = cluster.ask("", "squeue --me --noheader --states=PENDING", show=False).output
print(left + "nothing waits")
"""


def test_who_does_not_wait_for_a_full_cluster_gets_the_recorded_output(two_users):
    """The limit of both calls is far longer than a queue takes here, and does not count in it."""
    reader, _ = two_users
    command = f"exec {reader.cluster.folder}/bin/python -c '{WAITING}'"
    with reader.in_a_copy():
        ended = reader.run("srun", "--ntasks=1", "sh", "-c", command)
    assert ended.stdout.count("You did not wait") == 2, ended.stdout + ended.stderr
    assert re.search(r"PENDING \((Resources|Priority|None)\)", ended.stdout)
    assert "rank 3: node 1, there number 1" in ended.stdout
    assert ended.stdout.endswith("nothing waits\n")


@pytest.mark.soak  # test_slurm.py sends the signal that SLURM sends before the limit
def test_at_a_real_time_limit_a_job_saves_quietly_and_queues_again(two_users, unfinished):
    _, owner = two_users
    output = owner.wait_for(unfinished[0], "attempt 2", limit=150).split("attempt 2")[0]
    assert "stopped by SIGUSR1" in output and "back into the queue" in output
    assert "Traceback" not in output and "exitcode" not in output, "torchrun's report of a failure"
    owner.wait_for(unfinished[0], "continues after", limit=60)


# Lesson 11 in JupyterLab's job.


def in_jupyters_job(folder):
    """jupyter.sbatch, which runs lesson 11 in place of a server."""
    script = (ROOT / "slurm" / "jupyter.sbatch").read_text()
    script, server = script.split("\nexec ")
    assert server.startswith('"${PYTHON[@]}" -m jupyterlab')
    words = f"nbconvert --to notebook --execute --output-dir . --output done.ipynb {LESSON}"
    path = folder / "lesson.sbatch"
    path.write_text(f'{script}\nexec "${{PYTHON[@]}}" -m {words}\n')
    return path


def what_is_checked(notebook):
    """The printed output of every checked cell, without the lines about a queue or about progress."""
    cells = nbformat.read(notebook, as_version=4).cells
    outputs = [c.outputs for c in cells if "nbval-check-output" in c.metadata.get("tags", [])]
    texts = ["".join(o.text for o in each if o.get("name") == "stdout") for each in outputs]
    left_out = r"^ *\d+\.\d s  .*\n|^Checks note your progress in .*\n"
    return [re.sub(left_out, "", text, flags=re.MULTILINE) for text in texts]


def submit_lesson(user):
    """Lesson 11 in a job of its own, from a copy of the course, as the pack says."""
    with user.in_a_copy() as copy:
        return user.submit("--gres=none", in_jupyters_job(copy))


def assert_lesson_was_whole(user, job):
    output = user.wait_for_end(job, limit=280)
    assert user.state(job) == "COMPLETED", output
    done = user.folder / "copy" / "done.ipynb"
    assert what_is_checked(done) == what_is_checked(ROOT / LESSON)
    assert "what it submits gets nodes of its own" in done.read_text()
    assert "elsewhere" not in "\n".join(what_is_checked(done)), "that would be the record"


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_two_users_take_lesson_11_at_once_beside_four_jobs_of_two_nodes(two_users):
    words = ["slurm/train.sbatch", "gpipe.py", "--steps", 20, "--pace", 10, 20, *SMALL]
    beside = [(user, user.submit("--gres=gpu:1", *words)) for user in two_users for _ in range(2)]
    lessons = [submit_lesson(user) for user in two_users]
    for user, job in zip(two_users, lessons, strict=True):
        assert_lesson_was_whole(user, job)
    for user, job in beside:
        output = user.wait_for_end(job)
        assert len(losses_of(output)) == 20, output


# Without a cluster.


STAND_IN = """#!/bin/sh
case $1 in
    status) test -e "{folder}/running" ;;
    start) touch "{folder}/running" ;;
    stop) rm "{folder}/running" ;;
    env) echo "export SLURM_CONF=/somewhere" ;;
esac
"""


def test_the_last_notebook_stops_a_cluster_that_notebooks_started_and_no_other(
    tmp_path, monkeypatch
):
    script, running = tmp_path / "local_cluster.sh", tmp_path / "running"
    script.write_text(STAND_IN.format(folder=tmp_path))
    script.chmod(0o755)
    (tmp_path / "users").mkdir()
    (tmp_path / "users" / ".DS_Store").touch()  # of no notebook
    monkeypatch.setattr(cluster_of_lesson, "LOCAL_CLUSTER", script)
    monkeypatch.setattr(cluster_of_lesson, "USERS", tmp_path / "users")
    kernels = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]

    def ends(kernel):
        kernel.kill()
        kernel.wait()
        time.sleep(2.5)  # it is looked for once a second

    try:
        for kernel in kernels[:2]:
            monkeypatch.setattr(os, "getpid", lambda kernel=kernel: kernel.pid)
            assert cluster_of_lesson._start_local() == {"SLURM_CONF": "/somewhere"}
        ends(kernels[0])
        assert running.exists()
        ends(kernels[1])
        assert not running.exists()
        running.touch()  # by hand
        monkeypatch.setattr(os, "getpid", lambda: kernels[2].pid)
        cluster_of_lesson._start_local()
        ends(kernels[2])
        assert running.exists()
    finally:
        for kernel in kernels:
            kernel.kill()
            kernel.wait()


def test_a_notebook_s_jobs_do_not_know_the_job_that_it_is():
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "1",
        "SRUN_CPUS_PER_TASK": "2",
        "SLURMD_NODENAME": "a",
    }
    kept = {"SLURM_CONF": "/c", "HOME": "/h"}
    assert without_job({**job, **kept, "CUDA_VISIBLE_DEVICES": "0"}) == kept
    own = {**kept, "CUDA_VISIBLE_DEVICES": "0", "SLURM_PARTITION": "gpu"}
    assert without_job(own) == own  # no job, nothing to take away


def test_the_limit_of_a_job_counts_from_the_moment_it_runs(monkeypatch, capsys):
    from course import job_queue

    said = iter(["PENDING (Priority)"] * 4 + ["RUNNING pp[0-1]"] * 3)
    clock = iter(range(0, 10**6, 50))
    monkeypatch.setattr(job_queue.time, "monotonic", lambda: next(clock))
    watch = job_queue.QueueWatch(lambda: next(said), limit=120, job="7")
    for _ in range(4):
        assert watch.look() and watch.is_waiting  # for 400 s by this clock
    shown = capsys.readouterr().out
    assert shown.count("PENDING (Priority)") == 1 and "recorded output" in shown
    assert watch.look() == "RUNNING pp[0-1]"
    with pytest.raises(TimeoutError, match="job 7 has not ended within 120 s"):
        watch.look()
        watch.look()
