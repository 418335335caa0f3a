"""Every path that a run reads or writes: one sentence for what is not a file, and nothing is lost."""

import ast
import errno
import importlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ranks import run_on_ranks
from test_bad_input import SCRIPTS, Refusal
from whole_checkpoints import COUNTED

from broken.pipelines import faults
from extensions.checkpointing import checkpoint_folder
from extensions.data_parallel.replicas import replicate
from files import inputs, outputs
from files.inputs import (
    InputError,
    is_count,
    is_number,
    parse_json,
    read_bytes,
    read_json,
    read_text,
)
from files.outputs import can_be_written, write_output, write_whole
from guard import ending
from guard.one_sentence import naming_files
from guard.paths import LONGEST_FILE_NAME, check_file
from guard.printing import Output
from lab.simulator import Costs, simulate
from lab.timeline import to_chrome_trace
from pipeline.command_line import Parser
from pipeline.schedule import ScheduleError
from pipeline.schedules import MOST_ACTIONS, build_schedule, gpipe
from pipeline.schedules.text_form import to_csv

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "source_code"
TINY = "--layers 2 --dim 16 --heads 2 --kv-heads 2 --seq-len 8 --batch-size 2 --microbatches 2"


@pytest.fixture
def refusal(monkeypatch, capsys):
    return Refusal(monkeypatch, capsys)


# Inputs


def no_files(folder):
    """By what they are: paths that no reader may wait for, or take for a file."""
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "pipe behind a link").symlink_to(folder / "pipe")
    paths = [path for path in folder.iterdir()]
    return [*paths, folder / "missing", "/dev/zero", "/dev/urandom", folder / ("x" * 300)]


def test_what_is_no_file_is_named_and_not_waited_for(tmp_path):
    for path in no_files(tmp_path):
        with pytest.raises(InputError, match="is not a regular file|cannot be read") as rejected:
            read_bytes(path)
        assert str(path) in str(rejected.value) and "\n" not in str(rejected.value)


def test_a_file_or_folder_without_permission_is_named(tmp_path):
    (tmp_path / "file").write_text("text")
    (tmp_path / "file").chmod(0)
    user = os.geteuid()
    try:
        if user == 0:  # root may read everything
            os.seteuid(65534)
        with pytest.raises(InputError, match="file cannot be read .Permission denied"):
            read_bytes(tmp_path / "file")
    finally:
        os.seteuid(user)


def test_a_file_is_read_up_to_a_limit(tmp_path):
    (tmp_path / "file").write_bytes(bytes(3 * inputs.MEBIBYTE))
    assert len(read_bytes(tmp_path / "file")) == 3 * inputs.MEBIBYTE
    with pytest.raises(InputError, match="has more than 1,048,576 bytes"):
        read_bytes(tmp_path / "file", inputs.MEBIBYTE)


def test_text_is_utf_8_with_or_without_a_byte_order_mark(tmp_path):
    path = tmp_path / "file"
    for content in ("Ä\r\n".encode(), "Ä\r\n".encode("utf-8-sig")):
        path.write_bytes(content)
        assert read_text(path) == "Ä\r\n"
    path.write_bytes("Ä".encode("latin-1"))
    with pytest.raises(InputError, match="is not text in UTF-8 .byte 0"):
        read_text(path)


@pytest.mark.parametrize("text", ["", "{", "NaN", "[1, Infinity]", "[" * 100_000, "9" * 5000])
def test_what_is_no_json_is_rejected(tmp_path, text):
    (tmp_path / "file").write_text(text)
    with pytest.raises(InputError, match="is not JSON"):
        read_json(tmp_path / "file")


@pytest.mark.parametrize("form", ["[{}]", '{{"a": {}}}'])
def test_json_has_as_many_levels_as_may_be_written_again(form):
    """json.dumps with an indent needs a few of Python's 1,000 calls for each level."""

    def nested(levels):
        text = "1"
        for _ in range(levels):
            text = form.format(text)
        return text

    assert json.dumps(parse_json(nested(100), "it"), indent=2)
    with pytest.raises(InputError, match="it has JSON of more than 100 levels"):
        parse_json(nested(101), "it")


def test_numbers_of_json_are_finite_and_no_truth_values():
    assert is_number(3) and is_number(-2.5) and is_count(0) and is_count(7)
    assert not any(map(is_number, [True, None, "3", float("inf"), float("nan"), [], 10**400]))
    assert not any(map(is_count, [True, -1, 2.0, None, 10**20]))


# What may open a file otherwise: its own source, a program of its own, or a file just checked. The
# core reads as Python does: the guard has looked at the flags that its parser's `reads` lists.
OWN_FILES = {
    "source.py", "copy_template.py", "preflight.py", "cluster.py", "launch.py", "lesson_07.py",
    "agreement.py", "broken_stuck_rank.py", "profile.py", "checkpoint_folder.py", "inputs.py", "printing.py",
}  # fmt: skip


