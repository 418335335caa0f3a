"""The job scripts on a real SLURM cluster: two nodes, pretended on this machine.

Their names are pp9 and pp10, whose order as text is not their order in the cluster.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from cluster import (
    LOCAL_CLUSTER,
    MISSING,
    ROOT,
    SMALL,
    Cluster,
    assert_gone,
    free_ports,
    losses_of,
    runs,
)
from kernels import Kernel

from course.launch import run
from lab.timeline import from_chrome_trace

pytestmark = pytest.mark.further  # a cluster

JOB_SCRIPTS = sorted((ROOT / "slurm").glob("*.sbatch"))
needs_slurm = pytest.mark.skipif(
    bool(MISSING),
    reason=f"SLURM is not on this machine ({', '.join(MISSING)} missing); .ci/run installs it",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if MISSING:
        pytest.skip(f"no SLURM on this machine ({', '.join(MISSING)} missing); .ci/run installs it")
    port = free_ports(3)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), "--first", "9", "--port", str(port))
    begun = time.monotonic()
    try:
        cluster.start()
        cluster.started_in = time.monotonic() - begun
        yield cluster
    finally:
        cluster.stop()
        assert_gone(cluster)


@pytest.fixture(scope="module")
def one_machine():
    """What the jobs must print: the losses of four ranks on this machine."""
    return losses_of(run(f"gpipe.py --steps 3 {' '.join(SMALL)}", warm=True, show=False).output)


# The cluster.


def test_two_nodes_with_pretended_gpus_are_up_within_five_seconds(cluster):
    assert cluster.started_in < 5
    shown = cluster.run("sinfo", "--noheader", "--Node", "--format=%N %G %t").stdout
    assert re.findall(r"^(\S+) gpu:4 (idle|mix|alloc)$", shown, re.MULTILINE)
    assert [line.split()[0] for line in shown.splitlines()] == ["pp9", "pp10"]


def test_nothing_of_the_cluster_listens_beyond_loopback(cluster):
    listening = [
        (process.name(), connection.laddr.ip)
        for process in cluster.daemons()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert sorted({name for name, _ in listening}) == ["slurmctld", "slurmd"]
    assert {address for _, address in listening} == {"127.0.0.1"}


def test_starting_a_cluster_that_runs_starts_only_what_is_missing(cluster):
    before = {process.pid for process in cluster.daemons()}
    (node,) = [p for p in cluster.daemons() if p.name() == "slurmd" and "pp10" in p.cmdline()]
    node.kill()
    psutil.wait_procs([node], timeout=20)
    cluster.start()
    after = {process.pid for process in cluster.daemons()}
    assert before - after == {node.pid} and len(after) == len(before)


def test_a_recorded_process_that_is_another_cluster_s_by_now_is_not_ended(cluster, short_path):
    """As after a restart of a container, where the same numbers come again."""
    (munge,) = [p for p in cluster.daemons() if p.name() == "munged"]
    other = short_path / "other"
    (other / "run").mkdir(mode=0o700, parents=True)
    (other / "run" / "munged.pid").write_text(f"{munge.pid}\n")
    (other / "slurm.conf").touch()
    words = [LOCAL_CLUSTER, "stop", "--folder", other]
    stopped = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert stopped.stdout == f"no cluster is running in {other}\n", stopped.stderr
    assert munge.is_running() and munge.status() != psutil.STATUS_ZOMBIE


def test_stop_ends_a_running_job_and_leaves_no_process_in_a_folder_of_the_longest_name(short_path):
    if MISSING:
        pytest.skip(f"no SLURM on this machine ({', '.join(MISSING)} missing)")
    longest = int(re.search(r"use one of (\d+) characters", LOCAL_CLUSTER.read_text())[1])
    long_path = short_path / ("x" * (longest - len(f"{short_path}//cluster")))
    long_path.mkdir()
    flags = ["--nodes", "1", "--first", "9999", "--gpus", "0", "--port", str(free_ports(2))]
    other = Cluster(long_path, *flags)
    try:
        other.start()
        job = other.submit("--gres=none", "--nodes=1", "--wrap=echo started; sleep 600")
        other.wait_for(job, "started")
        assert len(other.processes()) >= 5  # controller, node, munge, the job's keeper, the job
    finally:
        other.stop()
    assert_gone(other)


def test_where_nodes_cannot_have_names_of_their_own_their_ranks_meet_all_the_same(
    short_path, one_machine
):
    if MISSING:
        pytest.skip(f"no SLURM on this machine ({', '.join(MISSING)} missing)")
    other = Cluster(short_path, "--port", str(free_ports(3)))
    for name in ("state", "gpu", "munge"):
        (short_path / "cluster" / name).mkdir(parents=True)
    (short_path / "cluster" / "plain").touch()  # what start leaves where unshare is refused
    try:
        other.start()
        assert other.environment["MASTER_ADDR"] == "127.0.0.1"
        names = other.run("srun", "--nodes=2", "hostname").stdout.split()
        assert "pp0" not in names and len(set(names)) == 1
        job = other.submit("slurm/train_srun.sbatch", "gpipe.py", "--steps", 3, *SMALL)
        output = other.wait_for_end(job)
        assert losses_of(output) == one_machine
        assert "0: gpipe: 4 ranks on cpu of nodes pp0 pp0 pp1 pp1, gloo messages" in output
        assert other.state(job) == "COMPLETED"
        assert "step 2  loss" in (ROOT / "build/jobs" / job / "rank3.log").read_text()
    finally:
        other.stop()
    assert_gone(other)


@pytest.mark.skipif(os.getuid() != 0, reason="everything else here runs as an ordinary user")
def test_an_ordinary_user_starts_one_too():
    if MISSING:
        pytest.skip(f"no SLURM on this machine ({', '.join(MISSING)} missing)")
    folder = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
    os.chown(folder, 65534, 65534)
    script = shutil.copy(LOCAL_CLUSTER, folder)
    environment = {"PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}
    flags = f"--folder {folder}/cluster --port {free_ports(3)}"
    commands = f"""
        set -e
        trap '{script} stop {flags}' EXIT
        {script} start {flags}
        eval "$({script} env {flags})"
        srun --nodes=2 --gres=gpu:2 bash -c 'echo "$(id -u) $CUDA_VISIBLE_DEVICES"'
    """
    try:
        ended = subprocess.run(
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "bash", "-c", commands],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.count("65534 0,1\n") == 2
        assert ended.stdout.splitlines()[-1].startswith("stopped; ")
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "usage: slurm/local_cluster.sh start|stop|status|env"),
        (["start", "--nodes", "0"], "--nodes must be a whole number from 1 to 16, not '0'"),
        (["start", "--gpus", "two"], "--gpus must be a whole number from 0 to 16, not 'two'"),
        (["start", "--nodes"], "--nodes needs a value"),
        (["start", "--node", "2"], "--node is not a flag of this program"),
        (["env", "--folder", "/nowhere/at/all"], "first: slurm/local_cluster.sh start --folder"),
    ],
)
def test_the_cluster_refuses_in_one_sentence(arguments, sentence):
    ended = subprocess.run([LOCAL_CLUSTER, *arguments], capture_output=True, text=True, timeout=10)
    assert ended.returncode == 2
    assert sentence in ended.stderr and len(ended.stderr.splitlines()) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="says first that SLURM needs Linux")
def test_without_slurm_it_says_what_to_install(tmp_path):
    for name in ("bash", "realpath", "id", "uname", "dirname", "cksum", "stat"):
        (tmp_path / name).symlink_to(shutil.which(name))
    text = LOCAL_CLUSTER.read_text().replace("PATH=$PATH:/usr/sbin:/sbin", "")
    ended = subprocess.run(
        ["bash", "-c", text, "local_cluster.sh", "start"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=10,
    )
    assert ended.returncode == 2
    assert ended.stderr == (
        "not installed: slurmctld slurmd srun sbatch munged; on Debian and Ubuntu, as root: "
        "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge\n"
    )


@needs_slurm
@pytest.mark.parametrize("end", ["shutdown", "kill"])
def test_the_cluster_of_a_notebook_ends_with_its_kernel(short_path, monkeypatch, end):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "COURSE_"))]:
        monkeypatch.delenv(name)
    folder = short_path / "cluster"
    monkeypatch.setenv("COURSE_CLUSTER_FOLDER", str(folder))
    manager = Kernel(kernel_name="python3")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        source = str(ROOT / "source_code")
        client.execute_interactive(
            f"import sys; sys.path.insert(0, {source!r})\n"
            "from course.cluster import open_cluster\n"
            "open_cluster().ask('', 'srun --quiet --nodes=2 true')",
            timeout=60,
            output_hook=lambda message: None,
        )
        daemons = [psutil.Process(int(file.read_text())) for file in folder.glob("run/*.pid")]
        assert len(daemons) == 4 and all(map(runs, daemons))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=end == "kill")
    _, left = psutil.wait_procs(daemons, timeout=10)
    assert [process for process in left if runs(process)] == []


# The job scripts.


@pytest.mark.parametrize("script", JOB_SCRIPTS, ids=lambda path: path.stem)
def test_slurm_parses_every_line_of_a_job_script(cluster, script):
    lines = script.read_text().splitlines()
    options = [i for i, line in enumerate(lines) if line.startswith("#SBATCH ")]
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert options and options[-1] < first_command, "SLURM reads no option after a command"
    assert not [line for line in lines if re.match(r"#\s+SBATCH\s|#SBATCH\S", line)], "a comment"
    ended = cluster.run("sbatch", "--test-only", str(script))
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"Job \d+ to start at", ended.stderr)


@pytest.mark.parametrize("script", [*JOB_SCRIPTS, ROOT / "slurm/prepare.sh"], ids=lambda p: p.stem)
def test_bash_parses_a_job_script(script):
    subprocess.run(["bash", "-n", script], check=True, timeout=10)


@pytest.fixture(scope="module")
def long_job(cluster):
    """A training run on two nodes that nobody lets end, after three steps."""
    flags = ["--steps", 9999, "--pace", 5, 10, *SMALL]
    job = cluster.submit("slurm/train.sbatch", "gpipe.py", *flags)
    cluster.wait_for(job, "step 2  loss")
    yield job
    cluster.run("scancel", job)


def test_two_nodes_print_the_same_six_decimals_and_stages_follow_the_nodes(
    cluster, long_job, one_machine
):
    output = cluster.output(long_job)
    losses = losses_of(output)
    assert {step: losses[step] for step in "012"} == one_machine
    assert "4 ranks on cpu of nodes pp9 pp9 pp10 pp10, gloo messages" in output
    logs = list((ROOT / "build/jobs" / long_job).glob("node*/*/attempt_0/*/stdout.log"))
    assert len(logs) == 4
    assert sum("step 2  loss" in log.read_text() for log in logs) == 1


def test_a_killed_rank_fails_the_job_within_15_seconds_and_is_named(cluster, long_job):
    (first_of_pp10,) = [
        process
        for process in cluster.processes("gpipe.py")
        if "torch.distributed.run" not in " ".join(process.cmdline())
        and process.environ().get("SLURM_JOB_ID") == long_job
        and process.environ().get("SLURMD_NODENAME") == "pp10"
        and process.environ().get("LOCAL_RANK") == "0"
    ]
    first_of_pp10.kill()
    output = cluster.wait_for_end(long_job, limit=15)
    assert cluster.state(long_job) == "FAILED"
    assert "rank 1 lost rank 2" in output and "SIGKILL" in output
    assert re.search(r"ends with exit status (?!0)\d+\n\Z", output)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (["--nodes=3"], "Node count specification invalid|configuration is not available"),
        (["--gres=gpu:9"], "configuration is not available"),
        (["--partition=nope"], "invalid partition specified: nope"),
    ],
)
def test_a_request_beyond_the_cluster_is_refused_at_once(cluster, request_, words):
    ended = cluster.run("sbatch", *request_, "slurm/train.sbatch", "gpipe.py", limit=10)
    assert ended.returncode != 0 and re.search(words, ended.stderr)
    assert "Submitted" not in ended.stdout


def test_sourced_in_a_shell_site_env_sets_what_slurm_s_own_commands_read(cluster):
    cluster.use_site(COURSE_ACCOUNT="physics", COURSE_PARTITION="nope", COURSE_GPUS_PER_NODE=3)
    try:
        command = '. "$COURSE_SITE"; env; sbatch slurm/train.sbatch gpipe.py'
        ended = cluster.run("sh", "-c", command)
    finally:
        cluster.use_site()
    assert "invalid partition specified: nope" in ended.stderr
    for line in ("SBATCH_ACCOUNT=physics", "SLURM_PARTITION=nope", "SBATCH_GRES=gpu:3"):
        assert line in ended.stdout.splitlines()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"COURSE_GPUS_PER_NODE": ""}, "Job \\d+ to start"),  # not needed, says the file
        ({"COURSE_MEMORY": "2G"}, "Job \\d+ to start"),
        ({"COURSE_EXCLUSIVE": "yes"}, "Job \\d+ to start .*using 4 processors"),
        ({"COURSE_CONSTRAINT": "infiniband"}, "Invalid feature specification"),
        ({"COURSE_GPU_TYPE": "a100"}, "configuration is not available|generic resource"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_slurm_reads_every_value_that_the_site_sets(cluster, values, words):
    cluster.use_site(**values)
    try:
        command = '. "$COURSE_SITE"; sbatch --test-only --nodes=1 slurm/jupyter.sbatch'
        ended = cluster.run("sh", "-c", command)
    finally:
        cluster.use_site()
    assert re.search(words, ended.stderr), ended.stderr


def test_a_constraint_of_the_shell_does_not_hold_up_a_step_of_the_job(cluster, monkeypatch):
    monkeypatch.setitem(cluster.environment, "SLURM_CONSTRAINT", "infiniband")
    step = ". slurm/prepare.sh; srun --ntasks=1 echo the step runs"
    job = cluster.submit("--nodes=1", "--gres=none", f"--wrap=bash -c '{step}'")
    assert "the step runs" in cluster.wait_for_end(job, limit=30)


def environment_after(site, shell="sh"):
    """What slurm/site.env, with some values, sets in a shell; and what it says there."""
    text = (ROOT / "slurm" / "site.env").read_text()
    for name, value in site.items():
        text = re.sub(rf"^{name}=.*$", f"{name}={value}", text, flags=re.MULTILINE)
    words = [shell, "-euc", f"{text}\nenv"]
    ended = subprocess.run(
        words, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=10
    )
    assert ended.returncode == 0, ended.stderr
    return dict(line.split("=", 1) for line in ended.stdout.splitlines()), ended.stderr


@pytest.mark.parametrize("shell", [name for name in ("dash", "bash") if shutil.which(name)])
def test_every_value_of_the_site_reaches_slurm_and_an_empty_one_is_not_needed(shell, tmp_path):
    names = "ACCOUNT PARTITION QOS RESERVATION CONSTRAINT MEMORY EXCLUSIVE GPUS_PER_NODE GPU_TYPE"
    empty, said = environment_after({f"COURSE_{name}": "" for name in names.split()}, shell)
    of_slurm = {key: value for key, value in empty.items() if re.match("S(BATCH|ALLOC|LURM)_", key)}
    assert of_slurm == {"SBATCH_GRES": "none"} and said == ""
    values = {"QOS": "course", "CONSTRAINT": '"a100&ib"', "MEMORY": "16G", "EXCLUSIVE": "yes"}
    values |= {"GPUS_PER_NODE": "2", "GPU_TYPE": "1g.10gb", "PYTHON": tmp_path / "python"}
    found, _ = environment_after({f"COURSE_{name}": v for name, v in values.items()}, shell)
    for command in ("SBATCH", "SALLOC", "SLURM"):
        assert found[f"{command}_QOS"] == "course"
        assert found[f"{command}_MEM_PER_NODE"] == "16G"
    assert found["SBATCH_EXCLUSIVE"] == "exclusive" and "SLURM_EXCLUSIVE" not in found
    assert found["SALLOC_CONSTRAINT"] == "a100&ib" and "SLURM_CONSTRAINT" not in found
    assert found["SBATCH_GRES"] == "gpu:1g.10gb:2"
    assert found["PATH"].split(":")[0] == str(tmp_path)


@pytest.mark.parametrize("python", ["python3", "slurm/python"])
def test_no_folder_that_depends_on_where_one_is_goes_into_path(python):
    found, _ = environment_after({"COURSE_PYTHON": python})
    assert all(os.path.isabs(folder) for folder in found["PATH"].split(":"))


@pytest.mark.parametrize("value", ["a100:2", "two"])
def test_a_number_of_gpus_that_is_none_is_named_before_a_job_is_submitted(value):
    found, said = environment_after({"COURSE_GPUS_PER_NODE": value})
    assert f"COURSE_GPUS_PER_NODE={value} is wrong" in said and "COURSE_GPU_TYPE" in said
    assert found["SBATCH_GRES"] == "none"


def test_a_job_with_a_wrong_site_value_says_which(cluster):
    cluster.use_site(COURSE_INTERFACE="ib7")
    try:
        job = cluster.submit("slurm/train.sbatch", "gpipe.py")
        output = cluster.wait_for_end(job)
    finally:
        cluster.use_site()
    assert re.search(r"site.env: COURSE_INTERFACE=ib7 is wrong: pp9 has .*\blo\b", output)
    assert cluster.state(job) == "FAILED"


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("COURSE_PYTHON", "/nowhere/python", "does not start on"),
        ("COURSE_MODULES", "cuda/99", "has no module command; leave it empty|module load fails"),
        ("COURSE_CONTAINER", '"apptainer-nope exec x.sif"', "there is no program apptainer-nope"),
        ("COURSE_GPUS_PER_NODE", "two", "it must be a whole number"),
        ("COURSE_RANKS_PER_NODE", "0", "a node needs a rank"),
        ("COURSE_GPU_TYPE", "gpu:a100", "it is one word"),
        ("COURSE_EXCLUSIVE", "no", "it is yes or empty"),
        *(("COURSE_INTERFACE", name, "has .*lo") for name in ("ib7", "/dev/lo", "../net/lo", "..")),
    ],
)
def test_every_wrong_site_value_is_named(tmp_path, name, value, why):
    text = (ROOT / "slurm/site.env").read_text()
    for key, to in {"COURSE_PYTHON": sys.executable, name: value}.items():
        text = re.sub(rf"^{key}=.*$", f"{key}={to}", text, flags=re.MULTILINE)
    (tmp_path / "site.env").write_text(text)
    ended = subprocess.run(
        ["bash", "-c", ". slurm/prepare.sh"],
        cwd=ROOT,
        env={**os.environ, "COURSE_SITE": str(tmp_path / "site.env"), "SLURM_JOB_ID": "1"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ended.returncode == 2
    value = value.strip('"')
    assert re.search(rf"site.env: {name}={value} is wrong: .*{why}", ended.stderr), ended.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace(b"\n", b"\r\n"), "was saved as on Windows; mend it: sed"),
        (lambda text: b"\xef\xbb\xbf" + text, "was saved as on Windows; mend it: sed"),
        (lambda text: text.replace(b"COURSE_GPU_TYPE=\n", b""), "has no COURSE_GPU_TYPE;"),
        (lambda text: b"", "has no COURSE_GPUS_PER_NODE;"),
        (
            lambda text: text.replace(b"=gpu\n", b"='gpu\n"),
            "cannot be read (COURSE_PARTITION='gpu);",
        ),
        (lambda text: text.replace(b"\n", b"\r\n").decode().encode("utf-16"), "cannot be read ("),
    ],
)
def test_a_site_file_of_another_system_or_an_older_course_is_one_sentence(tmp_path, change, said):
    site = tmp_path / "site.env"
    site.write_bytes(change((ROOT / "slurm/site.env").read_bytes()))

    def prepared():
        return subprocess.run(
            ["bash", "-c", ". slurm/prepare.sh"],
            cwd=ROOT,
            env={**os.environ, "COURSE_SITE": str(site), "SLURM_JOB_ID": "1"},
            capture_output=True,
            text=True,
            timeout=30,
        )

    ended = prepared()
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1, ended.stderr
    assert f"{site} {said}" in ended.stderr
    if "mend it: " in ended.stderr:
        subprocess.run(
            ["bash", "-c", ended.stderr.partition("mend it: ")[2]], check=True, timeout=30
        )
        assert site.read_bytes() == (ROOT / "slurm/site.env").read_bytes()


def test_a_job_whose_logs_cannot_be_written_says_so_before_it_starts_ranks(tmp_path):
    """On a full disk: torchrun would lose what the ranks say."""
    text = (ROOT / "slurm/site.env").read_text()
    (tmp_path / "site.env").write_text(f"{text}\nCOURSE_PYTHON={sys.executable}\n")
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node", "MASTER_ADDR": "node"}
    for limit, said in ("unlimited", ""), ("0", f"{tmp_path}/build/jobs/1 cannot be written to (a"):
        ended = subprocess.run(
            ["bash", "-c", f"ulimit -f {limit}; . {ROOT}/slurm/prepare.sh"],
            cwd=tmp_path,
            env={**os.environ, **job, "COURSE_SITE": str(tmp_path / "site.env")},
            capture_output=True,
            text=True,
            timeout=30,
            restore_signals=False,  # a write beyond the limit fails, and does not kill
        )
        assert (ended.returncode, ended.stderr.count("\n")) == ((2, 1) if said else (0, 0))
        assert ended.stderr.startswith(said), ended.stderr


@pytest.mark.parametrize(
    ("script", "advice"),
    [
        ("train.sbatch", "start a job script with sbatch"),
        ("program.sbatch", "name a program"),
        ("sweep.sbatch", "as in: sbatch --array=0-4"),
    ],
)
def test_a_job_script_without_a_job_or_a_program_says_what_to_do(tmp_path, script, advice):
    text = (ROOT / "slurm/site.env").read_text()
    (tmp_path / "site.env").write_text(f"{text}\nCOURSE_PYTHON={sys.executable}\n")
    outside = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    ended = subprocess.run(
        ["bash", ROOT / "slurm" / script],
        cwd=ROOT,
        env={**outside, "COURSE_SITE": str(tmp_path / "site.env"), "SLURM_SUBMIT_DIR": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ended.returncode != 0 and advice in ended.stderr.splitlines()[-1]


def test_a_job_that_names_no_script_says_so(cluster):
    job = cluster.submit("slurm/train.sbatch", "gpip.py")
    assert "there is no source_code/gpip.py" in cluster.wait_for_end(job)
    assert cluster.state(job) == "FAILED"


@pytest.mark.parametrize(
    "script",
    [
        "distributed_checkpointing.py",
        pytest.param("pretrain_llama.py --dtype float64", marks=pytest.mark.soak),
    ],
)
def test_a_checkpointed_job_stops_saves_queues_again_and_resumes_digit_for_digit(cluster, script):
    script, *own = script.split()
    flags = [*own, "--steps", 12, "--save-every", 4, "--pace", 10, 20, *SMALL]
    plain = " ".join(map(str, flags)).replace("--save-every 4", "")
    whole = run(f"{script} {plain}", 1, True, False)
    # One rank; those of two nodes stop and continue in test_room.py.
    named = [script] if own else []
    words = ["--nodes=1", "--gres=gpu:1", "slurm/checkpointed.sbatch", *named, *flags]
    job = cluster.submit(*words)
    output = cluster.wait_for(job, "step 5  loss")
    cluster.run("scancel", "--signal=USR1", f"{job}.0")
    output = cluster.wait_for(job, "attempt 2", limit=60)
    trained = int(re.search(r"stopped by SIGUSR1 after (\d+) steps, saved", output)[1])
    assert "back into the queue" in output
    output = cluster.wait_for_end(job)
    assert cluster.state(job) == "COMPLETED"
    first, second = output.split("attempt 2")
    assert set(losses_of(first)) | set(losses_of(second)) == {str(step) for step in range(12)}
    assert min(map(int, losses_of(second))) == trained  # steps count from 0
    assert {**losses_of(first), **losses_of(second)} == losses_of(whole.output)


def test_a_sweep_leaves_a_table_and_a_figure(cluster):
    flags = ["1", "4", "--", "gpipe.py", "--pace", 80, 160, "--steps", 2, *SMALL]
    job = cluster.submit("--array=0-1", "slurm/sweep.sbatch", *flags)
    output = cluster.wait_for_end(job)
    folder = ROOT / "build" / f"sweep-{job}"
    rows = (folder / "sweep.md").read_text().splitlines()
    assert re.match(r"\| 1 \| \d+ \| \d+\.\d% \| 50\.0% \|", rows[2]), output
    assert re.match(r"\| 4 \| \d+ \| \d+\.\d% \| 20\.0% \|", rows[3]), output
    assert 'role="img" aria-label="Idle share' in (folder / "sweep.svg").read_text()
    timelines = {m: from_chrome_trace((folder / f"{m}.json").read_text()) for m in (1, 4)}
    work = {m: sum(one.busy_per_rank) for m, one in timelines.items()}
    # An action is never shorter than its pace; four times 480 ms would be the pace undivided.
    assert all(470 < milliseconds < 1900 for milliseconds in work.values()), "the same work"


def test_preflight_checks_every_node_and_every_pair_of_neighbours(cluster):
    output = cluster.wait_for_end(cluster.submit("--ntasks-per-node=1", "slurm/preflight.sbatch"))
    assert "text on pp10" in output
    assert re.search(r"rank 0 to 1 .* GB/s", output) and re.search(r"rank 1 to 0 ", output)
    assert "FAIL\n" not in output.split("\n", 2)[2], output
    assert re.search(r"GPUs +\| 0 of 2 seen by torch +\| warn\n", output), "pretend GPUs"


def test_the_acceptance_starts_its_ranks_on_both_nodes_and_names_a_lost_one(cluster):
    flags = "--device cpu --small --ranks 2 --only lost_ranks --patience 3".split()
    where = "--gres=none", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1"
    job = cluster.submit(*where, "slurm/accept.sbatch", *flags)
    output = cluster.wait_for_end(job, limit=240)
    assert f"job {job} ends with exit status 0" in output, output
    file = ROOT / "build" / f"accept-{job}.json"
    found = json.loads(file.read_text())
    file.unlink()
    assert (found["machine"]["nodes"], found["machine"]["slurm_job"]) == (2, job)
    [part] = found["parts"]
    assert [row[0] for row in part["rows"]] == ["SIGKILL", "SIGSTOP"]
    assert "rank 0 has stopped answering" in part["rows"][1][2]


# Interactive.


INSIDE = """
import os, signal, threading, time
from course.launch import run

