"""A saved Llama, Mistral, Qwen2 or Qwen3 goes through a pipeline and comes out as one, to the last digit."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import convert
import finetune
import pytest
import torch
from convert import settings_in_checkpoint
from further import first_of, further
from ranks import PRELOAD, run_on_ranks
from saved_models import library_config, library_model_with, save_library_model, write_model
from token_folders import prepare

from course.failed_run import RunFailed
from course.launch import run
from extensions.checkpointing.checkpoint_folder import find_checkpoint
from extensions.checkpointing.whole_checkpoint import fill_weights
from extensions.pretraining.forward_only import forwards_of, nothing_kept
from extensions.real_models import saved_output, tensor_files
from extensions.real_models.saved_folder import read_model
from extensions.real_models.saved_part import (
    fill_part,
    frequencies,
    lay_out,
    name_in_file,
    with_settings,
)
from extensions.real_models.saved_settings import LEFT_OUT, read_settings
from extensions.real_models.tensor_files import StoredTensor, stored_tensors, write_tensors
from extensions.torch_pipelining.hugging_face import LATE_IMPORTS
from files.inputs import InputError
from guard.around_main import attached
from pipeline.model import ModelConfig, build_part
from pipeline.worker import Worker

PRELOAD.extend([*LATE_IMPORTS, "transformers.models.qwen2.modeling_qwen2"])
FLAGS = "--seq-len 16 --batch-size 8 --microbatches 4 --device cpu --learning-rate 0.003"


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """{(family, number of files): folder} of saved models."""
    return {
        (family, shards): save_library_model(
            tmp_path_factory.mktemp(f"{family}-{shards}"), family, shards
        )
        for family in ("llama", "mistral", "qwen2", "qwen3")
        for shards in (1, 3)
    }


def fine_tune(rank, flags, folder):
    """In a rank: run finetune.py; before it saves, leave the logits of a batch in `folder`.

    Returns the status, the names that this rank has read, and its parameters when it saves.
    """
    workers, reads, saved = [], [], []
    read, save = StoredTensor.read, saved_output.save_model

    class Remembered(Worker):
        def __init__(self, *words):
            super().__init__(*words)
            workers.append(self)

    def noted(self):
        reads.append((self.path.name, self.start, self.length))
        return read(self)

    def scored_and_saved(job, flag, out, config, parts, *rest):
        saved.append(sum(weight.numel() for part in parts for weight in part.parameters()))
        worker = workers[0]
        rows = tokens_of_test().chunk(worker.schedule.num_microbatches)
        scoring = Worker(job, forwards_of(worker.schedule), worker.stages)
        with nothing_kept(worker.stages, last_result=lambda scores, targets: scores):
            scoring.run_step(rows, rows)
        if scoring.losses:
            scores = [scoring.losses[number] for number in sorted(scoring.losses)]
            torch.save(torch.cat(scores), Path(folder, "logits"))
        save(job, flag, out, config, parts, *rest)

    with (
        mock.patch.object(sys, "argv", ["finetune.py", *flags.split()]),
        mock.patch.object(finetune, "Worker", Remembered),
        mock.patch.object(saved_output, "save_model", scored_and_saved),
        mock.patch.object(StoredTensor, "read", noted),
        open(Path(folder, f"printed {rank}"), "w") as printed,
        mock.patch.object(sys, "stdout", printed),
    ):
        status = finetune.main()
    return status, reads, saved


def tokens_of_test():
    return torch.randint(256, (8, 16), generator=torch.Generator().manual_seed(5))


def loaded(folder, dtype):
    """The model that transformers loads, after it has said that nothing is missing or left over."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, output_loading_info=True
    )
    assert not any(info.values()), info
    return model


def largest_difference(printed):
    return float(re.search(r"largest difference from one process: (\S+),", printed)[1])


# There and back