def calls_in(file):
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield getattr(node.func, "attr", getattr(node.func, "id", None)), node


def test_packages_open_inputs_in_one_place():
    for package in ("files", "guard", "lab", "extensions", "planning"):
        for file in (SOURCE / package).rglob("*.py"):
            for name, call in calls_in(file):
                reads = name in ("read_text", "read_bytes") and isinstance(call.func, ast.Attribute)
                assert not (reads and file.name not in OWN_FILES), (file, call.lineno)


def test_every_text_is_written_and_read_in_a_named_encoding():
    packages = ("pipeline", "files", "guard", "lab", "extensions", "planning", "course")
    for folder in [*(SOURCE / package for package in packages), ROOT / "tools"]:
        for file in folder.rglob("*.py"):
            for name, call in calls_in(file):
                if name == "read_text" and isinstance(call.func, ast.Attribute):
                    assert call.args or call.keywords, (file.name, call.lineno)
                if name == "write_text" or name == "open" and isinstance(call.func, ast.Name):
                    words = ast.unparse(call)
                    if re.match(r"open\([12],", words):  # a stream, read as the locale says
                        continue
                    harmless = "encoding=" in words or "json.dumps(" in words  # which is ASCII
                    assert harmless or re.search(r"'[rwax]?b[+]?'", words), (file.name, call.lineno)


def test_no_reader_catches_whatever_comes():
    """A handler for all exceptions raises again what is not the library's own bare Exception."""
    for package in ("pipeline", "files", "guard", "lab", "extensions", "planning"):
        for file in (SOURCE / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ExceptHandler):
                    caught = ast.unparse(node.type) if node.type else "everything"
                    first = ast.unparse(node.body[0])
                    allowed = "is not Exception:\n    raise" in first
                    blanket = caught in ("everything", "Exception", "BaseException")
                    assert allowed or not blanket, (file.name, node.lineno)


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_empty_text_is_never_taken_for_a_flag_that_was_not_given(refusal, monkeypatch, script):
    """As with --tokenizer "$TOKENIZER" where the variable is not set."""
    parsers, parse = [], Parser.parse_args

    def seen(parser, *words):
        parsers.append(parser)
        return parse(parser, *words)

    monkeypatch.setattr(Parser, "parse_args", seen)
    refusal(script, "--steps", "0")
    texts = [
        action.option_strings[0]
        for action in parsers[0]._actions
        if action.option_strings and not action.type and not action.choices and action.nargs is None
    ]
    assert {"--data", "--losses", "--timeline", "--profile", "--record"} <= set(texts)
    for flag in texts:
        refusal.check(script, flag, "", names=flag)
    places = [
        action.option_strings[0] if action.option_strings else action.metavar
        for action in parsers[0]._actions
        if action.metavar in ("FILE", "FOLDER", "DIR", "FILE.csv")
    ]
    assert set(places) <= {*parsers[0].reads, *parsers[0].writes}  # no path of a run is left out


@pytest.mark.parametrize(
    "words",
    ["predict.py|", "predict.py|gpipe|--csv|", "predict.py|gpipe|--svg|", "predict.py|gpipe|--svg|x|--performed|",
     "plan_partition.py|--workers|2|--bandwidth|1e9|--profile|", "train.py|",
     "copy_template.py|gpipe.py|--|--", "copy_template.py||mine", "compare_logs.py|a|--|--",
     "gpipe.py|--losses=--", "gpipe.py|--data=--", "gpipe.py|--seed=--", "train.py|--option=--",
     "train.py|--record=--", "plan.py|gpt3-1b|--machine=--", "search_schedule.py|--hop=--"],
)  # fmt: skip
def test_nor_is_it_by_the_other_programs(monkeypatch, capsys, words):
    words = words.split("|")
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        importlib.import_module(words[0].removesuffix(".py")).main()
    assert end.value.code == 2 and "is empty text" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--svg", "--csv"])
def test_predict_overwrites_neither_the_schedule_nor_the_timeline_that_it_reads(
    monkeypatch, capsys, tmp_path, flag
):
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(gpipe(2, 2)))
    (tmp_path / "link").symlink_to(path)
    monkeypatch.setattr(sys, "argv", ["predict.py", str(path), flag, str(tmp_path / "link")])
    with pytest.raises(SystemExit):
        importlib.import_module("predict").main()
    assert "name the same file" in capsys.readouterr().err
    assert path.read_text() == to_csv(gpipe(2, 2))


