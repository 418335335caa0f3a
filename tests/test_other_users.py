"""Nothing that another user of the machine puts in the way is adopted, followed or overwritten."""

import os
import re
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import prepare_data
import pytest
from cluster import LOCAL_CLUSTER, ROOT

from course import launch, progress
from course.failed_run import RunFailed
from extensions.checkpointing import checkpoint_folder
from extensions.checkpointing.checkpoint import CheckpointError, Checkpoints
from extensions.pretraining import metrics
from extensions.pretraining.metrics import open_in_place
from extensions.real_models.saved_output import copy_beside
from files.outputs import can_be_written, replace_file, write_whole
from guard import watch
from lab.flight_log import FlightLog
from pipeline.data import DEFAULT_TEXT
from pipeline.schedules import build_schedule

OTHER = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root may become somebody else")


@pytest.fixture
def everybodys():
    """A folder in which everybody may make files, and remove only their own, such as /tmp."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def local_cluster(command, folder=None, **variables):
    """How slurm/local_cluster.sh ends."""
    environment = {name: value for name, value in os.environ.items() if name[:6] != "COURSE"}
    return subprocess.run(
        [LOCAL_CLUSTER, command, *(["--folder", folder] if folder else [])],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=30,
    )


def refusal(ended):
    """The one sentence of a program that has done nothing."""
    assert ended.returncode == 2 and not ended.stdout
    (line,) = ended.stderr.splitlines()
    return line


# The local cluster.


@needs_root
@pytest.mark.parametrize("command", ["start", "status", "env", "stop"])
def test_a_cluster_folder_that_another_user_has_made_first_is_never_used(everybodys, command):
    folder, precious = everybodys / "cluster", everybodys / "precious"
    precious.write_text("root's\n")
    precious.chmod(0o600)
    subprocess.run(
        f"umask 022; mkdir {folder} {folder}/munge; echo known >{folder}/munge/key;"
        f" ln -s {precious} {folder}/slurm.conf; ln -s {precious} {folder}/gres.conf",
        shell=True,
        check=True,
        timeout=10,
        user=OTHER,
    )
    said = refusal(local_cluster(command, folder))
    assert said.startswith(f"{folder} is not a folder that only you can write to")
    assert precious.read_text() == "root's\n"
    assert sorted(path.name for path in folder.iterdir()) == ["gres.conf", "munge", "slurm.conf"]


@needs_root
def test_a_cluster_folder_below_a_folder_of_another_user_is_never_used(everybodys):
    """They could exchange it."""
    above = everybodys / "above"
    above.mkdir()
    (above / "cluster").mkdir()
    os.chown(above, OTHER, OTHER)
    said = refusal(local_cluster("start", above / "cluster"))
    assert said.startswith(f"{above}, which {above}/cluster lies in, can be changed by others")


@needs_root
def test_another_users_link_on_the_way_leads_to_no_cluster_folder(everybodys, no_daemons):
    own, link, to_it = (everybodys / name for name in ("own", "link", "to_it"))
    own.mkdir(0o755)
    link.symlink_to("own")
    to_it.symlink_to(link)
    ours = local_cluster("status", to_it / "new")
    assert ours.stdout == f"no cluster is running in {os.path.realpath(own)}/new\n"
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    for way in (link, link / "missing", link / ".." / "own", to_it):
        for command in ("start", "status", "env", "stop"):
            said = refusal(local_cluster(command, way / "new", PATH=no_daemons))
            assert said == f"{link} is another user's link; name another --folder"
    assert list(own.iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_cluster_folder_that_others_may_write_to_is_never_used(everybodys, mode):
    folder = everybodys / "cluster"
    folder.mkdir()
    folder.chmod(mode)
    assert "is not a folder that only you can write to" in refusal(local_cluster("start", folder))
    assert list(folder.iterdir()) == []


def test_a_link_or_a_file_in_place_of_the_cluster_folder_is_refused(everybodys):
    own, link, file = (everybodys / name for name in ("own", "link", "file"))
    own.mkdir(0o700)
    link.symlink_to(own)
    file.touch(0o600)
    assert refusal(local_cluster("start", link)).startswith(f"{link} is a link")
    assert "is not a folder that only you can write to" in refusal(local_cluster("start", file))
    link.unlink()
    link.symlink_to("nowhere")
    assert refusal(local_cluster("start", f"{link}/")).startswith(f"{link}/ is a link")
    assert list(own.iterdir()) == [] and not (everybodys / "nowhere").exists()


@pytest.fixture
def no_daemons(everybodys):
    """A PATH on which the programs of SLURM are found first, and fail."""
    folder = everybodys / "programs"
    folder.mkdir(0o755)
    for name in ("slurmctld", "slurmd", "srun", "sbatch", "munged", "sinfo"):
        (folder / name).write_text("#!/bin/sh\nexit 1\n")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_a_cluster_does_not_begin_in_a_folder_with_something_else(everybodys, no_daemons):
    """Such as /etc, whose file hosts was overwritten."""
    folder = everybodys / "own"
    folder.mkdir(0o700)
    (folder / "hosts").write_text("precious")
    (folder / "munge").mkdir()
    said = refusal(local_cluster("start", folder, PATH=no_daemons))
    assert said.startswith(f"{folder} has files of something else in it; name a new folder")
    assert (folder / "hosts").read_text() == "precious" and stat.S_IMODE(
        os.stat(folder)[0]
    ) == 0o700
    (folder / "hosts").unlink()
    (folder / "munge").rmdir()
    for _ in range(2):  # what a start has left that failed is a cluster's folder
        ended = local_cluster("start", folder, PATH=no_daemons)
        assert ended.returncode == 1 and "munged did not start" in ended.stderr
    assert (folder / "hosts").exists()


def test_numbers_and_folders_of_a_cluster_are_not_read_in_another_way(everybodys, no_daemons):
    words = LOCAL_CLUSTER, "start", "--folder", "-x", "--nodes", "08", "--port", "26900"
    options = {"cwd": everybodys, "env": os.environ | {"PATH": no_daemons}, "timeout": 30}
    everybodys.chmod(0o700)
    ended = subprocess.run(words, **options, capture_output=True, text=True)
    assert ended.returncode == 1 and "08" not in ended.stderr
    configured = (everybodys / "-x" / "slurm.conf").read_text()
    assert configured.count("NodeName=") == 8


def test_the_usual_cluster_folder_lies_where_nobody_else_can_make_it(everybodys):
    home = everybodys / "home"
    home.mkdir(0o700)
    in_run = sorted(Path("/run").iterdir())  # an earlier cluster of this checkout may be there
    ended = local_cluster("env", TMPDIR=str(everybodys), HOME=str(home))
    folder = Path(re.match(r"no cluster is running in (\S+);", refusal(ended))[1])
    assert folder.parent in (Path("/run"), home)
    assert sorted(Path("/run").iterdir()) == in_run and list(home.iterdir()) == []
    assert not stat.S_IMODE(folder.parent.stat().st_mode) & 0o022


@needs_root
def test_without_a_home_of_ones_own_the_cluster_wants_a_folder(everybodys):
    script = shutil.copy(LOCAL_CLUSTER, everybodys)
    ended = subprocess.run(
        [script, "start"],
        env={"PATH": os.environ["PATH"], "HOME": str(everybodys)},
        capture_output=True,
        text=True,
        timeout=10,
        user=OTHER,
        group=OTHER,
    )
    assert refusal(ended).endswith("name one, yours or somebody else's, with --folder")


# Files in a folder that everybody may write to.


def test_a_link_at_the_name_that_a_file_has_while_it_is_written_is_not_followed(everybodys):
    precious, out = everybodys / "precious", everybodys / "out.json"
    precious.write_text("kept")
    (everybodys / f".out.json.{os.getpid()}").symlink_to(precious)
    (everybodys / ".out.json.partial").symlink_to(precious)
    write_whole(out, "new")
    assert can_be_written(out)
    assert (precious.read_text(), out.read_text()) == ("kept", "new")
    assert not can_be_written(everybodys / "missing" / "out.json")


@needs_root
@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o2770])
@pytest.mark.parametrize("owner", [os.getuid(), OTHER])
def test_no_link_in_a_folder_of_others_leads_an_output_to_a_file_of_ours(everybodys, mode, owner):
    own = everybodys / "own"
    own.mkdir(0o755)
    precious, out, to_it = own / "precious", everybodys / "out.json", own / "to_it"
    precious.write_text("kept")
    out.symlink_to(precious)
    to_it.symlink_to(out)
    os.chown(out, owner, owner, follow_symlinks=False)
    everybodys.chmod(mode)
    for name in (out, to_it, everybodys / "own" / ".." / "out.json"):
        assert not can_be_written(name)
        with pytest.raises(PermissionError, match="a link in a folder of others"):
            write_whole(name, "lost")
        with pytest.raises(PermissionError, match="a link in a folder of others"):
            open_in_place(name, "w")
    everybodys.chmod(0o755)
    os.chown(everybodys, OTHER, OTHER)  # who alone may write here, and could exchange the link
    with pytest.raises(PermissionError, match="a link in a folder of others"):
        write_whole(to_it, "lost")
    assert precious.read_text() == "kept"
    os.chown(everybodys, 0, 0)
    write_whole(to_it, "ours")
    assert can_be_written(out) and out.is_symlink() and to_it.is_symlink()
    assert precious.read_text() == "ours"


@needs_root
def test_a_folder_of_ours_behind_a_link_of_another_user_gets_no_output(everybodys):
    own, table = everybodys / "own", everybodys / "table"
    own.mkdir(0o755)
    table.symlink_to(own)
    write_whole(table / "out.json", "ours")  # as to another disk
    os.chown(table, OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(PermissionError, match="a link of another user"):
        write_whole(table / "out.json", "lost")
    assert (own / "out.json").read_text() == "ours" and not can_be_written(table / "new.json")


@needs_root
def test_another_users_file_in_a_folder_such_as_tmp_is_refused_before_the_run(everybodys):
    theirs, own = everybodys / "theirs.json", everybodys / "own.json"
    for path, owner in (theirs, OTHER), (own, OTHER + 1):
        path.write_text("")
        path.chmod(0o666)
        os.chown(path, owner, owner)
    os.chown(everybodys, OTHER + 2, OTHER + 2)
    everybodys.chmod(0o1777)
    with mock.patch("os.geteuid", return_value=OTHER + 1):
        assert can_be_written(own) and not can_be_written(theirs)
    everybodys.chmod(0o777)  # where anybody may replace anything
    with mock.patch("os.geteuid", return_value=OTHER + 1):
        assert can_be_written(theirs)


def test_no_link_that_others_make_in_a_claimed_folder_is_written_through(
    everybodys, monkeypatch, capsys
):
    """The folder of tokens or of a model was empty and theirs; the link comes after the claim."""
    precious, out = everybodys / "precious", everybodys / "out"
    precious.write_text("kept")
    out.mkdir()
    out.chmod(0o777)
    choose, link = prepare_data.choose_tokenizer, out / "tokenizer.json"

    def choose_meanwhile(arguments):
        link.symlink_to(precious)
        return choose(arguments)

    monkeypatch.setattr(prepare_data, "choose_tokenizer", choose_meanwhile)
    words = f"prepare_data.py --data {DEFAULT_TEXT} --vocabulary 300 --out {out}"
    monkeypatch.setattr("sys.argv", words.split())
    with pytest.raises(SystemExit, match="2"):
        prepare_data.main()
    assert re.search("--out .* is a link", capsys.readouterr().err)
    assert link.is_symlink()  # it is not removed with what is ours
    with pytest.raises(OSError, match="is a link"):
        copy_beside(Path(DEFAULT_TEXT), link)
    assert precious.read_text() == "kept"


@needs_root
@pytest.mark.parametrize(
    ("link", "theirs"), [("saved", False), ("saved/run-0001", False), ("saved/run-0001", True)]
)
def test_another_users_link_leads_no_training_to_checkpoints_elsewhere(everybodys, link, theirs):
    flags = "--layers 2 --dim 8 --heads 2 --kv-heads 1 --seq-len 8 --keep 1 --steps"
    train = "distributed_checkpointing.py --device cpu --save-every 1 --checkpoints"
    launch.run(f"{train} {everybodys}/own {flags} 1", 1, warm=True, show=False, limit=60)
    half = everybodys / "own/run-0001/.writing-step-00000002-a1b2"
    half.mkdir()
    before = sorted((everybodys / "own").rglob("*"))
    (everybodys / link).parent.mkdir(exist_ok=True)
    (everybodys / link).parent.chmod(0o755 if theirs else 0o1777)
    (everybodys / link).symlink_to(everybodys / "own" / link.partition("/")[2])
    for each in (everybodys / link, *[everybodys / "saved"] * theirs):
        os.chown(each, OTHER, OTHER, follow_symlinks=False)
    if link == "saved/run-0001":  # a link that comes while the training runs
        with pytest.raises(PermissionError, match="it is a link"):
            checkpoint_folder.begin_writing(everybodys / "saved", "run-0001", 2)
    held = checkpoint_folder.claim(everybodys)  # not that of the link, as after an exchange
    saving = SimpleNamespace(claim=held, claimed=os.stat(everybodys), folder=everybodys / link)
    with pytest.raises(CheckpointError, match="another folder has the name"):
        Checkpoints.begin_writing(saving, 2)
    held.close()
    for steps in 1, 2:
        with pytest.raises(RunFailed) as refused:
            words = f"{train} {everybodys}/saved {flags} {steps}"
            launch.run(words, 1, warm=True, show=False, limit=60)
        sentence = str(refused.value).splitlines()[0]
        assert sentence.startswith(f"--checkpoints {everybodys / link} ") and "a link" in sentence
        assert sorted((everybodys / "own").rglob("*")) == before


def test_a_link_that_others_make_after_the_check_is_replaced_or_not_followed(everybodys):
    precious, out, log = (everybodys / name for name in ("precious", "out.json", "log"))
    precious.write_text("kept")
    replace_file(out, lambda partial: (partial.write_text("new"), out.symlink_to(precious)))
    assert not out.is_symlink() and out.read_text() == "new"
    log.symlink_to(precious)
    with mock.patch.object(metrics, "place_of", return_value=log), pytest.raises(OSError):
        open_in_place(log, "a")
    assert precious.read_text() == "kept"


def test_no_record_of_a_run_follows_a_link(everybodys, monkeypatch):
    precious = everybodys / "precious"
    precious.write_text("kept")
    monkeypatch.setenv(watch.FLIGHT_VARIABLE, str(everybodys))
    monkeypatch.setattr(watch, "flight_record", lambda backend: b"{}")
    for name in ("rank0.json", "rank0.jsonl"):
        (everybodys / name).symlink_to(precious)
    watch.Watch(0, 1.0).write_flight_recorder()
    with pytest.raises(FileExistsError):
        FlightLog(everybodys, 0, build_schedule("gpipe", 2, 4), None, None)
    assert precious.read_text() == "kept"


def test_links_that_lead_in_a_circle_are_no_place(tmp_path):
    (tmp_path / "a").symlink_to("b"), (tmp_path / "b").symlink_to("a")
    assert not can_be_written(tmp_path / "a")


def test_no_progress_is_noted_in_a_file_that_a_link_names(everybodys, monkeypatch, capsys):
    precious = everybodys / "precious"
    precious.write_text("kept")
    monkeypatch.setenv(progress.FOLDER_VARIABLE, str(everybodys))
    monkeypatch.setenv(progress.NAME_VARIABLE, "ada")
    monkeypatch.delenv("PIPELINE_STORED_PICTURES", raising=False)
    (everybodys / "ada.jsonl").symlink_to(precious)
    progress.note("count_layers", progress.RIGHT)
    assert precious.read_text() == "kept"
    assert "Your progress is not noted" in capsys.readouterr().err


def test_no_program_names_a_file_of_a_folder_that_everybody_may_write_to():
    """They use tempfile, whose names nobody can make first."""
    for folder in ("source_code", "slurm", "tools"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".sh", ".sbatch"):
                text = re.sub(r"\s*#.*", "", path.read_text())
                assert not re.search(r"(?<![\w.])/(var/)?tmp\b|/dev/shm|gettempdir|mktemp\(", text)