@pytest.mark.parametrize(
    ("family", "shards", "ranks"),
    [
        ("llama", 3, 1),
        ("llama", 1, 2),
        ("llama", 3, 4),
        *(
            pytest.param(*others, marks=further)
            for others in [
                ("qwen3", 1, 4),
                ("mistral", 3, 2),
                ("qwen2", 1, 1),
                ("qwen2", 3, 2),
                ("qwen2", 1, 4),
            ]
        ),
        *(
            pytest.param(*others, marks=pytest.mark.soak)
            for others in [
                ("llama", 1, 1),
                ("llama", 3, 2),
                ("llama", 1, 4),
                ("qwen2", 3, 1),
                ("qwen2", 1, 2),
                ("qwen2", 3, 4),
            ]
        ),
    ],
)
def test_ten_steps_have_the_losses_of_transformers_and_the_saved_model_the_pipeline_s_logits(
    folders, tmp_path, family, shards, ranks
):
    folder, out = folders[family, shards], tmp_path / "out"
    flags = f"--model {folder} --save {out} {FLAGS} --dtype float64 --steps 10 --clip 0.3 --verify"
    results = run_on_ranks(fine_tune, ranks, flags, str(tmp_path), timeout=90)
    assert [status for status, *_ in results] == [0] * ranks
    printed = "".join((tmp_path / f"printed {rank}").read_text() for rank in range(ranks))
    assert largest_difference(printed) <= 1e-12 and "as promised" in printed
    assert len(list(out.glob("*.safetensors"))) == ranks
    logits = torch.load(tmp_path / "logits")
    with torch.no_grad():
        theirs = loaded(out, torch.float64)(tokens_of_test()).logits
    assert (logits - theirs).abs().max() <= 1e-12
    check_what_ranks_read(folder, results)


def check_what_ranks_read(folder, results):
    """Every tensor is read once, a tied one by both ends; no rank has the model, alone one has."""
    files = [stored_tensors(path) for path in folder.glob("*.safetensors")]
    lies_at = {(t.path.name, t.start, t.length): name for file in files for name, t in file.items()}
    read = [[lies_at[where] for where in reads] for _, reads, _ in results]
    tied = {name for file in files for name in file} - {"lm_head.weight"} == set(lies_at.values())
    times = Counter(name for names in read for name in names)
    assert set(times) == set(lies_at.values())
    assert {name for name, count in times.items() if count != 1} == (
        {"model.embed_tokens.weight"} if tied else set()
    )
    numbers = sum(
        weight.numel() for weight in lay_out(read_model(folder, 16).settings).parameters()
    )
    held = [saved[0] for _, _, saved in results]
    assert sum(held) == numbers
    if len(held) > 1:
        assert max(held) < 0.8 * numbers
        layers = [set(re.findall(r"layers\.(\d+)", " ".join(names))) for names in read]
        assert not set.intersection(*layers)


@pytest.mark.parametrize("family", first_of(["qwen2", "llama"], 1))
def test_in_bfloat16_the_saved_model_has_the_pipeline_s_logits_and_float32_masters_trained_it(
    folders, tmp_path, family
):
    out = tmp_path / "out"
    flags = f"--model {folders[family, 1]} --save {out} {FLAGS} --dtype bfloat16 --steps 3"
    run_on_ranks(fine_tune, 2, flags, str(tmp_path), timeout=90)
    model = loaded(out, "auto")
    assert model.dtype == torch.bfloat16 and json.loads((out / "config.json").read_text())["dtype"]
    with torch.no_grad():
        theirs = model(tokens_of_test()).logits
    logits = torch.load(tmp_path / "logits")
    assert logits.dtype == torch.bfloat16 and (logits - theirs).abs().max() <= 1e-2