def test_an_empty_text_without_a_flag_or_a_name_is_named_all_the_same():
    parser = Parser()
    parser.add_argument("lessons", nargs="*")
    with pytest.raises(SystemExit, match="^lessons is empty text"):
        parser.parse_args(["02", ""])
    assert parser.parse_args([]).lessons == []


def test_a_file_that_cannot_be_written_is_named_and_not_its_unfinished_copy(tmp_path):
    with pytest.raises(FileNotFoundError) as raised:
        outputs.replace_file(tmp_path / "b", lambda partial: partial.unlink())
    assert str(raised.value.filename) == str(tmp_path / "b")
    with pytest.raises(FileNotFoundError) as raised:
        outputs.replace_file(tmp_path / "gone" / "b", lambda partial: None)
    assert raised.value.filename == str(tmp_path / "gone" / "b")

    def full(partial):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a write says it: without a name

    with pytest.raises(OSError) as raised:
        outputs.replace_file(tmp_path / "b", full)
    assert raised.value.filename == str(tmp_path / "b")


def test_a_copy_that_fails_names_the_file_that_is_written(tmp_path):
    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), source, None, target)

    (tmp_path / "from").mkdir()
    for name in ("a", "b"):
        (tmp_path / "from" / name).touch()
    with pytest.raises(SystemExit, match=f": {tmp_path}/to/a cannot be used"), naming_files():
        full(f"{tmp_path}/from/a", f"{tmp_path}/to/a")
    with pytest.raises(SystemExit, match=f": {tmp_path}/to/[ab] cannot be used") as ended:
        with naming_files():
            shutil.copytree(tmp_path / "from", tmp_path / "to", copy_function=full)
    assert str(ended.value).count("No space left") == 1


def test_a_sweep_of_replicas_is_compared_with_the_bubble_of_one_pipeline(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "slurm"))
    bubble = importlib.import_module("collect_sweep").bubble
    for replicas in (1, 2):
        timeline = simulate(replicate(build_schedule("gpipe", 2, 4), replicas), Costs())
        assert bubble(timeline, 4) == 1 / 5


def test_a_sweep_of_something_else_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "slurm"))
    collect_sweep = importlib.import_module("collect_sweep")
    (tmp_path / "4.json").write_text("{}")
    (tmp_path / "8.json").write_text(
        to_chrome_trace(simulate(build_schedule("gpipe", 2, 4), Costs()))
    )
    for words in ([], [""], [str(tmp_path / "nowhere")], [str(tmp_path)]):
        monkeypatch.setattr(sys, "argv", ["collect_sweep.py", *words])
        with pytest.raises(SystemExit, match="2"):
            collect_sweep.main()
        said = capsys.readouterr().err
        assert "name the folder" in said or "holds no timeline; the output files" in said
    assert "skipped: " in said and "4.json: it is not a timeline" in said
    assert "8.json has 4 micro-batches, and not 8" in said


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("1 / 0", "cannot be run (ZeroDivisionError: division by zero)"),
        ("def next_to_send(:", "cannot be run (SyntaxError: "),
        ("raise SystemExit", "cannot be run (SystemExit: "),
        ("next_to_send = 3", "defines no function next_to_send"),
        ("\xff", "is not text in UTF-8"),
    ],
)
def test_a_repair_that_cannot_be_run_gets_a_sentence(tmp_path, text, sentence):
    (tmp_path / "mine.py").write_text(text, encoding="latin-1")
    with pytest.raises(SystemExit) as end:
        faults.piece_in(str(tmp_path / "mine.py"), "next_to_send")
    assert sentence in end.value.code


@pytest.mark.parametrize(
    ("body", "sentence"), [("pass", "returned nothing"), ("return outputs[9]", "raised IndexError")]
)
def test_a_repair_that_raises_or_returns_nothing_ends_the_run_with_a_sentence(
    monkeypatch, tmp_path, body, sentence
):
    said = []
    monkeypatch.setattr(faults, "end_process", said.append)
    (tmp_path / "mine.py").write_text(f"def next_to_send(outputs):\n    {body}\n")
    try:
        faults.piece_in(str(tmp_path / "mine.py"), "next_to_send")([1])
    except UnboundLocalError:  # the run would have ended before
        pass
    assert sentence in said[0] and "mine.py: next_to_send" in said[0]


# Outputs


def test_an_output_behind_a_link_is_possible_where_the_link_leads(tmp_path):
    (tmp_path / "target").write_text("old")
    links = {
        "to a file": "target",
        "to a new file": "new",
        "nowhere": "missing/file",
        "loop": "loop",
    }
    for name, target in links.items():
        (tmp_path / name).symlink_to(tmp_path / target)
    possible = {name: can_be_written(str(tmp_path / name)) for name in links}
    assert possible == {"to a file": True, "to a new file": True, "nowhere": False, "loop": False}
    write_whole(tmp_path / "to a new file", "text")
    assert (tmp_path / "new").read_text() == "text" and (tmp_path / "to a new file").is_symlink()


