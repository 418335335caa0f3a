"""Bad input is refused before the first message: one sentence that names the flag, status 2.

Importing torch takes seconds, so most cases call a script's main() in this process, where a rank
that wants to meet the others ends; four start the real thing.
"""

import errno
import functools
import importlib
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from further import first_of
from ranks import run_on_ranks
from saved_models import write_model

from extensions.tensor_parallel import mesh
from extensions.torch_pipelining import library
from files.outputs import write_whole
from guard import one_sentence, sizes
from lab.checks import check_pace_per_layer
from lab.simulator import Costs
from pipeline import training
from pipeline.command_line import Parser
from pipeline.data import load_text
from pipeline.model import ModelConfig
from pipeline.schedules import gpipe
from pipeline.schedules.text_form import to_csv

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "source_code"
SCRIPTS = sorted(
    path.stem
    for path in SOURCE.glob("*.py")
    if "training_parser" in path.read_text() and not path.stem.startswith("broken_")
)
COUNTS = "steps batch-size microbatches layers dim heads kv-heads seq-len".split()

# Flags, and what the sentence must name.
CASES = [
    *((f"--{count} {text}", f"--{count}") for count in COUNTS for text in ("0", "-3", "two")),
    *((f"--{count} {2**80}", f"--{count}") for count in COUNTS),
    ("--steps 2.5", "--steps"),
    ("--steps ''", "--steps"),
    ("--steps 'two\nlines'", "--steps"),
    ("--steps", "--steps"),
    ("--batch-size 16 --microbatches 5", "--microbatches"),
    ("--batch-size 2 --microbatches 4", "--microbatches"),
    ("--heads 3", "--heads"),
    ("--dim 12 --heads 4", "--heads"),  # divides, into heads of the odd width 3
    ("--heads 4 --kv-heads 3", "--kv-heads"),
    ("--heads 4 --kv-heads 8", "--kv-heads"),
    ("--dim 2000000000 --heads 1 --kv-heads 1", "--dim"),
    ("--batch-size 2000000000", "--batch-size"),
    ("--layers 2000000000", "--layers"),
    *((f"--learning-rate {text}", "--learning-rate") for text in "0 -1 nan inf 1e999 abc".split()),
    ("--learning-rate 3.5e38 --dtype float32", "--learning-rate"),  # beyond the type
    ("--learning-rate 3.3e38 --dtype bfloat16 --optimizer adamw", "--learning-rate"),
    ("--steps ٠", "--steps"),  # a zero that is not "0"
    ("--timeout ٣", "--timeout"),
    *((f"{flag} 1_0", flag) for flag in ("--timeout", "--steps", "--learning-rate", "--seed")),
    ("--seed ٣", "--seed"),
    ("--seed abc", "--seed"),
    ("--seed -1", "--seed"),
    ("--seed 1.5", "--seed"),
    ("--seed 2147483648", "--seed"),
    ("--optimizer adam", "--optimizer"),
    ("--dtype float16", "--dtype"),
    ("--dtype ''", "--dtype"),
    ("--device gpu", "--device"),
    ("--device cuda", "--device"),  # this process sees no GPU
    ("--cut 4,5", "--cut"),
    ("--cut 2,2,4", "--cut"),  # three stages, one rank
    ("--cut 0,8", "--cut"),
    ("--cut a", "--cut"),
    ("--cut ''", "--cut"),
    ("--cut 8,", "--cut"),
    ("--pace", "--pace"),
    ("--pace 10", "--pace"),
    ("--pace 10 abc", "--pace"),
    ("--pace 10 0", "--pace"),
    ("--pace 10 20 20", "--pace"),  # the weights' part is all of the backward
    ("--pace 10 20 5 1", "--pace"),
    ("--pace 1 1e300", "--pace"),
    ("--pace 1000 2000 --timeout 2", "--pace"),  # the others would take it for lost
    *((f"--timeout {text}", "--timeout") for text in "-1 0 0.5 nan inf 1e300 abc".split()),
    ("--data ''", "--data"),
    ("--seq-len 1000000", "--seq-len"),  # longer than the text
    ("--losses ''", "--losses"),
    ("--timeline ''", "--timeline"),
    ("--record ''", "--record"),
    ("--no-such-flag", "--no-such-flag"),
    ("surplus", "surplus"),
    ("--step 3", "--step"),  # no abbreviations: a later flag could change what they mean
]


class Accepted(Exception):
    """Raised where a script wants to meet the other ranks: it has taken its flags."""