@pytest.mark.parametrize(
    ("family", "ranks", "flags"),
    first_of(
        [
            ("qwen2", 2, "--schedule zb-v"),  # both ends are on rank 0
            ("qwen2", 2, "--schedule interleaved-1f1b --chunks 2 --recompute layer"),
            ("qwen2", 3, "--schedule zb-h2 --recompute selective --optimizer sgd"),
            ("qwen3", 2, "--schedule zb-v --recompute layer --cut 1,1,1,1"),
            ("llama", 2, "--schedule gpipe --recompute stage --shuffle --cut auto"),
            ("llama", 2, "--schedule zb-v --recompute layer --data {tokens} --packed --shuffle"),
            ("qwen2", 2, "--cut 3,1 --warm-up-steps 2 --decay-steps 3"),
        ],
        3,
    ),
)
def test_every_kind_of_schedule_and_recomputation_has_the_losses_of_transformers(
    folders, tmp_path, family, ranks, flags
):
    flags = flags.format(tokens=prepare(tmp_path / "tokens"))
    command = f"--model {folders[family, 1]} {FLAGS} --dtype float64 --steps 3 --verify {flags}"
    results = run_on_ranks(fine_tune, ranks, command, str(tmp_path), timeout=90)
    assert [status for status, *_ in results] == [0] * ranks
    printed = "".join((tmp_path / f"printed {rank}").read_text() for rank in range(ranks))
    assert largest_difference(printed) <= 1e-12


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"pad_token_id": ord("e")}),  # its row of the embedding gets no gradient
        ("qwen2", {"pad_token_id": ord("e")}),  # but a head of the same matrix has one
        ("llama", {"pad_token_id": ord("e") - 256}),
        ("llama", {"rope_scaling": LLAMA3, "original_max_position_embeddings": 16}),  # this counts
    ],
)
def test_settings_that_are_seldom_given_mean_what_they_mean_in_transformers(
    folders, tmp_path, family, changes
):
    folder = shutil.copytree(folders[family, 1], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    flags = "--dtype float64 --steps 3 --verify --optimizer sgd --learning-rate 0.3"
    command = f"finetune.py {FLAGS} --model {folder} {flags}"
    printed = run(command, 2, warm=True, show=False, limit=60).output
    assert largest_difference(printed) <= 1e-12


@pytest.mark.parametrize("changes", [{"rms_norm_eps": 0}, {"eos_token_id": "</s>"}])
def test_what_transformers_cannot_build_is_rejected_before_the_training(folders, tmp_path, changes):
    folder = shutil.copytree(folders["llama", 1], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(RunFailed, match="--verify: transformers cannot build") as refused:
        run(f"finetune.py {FLAGS} --model {folder} --verify", 1, warm=True, show=False, limit=60)
    assert "Traceback" not in str(refused.value) and "step 0" not in str(refused.value)


def count_twice(rank, flags, folder, what):
    """In a rank: fine_tune with a tied embedding that is treated as two matrices."""
    wrong = {"sum_gradients": lambda self: None, "named_once": lambda self: self.parameters.items()}
    from extensions.real_models.tied_ends import TiedEnds

    with mock.patch.object(TiedEnds, what, wrong[what]):
        return fine_tune(rank, flags, folder)[0]


@pytest.mark.parametrize("what", ["sum_gradients", "named_once"])
def test_gradients_that_are_not_summed_and_a_norm_that_counts_twice_are_found(
    folders, tmp_path, what
):
    flags = f"{FLAGS} --dtype float64 --steps 3 --clip 0.3 --verify --optimizer sgd"
    command = f"--model {folders['qwen2', 1]} {flags} --learning-rate 0.3"
    assert sum(run_on_ranks(count_twice, 2, command, str(tmp_path), what, timeout=90)) == 1
    printed = (tmp_path / "printed 1").read_text()
    assert largest_difference(printed) > 1e-6 and "MORE THAN PROMISED" in printed


# convert.py and pretrain_llama.py


def converted(flags):
    return run(f"convert.py {flags}", None, warm=True, show=False, limit=60).output


PRETRAINING = f"pretrain_llama.py {FLAGS} --warm-up-steps 1 --decay-steps 9 --evaluate-windows 8"


def pretrained(ranks, flags, losses, dtype="float64"):
    """The losses of pretrain_llama.py on so many ranks, and what it prints."""
    command = f"{PRETRAINING} --dtype {dtype} --losses {losses} {flags}"
    printed = run(command, ranks, warm=True, show=False, limit=90).output
    return [json.loads(line)["loss"] for line in losses.read_text().splitlines()], printed


def sizes_in(printed):
    """The flags that convert.py says pretrain_llama.py needs."""
    return re.search(r"pretrain_llama\.py (--checkpoints .*) --learning-rate", printed)[1]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
        ("qwen2", {"num_key_value_heads": 4}),
        ("qwen3", {"head_dim": 16, "attention_bias": True}),
        ("mistral", {"tie_word_embeddings": True}),
    ],
)
def test_a_model_that_comes_in_and_goes_out_has_the_logits_and_the_config_that_it_had(
    tmp_path, family, changes
):
    folder = save_library_model(tmp_path / "model", family, 1, **changes)
    converted(f"--from-hf {folder} --checkpoints {tmp_path / 'saved'}")
    out = f"--checkpoints {tmp_path / 'saved'} --to-hf {tmp_path / 'out'}"
    assert "the model is in" in converted(f"{out} --tokenizer {folder}")
    assert (tmp_path / "out/generation_config.json").exists()
    before, after = (
        json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "out")
    )
    assert before == after
    with torch.no_grad():
        before, after = (loaded(f, torch.float64) for f in (folder, tmp_path / "out"))
        assert torch.equal(before(tokens_of_test()).logits, after(tokens_of_test()).logits)


