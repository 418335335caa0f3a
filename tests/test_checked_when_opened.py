"""What a file or a flag says is checked when it is read, and not when a step first uses it."""

import argparse
import errno
import hashlib
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import copy_template
import inference
import plan
import prepare_data
import pytest
import torch
from saved_models import write_model

from extensions.checkpointing.checkpoint_folder import checksum_of_file
from extensions.inference.requests import choose_token
from extensions.pretraining import token_files
from extensions.pretraining.token_files import load_tokens
from extensions.pretraining.token_writer import TokenWriter, write_tokens_file
from extensions.pretraining.tokens import (
    DataError,
    complaints_of_library,
    encode,
    load_corpus,
    read_tokenizer,
)
from extensions.real_models import saved_output
from extensions.real_models.saved_folder import find_tensors, read_model
from extensions.real_models.saved_settings import read_settings
from extensions.real_models.tensor_files import stored_tensors
from files.claims import NewFolder
from files.inputs import InputError, is_file_name, open_input, read_as_it_is, read_bytes
from guard import around_main
from guard.agreement import settings_of
from guard.one_sentence import in_one_sentence
from pipeline.command_line import Parser, positive_integer
from pipeline.data import load_text


@pytest.fixture
def tokens(tmp_path):
    """A function that makes a folder of bytes whose tokens.json says something else, validly."""
    folder = tmp_path / "tokens"
    claimed = NewFolder("--out", folder)
    writers = {part: TokenWriter(claimed, part, 2) for part in token_files.TOKEN_PARTS}
    for writer in writers.values():
        writer.write(list(range(200)))
        writer.end_document()
        writer.close()
    description = write_tokens_file(folder, writers, 2, 256, 1.0, False)
    claimed.release()

    def change(**changes):
        said = json.loads(json.dumps({**description, **changes}))
        said["checksum"] = token_files.checksum_of_tokens_file(said)
        (folder / token_files.TOKENS_FILE).write_text(json.dumps(said))
        return folder

    return change


@pytest.mark.parametrize("part", token_files.TOKEN_PARTS)
@pytest.mark.parametrize("token", [256, 65535])
def test_a_token_above_the_vocabulary_is_named_with_its_file(tokens, part, token):
    folder = tokens()
    file = folder / f"{part}.bin"
    content = bytearray(file.read_bytes())
    content[-2:] = token.to_bytes(2, "little")
    file.write_bytes(content)
    with pytest.raises(DataError, match=f"{part}.bin has the token {token}, and there are 256"):
        load_tokens(folder, 256, 8)


@pytest.mark.parametrize("file", ["training", "held_out", "training-ends"])
def test_a_node_with_other_tokens_is_a_difference_even_if_tokens_json_is_the_same(tokens, file):
    def settings():
        text = load_tokens(folder, 256, 8, packed=file == "training-ends")
        return settings_of(argparse.Namespace(data=str(folder), text=text))

    folder = tokens()
    whole, path = settings(), token_files.place_of_tokens(folder, file)
    content = bytearray(path.read_bytes())
    content[0] ^= 8
    path.write_bytes(content)
    changed = settings()
    assert [name for name in whole if whole[name] != changed[name]] == ["the content of --data"]


def test_a_text_in_bytes_is_compared_too(tmp_path):
    found = []
    for text in ("one text", "two text"):
        (tmp_path / "text.txt").write_text(f"{text} " * 50)
        corpus = load_corpus(load_text(tmp_path / "text.txt", 8))
        found.append(settings_of(argparse.Namespace(text=corpus))["the text"])
    assert found[0] != found[1]


def test_a_negative_token_is_named_too(tmp_path):
    wide = torch.tensor([5, -1], dtype=torch.int32)
    with pytest.raises(InputError, match="token 4294967295"):
        token_files.check_ids(tmp_path / "file", wide, 2**31)
    token_files.check_ids(tmp_path / "file", wide[:1], 6)


def test_beyond_what_is_checked_at_opening_nothing_is_read(tokens, monkeypatch):
    folder, seen = tokens(), []
    monkeypatch.setattr(token_files, "CHECKED_AT_OPENING", 50)
    monkeypatch.setattr(token_files, "check_ids", lambda path, part, most: seen.append(len(part)))
    load_tokens(folder, 256, 8)
    assert seen == [50, 50]


@pytest.mark.parametrize(
    "changes",
    [
        *({"bytes_per_token": value} for value in (0, 1e-300, -1, "1", None)),
        *({"bytes_per_number": value} for value in ([2], {}, True, 2.0, 3, "2")),
        *({"num_tokens": value} for value in (2**17, -1, 0.5)),
        {"files": {}},
        *(
            {"files": dict.fromkeys(token_files.TOKEN_FILES, {"numbers": count, "sha256": ""})}
            for count in (-1, 0, 2.0, "2", None)
        ),
    ],
)
def test_tokens_json_that_says_what_cannot_be_is_one_sentence(tokens, changes):
    with pytest.raises(DataError, match="tokens.json does not describe tokens") as said:
        load_tokens(tokens(**changes), 256, 8)
    assert len(str(said.value)) < 500