class Interrupt:
    def write(self, text):
        os.write(1, text.encode())
        if text.startswith("step 1 "):
            os.kill(os.getpid(), signal.SIGINT)
    def flush(self):
        pass

import sys
sys.stdout = Interrupt()
try:
    run("gpipe.py --steps 999 --pace 10 20 --dim 16 --heads 2 --kv-heads 2 --seq-len 8", ranks=2)
except KeyboardInterrupt:
    os.write(1, b"interrupted\\n")
"""


def test_a_notebook_in_an_allocation_starts_srun_and_an_interrupt_ends_its_ranks(cluster):
    environment = {**cluster.environment, "PYTHONPATH": str(ROOT / "source_code")}
    environment.pop("PIPELINE_WARM_RUNS", None)
    ended = subprocess.run(
        ["salloc", "--nodes=1", "--gres=gpu:2", "srun", "--ntasks=1", sys.executable, "-c", INSIDE],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert re.match(
        r"\$ srun --overlap --nodes=1 --ntasks=1 --cpus-per-task=\d+ torchrun --standalone "
        r"--nproc-per-node 2 source_code/gpipe.py --steps 999 ",
        ended.stdout,
    ), ended.stderr
    assert "step 1  loss" in ended.stdout and ended.stdout.endswith("interrupted\n")
    end = time.monotonic() + 20
    while left := cluster.processes("gpipe.py"):
        assert time.monotonic() < end, left
        time.sleep(0.05)


def test_jupyter_listens_on_its_node_wants_a_token_and_says_how_to_get_there(cluster):
    job = cluster.submit("slurm/jupyter.sbatch")
    try:
        output = cluster.wait_for(job, "scancel")
        assert "2 cores and 2 GPUs" in output and "on its own machine leave this step out" in output
        node = re.search(r"^job \d+ on (pp9|pp10),", output)[1]  # pp9 may not be free yet
        port = int(re.search(rf"ssh -N -L (\d+):{node}:\1 LOGIN$", output, re.MULTILINE)[1])
        cluster.wait_for_server(job, port)  # JupyterLab says that it runs before it listens
        card = ROOT / re.search(r"^ +cat (\S+)$", output, re.MULTILINE)[1]
        assert card.stat().st_mode & 0o777 == 0o600
        token = re.search(r"token=(\w{48})$", card.read_text().strip())[1]
        assert token not in cluster.output(job)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api/contents", timeout=10)
        address = f"http://127.0.0.1:{port}/api/contents?token={token}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            names = {entry["name"] for entry in json.load(answer)["content"]}
        assert "notebooks" in names
        server = cluster.processes("jupyterlab")[0]
        assert {c.laddr.ip for c in server.net_connections("inet") if c.status == "LISTEN"} == {
            "127.0.0.1"
        }
    finally:
        cluster.run("scancel", job)
        cluster.wait_for_end(job, limit=30)


@pytest.mark.parametrize("form", ["--bare", None])
def test_a_copied_folder_trains_by_its_own_job_script(
    cluster, tmp_path, one_machine, monkeypatch, form
):
    words = [sys.executable, "source_code/copy_template.py", "gpipe.py", tmp_path / "mine"]
    words += [form] if form else []
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True, timeout=60)
    monkeypatch.setattr(cluster, "place", tmp_path / "mine")
    monkeypatch.setitem(cluster.environment, "PYTHON", sys.executable)
    words = ["--ntasks-per-node=1", "job.sbatch", "gpipe.py", "--steps", 3, *SMALL]
    job = cluster.submit(*words)
    output = cluster.wait_for_end(job)
    assert losses_of(output) == one_machine and len(one_machine) == 3
    assert cluster.state(job) == "COMPLETED"