@pytest.mark.parametrize(("name", "advice"), [("-", "./-"), ("x" * 246, "245 bytes")])
def test_no_output_is_called_as_standard_output_or_has_too_long_a_name(refusal, name, advice):
    refusal.check("gpipe", "--losses", name, names=advice)


def test_an_output_can_have_the_longest_name_that_is_promised(tmp_path):
    name = str(tmp_path / ("x" * LONGEST_FILE_NAME))
    check_file("--losses", name)
    write_whole(name, "text")
    assert Path(name).read_text() == "text"


def test_two_names_of_one_file_are_one_path(refusal, tmp_path):
    (tmp_path / "text").write_bytes(bytes(1000))
    os.link(tmp_path / "text", tmp_path / "other name")
    flags = ["--data", str(tmp_path / "text"), "--losses", str(tmp_path / "other name")]
    refusal.check("gpipe", *flags, names="--losses and --data name the same file")


def full_disk():
    """From now on this process can write no file beyond a kilobyte, as if the disk were full."""
    sys.dont_write_bytecode = True  # Python would keep compiled modules that are cut off
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))


def write_on_full_disk(rank, path):
    full_disk()
    write_output("--timeline", path, "x" * 5000)
    return outputs.not_written


@pytest.mark.processes
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path):
    (tmp_path / "file").write_text("old")
    assert run_on_ranks(write_on_full_disk, 1, str(tmp_path / "file")) == [["--timeline"]]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def train_on_full_disk(rank, script, flags, folder):
    """The exit status, the number of losses, and what was said on standard error."""
    import contextlib
    import io

    full_disk()
    sys.argv = [f"{script}.py", *flags.split()]
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = importlib.import_module(script).main()
    return status, out.getvalue().count("  loss "), errors.getvalue()


@pytest.mark.processes
def test_a_full_disk_costs_an_output_and_a_sentence_and_not_the_training(tmp_path):
    names = "losses", "timeline", "record", "metrics"
    outputs = " ".join(f"--{name} {tmp_path / name}" for name in names)
    flags = f"{TINY} --steps 30 --vocabulary 256 --evaluate-windows 2 {outputs}"
    ends = run_on_ranks(train_on_full_disk, 2, "pretrain_llama", flags, str(tmp_path))
    assert [status for status, _, _ in ends] == [1, 1]
    assert [count for _, count, _ in ends] == [0, 30]
    said = "".join(errors for _, _, errors in ends)
    for name in names:
        assert f"--{name} {tmp_path / name}" in said
    assert said.count("was not written (File too large); nothing else is lost") == said.count("\n")
    left = {path.name for path in tmp_path.rglob("*")}
    assert left == {"metrics", "record", "run.json", "rank0.jsonl", "rank1.jsonl"}