@pytest.mark.parametrize("ends", [[-1, 200], [100, 50], [201]])
def test_ends_of_documents_lie_in_their_part_in_order(tokens, ends):
    folder = tokens()
    content = torch.tensor(ends, dtype=torch.int64).numpy().tobytes()
    said = json.loads((folder / token_files.TOKENS_FILE).read_text())["files"]
    (folder / "training-ends.bin").write_bytes(content)
    said["training-ends"] = {"numbers": len(ends), "sha256": hashlib.sha256(content).hexdigest()}
    with pytest.raises(DataError, match="does not say where documents end"):
        load_tokens(tokens(files=said), 256, 8, packed=True)


# Texts.


def ends_with(main, monkeypatch, capsys, *words):
    """The one sentence with which a program rejects its arguments."""
    monkeypatch.setattr(sys, "argv", ["program", *map(str, words)])
    with pytest.raises(SystemExit) as ended, in_one_sentence():
        sys.exit(main())
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and len(line) < 1000
    return line


@pytest.mark.parametrize("flags", [[], ["--vocabulary", "300"]])
@pytest.mark.parametrize("half", ["\\ud800", "\\udfff"])
def test_a_text_that_no_encoder_can_take_is_named_with_its_line(
    tmp_path, monkeypatch, capsys, flags, half
):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good"}\n\n{"text": "a HALF b"}\n'.replace("HALF", half))
    words = "--data", file, "--out", tmp_path / "out", *flags
    said = ends_with(prepare_data.main, monkeypatch, capsys, *words)
    assert "a.jsonl, line 3 has text that is not Unicode" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [["--data", ""], ["--data", "a.txt", ""]])
def test_an_empty_name_is_not_taken_for_the_current_folder(tmp_path, monkeypatch, capsys, words):
    said = ends_with(prepare_data.main, monkeypatch, capsys, *words, "--out", tmp_path / "out")
    assert said.startswith("--data is empty text")


def test_a_name_that_is_too_long_is_one_sentence(tmp_path, monkeypatch, capsys):
    words = "--data", "x" * 5000, "--out", tmp_path / "out"
    said = ends_with(prepare_data.main, monkeypatch, capsys, *words)
    assert said.startswith("--data: xxx") and "too long" in said
    for model in ("llama-3-8b", plan.PROGRAM):
        said = ends_with(plan.main, monkeypatch, capsys, model, "--machine", "x" * 5000)
        assert "is neither a file nor one of" in said


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="a file whose reading fails")
def test_an_error_of_what_is_read_does_not_blame_what_is_written(tmp_path, monkeypatch, capsys):
    words = "--data", "/proc/self/mem", "--out", tmp_path / "out"
    said = ends_with(prepare_data.main, monkeypatch, capsys, *words)
    assert said.startswith("--data: /proc/self/mem cannot be read")


def test_a_folder_of_texts_that_may_not_be_listed_does_not_blame_what_is_written(
    tmp_path, monkeypatch, capsys
):
    def forbidden(folder):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    monkeypatch.setattr(Path, "iterdir", forbidden)  # root may list any folder
    words = "--data", tmp_path, "--out", tmp_path / "out"
    said = ends_with(prepare_data.main, monkeypatch, capsys, *words)
    assert said.startswith(f"--data: {tmp_path} cannot be read") and "--out" not in said


@pytest.mark.parametrize("largest", [70_000, 2**32 - 1])
def test_a_tokenizer_that_leaves_numbers_out_keeps_its_numbers(
    tmp_path, monkeypatch, capsys, largest
):
    model = {"type": "WordLevel", "vocab": {"hello": 0, "world": largest}, "unk_token": "hello"}
    split = {"type": "Whitespace"}
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(json.dumps({"version": "1.0", "pre_tokenizer": split, "model": model}))
    (tmp_path / "a.txt").write_text("hello world\n\n" * 100)
    out = tmp_path / "out"
    words = ["--data", tmp_path / "a.txt", "--out", out, "--tokenizer", tokenizer]
    if largest > 2**31:
        said = ends_with(prepare_data.main, monkeypatch, capsys, *words)
        assert said.startswith(f"the tokenizer {tokenizer} has the token") and not out.exists()
        return
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", *map(str, words)])
    assert prepare_data.main() == 0
    assert "tokens of 4 bytes, numbers below 70001\n" in capsys.readouterr().out
    corpus = load_tokens(out, largest + 1, 2)
    assert corpus.training[0:4].tolist() == [0, largest, 0, largest]


