"""What a job script makes of its words, with stand-ins for SLURM's commands, and what make does."""

import os
import subprocess
import sys

import pytest

from course.cluster import Cluster, ClusterFailed
from course.launch import ROOT

pytestmark = pytest.mark.processes
# They write down the words that they are called with, one per line.
STAND_IN = '#!/bin/sh\nprintf "%s\\n" "$0" "$@" >>"$WORDS"\n'


@pytest.fixture
def job(tmp_path):
    """A function that runs a job script in a folder of its own: (status, words, standard error)."""
    for name in ("slurm", "source_code"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "bin").mkdir()
    for name in ("srun", "squeue", "scontrol", "sleep"):
        (tmp_path / "bin" / name).write_text(STAND_IN)
        (tmp_path / "bin" / name).chmod(0o755)
    site = (ROOT / "slurm" / "site.env").read_text()
    site = site.replace("COURSE_PYTHON=\n", f"COURSE_PYTHON={sys.executable}\n")
    (tmp_path / "site.env").write_text(site)
    variables = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "WORDS": str(tmp_path / "words"),
        "COURSE_SITE": str(tmp_path / "site.env"), "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "a", "SLURM_JOB_NUM_NODES": "1",
        "MASTER_ADDR": "a", "SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_JOB_ID": "17",
    }  # fmt: skip

    def run(script, *words, **changed):
        ended = subprocess.run(
            ["bash", ROOT / "slurm" / script, *words],
            env={**variables, **changed}, cwd=tmp_path, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        said = tmp_path / "words"
        called = said.read_text().splitlines() if said.exists() else []
        return ended.returncode, called, ended.stderr

    return run


# srun, whose ranks stop and save into the folder that they are told.
SAVES = STAND_IN + 'for word; do folder=${word#--checkpoints=}; done; echo yes >"$folder/stopped"\n'


@pytest.mark.parametrize("flags", [["--checkpoints", "a b"], ["--checkpoints=a b"]])
def test_the_folder_of_checkpoints_is_the_one_that_was_named_in_either_way(job, tmp_path, flags):
    (tmp_path / "a b").mkdir()
    (tmp_path / "bin" / "srun").write_text(SAVES)
    status, called, _ = job("checkpointed.sbatch", *flags)
    assert [word for word in called if word.startswith("--checkpoints")] == flags[:1]
    assert "requeue" in called and status == 75, "it looks there for the file `stopped`"


def test_a_job_that_fails_before_it_trains_is_not_queued_again_for_what_an_earlier_one_saved(
    job, tmp_path
):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "stopped").write_text("SIGUSR1 after 3 steps\n")
    (tmp_path / "bin" / "srun").write_text(STAND_IN + "exit 2\n")
    status, called, _ = job("checkpointed.sbatch", "--checkpoints", "saved", "--stepz", "3")
    assert (status, "requeue" in called) == (2, False)


# srun, whose ranks saved in that attempt, and could only print it; the place is torchrun's.
PRINTS = (
    STAND_IN
    + """log=$LOGS/node0/17.ATTEMPT_x/attempt_0/0
mkdir -p "$log" && echo 'stopped by SIGUSR1 after 3 steps, saved' >"$log/stdout.log"
"""
)


@pytest.mark.parametrize(("attempt", "again"), [(1, True), (0, False)])
def test_a_job_that_saved_and_could_not_mark_it_goes_back_into_the_queue(
    job, tmp_path, attempt, again
):
    (tmp_path / "bin" / "srun").write_text(PRINTS.replace("ATTEMPT", str(attempt)))
    status, called, said = job("checkpointed.sbatch", SLURM_RESTART_COUNT="1")
    assert (status, "requeue" in called, said) == (75 if again else 0, again, "")


def test_a_job_that_may_not_start_again_says_so_the_first_time(job, tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "bin" / "srun").write_text(SAVES)
    status, called, said = job("checkpointed.sbatch", "--checkpoints=saved", COURSE_RESTARTS="0")
    assert (status, "requeue" in called, said) == (75, False, "")


def test_a_limit_of_starts_that_is_no_number_is_one_sentence(job):
    status, called, said = job("checkpointed.sbatch", "--steps", "3", COURSE_RESTARTS="many")
    assert status == 2 and "COURSE_RESTARTS=many is not a whole number" in said
    assert said.count("\n") == 1 and not any(word.endswith("srun") for word in called)


