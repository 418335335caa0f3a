"""Every reader of a file either returns what can be used or ends in one sentence of its own class.

Seeded damage: 200 inputs per reader here, 10,000 with `make soak`. What has a checksum is returned
unchanged or not at all.
"""

import io
import json
import resource
import shutil
import time

import copy_template
import grade_submissions
import make_submission
import prepare_data
import pytest
import torch
from damage import INPUTS, damaged, generator, replace
from further import further
from saved_models import write_model
from test_machine_timing import MODEL, text_of_here
from whole_checkpoints import read_whole

from course import launch, progress
from extensions.checkpointing import checkpoint_folder
from extensions.checkpointing.checkpoint_folder import CheckpointError, check_files
from extensions.pretraining.token_files import load_tokens
from extensions.pretraining.token_writer import check_folder
from extensions.pretraining.tokens import load_corpus
from extensions.real_models.saved_folder import read_model
from files.inputs import InputError
from guard.paths import check_input
from lab.figures import draw_timelines
from lab.flight_log_comparing import compare
from lab.flight_log_reader import RecordingError, describe_unanswered_waits, read_recording
from lab.simulator import Costs, simulate
from lab.timeline import TimelineError, read_timeline, to_chrome_trace
from pipeline.data import DataError, load_text
from pipeline.schedule import ScheduleError
from pipeline.schedules import zb_h1
from pipeline.schedules.legal import check_legal
from pipeline.schedules.text_form import read_csv, to_csv
from planning.forecast import forecast
from planning.known_models import find_model
from planning.machine import Machine, read_machine
from planning.partition import PartitionError, plan_stages, read_profile
from planning.training_plan import Plan

SLOWEST = 10.0  # seconds for one input, on a machine that does much else
MOST_MEMORY = 2**30  # bytes more after all inputs than before
SIZES = "--layers 2 --dim 8 --heads 2 --kv-heads 1 --seq-len 8 --batch-size 4 --microbatches 2"

pytestmark = pytest.mark.timeout(max(300, INPUTS))


def peak_memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def attack(reader, path, read, errors, contents=None):
    """Damage the file, or one of the files in the folder `path`, again and again, and read it.

    `read(path)` uses what it reads and returns whether that is right. Returns how many inputs were
    read and how many were rejected.
    """
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    whole = {file: file.read_bytes() for file in files}
    assert read(path)
    before, outcomes = peak_memory(), {True: 0, False: 0}
    for number in range(INPUTS):
        rng = generator(reader, number)
        file = rng.choice(files)
        replace(file, damaged(whole[file], rng), rng)
        started = time.perf_counter()
        try:
            outcomes[True] += 1
            assert read(path), f"input {number} of {reader} is read as something else"
        except errors as error:
            outcomes[True] -= 1
            outcomes[False] += 1
            assert "\n" not in str(error) and 10 < len(str(error)) < 1000, (number, error)
        except Exception as error:
            raise AssertionError(f"input {number} of {reader}: {type(error).__name__}") from error
        assert time.perf_counter() - started < SLOWEST, f"input {number} of {reader}"
        replace_back(file, whole[file])
    assert peak_memory() - before < MOST_MEMORY
    assert read(path)
    return outcomes[True], outcomes[False]


def replace_back(file, content):
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    file.unlink(missing_ok=True)
    file.write_bytes(content)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the checkpoints, the recording and the timeline of a training run on two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    command = (
        f"distributed_checkpointing.py {SIZES} --steps 2 --save-every 1 --optimizer momentum "
        f"--checkpoints {folder}/saved --record {folder}/run --timeline {folder}/timeline.json"
    )
    launch.run(command, 2, warm=True, show=False, limit=60)
    return folder


# Text forms: nothing tells a number from another, so what is read has to be something usable.


def test_schedules(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(zb_h1(4, 4)))

    def read(path):
        check_input("FILE.csv", path)  # as a guarded program does first
        schedule = check_legal(read_csv(path))
        return simulate(schedule, Costs()).makespan > 0 and len(schedule.messages) >= 0

    assert all(
        attack("schedules", path, read, (OSError, UnicodeDecodeError, ScheduleError, SystemExit))
    )


def test_timelines(tmp_path):
    path = tmp_path / "timeline.json"
    path.write_text(to_chrome_trace(simulate(zb_h1(3, 3), Costs())))

    def read(path):
        timeline = read_timeline(path)
        return "<svg" in draw_timelines({"performed": timeline}).svg and timeline.ideal > 0

    assert all(attack("timelines", path, read, TimelineError))