@pytest.mark.timeout(30)  # the time grew with the square of a word's length: hours
def test_a_tokenizer_is_trained_on_a_word_of_any_length():
    assert prepare_data.train_tokenizer("word " + "a" * 10**6, 300).get_vocab_size() <= 300


def test_a_document_costs_no_look_at_the_whole_vocabulary():
    class Tokenizer:
        def encode(self, text, add_special_tokens):
            return SimpleNamespace(ids=[int(text)])

        def id_to_token(self, number):
            return "word" if number < 9 else None

    assert encode(Tokenizer(), "8") == [8]
    with pytest.raises(DataError, match="encodes the text as 9, which is not a token"):
        encode(Tokenizer(), "9")


def test_a_panic_in_the_tokenizer_is_a_sentence_and_an_interrupt_stays_one():
    panic = type("PanicException", (BaseException,), {})
    with (
        pytest.raises(DataError, match=r"it cannot encode \(deep\)"),
        complaints_of_library("it cannot encode"),
    ):
        raise panic("deep\nand more")
    with pytest.raises(KeyboardInterrupt), complaints_of_library("it cannot encode"):
        raise KeyboardInterrupt


def test_a_tokenizer_with_dropout_encodes_a_text_alike_on_every_rank(tmp_path):
    prepare_data.train_tokenizer("again and again it rains " * 9, 300).save(
        str(tmp_path / "t.json")
    )
    content = json.loads((tmp_path / "t.json").read_text())
    content["model"]["dropout"] = 0.5
    (tmp_path / "t.json").write_text(json.dumps(content))
    tokenizer = read_tokenizer(tmp_path / "t.json")
    encoded = {tuple(encode(tokenizer, "again and again it rains " * 9)) for _ in range(9)}
    assert len(encoded) == 1


# Numbers.


@pytest.mark.parametrize("temperature", [1e-320, 1e-12, 0.8, 999.0])
def test_every_allowed_temperature_chooses_a_token(temperature):
    scores = torch.tensor([-1e30, 3.0, 1e30, 2.0])
    assert choose_token(scores, 0, 0, 0, temperature) == 2


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_scores_that_are_not_numbers_end_the_run_with_a_sentence(temperature, value):
    with pytest.raises(InputError, match="request 4: the model's scores are not numbers"):
        choose_token(torch.tensor([1.0, value]), 0, 4, 0, temperature)


def test_a_token_that_is_no_byte_is_neither_read_nor_printed_as_one():
    model = SimpleNamespace(tokenizer=None, model_folder=None, data=None, vocabulary=300, seq_len=8)
    model.checkpoints = "saved"
    with pytest.raises(
        SystemExit, match="--checkpoints saved has no tokenizer.json; .*--tokenizer"
    ):
        inference.read_corpus(model)
    assert load_corpus(load_text()).decode([104, 105, 256, 299, 33]) == "hi\ufffd\ufffd!"


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 31, "2147483648"])
def test_a_number_of_any_length_is_rejected_in_a_short_sentence(monkeypatch, capsys, text):
    def main():
        parser = Parser("A program.")
        parser.add_argument("--steps", type=positive_integer)
        parser.parse_args()

    said = ends_with(main, monkeypatch, capsys, "--steps", text)
    assert "--steps: must be at most 2147483647" in said


def test_a_word_that_is_too_long_is_cut_in_a_sentence(capsys):
    with pytest.raises(SystemExit), in_one_sentence():
        raise SystemExit(f"--data {'x' * 5000}: this is not a file")
    said = capsys.readouterr().err
    assert said == f"--data {'x' * 40}... (5,001 letters) this is not a file\n"


# Names.


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_name_that_no_file_can_have_is_an_input_error(tmp_path, name):
    with (
        pytest.raises(InputError, match="cannot be the name of a file"),
        open_input(tmp_path / name),
    ):
        pass


@pytest.mark.skipif(os.name == "nt", reason="named pipes and links of other systems")
def test_what_was_a_file_when_it_was_looked_at_is_opened_as_it_is(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    assert read_as_it_is(tmp_path / "file", 3) == b"123"
    for name in ("link", "pipe", "."):
        with pytest.raises(OSError):
            read_as_it_is(tmp_path / name, 3)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "..", "a/b", "x" * 300, 3])