def test_a_checkpoint_that_is_saved_is_not_said_to_be_lost_when_an_old_one_stays(
    tmp_path, monkeypatch, capsys
):
    def publish(step):
        temporary = checkpoint_folder.begin_writing(tmp_path, "run-0001", step)
        (temporary / "__0_0.distcp").write_bytes(b"tensors")
        described = checkpoint_folder.describe_files(temporary, "__0_")
        description = {**COUNTED, "configuration": {}, "files": described}
        checkpoint_folder.publish(temporary, tmp_path, "run-0001", step, description, keep=1)

    def deny(*arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    publish(1)
    monkeypatch.setattr(checkpoint_folder.os, "access", lambda path, mode: False)
    publish(2)
    assert "step-00000001 cannot be removed (Permission denied)" in capsys.readouterr().err
    assert checkpoint_folder.steps_of(tmp_path, "run-0001") == [1, 2]
    assert checkpoint_folder.find_checkpoint(tmp_path).step == 2
    assert not [path for path in tmp_path.rglob(".deleting-*")]


def test_many_damaged_checkpoints_are_each_looked_at_once(tmp_path, monkeypatch):
    for step in range(1, 41):
        (tmp_path / "run-0001" / checkpoint_folder.name_of_step(step)).mkdir(parents=True)
    looks, look = [], checkpoint_folder.look_at
    monkeypatch.setattr(checkpoint_folder, "look_at", lambda *a: looks.append(a) or look(*a))
    with pytest.raises(checkpoint_folder.CheckpointError, match="checkpoint.json is missing"):
        checkpoint_folder.find_checkpoint(tmp_path)
    assert len(looks) == 40


def test_checkpoint_json_says_when_it_was_changed(tmp_path):
    temporary = checkpoint_folder.begin_writing(tmp_path, "run-0001", 1)
    description = {**COUNTED, "configuration": {"--warm-up-steps": 2}, "files": {}}
    checkpoint_folder.publish(temporary, tmp_path, "run-0001", 1, description, keep=1)
    path = checkpoint_folder.find_checkpoint(tmp_path).path / "checkpoint.json"
    path.write_text(path.read_text().replace('"--warm-up-steps": 2', '"--warm-up-steps": 0'))
    assert json.loads(path.read_text())["configuration"] == {"--warm-up-steps": 0}
    with pytest.raises(checkpoint_folder.CheckpointError, match="has changed since it was written"):
        checkpoint_folder.find_checkpoint(tmp_path)


# Sizes


@pytest.mark.parametrize(
    ("script", "flags", "named"),
    [
        ("gpipe", "--batch-size 80000000 --microbatches 800000", "hours|GiB"),
        ("zero_bubble", "--batch-size 2000000000 --microbatches 200000", "hours|GiB"),
        ("gpipe", "--batch-size 1000001 --microbatches 1000001", "actions"),
        ("zero_bubble", "--batch-size 1000001 --microbatches 1000001", "actions"),
        ("interleaved_1f1b", "--batch-size 600000 --microbatches 600000 --chunks 2", "actions"),
        ("gpipe", "--layers 100000000 --dim 8", "hours|GiB"),
        ("pretrain_llama", "--vocabulary 2147483647", "GiB"),
        ("train", "--schedule 1f1b --microbatches 50000000 --batch-size 50000000", "actions"),
        ("experts", "--experts 2147483647", "1,024 are the most"),
        ("experts", "--capacity 1e300", "more than all tokens"),
        ("experts", "--experts 4 --top 2 --capacity 2.5", "more than all tokens; use at most 2,"),
        ("gpipe", "--seq-len 1000000", "hours"),
        ("gpipe", "--layers 27500 --batch-size 1000 --microbatches 1000", "more than 1."),
        ("pretrain_llama", "--sample 1000000", "10,000 tokens are the most"),
        ("inference", "--groups 1000 --requests 1 --tokens 1024 --seq-len 1100", "passes"),
    ],
)
def test_sizes_that_would_take_hours_or_all_memory_are_rejected_with_the_number(
    refusal, monkeypatch, script, flags, named
):
    monkeypatch.setattr("test_bad_input.call_of", lambda script, ranks=1: [f"{script}.py"])
    status, sentence = refusal(script, *flags.split())
    assert status == 2 and any(word in sentence for word in named.split("|"))
    assert sentence.count("\n") == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("plan.py pretrain_llama.py --layers 2147483647", "1,000,000 are the most"),
        ("plan_partition.py --workers 2 --bandwidth 1e9 --layers 2 --seq-len 1000000", "hours"),
    ],
)
def test_a_plan_of_sizes_that_would_take_hours_is_not_begun(monkeypatch, capsys, words, named):
    monkeypatch.setattr(sys, "argv", words.split())
    with pytest.raises(SystemExit):
        importlib.import_module(words.partition(".")[0]).main()
    assert named in capsys.readouterr().err


@pytest.mark.timeout(30)
@pytest.mark.parametrize("flag", ["--ranks", "--microbatches", "--chunks"])
def test_a_schedule_has_so_many_actions_at_most(monkeypatch, capsys, flag):
    words = ["predict.py", "interleaved-1f1b", flag, str(2**31 - 1)]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit):
        importlib.import_module("predict").main()
    assert f"{MOST_ACTIONS:,} are the most" in capsys.readouterr().err
    assert build_schedule("gpipe", 4, 8).num_ranks == 4


@pytest.mark.timeout(30)  # a V of 3,000 ranks takes minutes, also for one micro-batch
@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min", "dualpipe-v"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(3000, 1), (400, 400), (4, 50_000)])
def test_a_v_has_half_as_many_actions_at_most(name, ranks, microbatches):
    with pytest.raises(ScheduleError, match=f"{MOST_ACTIONS // 2:,} are the most"):
        build_schedule(name, ranks, microbatches)


def test_costs_are_such_that_sums_of_them_are_numbers(monkeypatch, capsys):
    def predict(*words):
        monkeypatch.setattr(sys, "argv", ["predict.py", "gpipe", "--json", *words])
        try:
            return importlib.import_module("predict").main(), capsys.readouterr()
        except SystemExit as end:
            return end.code, capsys.readouterr()

    for cost in ("1e308", "1e-308", "1e16"):
        status, said = predict("--forward", cost, "--backward", cost)
        assert status == 2 and "--forward" in said.err
    status, said = predict("--forward", "1e15", "--backward", "1e15", "--transfer", "1e-15")
    assert status == 0 and json.loads(said.out)["bubble_over_total"] > 0