@pytest.mark.processes
def test_a_model_that_did_not_fit_on_the_disk_comes_in_with_the_same_command(folders, tmp_path):
    flags = f"--from-hf {folders['llama', 1]} --checkpoints {tmp_path / 'saved'}"
    script = Path(convert.__file__)
    full = ["bash", "-c", f"ulimit -f 1; exec {sys.executable} -B {script} {flags}"]
    ended = subprocess.run(full, capture_output=True, text=True, timeout=90)
    assert ended.returncode == 2 and "was not brought in: " in ended.stderr
    assert ended.stderr.count("room") == 1, "it says what to do"
    assert ended.stderr.count("\n") == 1
    assert "continue with pretrain_llama.py" in converted(flags)


@pytest.mark.parametrize(
    ("family", "ranks", "flags"),
    [
        ("qwen2", 4, "--replicas 2 --clip 0.3"),  # its ends are one matrix
        ("llama", 3, "--schedule zb-h1 --recompute layer"),
    ],
)
def test_a_pretraining_that_continues_it_has_the_losses_of_finetune_and_leaves_its_logits(
    folders, tmp_path, family, ranks, flags
):
    folder, out = folders[family, 3], tmp_path / "out"
    start = sizes_in(converted(f"--from-hf {folder} --checkpoints {tmp_path / 'saved'}"))
    clip = "--clip 0.3" if "clip" in flags else "--clip 1"
    command = f"finetune.py {FLAGS} --model {folder} --dtype float64 --steps 4 --verify {clip}"
    command += " --optimizer sgd --warm-up-steps 1 --decay-steps 9"
    printed = run(
        f"{command} --save {tmp_path / 'tuned'} --losses {tmp_path / 'a'}", 2, warm=True, show=False
    ).output
    assert largest_difference(printed) <= 1e-12
    start = f"{start} --optimizer sgd {flags}"
    losses, _ = pretrained(ranks, f"{start} --steps 2", tmp_path / "b")
    further, printed = pretrained(ranks, f"{start} --steps 4", tmp_path / "b")
    assert "continues after 2 steps" in printed  # with the settings of the first checkpoint
    theirs = [json.loads(line)["loss"] for line in (tmp_path / "a").read_text().splitlines()]
    assert [*losses, *further] == pytest.approx(theirs, rel=0, abs=1e-12)
    converted(f"--checkpoints {tmp_path / 'saved'} --to-hf {out}")
    with torch.no_grad():
        ours, theirs = (
            loaded(f, torch.float64)(tokens_of_test()).logits for f in (out, tmp_path / "tuned")
        )
    assert (ours - theirs).abs().max() <= 1e-12


def test_the_course_s_own_llama_goes_out_with_its_logits_but_for_the_rounding_of_their_norms(
    tmp_path,
):
    """transformers computes its norms in float32, and the course its own in float64."""
    flags = f"--layers 4 --dim 16 --heads 2 --checkpoints {tmp_path / 'saved'} --steps 3"
    pretrained(2, flags, tmp_path / "losses")
    converted(f"--checkpoints {tmp_path / 'saved'} --to-hf {tmp_path / 'out'}")
    checkpoint = find_checkpoint(tmp_path / "saved")
    part = build_part(ModelConfig(4, 16, 2, 2, 16), 0, 4)
    weights = {name: weight.detach() for name, weight in part.named_parameters()}
    fill_weights(checkpoint, weights, weights)
    with torch.no_grad():
        theirs = loaded(tmp_path / "out", torch.float64)(tokens_of_test()).logits
        assert (part(tokens_of_test()) - theirs).abs().max() <= 1e-5
    converted(f"--checkpoints {tmp_path / 'saved'} --to-hf {tmp_path / 'half'} --dtype bfloat16")
    assert loaded(tmp_path / "half", "auto").dtype == torch.bfloat16