def test_an_index_names_files_that_can_be(tmp_path, name):
    assert not is_file_name(name) and is_file_name("model-ü 1.safetensors")
    index = {"weight_map": {"w": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="has no weight_map with names of files"):
        find_tensors(tmp_path)


@pytest.mark.skipif(
    sys.platform != "linux", reason="a file of Linux whose first byte is unreadable"
)
@pytest.mark.parametrize("read", [read_bytes, stored_tensors, checksum_of_file])
def test_a_file_that_the_disk_does_not_give_back_is_named(tmp_path, read):
    (tmp_path / "damaged").symlink_to("/proc/self/mem")
    with pytest.raises(InputError, match=r"damaged cannot be read \(Input/output error\)"):
        read(tmp_path / "damaged")


def test_a_file_that_changes_after_the_check_ends_its_rank_with_one_sentence(tmp_path, monkeypatch):
    write_model(tmp_path / "model", layers=1, dim=32, head_dim=8, longest=32)
    saved, file = read_model(tmp_path / "model", 8), tmp_path / "model" / "model.safetensors"
    os.truncate(file, file.stat().st_size - 8)
    told = []
    monkeypatch.setattr(around_main, "end_process", told.append)
    with around_main.naming_what_fails():
        saved.build_part(0, 1, torch.float64, "cpu")
    assert told == [f"rank 0: {file} has changed while it was read"]


def test_a_full_disk_is_a_sentence_that_says_what_to_do(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "a.txt").write_text("hello world\n\n" * 100)
    monkeypatch.setattr(TokenWriter, "open", full)
    words = ["--data", tmp_path / "a.txt", "--out", tmp_path / "out"]
    said = ends_with(prepare_data.main, monkeypatch, capsys, *words)
    assert "No space left on device" in said and "make room" in said
    assert os.listdir(tmp_path) == ["a.txt"]
    monkeypatch.setattr(saved_output, "write_whole", full)
    said = saved_output.finish_folder("--save", tmp_path, {}, None, [])
    assert "No space left on device" in said and "make room" in said


@pytest.mark.parametrize("fails", ["made", "filled", "another file"])
def test_a_folder_of_compiled_kernels_that_cannot_be_used_is_named(tmp_path, monkeypatch, fails):
    cache = tmp_path / "file" / "kernels"
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    told = []
    monkeypatch.setattr(around_main, "end_process", told.append)

    def fail():
        if fails == "another file":
            (tmp_path / "file" / "text").read_text()
        if fails == "made":
            cache.mkdir()
        full = RuntimeError("of torch's compiler")  # as it wraps what its writes raise
        full.inner_exception = OSError(errno.ENOSPC, "No space left on device")
        raise full

    raises = pytest.raises(NotADirectoryError) if fails == "another file" else nullcontext()
    with raises, around_main.naming_what_fails():
        fail()
    reason = {"made": "Not a directory", "filled": "No space left on device"}
    assert [f"({reason[fails]}: {cache})" in said for said in told] == [True] * (fails in reason)
    assert all("set TORCHINDUCTOR_CACHE_DIR" in said for said in told)


@pytest.mark.parametrize("sizes", [300, 20_000])  # more digits than Python prints, and seconds
def test_a_tensor_of_many_sizes_is_named_before_they_are_multiplied(tmp_path, sizes):
    entry = {"dtype": "F32", "shape": [2**53] * sizes, "data_offsets": [0, 4]}
    header = json.dumps({"w": entry}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(InputError, match="does not say where w lies"):
        stored_tensors(file)


@pytest.mark.timeout(30)  # to lay out 10^9 layers takes days
@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        (100, "too few for the 100 layers of config.json"),
        (10**9, "too few for the 1,000,000,000 layers of config.json"),
        (2**31 - 1, "not a whole number from 1 to 1,073,741,824"),
    ],
)
def test_more_layers_than_tensors_are_named_before_a_layer_is_built(tmp_path, layers, sentence):
    write_model(tmp_path / "model", layers=2, dim=32, head_dim=8, longest=32)
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": layers}))
    with pytest.raises(InputError, match=sentence):
        read_model(tmp_path / "model", 8)


@pytest.mark.parametrize("kind", [[], ["llama3"], {}, {"a": 1}, 3, None, True])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_rope_type_of_any_kind_is_one_sentence(tmp_path, key, kind):
    folder = write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config[key] = {**(config.get(key) or {}), "rope_type": kind}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="the rope_type is .* which is not one of default"):
        read_settings(folder, 8)


@pytest.mark.parametrize("script", [".", "/", "..", "a\nb", "x" * 5000, "gpipe.txt"])
def test_a_script_to_copy_of_any_name_is_one_sentence(tmp_path, monkeypatch, capsys, script):
    said = ends_with(copy_template.main, monkeypatch, capsys, script, tmp_path / "mine")
    assert "does not train; use one of" in said


@pytest.mark.parametrize("there", ["loop", "loop/below", "nowhere", "x" * 5000, "file/below"])
def test_a_place_where_nothing_can_be_copied_is_one_sentence(tmp_path, monkeypatch, capsys, there):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to("not-there")
    (tmp_path / "file").touch()
    ends_with(copy_template.main, monkeypatch, capsys, "gpipe.py", tmp_path / there)
    assert not (tmp_path / "not-there").exists()
