"""The changes that docs/your-own-model.md shows are made to fresh copies, which then train."""

import functools
import json
import math
import re
import shutil
import subprocess
import sys

import pytest
import torch
from ranks import run_on_ranks
from saved_models import write_model
from test_copy_template import FLAGS, SMALL, copy, perform, train

from course.failed_run import RunFailed
from course.launch import ROOT
from extensions.bundle import Bundle
from extensions.real_models.saved_folder import read_model

pytestmark = pytest.mark.further  # whole programs of a page

PAGE = ROOT / "docs" / "your-own-model.md"
OWN_TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind.\n" * 50


def diffs_of(heading):
    """{file: its diff} of all diffs that the page shows under a heading."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"^```diff\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return {diff.split()[1]: diff for diff in found}


def changed_lines(diffs):
    return sum(len(re.findall(r"^[+-](?![+-]{2})", diff, re.MULTILINE)) for diff in diffs.values())


def patched(text, diff):
    """`text` with a unified diff applied to it; every line that the diff shows must be there."""
    for hunk in re.split(r"^@@.*@@\n", diff, flags=re.MULTILINE)[1:]:
        lines = [(line[:1] or " ", line[1:]) for line in hunk.splitlines()]
        before = "".join(line + "\n" for sign, line in lines if sign in " -")
        after = "".join(line + "\n" for sign, line in lines if sign in " +")
        assert text.count(before) == 1, f"a fresh copy does not have these lines:\n{before}"
        text = text.replace(before, after)
    return text


def check_numbers(text, diff):
    """Assert that each hunk has as many lines as it says, at the number that it says, for `patch`."""
    for numbers, hunk in re.findall(r"^@@ (.*) @@\n((?:[ +-].*\n)+)", diff, re.MULTILINE):
        start, before, _, after = map(int, re.findall(r"\d+", numbers))
        lines = [line[1:] for line in hunk.splitlines() if line[0] != "+"]
        assert text.splitlines()[start - 1 :][:before] == lines, numbers
        assert len(re.findall(r"^[ +]", hunk, re.MULTILINE)) == after, numbers


def change(folder, diffs):
    """Make the changes in a folder copy."""
    for file, diff in diffs.items():
        path = folder / file
        check_numbers(path.read_text(), diff)
        path.write_text(patched(path.read_text(), diff))


def replace(file, before, after):
    assert file.read_text().count(before) == 1, before
    file.write_text(file.read_text().replace(before, after))


def test_one_file_takes_another_layer_and_other_data_in_20_changed_lines(tmp_path):
    diffs = diffs_of("One file")
    assert changed_lines(diffs) <= 20
    text = (ROOT / "source_code" / "small" / "pipeline.py").read_text()
    (tmp_path / "pipeline.py").write_text(patched(text, diffs["pipeline.py"]))
    (tmp_path / "my_text.txt").write_text(OWN_TEXT)
    for name in "naive", "gpipe", "1f1b", "interleaved":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "4", "pipeline.py", name, "--verify"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        [difference] = re.findall(r"from one process: (\S+)", ended.stdout)
        assert float(difference) <= 1e-12, name


@pytest.mark.parametrize(
    "script, form, heading, file",
    [
        ("gpipe.py", "mine", "Another layer", "pipeline/model.py"),
        ("gpipe.py", "mine.py", "Another layer", "pipeline/model.py"),
        ("zero_bubble.py", "mine", "Another layer", "pipeline/model.py"),
        ("pretrain_llama.py", "mine", "Another model", "pretrain_llama.py"),
    ],
)
def test_fewer_than_20_lines_bring_in_another_model_and_text(
    script, form, heading, file, tmp_path, monkeypatch
):
    diff = diffs_of(heading)[file]
    assert 0 < changed_lines({file: diff}) < 20
    assert copy(script, tmp_path / form) == 0
    copied = tmp_path / form / script if form == "mine" else tmp_path / form
    changed = tmp_path / form / file if form == "mine" else copied
    if form == "mine":
        check_numbers(changed.read_text(), diff)
    changed.write_text(patched(changed.read_text(), diff))
    (tmp_path / "my_text.txt").write_text(OWN_TEXT)
    flags = f"{FLAGS.get(script, SMALL)} --data {tmp_path / 'my_text.txt'}"
    monkeypatch.setitem(FLAGS, script, flags)
    losses = train(copied, script, tmp_path)  # with --verify
    assert losses[-1] < losses[0]


def test_32_lines_make_a_vision_transformer_that_learns_labels_of_images(tmp_path, monkeypatch):
    diffs = diffs_of("Images and labels")
    assert changed_lines(diffs) == 32
    assert copy("gpipe.py", tmp_path / "mine") == 0
    change(tmp_path / "mine", diffs)
    [flags] = re.findall(r"^torchrun .* gpipe.py (.* --steps 60) --verify$", PAGE.read_text(), re.M)
    monkeypatch.setitem(FLAGS, "gpipe.py", f"{flags} --device cpu")
    losses = train(tmp_path / "mine" / "gpipe.py", "gpipe.py", tmp_path)  # with --verify
    guess, stated = re.search(
        r"begins a little above ([\d.]+) nats.*? below ([\d.]+)\.\s", PAGE.read_text()
    ).groups()
    assert f"{math.log(4):.2f}" == guess and math.log(4) < losses[0] < 1.2 * math.log(4)
    assert losses[-1] < float(stated)


OWN_MODELS = ROOT / "docs" / "own-models"
FILES = sorted(path.stem for path in OWN_MODELS.glob("*.diff"))
NAMES = [name for name in FILES if name != "lora-finetune"]  # changes of train.py
WAYS = "1f1b", "interleaved-1f1b", "zb-v", "1f1b --recompute layer", "zb-v --recompute layer"


def changes_of(name):
    """{file: its diff} of the file in docs/own-models."""
    diffs = re.split(r"^(?=--- )", (OWN_MODELS / f"{name}.diff").read_text(), flags=re.MULTILINE)
    return {diff.split()[1]: diff for diff in diffs if diff}


@pytest.fixture(scope="module")
def changed_copies(tmp_path_factory):
    """A function: the folder of a copy with the changes of a model."""

    @functools.cache
    def of(name, script="train.py"):
        folder = tmp_path_factory.mktemp(name) / "mine"
        assert copy(script, folder) == 0
        if name in ("encoder-decoder", "experts", "dropout"):
            shutil.copy(ROOT / "source_code" / "extensions" / "bundle.py", folder / "extensions")
        shown = name == "vision-transformer"  # on the page itself
        change(folder, diffs_of("Images and labels") if shown else changes_of(name))
        return folder

    return of


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [*NAMES, "vision-transformer"])
def test_a_model_of_the_table_trains_as_one_process_with_every_cut(
    name, ranks, changed_copies, tmp_path
):
    script = changed_copies(name) / "train.py"
    small = "--steps 3 --batch-size 8 --microbatches 4 --dim 16 --seq-len 16 --layers 8"
    for number, way in enumerate(WAYS):
        flags = f"{small} --device cpu --verify --schedule {way}".split()
        printed = tmp_path / f"{number}.txt"
        run_on_ranks(perform, ranks, script, flags, str(printed))
        assert "as promised" in printed.read_text(), way
        losses = re.findall(r"^step \d+  loss (\S+)$", printed.read_text(), re.MULTILINE)
        assert len(losses) == 3 and losses[0] != losses[2], way


@pytest.mark.parametrize("flags", ["", "--schedule zb-v --recompute layer", "--dtype bfloat16"])
def test_lora_in_finetune_trains_adapters_only_and_saves_a_model_without_them(
    flags, changed_copies, tmp_path
):
    script, saved = changed_copies("lora-finetune", "finetune.py") / "finetune.py", tmp_path / "new"
    started = write_model(tmp_path / "old", layers=8)
    small = f"--steps 6 --batch-size 4 --microbatches 4 --seq-len 8 --model {started}"
    flags = f"{small} --device cpu --learning-rate 0.009 --dtype float64 {flags} --verify --save {saved}"
    printed = tmp_path / "printed.txt"
    run_on_ranks(perform, 4, script, flags.split(), str(printed))
    assert "as promised" in printed.read_text()
    before, after = read_model(started, 8), read_model(saved, 8)
    assert before.tensors.keys() == after.tensors.keys()
    for name in before.tensors:
        pair = [model.tensors[name].read().double() for model in (before, after)]
        largest = (pair[0] - pair[1]).abs().max()
        rounded = 0.01 if "bfloat16" in flags else 0.0
        assert (largest > 0.003) if "q_proj" in name else (largest <= rounded), name


def test_frozen_layers_of_finetune_are_verified_with_the_line_that_the_page_names(tmp_path):
    [line] = re.findall(r"`(return build_model_part[^`]*)`", PAGE.read_text())
    assert copy("finetune.py", tmp_path / "mine") == 0
    script = tmp_path / "mine" / "finetune.py"
    made = "    return arguments.saved.build_part(first, last, dtype, device)\n"
    frozen = made.replace("return", "part =") + "    part.layers.requires_grad_(False)\n"
    replace(script, made, f"{frozen}    return part\n")
    (tmp_path / "before").mkdir()
    with pytest.raises(RunFailed):
        train(script, "finetune.py", tmp_path / "before", "--learning-rate 0.009")
    assert "MORE THAN PROMISED" in (tmp_path / "before" / "printed.txt").read_text()
    library = "return library_model(arguments.model_folder, arguments.torch_dtype, device)"
    replace(script, library, line)
    train(script, "finetune.py", tmp_path, "--learning-rate 0.009")


def test_another_loss_of_pretrain_llama_is_changed_in_both_places_that_the_page_names(tmp_path):
    name, file, other = re.search(
        r"step 5 `(\w+)` in `(\S+)` .*?`(\w+)`", PAGE.read_text()
    ).groups()
    assert (name, other) == ("SummedLoss", "token_loss")
    assert copy("pretrain_llama.py", tmp_path / "mine") == 0
    script, model = (
        tmp_path / "mine" / path for path in ("pretrain_llama.py", "pipeline/model.py")
    )
    replace(model, "return F.cross_entropy(", "return 2 * F.cross_entropy(")
    (tmp_path / "before").mkdir()
    with pytest.raises(RunFailed):
        train(script, script.name, tmp_path / "before")
    assert "MORE THAN PROMISED" in (tmp_path / "before" / "printed.txt").read_text()
    summed = tmp_path / "mine" / file
    replace(summed, "total + F.cross_entropy(", "total + 2 * F.cross_entropy(")
    replace(summed, "slope.mul_((real * gradient)", "slope.mul_((2 * real * gradient)")
    train(script, script.name, tmp_path)


def test_a_flag_of_ones_own_is_compared_when_a_training_continues(tmp_path):
    assert copy("pretrain_llama.py", tmp_path / "mine") == 0
    change(tmp_path / "mine", diffs_of("A flag of your own"))
    script, kept = tmp_path / "mine" / "pretrain_llama.py", f"--checkpoints {tmp_path / 'kept'}"
    train(script, script.name, tmp_path, f"{kept} --window 32")
    with pytest.raises(RunFailed, match="--window is 16, and .* was made with --window 32"):
        train(script, script.name, tmp_path, f"{kept} --window 16 --steps 4")
    train(script, script.name, tmp_path, f"{kept} --steps 4")


def test_the_page_names_what_is_in_the_log_of_a_training(tmp_path):
    section = PAGE.read_text().split("\n## A log of the training\n")[1].split("```")[0]
    named = [set(re.findall(r"`(\w+)`", part)) for part in re.findall(r"A row with .*?\.", section)]
    assert copy("pretrain_llama.py", tmp_path / "mine") == 0
    script, log = tmp_path / "mine" / "pretrain_llama.py", tmp_path / "metrics.jsonl"
    train(script, script.name, tmp_path, f"--metrics {log}")
    rows = [set(json.loads(row)) for row in log.read_text().splitlines()]
    assert len(named) == 2 and all(row in named for row in rows)
    assert all(names in rows for names in named)


def test_the_table_names_every_model_and_how_many_lines_it_changes():
    rows = re.findall(r"\[(\d+) lines\]\(own-models/(.*?)\.diff\)", PAGE.read_text())
    assert sorted(name for _, name in rows) == FILES
    for lines, name in rows:
        assert int(lines) == changed_lines(changes_of(name)), name


def test_two_tensors_travel_between_stages_that_a_copy_declares_once(tmp_path):
    diffs = diffs_of("Several tensors between stages")
    assert changed_lines(diffs) < 20
    assert copy("gpipe.py", tmp_path / "mine") == 0
    change(tmp_path / "mine", diffs)
    extensions = tmp_path / "mine" / "extensions"
    extensions.mkdir()
    shutil.copy(ROOT / "source_code" / "extensions" / "bundle.py", extensions)
    losses = train(tmp_path / "mine" / "gpipe.py", "gpipe.py", tmp_path)  # with --verify
    assert losses[-1] < losses[0]


def test_in_a_copy_of_gpipe_one_line_lets_rows_have_another_length_in_every_step(tmp_path):
    [line] = re.findall(r"`(job\.shape = [^`]*)`", PAGE.read_text())
    section = PAGE.read_text().split("\n## Another row length in every step\n")[1].split("\n## ")[0]
    assert re.findall(r"^```python\n(.*?)\n```$", section, re.MULTILINE | re.DOTALL) == [line]
    assert f"\n        {line}  #" in (ROOT / "source_code" / "finetune.py").read_text()
    assert copy("gpipe.py", tmp_path / "mine") == 0
    data = tmp_path / "mine" / "pipeline" / "data.py"
    start = "        generator = torch.Generator()"
    assert data.read_text().count(start) == 1
    data.write_text(data.read_text().replace(start, f"        seq_len -= step\n{start}"))
    training = tmp_path / "mine" / "pipeline" / "training.py"
    call = "        loss = run_step(inputs, targets)\n"
    assert training.read_text().count(call) == 1
    with pytest.raises(RunFailed, match="the activation of micro-batch 0 .* but has to be"):
        train(tmp_path / "mine" / "gpipe.py", "gpipe.py", tmp_path)
    training.write_text(training.read_text().replace(call, f"        {line}\n{call}"))
    train(tmp_path / "mine" / "gpipe.py", "gpipe.py", tmp_path)  # with --verify


def test_a_larger_vocabulary_and_another_loss_are_one_line_each_of_a_copy(tmp_path):
    assert copy("gpipe.py", tmp_path / "mine") == 0
    model, data = (tmp_path / "mine" / "pipeline" / file for file in ("model.py", "data.py"))
    loss = "return F.cross_entropy(scores.flatten(0, -2), targets.flatten())"
    smooth = loss.replace("targets.flatten())", "targets.flatten(), label_smoothing=0.1)")

    def trained_with(file, before, after):
        assert file.read_text().count(before) == 1, before
        file.write_text(file.read_text().replace(before, after))
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return train(tmp_path / "mine" / "gpipe.py", "gpipe.py", folder)  # with --verify

    larger = "rows = rows + 200\n        return rows[:, :-1]"
    with pytest.raises(RunFailed, match="index out of range"):
        trained_with(data, "return rows[:, :-1]", larger)
    plain = trained_with(model, "vocabulary: int = 256", "vocabulary: int = 500")
    losses = trained_with(model, loss, smooth)
    assert losses[-1] < losses[0] and abs(losses[0] - plain[0]) > 1e-3


def test_in_a_copy_of_pretrain_llama_one_line_compiles_the_layers(tmp_path):
    [line] = re.findall(r"`(\[layer\.compile\(\)[^`]*)`", PAGE.read_text())
    [patience] = re.findall(r"`(--timeout \d+)`", PAGE.read_text())
    assert copy("pretrain_llama.py", tmp_path / "mine") == 0
    stages = tmp_path / "mine" / "extensions" / "pretraining" / "trained_stages.py"
    made, text = "        masters[index], part = build(*cut[index])\n", stages.read_text()
    assert text.count(made) == 1

    def train_with(backend):
        compiled = line.replace("compile()", f"compile(backend={backend!r})")
        stages.write_text(text.replace(made, f"{made}        {compiled}\n"))
        more = f"--schedule looped-bfs --chunks 2 --recompute stage --sample 1 {patience}"
        program = tmp_path / "mine" / "pretrain_llama.py"
        # With --verify. Compiling takes 15 s on two free cores, four times that on busy ones.
        train(program, program.name, tmp_path, more, timeout=240)

    with pytest.raises(RunFailed, match="no_such_compiler"):  # so layers are compiled
        train_with("no_such_compiler")
    train_with("aot_eager")  # which needs no C++ compiler


def test_a_bundle_is_the_tensors_and_nothing_else_and_rejects_other_shapes():
    bundle = Bundle((4, 2), (3,), ())
    tensors = torch.randn(5, 4, 2, requires_grad=True), torch.randn(5, 3), torch.randn(5)
    together = bundle.together(*tensors)
    assert together.shape == (5, bundle.numbers) == (5, 12)
    assert all(map(torch.equal, bundle.apart(together), tensors))
    bundle.apart(together)[0].sum().backward()
    assert torch.equal(tensors[0].grad, torch.ones(5, 4, 2))
    with pytest.raises(ValueError, match="has to be"):
        bundle.together(tensors[0], tensors[2], tensors[1])
    with pytest.raises(ValueError, match="has to be"):
        bundle.together(*tensors[:2])
