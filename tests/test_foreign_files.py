"""Files of other programs: nothing in them is dropped, learnt or taken for equal in silence."""

import json
import math
import sys

import compare_logs
import convert
import prepare_data
import pytest
from saved_models import write_model

from extensions.pretraining.token_files import load_tokens
from extensions.pretraining.tokens import read_tokenizer
from extensions.real_models.saved_folder import read_model
from extensions.real_models.tensor_files import stored_tensors, write_tensors
from files.inputs import InputError
from lab.flight_log_reader import Fingerprint
from pipeline.data import DataError, load_text


def rejected(main, monkeypatch, capsys, *words):
    """The one sentence with which a program rejects its words."""
    monkeypatch.setattr(sys, "argv", [f"{main.__module__}.py", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    return sentence


# Models.


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",  # of a Qwen2 whose config.json says llama
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "score.weight",
    ],
)
def test_a_tensor_that_the_settings_have_no_place_for_is_named(tmp_path, name):
    folder = write_model(tmp_path / "model")
    file = folder / "model.safetensors"
    tensors = {each: stored.read() for each, stored in stored_tensors(file).items()}
    norm = tensors["model.norm.weight"]
    computed = {"model.layers.0.self_attn.rotary_emb.inv_freq": norm.float()}
    write_tensors(file, {**tensors, **computed})
    assert read_model(folder, 8).settings.layers == 4
    write_tensors(file, {**tensors, name: norm})
    index = {"weight_map": dict.fromkeys(tensors, "weights.safetensors")}  # silent about `name`
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=f"has the tensor {name}, .*; use the config.json of"):
        read_model(folder, 8)
    file.rename(folder / "weights.safetensors")
    with pytest.raises(InputError, match=rf"json has no tensor {name}, which its files have; "):
        read_model(folder, 8)


@pytest.mark.parametrize("how", ["overlap", "gap", "surplus"])
def test_tensors_that_do_not_fill_their_file_are_not_read(tmp_path, how):
    first, second = {"overlap": (0, 0), "gap": (0, 16), "surplus": (0, 8)}[how]
    entries = {
        name: {"dtype": "F64", "shape": [1], "data_offsets": [start, start + 8]}
        for name, start in (("a", first), ("b", second))
    }
    header = json.dumps(entries).encode()
    data = bytes({"overlap": 8, "gap": 24, "surplus": 17}[how])
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)
    with pytest.raises(InputError, match="do not lie one after the other"):
        stored_tensors(file)


@pytest.mark.parametrize("fault", ["too many", "damaged"])
def test_no_model_goes_out_with_a_tokenizer_that_it_cannot_have(tmp_path, monkeypatch, fault):
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 255}, "unk_token": "a"}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"version": "1.0", "model": model}))
    convert.check_tokenizer(tmp_path, 256)
    convert.check_tokenizer(None, 1)
    if fault == "damaged":
        file.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(SystemExit, match="^--tokenizer.*(use another|name the folder)"):
        convert.check_tokenizer(tmp_path, 256 - (fault == "too many"))


def test_a_tokenizer_that_the_library_could_not_write_is_named_before_it_is_used(tmp_path):
    for largest in (2**24, 2**24 + 1):
        model = {"type": "WordLevel", "vocab": {"a": 0, "b": largest}, "unk_token": "a"}
        (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
        if largest == 2**24:
            assert read_tokenizer(tmp_path / "tokenizer.json").token_to_id("b") == largest
    with pytest.raises(
        DataError, match="has the token 16,777,217, which is too large; use another"
    ):
        read_tokenizer(tmp_path / "tokenizer.json")


def test_a_tokenizer_that_the_library_cannot_read_is_named_with_what_to_do(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="tokenizer.json cannot be read .*; use another"):
        read_tokenizer(tmp_path / "tokenizer.json")


# Texts.


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", b"one\0two\n\n" * 20),
        ("a.txt", b'\n{"text": "a"}\n\n' * 20),
        ("a.JSONL", b'\xef\xbb\xbf{"text": "a"}\n' * 20),
        ("a.txt", b"\xff\xfeo\0n\0e\0"),
        ("a.jsonl", b'{"body": "a"}\n'),
        ("a.jsonl", b"{"),
        ("folder", None),
    ],
)
def test_what_is_no_text_is_not_learnt_and_the_sentence_says_what_to_do(
    tmp_path, monkeypatch, capsys, name, content
):
    if content is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(content)
    words = "--data", tmp_path / name, "--out", tmp_path / "out"
    said = rejected(prepare_data.main, monkeypatch, capsys, *words)
    assert said.startswith(f"--data: {tmp_path / name}") and "; " in said
    assert not (tmp_path / "out").exists()


def test_the_mark_of_an_encoding_is_no_part_of_a_text(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("\ufeffone\n\n" + 'two\n{"three": 3}\n\n' * 20, "utf-8")
    words = f"prepare_data.py --data {tmp_path}/a.txt --out {tmp_path}/out"
    monkeypatch.setattr(sys, "argv", words.split())
    assert prepare_data.main() == 0
    start = bytes(load_tokens(tmp_path / "out", 256, 8).training[0:10].tolist())
    assert start == b"one\n\ntwo\n{"


@pytest.mark.parametrize("before", ["\n", "\ufeff", " \r\n\n"])
def test_rows_behind_an_empty_line_are_no_text_either(tmp_path, before):
    (tmp_path / "a.jsonl").write_text(before + '{"prompt": "a", "completion": "b"}\n' * 20, "utf-8")
    with pytest.raises(DataError, match="JSON lines"):
        load_text(tmp_path / "a.jsonl", 8)


# Recordings.


def test_a_tensor_that_is_not_finite_is_close_to_no_other():
    finite, lost = Fingerprint("a", 2.0, 1.0), Fingerprint("b", math.nan, math.nan)
    assert finite.distance(lost) == lost.distance(finite) == math.inf
    assert lost.distance(Fingerprint("c", math.nan, 1.0)) == math.inf
    assert lost.distance(lost) == 0.0 and finite.distance(Fingerprint("c", 2.0, 1.0)) == 0.0


DID = {
    "did": "0F0", "start": 0, "end": 1, "recompute": 0, "used": None, "made": None, "version": 0,
    "held": 0, "gradient": None,
}  # fmt: skip


def test_two_runs_that_have_recorded_nothing_are_not_equal(tmp_path, monkeypatch, capsys):
    (tmp_path / "run.json").write_text('{"name": "a", "rows": ["0F0,0B0"]}')
    said = rejected(compare_logs.main, monkeypatch, capsys, tmp_path, tmp_path)
    assert "neither run has recorded an action" in said


def test_names_in_a_recording_command_no_terminal(tmp_path, monkeypatch, capsys):
    for folder, digest in (("one", "0" * 8), ("other", "1" * 8)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "run.json").write_text('{"name": "a", "rows": ["0F0,0B0"]}')
        weights = {"weights": {"\x1b[2J\nw": [digest, 1.0, 1.0]}, "stage": 0, "version": 0}
        file = tmp_path / folder / "rank0.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in (weights, DID)))
    monkeypatch.setattr(sys, "argv", ["compare_logs.py", *map(str, tmp_path.iterdir())])
    assert compare_logs.main() == 1
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and r"another \x1b[2J w on" in said and said.isascii()