def test_what_a_converted_model_does_not_fit_is_rejected_in_one_sentence(folders, tmp_path):
    saved, model = tmp_path / "saved", folders["qwen2", 1]
    start = sizes_in(converted(f"--from-hf {model} --checkpoints {saved}"))
    narrow = write_model(tmp_path / "narrow", dim=20)
    for program, flags, words in [
        ("convert.py", f"--checkpoints {saved}", "use one of them"),
        ("convert.py", f"--from-hf {model} --checkpoints {saved}", "already there"),
        ("convert.py", f"--from-hf {saved} --checkpoints {tmp_path / 'x'}", "--from-hf: .*config"),
        ("convert.py", f"--from-hf {narrow} --checkpoints {tmp_path / 'x'}", "with finetune.py"),
        ("convert.py", f"--checkpoints {model} --to-hf {tmp_path / 'x'}", "no checkpoint in"),
        ("convert.py", f"--checkpoints {saved} --to-hf {saved}/x", "lies in"),
        ("convert.py", f"--checkpoints {saved} --to-hf /proc/folder", "--to-hf"),
        ("convert.py", f"--checkpoints {saved} --to-hf {saved}/x --from-hf x", "use one of them"),
        ("convert.py", f"--checkpoints {saved} --to-hf {tmp_path / 'x'} --dtype 8", "--dtype"),
        (
            "convert.py",
            f"--checkpoints {saved} --to-hf {tmp_path / 'x'} --tokenizer no",
            "no tokeniz",
        ),
        ("pretrain_llama.py", f"{start} --seq-len 16 --verify", "--verify begins with drawn"),
        ("pretrain_llama.py", f"{start} --seq-len 65", "64 positions"),
        ("pretrain_llama.py", f"--checkpoints {saved} --seq-len 16", "--layers is 8, and"),
        ("distributed_checkpointing.py", start.partition(" --vocab")[0], "came in with convert.py"),
        ("inference.py", f"--checkpoints {saved}", "take it out with convert.py --to-hf"),
    ]:
        device = "" if program == "convert.py" else "--device cpu"
        with pytest.raises(RunFailed, match=words):
            run(f"{program} {flags} {device}", 1, warm=True, show=False, limit=60)
        assert not (tmp_path / "x").exists()


# The same arithmetic

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
ROTARY = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3": LLAMA3,
}
LINEAR = {"rope_type": "linear", "rope_theta": 5.0, "factor": 8.0}


def saved_config(folder, config):
    config.save_pretrained(folder)
    return read_settings(folder, 64)[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ROTARY)
def test_the_rotary_tables_are_those_of_transformers_bit_by_bit(tmp_path, kind, dtype):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = library_config("llama", rope_parameters=ROTARY[kind], head_dim=32)
    settings = saved_config(tmp_path, config)
    layout = lay_out(settings, 1, 2)
    part = fill_part(layout, lambda name: torch.zeros(1), dtype, "cpu")
    cosine, sine = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=dtype), torch.arange(64)[None])
    for ours, theirs in ((part.cosine, cosine), (part.sine, sine)):
        assert ours.dtype == dtype and torch.equal(torch.cat([ours, ours], -1), theirs[0])


@pytest.mark.parametrize("kind", ROTARY)
def test_an_integer_of_more_than_64_bits_is_a_number_of_the_rotary_embedding(tmp_path, kind):
    path = saved_config_file(tmp_path, kind)
    said = json.loads(path.read_text())
    named = {name: 10**25 for name in said["rope_parameters"] if name != "rope_type"}
    named["low_freq_factor"] = 10**24  # below high_freq_factor; other types do not read it
    path.write_text(json.dumps({**said, "rope_parameters": {"rope_type": kind, **named}}))
    assert frequencies(read_settings(tmp_path, 64)[0])[0] >= 0


def saved_config_file(folder, kind):
    saved_config(folder, library_config("llama", rope_parameters=ROTARY[kind], head_dim=32))
    return folder / "config.json"


def test_a_config_in_a_checkpoint_is_checked_as_one_in_a_folder(tmp_path):
    path = saved_config_file(tmp_path, "default")
    settings, said = read_settings(tmp_path, 64)
    config = ModelConfig(*(getattr(settings, name) for name in ModelConfig.__dataclass_fields__))
    assert settings_in_checkpoint(config, {"config": path.read_text()}) == (settings, said)
    with pytest.raises(InputError, match="other sizes than its flags"):
        settings_in_checkpoint(ModelConfig(layers=1), {"config": path.read_text()})
    wrong = [json.dumps({**said, **change}) for change in ({"rms_norm_eps": "x"}, {"head_dim": 3})]
    for kept in (
        [],
        "text",
        {},
        {"config": 3},
        *({"config": text} for text in ("{", "[]", *wrong)),
    ):
        with pytest.raises(InputError, match="config.json in the checkpoint"):
            settings_in_checkpoint(config, kept)