def call(monkeypatch, *words):
    """Call a script's main() as its command line does, as far as the first message.

    Raises Accepted there, and SystemExit where the flags are refused.
    """
    module = importlib.import_module(words[0].removesuffix(".py"))

    def meet(*arguments, **options):
        raise Accepted

    for joins in (training, library, mesh, module):
        monkeypatch.setattr(joins, "join_job", meet, raising=joins is not module)
    monkeypatch.setattr(sys, "argv", [*words])
    module.main()


@functools.cache
def schedule_file(ranks):
    """A schedule for train.py, which refuses to start without one."""
    path = Path(tempfile.mkdtemp()) / "schedule.csv"
    path.write_text(to_csv(gpipe(ranks, 8)))
    return str(path)


@functools.cache
def saved_model():
    """A model for finetune.py, of the sizes that the flags of others have by default."""
    folder = Path(tempfile.mkdtemp()) / "model"
    return str(write_model(folder, layers=8, dim=32, head_dim=8, longest=128))


def call_of(script, ranks=1):
    """The script and what it cannot do without."""
    needed = {
        "train": lambda: [schedule_file(ranks)],
        "finetune": lambda: ["--model", saved_model()],
    }
    return [f"{script}.py", *needed.get(script, list)()]


def options_of(monkeypatch, script):
    """All options of a script's parser, at the moment at which it reads the flags."""
    parsers = []
    parse = Parser.parse_args

    def seen(parser, *words):
        parsers.append(parser)
        return parse(parser, *words)

    monkeypatch.setattr(Parser, "parse_args", seen)
    with pytest.raises(Accepted):
        call(monkeypatch, *call_of(script))
    return {option for option in parsers[0]._option_string_actions if option.startswith("--")} - {
        "--help"
    }


class Refusal:
    """What one script said and returned for some flags, as one rank of several."""

    def __init__(self, monkeypatch, capsys):
        self.monkeypatch, self.capsys = monkeypatch, capsys
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        # The other ranks of a node wait before they speak, which needs no time here.
        monkeypatch.setattr(one_sentence, "WAIT", 0.0)
        for name in [name for name in os.environ if name.startswith(("SLURM_", "LOCAL_"))]:
            monkeypatch.delenv(name)

    def __call__(self, script, *flags, rank=0, ranks=1):
        """(exit status, standard error); fails unless the flags are refused."""
        self.monkeypatch.setenv("RANK", str(rank))
        self.monkeypatch.setenv("LOCAL_RANK", str(rank))
        self.monkeypatch.setenv("WORLD_SIZE", str(ranks))
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            call(self.monkeypatch, *call_of(script, ranks), *flags)
        printed = self.capsys.readouterr()
        assert printed.out == ""
        return end.value.code, printed.err

    def check(self, script, *flags, names, ranks=1):
        status, sentence = self(script, *flags, ranks=ranks)
        assert status == 2
        assert sentence.count("\n") == 1 and sentence.endswith("\n"), sentence
        assert names in sentence
        assert "Traceback" not in sentence
        return sentence


@pytest.fixture
def refusal(monkeypatch, capsys):
    return Refusal(monkeypatch, capsys)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(("flags", "named"), CASES, ids=[repr(flags) for flags, _ in CASES])
def test_a_bad_flag_is_refused_in_one_sentence_that_names_it(refusal, script, flags, named):
    refusal.check(script, *shlex.split(flags), names=named)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--pace-per-layer", "give --pace, too"),
        ("--pace-per-layer --pace 10 300 --timeout 2", "a stage with 8 layers takes 2400 ms"),
    ],
)
def test_a_pace_per_layer_without_a_pace_or_too_slow_is_refused(refusal, flags, named):
    assert "--pace-per-layer" in refusal.check("train", *flags.split(), names=named)


@pytest.mark.parametrize(
    ("sizes", "layers"),
    [
        ({"num_ranks": 1, "chunks": 2}, 4),
        ({"num_ranks": 1, "schedule": "zb-v"}, 4),
        ({"num_ranks": 4, "replicas": 2}, 4),
        ({"num_ranks": 4, "replicas": [2, 1, 1]}, 3),
        ({"num_ranks": 2}, 4),
        ({"num_ranks": 2, "cut": "auto"}, 4),
        ({"num_ranks": 2, "cut": [1, 7]}, 7),
    ],
)
def test_the_pace_per_layer_counts_the_layers_of_a_stage(sizes, layers):
    flags = SimpleNamespace(**{"pace_per_layer": True, "cut": None, "layers": 8, **sizes})
    flags.pace_costs, flags.timeout = Costs(100, 300), 0.3 * layers + 0.1
    check_pace_per_layer(flags)
    flags.timeout -= 0.1
    with pytest.raises(SystemExit, match=f"a stage with {layers} layers takes {300 * layers} ms"):
        check_pace_per_layer(flags)