def test_recordings(trained):
    expected = read_recording(trained / "run")

    def read(path):
        recording = read_recording(path)
        describe_unanswered_waits(recording)
        for number, _ in enumerate(recording.steps):
            assert recording.timeline(number).makespan > 0
            recording.updates(number)
        try:
            compare(expected, recording, 1e-12)
        except RecordingError:  # of another cut, or without an action
            pass
        return True

    assert all(attack("recordings", trained / "run", read, RecordingError))


def test_profiles(tmp_path):
    path = tmp_path / "profile.json"
    layer = {"forward_ms": 1, "backward_ms": 2.5, "activation_bytes": 3, "parameter_bytes": 4}
    path.write_text(json.dumps({"model": "small", "layers": [layer] * 4}, indent=1))

    def read(path):
        return plan_stages(read_profile(path), 2, 1e9).seconds_per_minibatch >= 0

    assert all(attack("profiles", path, read, PartitionError))


def test_machines_that_were_measured(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(text_of_here()))
    model, plan = MODEL, Plan("1f1b", 2, microbatch=2)

    def read(path):
        machine = read_machine(str(path), 2)
        return forecast(model, machine, plan).update >= 0

    assert all(attack("machines", path, read, InputError))


def test_configs_of_models(tmp_path):
    path = tmp_path / "config.json"
    sizes = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    path.write_text(json.dumps({**sizes, "hidden_act": "silu", "vocab_size": 300}))
    machine = Machine(2)

    def read(path):
        model = find_model(str(path), 32, 4)
        return model.parameters > 0 and forecast(model, machine, Plan()).update > 0

    assert all(attack("configs", path, read, InputError))


def test_tokenizers(tmp_path):
    path, text = tmp_path / "tokenizer.json", load_text()
    words = text.training[:2000].to(torch.uint8).numpy().tobytes().decode()
    prepare_data.train_tokenizer(words, 300).save(str(path))
    text = type(text)(text.training[:2000], text.held_out[:1000])

    def read(path):
        corpus = load_corpus(text, 100_000, path, seq_len=4)
        corpus.decode(corpus.held_out[:20].tolist())
        inputs, targets = corpus.batch(0, 4, 4)
        return 0 <= inputs.min() and max(inputs.max(), targets.max()) < corpus.num_tokens

    assert all(attack("tokenizers", path, read, DataError))