@pytest.mark.parametrize("kind", ROTARY)
def test_a_checkpoint_keeps_the_settings_of_a_model_and_damaged_ones_are_rejected(tmp_path, kind):
    settings, _ = read_settings(saved_config_file(tmp_path, kind).parent, 64)
    config = ModelConfig(*(getattr(settings, name) for name in ModelConfig.__dataclass_fields__))
    kept = json.loads(json.dumps({**settings.further(), "config": "{}"}))
    assert with_settings(config, kept) == settings
    wrong = [{name: value} for name in settings.further() for value in (None, "x", [], -2, 1e400)]
    wrong += [{"head_dim": 2**62}, {"rotary": {"type": "linear"}}, {"rotary": {"type": "other"}}]
    wrong += [{"rotary": {"type": "linear", "factor": factor}} for factor in ("x", -1.0, [1.0])]
    for forged in [[], "text", {}, *({**kept, **change} for change in wrong)]:
        with pytest.raises(ValueError, match="setting"):
            with_settings(config, forged)


def test_a_file_of_an_older_transformers_says_the_same_in_other_words(tmp_path):
    saved_config(tmp_path, library_config("llama", rope_parameters=LLAMA3))
    path = tmp_path / "config.json"
    new = json.loads(path.read_text())
    rope = new.pop("rope_parameters")
    old = {**new, "rope_theta": rope.pop("rope_theta"), "torch_dtype": new.pop("dtype", None)}
    old["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    before = read_settings(tmp_path, 64)[0]
    path.write_text(json.dumps(old))
    after = read_settings(tmp_path, 64)[0]
    assert after == before and torch.equal(frequencies(after), frequencies(before))


@pytest.mark.parametrize(
    "said",
    [
        {"rope_parameters": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": LINEAR, "rope_scaling": {"factor": 2.0}},
        {"rope_parameters": LINEAR, "rope_scaling": {"rope_type": "default"}, "rope_theta": 7.0},
        {"rope_parameters": {"rope_theta": 9.0}, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": LINEAR, "rope_scaling": {}},
    ],
)
def test_a_rotary_embedding_that_is_said_twice_is_the_one_of_transformers(tmp_path, said):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**library_config("llama").to_dict(), "rope_theta": 1e4, **said}))
    theirs = library_config("llama", **said).rope_parameters
    ours = read_settings(tmp_path, 64)[0]
    factor = {"factor": theirs["factor"]} if theirs["rope_type"] == "linear" else {}
    assert dict(ours.rotary) == {"type": theirs["rope_type"], **factor}
    assert ours.rotary_base == theirs["rope_theta"]