def test_a_pace_by_work_that_outlasts_the_timeout_is_refused(refusal):
    flags = "--pace 8000 16000 --timeout 60 --vocabulary 928".split()
    assert "takes 166667 ms" in refusal.check("vocabulary_parallel", *flags, names="--pace")


@pytest.mark.parametrize(("dtype", "gigabytes"), [("bfloat16", 12), ("float64", 46)])
def test_the_memory_of_weights_is_that_of_their_type(monkeypatch, dtype, gigabytes):
    flags = SimpleNamespace(num_ranks=1, batch_size=1, microbatch_size=1)
    flags.config = ModelConfig(32, 4096, 32, 8, 64, 128256)
    flags.torch_dtype = getattr(torch, dtype)
    monkeypatch.setattr(sizes, "memory_of_machine", lambda: (gigabytes + 1) * 2**30)
    sizes.check_memory(flags)
    monkeypatch.setattr(sizes, "memory_of_machine", lambda: (gigabytes - 1) * 2**30)
    with pytest.raises(SystemExit, match="GiB per rank"):
        sizes.check_memory(flags)


def pace_of_a_run(rank, *words):
    """The pace that the lab of this rank of train.py attached."""
    import train

    from lab import attach

    observe, paces = attach.observe, []

    def noted(*arguments, **options):
        laboratory = observe(*arguments, **options)
        paces.append(laboratory.clock.pace)
        return laboratory

    attach.observe = noted
    sys.argv = ["train.py", *shlex.split(" ".join(words))]
    assert train.main() == 0
    return paces[0]


@pytest.mark.further
def test_a_stage_takes_the_pace_of_each_of_its_layers(tmp_path):
    file = tmp_path / "two.csv"
    file.write_text(to_csv(gpipe(2, 8)))
    flags = "--layers 3 --cut 1,2 --pace 10 20 5 --pace-per-layer --steps 1"
    paces = run_on_ranks(pace_of_a_run, 2, str(file), flags)
    assert paces[0] == paces[1]
    paced = paces[0]
    assert (paced.forward, paced.backward, paced.backward_weight) == ([10, 20], [20, 40], [5, 10])


@pytest.mark.parametrize("script", SCRIPTS)
def test_good_flags_are_accepted(refusal, monkeypatch, tmp_path, script):
    flags = ["--timeline", str(tmp_path / "timeline"), "--losses", str(tmp_path / "losses")]
    with pytest.raises(Accepted):
        call(monkeypatch, *call_of(script), "--pace", "10", "20", *flags)
    assert list(tmp_path.iterdir()) == []  # looking whether a file can be written leaves none


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("flags", ["--layers 3", "--cut 4,4", "--steps 0", "--seed -1"])
def test_all_ranks_leave_with_the_same_sentence_and_status(refusal, script, flags):
    words = [*flags.split(), *(["--tensor", "1"] if "tensor_parallel" in script else [])]
    sentence = refusal.check(script, *words, names=words[0], ranks=4)
    for rank in (1, 3):
        assert refusal(script, *words, rank=rank, ranks=4) == (2, sentence)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("content", [None, b"", b"too short", bytes(329)])
def test_a_text_that_is_missing_empty_or_too_short_is_refused(refusal, tmp_path, script, content):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    assert str(path) in refusal.check(script, "--data", str(path), names="--data")


def test_a_text_of_any_letters_is_accepted_from_the_shortest_length_on(
    refusal, monkeypatch, tmp_path
):
    path = tmp_path / "junk"
    path.write_text("ß" * 165)  # 10 x (32 + 1) bytes
    with pytest.raises(Accepted):
        call(monkeypatch, "gpipe.py", "--data", str(path))
    assert len(load_text(path, 32).held_out) == 33


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_folder_or_a_pipe_is_no_text(refusal, tmp_path, script):
    refusal.check(script, "--data", str(tmp_path), names="--data")
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    refusal.check(script, "--data", str(tmp_path / "pipe"), names="--data")