@pytest.mark.parametrize("line", ["COURSE_QOS='day", 'COURSE_QOS="two words'])
def test_an_open_quote_in_the_site_file_is_named_in_the_notebook_too(tmp_path, monkeypatch, line):
    site = tmp_path / "site.env"
    site.write_text((ROOT / "slurm" / "site.env").read_text().replace("COURSE_QOS=", line))
    monkeypatch.setenv("COURSE_SITE", str(site))
    with pytest.raises(ClusterFailed) as named:
        Cluster({"PATH": os.environ["PATH"]})
    assert line in str(named.value) and str(site) in str(named.value)


def test_without_a_folder_the_checkpoints_are_in_one_of_the_job(job):
    _, called, _ = job("checkpointed.sbatch", "--steps", "3")
    assert called[-2:] == ["--checkpoints", "build/checkpoints-17"]


@pytest.mark.parametrize("number", ["0", "x", "-1", "1" * 10])
def test_a_sweep_over_what_is_no_number_is_one_sentence(job, number):
    status, called, said = job("sweep.sbatch", number, "--", "gpipe.py", "--pace", "80", "160")
    assert status == 2 and f"'{number}' is not a number of micro-batches" in said
    assert said.count("\n") == 1 and not any(word.endswith("srun") for word in called)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["gpip.py"], "there is no source_code/gpip.py"),
        *(
            (["gpipe.py", "--pace", "80", each], f"--pace '{each}' cannot")
            for each in ("1e2", "8_0")
        ),
        (["gpipe.py", "--pace=1e2"], "--pace '1e2' cannot"),
    ],
)
def test_a_sweep_that_cannot_do_equal_work_starts_no_ranks(job, words, sentence):
    status, called, said = job("sweep.sbatch", "3", "--", *words)
    assert status == 2 and sentence in said and said.count("\n") == 1
    assert not any(word.endswith("srun") for word in called)


@pytest.mark.parametrize(
    ("given", "divided"),
    [(["--pace", "80", "160"], ["--pace", "20", "40"]), (["--pace=80"], ["--pace=20"])],
)
def test_a_sweep_divides_a_pace_in_either_spelling_and_nothing_else(job, given, divided):
    _, called, _ = job("sweep.sbatch", "4", "--", "gpipe.py", *given, "--steps", "8")
    at = called.index("source_code/gpipe.py") + 1
    assert called[at : called.index("--microbatches")] == [*divided, "--steps", "8"]


@pytest.mark.parametrize(
    ("given", "ranks"), [("0", "2"), ("", "2"), ("a100:2", "2"), ("4", "4"), ("10", "10")]
)
def test_a_job_has_a_rank_for_each_gpu_and_two_where_slurm_gives_none(job, given, ranks):
    _, called, _ = job("train.sbatch", "gpipe.py", SLURM_GPUS_ON_NODE=given)
    assert called[called.index("--nproc-per-node") + 1] == ranks


def test_a_sweep_divides_by_the_number_in_every_locale(job, tmp_path):
    awk = '#!/bin/sh\n[ "$LC_ALL" = C ] && echo 26.6667 || echo 26,6667\n'  # as mawk in German
    (tmp_path / "bin" / "awk").write_text(awk)
    (tmp_path / "bin" / "awk").chmod(0o755)
    _, called, _ = job("sweep.sbatch", "3", "--", "gpipe.py", "--pace", "80", "80", LC_ALL="de_DE")
    assert called.count("26.6667") == 2


@pytest.mark.parametrize("script", ["train.sbatch", "checkpointed.sbatch"])
def test_a_job_that_has_no_place_to_meet_or_to_write_starts_no_ranks(job, tmp_path, script):
    status, called, said = job(script, "gpipe.py", MASTER_ADDR="")
    assert (status, said.count("\n")) == (2, 1) and "export MASTER_ADDR=" in said
    (tmp_path / "build").touch()
    status, called, said = job(script, "gpipe.py")
    assert (status, said.count("\n")) == (2, 1) and f"{tmp_path}/build/jobs/17 cannot be" in said
    assert not any(word.endswith("srun") for word in called)