@pytest.mark.parametrize("family", list(LEFT_OUT))
def test_what_a_config_leaves_out_is_what_transformers_takes(family, tmp_path):
    import transformers

    sizes = {"hidden_size": 64, "num_attention_heads": 32, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 96, "vocab_size": 96, "model_type": family}
    theirs = transformers.AutoConfig.for_model(**sizes)
    needed = {} if family != "mistral" else {"sliding_window": None}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **needed}))
    ours = read_settings(tmp_path, 16)[0]
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 64 // 32)
    assert ours.longest == theirs.max_position_embeddings
    assert ours.epsilon == theirs.rms_norm_eps and ours.tied == theirs.tie_word_embeddings
    assert ours.rotary_base == theirs.rope_parameters["rope_theta"]
    assert LEFT_OUT[family].get("sliding_window") == getattr(theirs, "sliding_window", None)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
        ("qwen2", {"num_key_value_heads": 4}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 16, "attention_bias": True}),
        ("mistral", {"head_dim": 16}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_logits_are_those_of_transformers_bit_by_bit_and_gradients_to_rounding(
    tmp_path, family, changes, dtype
):
    theirs = library_model_with(library_config(family, **changes))
    theirs.save_pretrained(tmp_path)
    theirs = loaded(tmp_path, dtype).train()
    ours = read_model(tmp_path, 16).build_part(0, 4, dtype, "cpu")
    logits = ours(tokens_of_test()), theirs(tokens_of_test()).logits
    assert torch.equal(*logits)
    for scores in logits:
        scores.float().logsumexp(-1).mean().backward()
    of_theirs = {name: weight.grad for name, weight in theirs.named_parameters()}
    for name, weight in ours.named_parameters():
        if name not in ("embedding.weight", "head.weight"):  # a tied one's has two halves here
            close = {"rtol": 0, "atol": 1e-14} if dtype == torch.float64 else {}
            torch.testing.assert_close(weight.grad, of_theirs[name_in_file(name)], **close)


# Files


def test_safetensors_are_those_of_the_library_both_ways(tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = {
        name: torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
        for name, dtype in tensor_files.DTYPE_OF_CODE.items()
    }
    tensors |= {"a number": torch.tensor(2.5), "nothing": torch.empty(0, 4)}
    write_tensors(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    ours = {name: stored.read() for name, stored in stored_tensors(tmp_path / "theirs").items()}
    for found in (load_file(tmp_path / "ours"), ours):
        assert set(found) == set(tensors)
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="asks Linux what was read")
def test_a_stage_reads_the_bytes_of_its_own_tensors_and_the_headers(tmp_path):
    def bytes_read():
        return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])

    folder = write_model(tmp_path / "model", layers=8, dim=64, head_dim=16)
    whole = (folder / "model.safetensors").stat().st_size
    before = bytes_read()
    part = read_model(folder, 16).build_part(2, 4, torch.float64, "cpu")
    own = sum(weight.nbytes for weight in part.parameters())
    assert own <= bytes_read() - before < own + 50_000 < whole / 3


# What is rejected


def spoil(folder, how):
    """Damage a folder with three files."""
    config, index = folder / "config.json", folder / "model.safetensors.index.json"
    first, second, _ = sorted(folder.glob("*.safetensors"))
    said, listed = json.loads(config.read_text()), json.loads(index.read_text())
    if how == "missing shard":
        second.unlink()
    elif how == "truncated":
        os.truncate(second, second.stat().st_size - 100)
    elif how == "empty":
        os.truncate(second, 0)
    elif how == "no header":
        first.write_bytes(b"\xff" * 1000)
    elif how == "no JSON":
        first.write_bytes((20).to_bytes(8, "little") + b"{" * 20)
    elif how == "no config":
        config.unlink()
    elif how == "no index":
        index.unlink()
    elif how == "missing tensor":
        listed["weight_map"].pop("model.norm.weight")
    elif how == "wrong file":
        names = listed["weight_map"]
        names["model.norm.weight"] = next(
            n for n in names.values() if n != names["model.norm.weight"]
        )
    elif how == "another folder":
        listed["weight_map"]["model.norm.weight"] = "../secret"
    elif how == "pipe":
        second.unlink()
        os.mkfifo(second)
    else:
        said.update(how)
    if index.exists():
        index.write_text(json.dumps(listed))
    if config.exists():
        config.write_text(json.dumps(said))