# Where and how Python runs


def start(*words, **options):
    environment = {**os.environ, **options.pop("variables", {})}
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, text=True,
        stdout=options.pop("stdout", subprocess.PIPE), stderr=subprocess.PIPE, timeout=120, **options,
    )  # fmt: skip


@pytest.mark.further
def test_without_docstrings_a_program_still_runs():
    ended = start("-OO", "source_code/predict.py", "gpipe", "--json")
    assert ended.returncode == 0 and json.loads(ended.stdout)["makespan"] == 33
    ended = start("-OO", "source_code/gpipe.py", "--microbatches", "5")
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    for program in ("source_code/small/pipeline.py", "tools/make_hosted.py"):
        ended = start("-OO", program, "--help")
        assert (ended.returncode, ended.stderr) == (0, "")


def test_a_warning_that_python_shows_when_asked_to_is_not_ours():
    ended = start("source_code/predict.py", "gpipe", variables={"PYTHONWARNINGS": "error"})
    assert (ended.returncode, ended.stderr) == (0, "")


def test_files_are_utf_8_in_a_posix_locale_too(tmp_path):
    path = tmp_path / "größe.csv"
    path.write_bytes(to_csv(gpipe(2, 2)).encode("utf-8-sig"))
    posix = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    svg = tmp_path / "größe.svg"
    words = ["source_code/predict.py", str(path), "--svg", str(svg)]
    ended = start(*words, variables=posix)
    assert ended.returncode == 0, ended.stderr
    assert "2 ranks" in svg.read_text(encoding="utf-8") and "gr\\udcc3" in ended.stdout


def test_a_name_that_is_no_utf_8_is_printed_with_escapes(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff.csv"
    with open(path, "wb") as file:
        file.write(to_csv(gpipe(2, 2)).encode())
    ended = start("source_code/predict.py", path)
    assert ended.returncode == 0 and ended.stdout.startswith("\\udcff: 2 ranks")


@pytest.mark.further
@pytest.mark.parametrize("how", ["closed", "a pipe that nobody reads", "a full disk"])
def test_an_output_that_nobody_can_read_costs_its_text_and_not_the_run(tmp_path, how):
    words = ["source_code/gpipe.py", *TINY.split(), "--steps", "3"]
    words += ["--losses", str(tmp_path / "losses"), "--device", "cpu"]
    if how == "closed":
        ended = start(*words, stdout=None, preexec_fn=lambda: os.close(1))
    elif how == "a full disk":
        with open("/dev/full", "w") as full:
            ended = start(*words, stdout=full)
    else:
        reader, writer = os.pipe()
        os.close(reader)
        ended = start(*words, stdout=writer)
        os.close(writer)
    assert len((tmp_path / "losses").read_text().splitlines()) == 3
    if how == "closed":
        assert (ended.returncode, ended.stderr) == (0, "")
    else:
        assert ended.returncode == 1
        assert "standard output was not written" in ended.stderr and "\n" not in ended.stderr[:-1]


@pytest.mark.parametrize("place", ["log", "/dev/stdout"])
def test_no_output_takes_the_place_of_the_file_that_is_printed_into(tmp_path, place):
    with open(tmp_path / "log", "w") as log:
        path = str(tmp_path / place)  # which is `place` itself, if that begins with a slash
        ended = start("source_code/predict.py", "gpipe", "--csv", path, stdout=log)
    assert ended.returncode == 2
    assert ended.stderr == f"--csv {path} is where this program prints; name another file\n"


@pytest.mark.further
def test_a_standard_error_that_is_closed_costs_its_text_and_not_the_run():
    closed = {"preexec_fn": lambda: os.close(2)}
    ended = start("source_code/gpipe.py", *TINY.split(), "--device", "cpu", **closed)
    assert ended.returncode == 0 and "step 0  loss " in ended.stdout
    ended = start("source_code/predict.py", "gpipe", "--ranks", "0", "--json", **closed)
    assert (ended.returncode, ended.stdout) == (2, "")


UNHEARD = "import sys; from guard.printing import keep_running_unheard; keep_running_unheard(); "


@pytest.mark.parametrize(("how", "status"), [("a pipe that nobody reads", 1), ("a full disk", 7)])
def test_errors_on_a_full_disk_do_not_end_a_run_and_without_a_reader_it_ends(how, status):
    """As with `> log 2>&1`, and as when the kernel of a notebook has been killed."""
    if how == "a full disk":
        writer = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, writer = os.pipe()
        os.close(reader)
    program = UNHEARD + "print(1); print(2, file=sys.stderr, flush=True); sys.exit(7)"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=SOURCE, stdout=writer, stderr=writer, timeout=60
    )
    os.close(writer)
    assert ended.returncode == status