def test_texts(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("It was a bright cold day in April. " * 20)

    def read(path):
        check_input("--data", path)  # as a guarded program does first
        text = load_text(path, 8)
        return len(text.held_out) >= 9 and int(text.training.max()) < 256

    assert all(attack("texts", path, read, (DataError, SystemExit)))


# What has checksums: the same to the last bit, or a sentence.


def tensors_of(state, path=()):
    """Every value in nested dictionaries, with its place."""
    for name, value in state.items():
        if isinstance(value, dict):
            yield from tensors_of(value, (*path, name))
        else:
            yield (*path, name), value


def same(state, expected):
    mine, others = dict(tensors_of(state)), dict(tensors_of(expected))
    return mine.keys() == others.keys() and all(
        torch.equal(value, others[place])
        if isinstance(value, torch.Tensor)
        else value == others[place]
        for place, value in mine.items()
    )


@further
def test_checkpoints(trained):
    folder = trained / "saved"
    states = {step: read_whole(checkpoint_folder.find_checkpoint(folder, step)) for step in (1, 2)}

    def read(path):
        checkpoint = checkpoint_folder.find_checkpoint(path)
        if checkpoint is None:
            return False
        check_files(checkpoint, checkpoint.description["files"])
        return same(read_whole(checkpoint), states[checkpoint.step])

    assert all(attack("checkpoints", folder, read, CheckpointError))


def test_checkpoints_whose_checksums_were_made_to_fit(trained, tmp_path):
    shutil.copytree(trained / "saved", tmp_path / "saved")
    folder = tmp_path / "saved" / "run-0001" / "step-00000002"
    description = json.loads((folder / "checkpoint.json").read_text())

    def read(path):
        files = checkpoint_folder.describe_files(folder, "")
        del files["checkpoint.json"]
        forged = {**description, "files": files}
        forged["checksum"] = checkpoint_folder.checksum_of_description(forged)
        (folder / "checkpoint.json").write_text(json.dumps(forged))
        state = read_whole(checkpoint_folder.find_checkpoint(tmp_path / "saved"))
        return isinstance(state, dict)

    read(folder / ".metadata")
    errors = (CheckpointError, InputError, FileNotFoundError)  # the latter two are the forger's
    assert attack("forged checkpoints", folder / ".metadata", read, errors)[1]


def test_token_files(tmp_path, monkeypatch):
    import prepare_data

    (tmp_path / "text.txt").write_text("How work moves through a line of stations.\n\n" * 80)
    words = f"prepare_data.py --data {tmp_path}/text.txt --out {tmp_path}/tokens"
    monkeypatch.setattr("sys.argv", words.split())
    assert not prepare_data.main()
    whole = load_tokens(tmp_path / "tokens", 256, 8).training[:].clone()

    def read(path):
        check_folder(path)
        return torch.equal(load_tokens(path, 256, 8).training[:], whole)

    assert all(attack("token files", tmp_path / "tokens", read, (DataError, InputError)))


# A room's files and saved models, which anybody may have written.


@further
def test_model_folders(tmp_path):
    folder = write_model(tmp_path / "model", layers=2)
    (folder / "tokenizer.json").unlink(missing_ok=True)

    def read(path):
        model = read_model(path, 8)
        part = model.build_part(0, model.settings.layers, torch.float32, "cpu")
        return sum(weight.numel() for weight in part.parameters()) > 0

    assert all(attack("model folders", folder, read, InputError))


@further
def test_progress(tmp_path):
    file = tmp_path / "ada.jsonl"
    line = '{"exercise": "puzzle 1", "outcome": "right", "time": 1700000000.5}'
    file.write_text(f"{line}\n" * 5)

    def read(path):
        people, skipped = progress.read_progress(path.parent)
        return all(map(isinstance, skipped, [str] * len(skipped))) and len(people) <= 1

    assert attack("progress", file, read, ())[0] == INPUTS


@further
def test_submissions(tmp_path):
    file, answer = tmp_path / "ada.json", {"lesson": "12", "exercise": "puzzle 1"}
    answers = [{**answer, "said": "Right: it is", "answer": "rows_1 = ..."}] * 3
    one = {"form": make_submission.FORM, "made": "now", "name": "Ada", "answers": answers}
    file.write_text(json.dumps(one, indent=1))

    def read(path):
        found, skipped = grade_submissions.read_all(path.parent)
        text = grade_submissions.csv_of(found, [])
        page = grade_submissions.page_of(found, skipped, [])
        return text.startswith('"name","file","made"') and page.encode(errors="backslashreplace")

    assert attack("submissions", file, read, ())[0] == INPUTS


# What one types to get a copy of a script.

SCRIPTS = ("gpipe.py", "gpipe", "train.py", "finetune.py", "naive_model_parallelism.py", "plan.py")
PLACES = ("new", "new.py", "below/new", "there", "there/new.py", "file/new", "loop", "random.py")
ODD = ("", " ", ".", "/", "..", "a\nb", "\udcff", "x" * 300, "-", "--", "*", "zb-v,", "é.py")


def words_of_a_copy(rng):
    """Arguments of copy_template.py, of which most are right."""
    words = [rng.choice(SCRIPTS), rng.choice(PLACES)]
    words += rng.choice([[], [], ["--bare"], ["--with-lab"], ["--schedules", "zb-h1,1f1b"]])
    for _ in range(rng.choice((0, 1, 1, 2))):
        words[rng.randrange(len(words))] = rng.choice(ODD)
    if rng.random() < 0.1:
        words.insert(rng.randrange(3), rng.choice(["--bare", "more", *ODD]))
    return words


@further
@pytest.mark.processes  # it takes as long
def test_arguments_of_a_copy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    before, made = set(tmp_path.rglob("*")), 0
    for number in range(INPUTS):
        words = words_of_a_copy(generator("copies", number))
        monkeypatch.setattr("sys.argv", ["copy_template.py", *words])
        said = io.StringIO()  # takes any character, as standard error does
        monkeypatch.setattr("sys.stdout", io.StringIO())
        monkeypatch.setattr("sys.stderr", said)
        try:
            status = copy_template.main()
        except SystemExit as end:
            status = end.code
        said, new = said.getvalue(), set(tmp_path.rglob("*")) - before
        assert status in (0, 2) and (status == 0) == bool(new or "-h" in words), (words, said)
        assert "Traceback" not in said and bool(said) == bool(status), (words, said)
        made += status == 0
        for path in sorted(new, reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        assert (tmp_path / "file").read_text() == "mine", words
    assert made