SPOILED = [
    ("missing shard", "model-00002-of-00003.safetensors cannot be read"),
    ("truncated", "model-00002-of-00003.safetensors is truncated"),
    ("empty", "not a complete safetensors file"),
    ("no header", "not a complete safetensors file"),
    ("no JSON", "not JSON"),
    ("no config", "config.json cannot be read"),
    ("no index", "has neither model.safetensors nor"),
    ("missing tensor", "no tensor model.norm.weight"),
    ("wrong file", "has no model.norm.weight"),
    ("another folder", "weight_map"),
    ("pipe", "not a regular file"),
    ({"model_type": "gpt2"}, "model_type is gpt2"),
    ({"model_type": "qwen2"}, "q_proj.bias, which config.json wants; use the config.json of these"),
    ({"intermediate_size": 96}, "has the shape"),
    ({"hidden_size": 0}, "hidden_size"),
    ({"num_key_value_heads": 3}, "heads"),
    ({"vocab_size": "many"}, "vocab_size"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type is yarn"),
    ({"rope_scaling": [1]}, "rope_scaling"),
    ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
    ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "not below high_freq_factor"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
    ({"hidden_size": 2**31, "head_dim": 8}, "hidden_size"),  # more bytes than 64 bits count
    ({"num_attention_heads": 2**30, "head_dim": 8}, "do not fit a width"),
    ({"tie_word_embeddings": True}, "is not model.embed_tokens"),
]


def flags_rejected(capsys, *words):
    """What finetune.py says before it meets other ranks; it has to be one sentence."""
    with mock.patch.object(sys, "argv", ["finetune.py", *map(str, words)]):
        with pytest.raises(SystemExit) as ended, attached():
            finetune.read_flags()
    said = ended.value.code
    assert "\n" not in said and not capsys.readouterr().err
    return said


@pytest.mark.parametrize(("how", "words"), SPOILED, ids=[str(how) for how, _ in SPOILED])
def test_a_malformed_folder_is_rejected_in_one_sentence(folders, tmp_path, capsys, how, words):
    import shutil

    folder = shutil.copytree(folders["llama", 3], tmp_path / "model")
    spoil(folder, how)
    said = flags_rejected(capsys, "--model", folder)
    assert words in said and said.startswith("--model") and "; " in said  # and what to do


def test_flags_that_do_not_fit_the_model_are_rejected(tmp_path, capsys):
    folder = write_model(tmp_path / "model")
    model = ("--model", folder, "--seq-len", 16)
    assert "--layers 5 contradicts" in flags_rejected(capsys, *model, "--layers", 5)
    assert "64 positions" in flags_rejected(capsys, *model, "--seq-len", 65)
    assert "name the same file" in flags_rejected(capsys, *model, "--save", folder)
    (tmp_path / "taken" / "notes").mkdir(parents=True)
    assert "already there" in flags_rejected(capsys, *model, "--save", tmp_path / "taken")
    beyond = tmp_path / "no" / "folder"
    assert "does not exist" in flags_rejected(capsys, *model, "--save", beyond)
    inside = folder / "out"
    assert "lies in" in flags_rejected(capsys, *model, "--save", inside)
    large = write_model(tmp_path / "large", vocabulary=300)
    assert "no tokenizer.json" in flags_rejected(capsys, "--model", large, "--seq-len", 16)
    words = {"type": "WordLevel", "vocab": {"a": 999}, "unk_token": "a"}
    (large / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": words}))
    said = flags_rejected(capsys, "--model", large, "--seq-len", 16)
    assert "the 1000 tokens" in said and "with a saved model" in said
    (large / "tokenizer.json").unlink()
    (large / "tokenizer.json").mkdir()
    said = flags_rejected(capsys, "--model", large, "--seq-len", 16)
    assert (
        f"the tokenizer {large / 'tokenizer.json'} cannot be read" in said
        and "--tokenizer" not in said
    )


def test_a_type_that_the_course_does_not_compute_with_is_named(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2, dtype=torch.int64)}, tmp_path / "file")
    with pytest.raises(InputError, match="type of a is not one of F64"):
        stored_tensors(tmp_path / "file")


def save_without_room(rank, folder):
    """In a rank: save, where the second rank's disk is full."""
    from pipeline.job import join_job

    job = join_job("cpu", pairs=[])
    part = lay_out(read_model(folder, 16).settings, *[(0, 2), (2, 4)][rank])
    part = read_model(folder, 16).build_part(*[(0, 2), (2, 4)][rank], torch.float64, "cpu")

    def full(path, tensors):
        raise OSError(28, "No space left on device")

    with mock.patch.object(saved_output, "write_tensors", full if rank else write_tensors):
        settings = read_model(folder, 16).settings
        saved_output.save_model(job, "--save", f"{folder}-out", {}, [part], settings)
    job.leave()
    return list(saved_output.not_written)


@pytest.mark.processes
def test_a_file_beside_the_weights_that_cannot_be_read_does_not_cost_the_model(tmp_path):
    model, out = write_model(tmp_path / "model"), tmp_path / "out"
    (model / "generation_config.json").symlink_to("nowhere")
    (model / "merges.txt").write_text("merges")
    sizes = "--steps 1 --seq-len 16 --batch-size 4 --microbatches 2 --device cpu"
    with pytest.raises(RunFailed, match="generation_config.json cannot be read"):
        run(f"finetune.py {sizes} --model {model} --save {out}", 1, warm=True, show=False)
    assert read_model(out, 16) and (out / "merges.txt").read_text() == "merges"


def test_a_full_disk_on_one_rank_leaves_no_folder_that_looks_like_a_model(tmp_path):
    folder = write_model(tmp_path / "model")
    assert run_on_ranks(save_without_room, 2, str(folder)) == [[], ["--save"]]
    assert not list(Path(f"{folder}-out").glob("*.json"))