@pytest.mark.parametrize("theirs", ["a link", "a folder"])
@pytest.mark.parametrize(
    ("script", "place"),
    [
        ("train.sbatch", "build/jobs"),
        ("train.sbatch", "build/jobs/17"),
        ("jupyter.sbatch", "build/jobs/17"),
        ("sweep.sbatch", "build/sweep-17"),
    ],
)
def test_a_folder_that_another_user_made_first_gets_nothing_and_loses_nothing(
    job, tmp_path, script, place, theirs
):
    """In a folder `build` to which all may write."""
    if theirs == "a folder" and os.getuid() != 0:
        pytest.skip("only root may give a folder away")
    mine = tmp_path / "mine"
    (mine / "17").mkdir(parents=True)
    (mine / "precious").touch(), (mine / "17" / "precious").touch()
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).symlink_to(mine) if theirs == "a link" else mine.rename(tmp_path / place)
    os.chown(tmp_path / place, 12345, -1, follow_symlinks=False) if os.getuid() == 0 else None
    status, called, said = job(script, SLURM_CPUS_ON_NODE="1")
    assert (status, said.count("\n")) == (2, 1)
    assert f"{tmp_path / place} is a link or another user's; submit from your own copy" in said
    found = sorted(path.name for path in (tmp_path / place).rglob("*"))
    assert found == ["17", "precious", "precious"]
    assert not any(word.endswith("srun") for word in called)


def test_the_card_of_jupyterlab_is_written_anew_and_not_through_a_link(job, tmp_path):
    card, precious = tmp_path / "build/jobs/17/jupyter.url", tmp_path / "precious"
    precious.write_text("kept")
    card.parent.mkdir(parents=True)
    card.symlink_to(precious)
    with open(tmp_path / "site.env", "a") as site:
        site.write("COURSE_PYTHON=true\n")  # in place of JupyterLab
    changed = {"SLURM_RESTART_COUNT": "1", "SLURM_CPUS_ON_NODE": "1", "MASTER_ADDR": "127.0.0.1"}
    status, _, said = job("jupyter.sbatch", **changed)
    assert (status, said, precious.read_text()) == (0, "", "kept")
    assert not card.is_symlink() and card.stat().st_mode & 0o777 == 0o600
    assert "?token=" in card.read_text()


COURSE_S_OWN = sorted(
    {path.name for path in (ROOT / "slurm").glob("*.sbatch")} - {"program.sbatch"}
)


@pytest.mark.parametrize("script", COURSE_S_OWN)
def test_a_job_script_that_is_submitted_elsewhere_says_from_where(job, tmp_path, script):
    status, called, said = job(script, "gpipe.py", SLURM_SUBMIT_DIR=str(tmp_path / "bin"))
    assert (status, called) == (2, []) and said.count("\n") == 1
    assert f"{tmp_path}/bin is not the course's own folder" in said


@pytest.mark.parametrize("signal", ["USR1", "USR1@08", "B:USR1@030"])
def test_a_lead_may_be_left_out_or_begin_with_a_zero(job, signal):
    status, called, said = job("checkpointed.sbatch", SBATCH_SIGNAL=signal)
    assert (status, said) == (0, "") and "--checkpoints" in called


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("COURSE_RANKS_PER_NODE", "00", "must be a whole number below 1000"),
        ("COURSE_RANKS_PER_NODE", "9" * 20, "must be a whole number below 1000"),
        ("COURSE_GPUS_PER_NODE", "010", "must be a whole number below 1000"),
        ("COURSE_CONTAINER", "'  '", "COURSE_CONTAINER=   is wrong: there is no program"),
        ("SLURM_JOB_ID", "../..", "SLURM_JOB_ID is not the number of a job"),
        ("SLURM_JOB_ID", "", "SLURM_JOB_ID is not the number of a job"),
    ],
)
def test_what_a_shell_would_count_with_is_a_number(job, tmp_path, name, value, sentence):
    changed = {"SLURM_JOB_ID": value} if name == "SLURM_JOB_ID" else {}
    with open(tmp_path / "site.env", "a") as site:
        site.write("" if changed else f"{name}={value}\n")
    status, called, said = job("train.sbatch", "gpipe.py", **changed)
    assert status == 2 and sentence in said and said.count("\n") == 1
    assert not any(word.endswith("srun") for word in called)


def test_make_takes_a_folder_with_a_space_as_one_and_does_not_make_it():
    words = ["make", "-n", "wall", "FOLDER=a b"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert 'tools/wall.py "a b"' in done.stdout and done.stdout.count("a b") == 1