@pytest.mark.parametrize("closed", [(0, 2), (0, 1, 2), (1, 2), (0, 1)])
def test_no_file_of_a_run_gets_the_number_of_a_closed_stream(tmp_path, closed):
    """To these numbers torch prints, too."""
    program = UNHEARD + "sys.exit(open(sys.argv[1], 'w').fileno())"
    ended = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "file"], cwd=SOURCE, timeout=60,
        preexec_fn=lambda: [os.close(number) for number in closed],
    )  # fmt: skip
    assert ended.returncode > 2


@pytest.mark.parametrize(
    "words_of", ["predict.py gpipe --csv a.csv", "copy_template.py gpipe.py a"]
)
def test_a_current_folder_that_is_gone_is_one_sentence(words_of, tmp_path):
    (tmp_path / "gone").mkdir()
    words = f'cd "{tmp_path}/gone" && rmdir "{tmp_path}/gone" && exec "$@"'
    command = [sys.executable, *f"{ROOT}/source_code/{words_of}".split()]
    ended = subprocess.run(
        ["sh", "-c", words, "sh", *command], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("the current folder cannot be used")


def test_what_is_printed_leaves_in_one_piece_since_ranks_share_a_pipe(monkeypatch):
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)  # keeps pieces apart
    reader.settimeout(5)
    with reader, writer:
        with open(os.dup(writer.fileno()), "w") as stream, Output(stream) as output:
            print("rank 0 waits", "for rank 1", "\n  queued: a message", file=output)
        assert reader.recv(999).decode() == "rank 0 waits for rank 1 \n  queued: a message\n"
        with open(os.dup(writer.fileno()), "w") as stream:
            monkeypatch.setattr(sys, "stderr", stream)
            monkeypatch.setattr(ending.os, "_exit", sys.exit)
            monkeypatch.setattr(ending, "ending", threading.Lock())
            with pytest.raises(SystemExit):
                ending.end_process("rank 1 waits for rank 0\n  queued: a message")
        assert reader.recv(999).decode() == "rank 1 waits for rank 0\n  queued: a message\n"


# The promise


@pytest.mark.parametrize(
    ("flags", "promised"),
    [
        ("", True),
        ("--dim 16 --layers 32", True),
        ("--dim 8", False),
        ("--layers 33", False),
        ("--learning-rate 0.6", True),
        ("--learning-rate 0.61", False),
    ],
)
def test_1e_12_is_promised_from_dim_16_up_to_32_layers_and_3_times_the_rate(flags, promised):
    from pipeline.one_process import is_promised
    from pipeline.training import training_parser

    arguments = training_parser("").parse_args(flags.split())
    arguments.learning_rate = arguments.learning_rate or 0.2
    assert is_promised(arguments) is promised


@pytest.mark.further
@pytest.mark.processes
def test_what_is_not_compared_with_one_process_is_not_called_as_promised(capsys):
    from pipeline.one_process import losses_agree

    one_process = [0.0] * 200 + [5.0]
    assert losses_agree("float64", [0.0, 5.0], one_process, 199)
    assert "as promised" in capsys.readouterr().out
    assert losses_agree("float64", [4.0], one_process, 200)
    said = capsys.readouterr().out
    assert "1.0e+00, and nothing is promised from step 200 on" in said and "as p" not in said
    assert losses_agree("float64", [], one_process, 201)
    said = capsys.readouterr().out
    assert "there is no loss to compare" in said and "as promised" not in said
    assert not losses_agree("float64", [0.1, 5.0], one_process, 199)


def test_beyond_its_range_the_script_says_that_nothing_is_promised():
    """The setting of width 2 in which one process already differs from itself by 9e-10."""
    flags = "--heads 1 --kv-heads 1 --dim 2 --seq-len 16 --seed 1 --batch-size 16 --layers 9"
    ended = start("source_code/gpipe.py", *flags.split(), "--verify", "--device", "cpu")
    assert ended.returncode == 0, ended.stderr
    last = ended.stdout.splitlines()[-1] if ended.stdout else ""
    assert "and nothing is promised for these flags, only from --dim 16 on" in ended.stdout, last


# Tokenizers


def test_a_tokenizer_that_leaves_numbers_out_has_room_for_its_largest(tmp_path):
    from extensions.pretraining.tokens import load_corpus
    from pipeline.data import DataError, load_text

    words = {"<unk>": 0, "the": 299, "pipeline": 300}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
    split = {"type": "Whitespace"}
    tokenizer = {"version": "1.0", "model": model, "pre_tokenizer": split}
    tokenizer["truncation"] = {"max_length": 5, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}  # fmt: skip
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer))
    corpus = load_corpus(load_text(), 301, path, seq_len=4)
    assert corpus.num_tokens == 301 and int(corpus.training.max()) == 300
    assert len(corpus.training) > 1000  # all of the text, whatever the file says of cutting
    with pytest.raises(DataError, match="less than the 301 tokens of the tokenizer"):
        load_corpus(load_text(), 300, path, seq_len=4)