def test_a_file_without_a_size_is_named_before_it_is_read(refusal, monkeypatch, tmp_path):
    (tmp_path / "empty").touch()  # so is /proc/kmsg, where a read waits for the next message
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} was read"))
    refusal.check("gpipe", "--data", str(tmp_path / "empty"), names="--data")


def test_a_text_that_is_larger_than_the_memory_is_named_before_it_is_read(refusal, tmp_path):
    text = tmp_path / "text"
    text.touch()
    os.truncate(text, 2**40)  # one hole, which takes no room on the disk
    assert "1,099,511,627,776 bytes" in refusal.check("gpipe", "--data", str(text), names="--data")


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("flag", ["--timeline", "--losses", "--record"])
def test_an_output_that_cannot_be_written_is_refused(refusal, tmp_path, script, flag):
    os.mkfifo(tmp_path / "pipe")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    # Permissions do not stop root, which may write there; /proc stops everybody.
    closed = Path("/proc") if os.geteuid() == 0 else closed
    for path in (
        tmp_path / "missing" / "file",
        tmp_path,
        tmp_path / "pipe",
        tmp_path / ("x" * 300),
        closed / "file",
    ):
        refusal.check(script, flag, str(path), names=flag)


def test_a_recording_goes_into_a_new_folder_or_an_empty_one(refusal, monkeypatch, tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in ("new", "new/", "empty"):
        with pytest.raises(Accepted):
            call(monkeypatch, "gpipe.py", "--record", f"{tmp_path}/{folder}")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    (tmp_path / "empty" / "run.json").touch()
    sentence = refusal.check("gpipe", "--record", str(tmp_path / "empty"), names="--record")
    assert "name a new folder, or empty this one" in sentence


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_output_may_overwrite_another_or_the_text(refusal, tmp_path, script):
    text = tmp_path / "text"
    text.write_text("x" * 1000)
    one, same = str(tmp_path / "file"), str(tmp_path / "." / "file")
    refusal.check(script, "--timeline", one, "--losses", same, names="--timeline and --losses")
    refusal.check(script, "--data", str(text), "--losses", str(text), names="--losses and --data")


def test_only_a_regular_file_is_ever_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # stands for /dev/null, which root could replace
    with pytest.raises(OSError) as refused:
        write_whole(tmp_path / "pipe", "text")
    assert refused.value.errno == errno.EINVAL
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "text"


def test_one_process_with_several_stages_has_no_ranks(refusal, tmp_path):
    def check(*flags, names="--single-process", ranks=1):
        refusal.check("naive_model_parallelism", *flags, names=names, ranks=ranks)

    check("--single-process", "4", ranks=2)
    check("--single-process", "4", "--pace", "10", "20")
    check("--single-process", "4", "--timeline", str(tmp_path / "file"))
    check("--single-process", "4", "--record", str(tmp_path / "folder"))
    check("--single-process", "4", "--rehearse", "strict")
    check("--single-process", "0")
    check("--single-process", "all")
    check("--single-process", "9", names="--layers")


def start(*words, **variables):
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_plain_python_ends_with_the_sentence_and_status_2():
    ended = start("source_code/gpipe.py", "--microbatches", "5")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.count("\n") == 1 and "--microbatches" in ended.stderr


@pytest.mark.parametrize("rank", first_of([0, 1], 1))
def test_a_rank_refuses_before_it_looks_for_the_others(rank):
    # No other rank exists and nobody listens at this address.
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    ended = start(
        "source_code/naive_model_parallelism.py",
        *("--layers", "1"),
        **{**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"},
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.count("\n") == 1 == ended.stderr.count("--layers")


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_of_a_node_speaks_at_once_and_another_after_a_wait(
    refusal, monkeypatch, rank
):
    waited = []
    monkeypatch.setattr(one_sentence.time, "sleep", waited.append)
    refusal("gpipe", "--learning-rate", "0", rank=rank, ranks=2)
    assert waited == [one_sentence.WAIT] * rank


def test_torchrun_begins_and_ends_with_the_sentence_and_shows_no_traceback_of_the_course():
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ended = start(*launcher, "source_code/gpipe.py", "--learning-rate", "0")
    assert ended.returncode != 0 and ended.stdout == ""
    first, *_, last, _ = ended.stderr.splitlines()
    assert first.startswith("--learning-rate") and last.endswith(f" : {first}")
    for line in ended.stderr.splitlines():
        # On a loaded machine torchrun may end the other rank only after it has spoken, too.
        assert "--learning-rate" not in line or line.endswith(first), line
        assert not (line.lstrip().startswith("File ") and "source_code" in line), line