def test_a_tokenizer_that_lacks_the_words_of_the_text_is_named(tmp_path):
    from extensions.pretraining.tokens import load_corpus
    from pipeline.data import DataError, load_text

    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    with pytest.raises(DataError, match="cannot encode the text"):
        load_corpus(load_text(), 300, tmp_path / "tokenizer.json", seq_len=4)


def replacing(*pairs):
    """Normalizers or decoders, as JSON, that replace the first of each pair by the second."""
    patterns = ({"String": one} if isinstance(one, str) else one for one, _ in pairs)
    contents = (content for _, content in pairs)
    return [
        {"type": "Replace", "pattern": one, "content": content}
        for one, content in zip(patterns, contents)
    ]


def doubling(times):
    return replacing(*[("a", "aa")] * times)


def with_replacements(path, normalizers=(), decoders=()):
    tokenizer = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": list(normalizers)}
    tokenizer["decoder"] = {"type": "Sequence", "decoders": list(decoders)}
    path.write_text(json.dumps(tokenizer))
    return path


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizers": doubling(12)},
        {"normalizers": [{"type": "NFC"}, {"type": "Sequence", "normalizers": doubling(12)}]},
        {"normalizers": replacing(*[("äb", "äbäb")] * 12)},
        {"normalizers": replacing(*[({"Regex": "[b-z]"}, "xyz")] * 12)},
        {"normalizers": replacing(("a", "b" * 2**20))},
        {"normalizers": [{"type": "Prepend", "prepend": "b" * 2**20}]},
        {"normalizers": replacing(*[("“", '"')] * 501)},
        {"normalizers": [*replacing(("a", "AA")), {"type": "Lowercase"}] * 12},
        {"decoders": doubling(12)},
    ],
)
def test_a_tokenizer_that_makes_a_letter_into_endless_ones_is_refused(parts, tmp_path):
    from extensions.pretraining.tokens import read_tokenizer
    from pipeline.data import DataError

    path = with_replacements(tmp_path / "tokenizer.json", **parts)
    with pytest.raises(DataError, match="one letter by more than 64; use another tokenizer"):
        read_tokenizer(path)


def test_a_tokenizer_may_spell_out_many_signs(tmp_path):
    from extensions.pretraining.tokens import read_tokenizer

    signs = replacing(*[(chr(8528 + number), "1/10") for number in range(100)])
    begin = {"type": "Prepend", "prepend": "▁"}
    parts = {"normalizers": [begin, {"type": "NFKC"}, *signs], "decoders": replacing(("▁", " "))}
    tokenizer = read_tokenizer(with_replacements(tmp_path / "tokenizer.json", **parts))
    assert tokenizer.normalizer.normalize_str("a") == "▁a"


@pytest.mark.parametrize("name", ["lock", "latest", "run-0001/step-00000001/checkpoint.json"])
def test_a_pipe_in_a_folder_of_checkpoints_is_not_waited_for(tmp_path, name):
    temporary = checkpoint_folder.begin_writing(tmp_path, "run-0001", 1)
    description = {**COUNTED, "configuration": {}, "files": {}}
    checkpoint_folder.publish(temporary, tmp_path, "run-0001", 1, description, keep=1)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(checkpoint_folder.CheckpointError):
        checkpoint_folder.find_checkpoint(tmp_path)
        checkpoint_folder.claim(tmp_path)


def test_a_pipe_in_place_of_an_old_checkpoint_is_not_waited_for_when_it_would_be_removed(
    tmp_path, capsys
):
    run = tmp_path / "run-0001"
    temporary = checkpoint_folder.begin_writing(tmp_path, run.name, 2)
    for name in ("step-00000001", ".writing-step-00000003-abcd"):
        os.mkfifo(run / name)
    description = {**COUNTED, "configuration": {}, "files": {}}
    checkpoint_folder.publish(temporary, tmp_path, run.name, 2, description, keep=1)
    assert "step-00000001 cannot be removed (Not a directory)" in capsys.readouterr().err
    checkpoint_folder.remove_leftovers(tmp_path)
    assert (run / "step-00000002").is_dir()


def test_a_number_of_thousands_of_digits_is_no_json_and_gets_no_advice_about_python(tmp_path):
    (tmp_path / "long.json").write_text("9" * 5000)
    with pytest.raises(InputError, match=r"long\.json is not JSON") as refused:
        read_json(tmp_path / "long.json")
    assert "sys." not in str(refused.value)
