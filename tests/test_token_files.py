"""Tokens that are made once, mapped into memory and read by position, from texts as people have them."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import prepare_data
import pytest
import tokenizers
import torch

from course.launch import PRELOAD, ROOT, run
from extensions.pretraining.token_files import (
    TOKEN_FILES,
    TOKENS_FILE,
    checksum_of_tokens_file,
    is_token_folder,
    load_tokens,
)
from extensions.pretraining.token_writer import check_folder
from files.inputs import InputError
from pipeline.data import DEFAULT_TEXT, DataError

PRELOAD.extend(["torch._dynamo", "torch.distributed.checkpoint", "tokenizers"])


def prepare(monkeypatch, capsys, words):
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", *map(str, words)])
    try:
        status = prepare_data.main()
    except SystemExit as ended:
        status = ended.code
    return status, "".join(capsys.readouterr())


@pytest.fixture
def make(monkeypatch, capsys, tmp_path):
    """Calls prepare_data.py with --out; returns its status, its words and the folder."""

    def call(*words, out="tokens"):
        status, said = prepare(monkeypatch, capsys, [*words, "--out", tmp_path / out])
        return status, said, tmp_path / out

    return call


# What is read is what was written


def test_every_byte_of_every_document_is_in_one_part_and_every_tenth_document_is_held_out(make):
    status, _, folder = make("--data", DEFAULT_TEXT)
    assert status == 0
    corpus = load_tokens(folder, 256, 16)
    documents = [d for d in DEFAULT_TEXT.read_text().split("\n\n") if d.strip()]
    for part, tokens in (("training", corpus.training), ("held_out", corpus.held_out)):
        wanted = [
            d.strip("\n")
            for n, d in enumerate(documents, 1)
            if (n % 10 == 0) == (part == "held_out")
        ]
        assert bytes(tokens[:].tolist()).decode() == "".join(f"{d}\n\n" for d in wanted)


def test_a_file_that_is_cut_off_while_it_is_mapped_is_named_before_it_is_read(make):
    _, _, folder = make("--data", DEFAULT_TEXT)
    training = load_tokens(folder, 256, 16).training
    file = folder / "training.bin"
    os.truncate(file, 100)  # a read beyond it would end the process with SIGBUS
    with pytest.raises(SystemExit, match=f"{file.name} was changed"):
        training[5000:5016]


def test_a_file_that_is_written_to_while_it_is_mapped_is_not_trained_on(make):
    _, _, folder = make("--data", DEFAULT_TEXT)
    training, file = load_tokens(folder, 256, 16).training, folder / "training.bin"
    shutil.copy(file, folder / "copy")
    (folder / "copy").rename(file)  # the mapped file has no name any more, and its content stays
    assert len(training[5000:5016]) == 16
    training = load_tokens(folder, 256, 16).training
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(SystemExit, match=f"{file.name} was changed"):
        training[5000:5016]


def test_json_lines_and_folders_are_read_and_a_tokenizer_is_trained_and_kept(make, tmp_path):
    source = tmp_path / "texts"
    source.mkdir()
    rows = [{"body": f"Document {n} is about pipelines.\n\nIt has two parts."} for n in range(40)]
    (source / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    (source / "a.txt").write_text("First one.\n\nSecond one.\n")
    (source / ".a.txt").write_text("A backup.")
    (source / "more").mkdir()
    (source / "c.md").write_text("Another kind.")
    status, said, folder = make("--data", source, "--field", "body", "--vocabulary", 300)
    assert (status, "42 documents" in said) == (0, True)
    assert f"not read in {source}: 'c.md', 'more'\n" in said
    corpus = load_tokens(folder, 300, 4)
    text = corpus.decode(corpus.training[:].tolist())
    assert text.startswith("First one.\n\nSecond one.\n\nDocument 0 is about pipelines.\n\nIt has")
    assert corpus.bytes_per_token > 1.5
    assert corpus.encode("Document") == corpus.encode("Document")


def test_a_token_that_begins_a_text_begins_each_document_once_however_often_it_is_cut(
    make, tmp_path, monkeypatch
):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<begin>"], initial_alphabet=letters, show_progress=False
    )
    tokenizer.train_from_iterator(["It rains again and again.\n"] * 9, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", tokenizer.token_to_id("<begin>"))]
    )
    tokenizer.save(str(tmp_path / "own.json"))
    (tmp_path / "a.txt").write_text("\n\n".join(["It rains again.\n" * 20] * 20))
    monkeypatch.setattr(prepare_data, "PIECE", 50)
    status, _, folder = make("--data", tmp_path / "a.txt", "--tokenizer", tmp_path / "own.json")
    assert status == 0
    corpus = load_tokens(folder, tokenizer.get_vocab_size(), 4)
    begins = [
        (part[:] == tokenizer.token_to_id("<begin>")).sum()
        for part in (corpus.training, corpus.held_out)
    ]
    assert begins == [18, 2]


@pytest.mark.further
def test_pretraining_continues_from_the_same_tokens_and_rejects_others(make, tmp_path):
    folders = [make("--data", DEFAULT_TEXT, "--hold-out", n, out=f"{n}")[2] for n in (10, 5)]
    sizes = "--dim 16 --heads 2 --kv-heads 1 --seq-len 16 --batch-size 16 --microbatches 4"
    flags = f"{sizes} --device cpu --dtype float64 --evaluate-windows 8 --warm-up-steps 1"
    command = f"pretrain_llama.py {flags} --decay-steps 4 --checkpoints {tmp_path}/saved"
    options = {"ranks": 2, "warm": True, "show": False, "limit": 60}
    output = run(f"{command} --data {folders[0]} --steps 2 --verify", **options).output
    assert "as promised" in output
    assert len(run(f"{command} --data {folders[0]} --steps 4", **options).losses) == 2
    with pytest.raises(Exception, match="--data"):
        run(f"{command} --data {folders[1]} --steps 6", **options)


# Data sets of Hugging Face


def stand_in(rows, asked):
    """A module in the place of Hugging Face's `datasets`."""
    module = types.ModuleType("datasets")

    def load_dataset(path, name=None, split=None, streaming=False):
        asked.append((path, name, split, streaming))
        for row in rows:
            asked.append(row)
            yield row

    module.load_dataset = load_dataset
    return module


def texts_of(folder):
    """All documents of a folder of bytes, the held-out ones last."""
    corpus = load_tokens(folder, 256, 4, packed=True)
    parts = zip((corpus.training, corpus.held_out), corpus.ends)
    return [
        bytes(tokens[first:end].tolist()).decode().removesuffix("\n\n")
        for tokens, ends in parts
        for first, end in zip([0, *ends.tolist()], ends.tolist())
    ]


def test_a_data_set_is_streamed_only_as_far_as_it_is_needed(monkeypatch, make):
    asked, rows = [], [{"text": f"story {number} " * 20} for number in range(100)]
    monkeypatch.setitem(sys.modules, "datasets", stand_in(rows, asked))
    status, _, folder = make(
        "--dataset", "somebody/stories:small", "--characters", 1200, "--hold-out", 4
    )
    assert status == 0 and asked[0] == ("somebody/stories", "small", "train", True)
    texts = [row["text"] for row in rows[:7]]
    assert sorted(texts_of(folder)) == sorted(
        [*texts, rows[7]["text"][: 1200 - sum(map(len, texts))]]
    )
    assert asked[-1] == rows[7]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{"words": "x"}], "no column named text"),
        ([{"text": "half \ud800"}], "--dataset: somebody/stories has text that is not Unicode"),
        ([{"text": "short"}], "--dataset has 1 documents, and none is left for the held_out part"),
    ],
)
def test_a_data_set_of_no_use_is_refused(rows, sentence, monkeypatch, make):
    monkeypatch.setitem(sys.modules, "datasets", stand_in(rows, []))
    status, said, folder = make("--dataset", "somebody/stories")
    assert status and sentence in f"{status} {said}" and not folder.exists()


@pytest.mark.parametrize(
    ("error", "reason"), [(KeyError("train"), "'train'"), (ValueError("\n\n"), "ValueError")]
)
def test_an_error_of_the_library_is_one_sentence(error, reason, monkeypatch, make):
    module = stand_in([], [])
    module.load_dataset = lambda *words, **named: (_ for _ in ()).throw(error)
    monkeypatch.setitem(sys.modules, "datasets", module)
    status, said, folder = make("--dataset", "somebody/stories")
    assert status and not folder.exists()
    assert f"--dataset somebody/stories cannot be read ({reason})" in f"{status} {said}"


@pytest.mark.parametrize("form", ["dataset_dict.json", "state.json"])
def test_a_folder_of_save_to_disk_is_read_by_its_own_function(form, tmp_path, monkeypatch, make):
    rows = [{"text": f"story {number} " * 20} for number in range(100)]
    module = stand_in([{"text": "of load_dataset"}], [])
    parts = {"train": rows} if form == "dataset_dict.json" else rows
    module.load_from_disk = lambda path: {str(tmp_path): parts}[path]
    monkeypatch.setitem(sys.modules, "datasets", module)
    (tmp_path / form).write_text("{}")
    status, _, folder = make("--dataset", tmp_path)
    assert status == 0
    assert sorted(texts_of(folder)) == sorted(row["text"] for row in rows)
    if form == "dataset_dict.json":
        module.load_from_disk = lambda path: {"test": rows, "dev": rows}
        status, said, _ = make("--dataset", tmp_path, out="other")
        assert "has the parts test, dev and no train" in f"{status} {said}"


def test_data_that_is_named_twice_is_all_read_and_a_folder_may_have_a_space(make, tmp_path):
    (tmp_path / "copy.txt").write_bytes(DEFAULT_TEXT.read_bytes())
    words = ["--data", DEFAULT_TEXT, "--data", tmp_path / "copy.txt"]
    status, said, folder = make(*words, out="two words")
    once = make("--data", DEFAULT_TEXT)[1]
    documents, twice = (int(text.split(" documents")[0]) for text in (once, said))
    assert status == 0 and twice == 2 * documents
    command = shlex.split(said.splitlines()[1])
    assert command[command.index("--data") + 1] == str(folder)


def test_a_folder_gives_its_texts_also_with_endings_in_capitals(make, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.TXT").write_text("one\n\n")
    (folder / "b.JSONL").write_text('{"text": "two"}\n')
    (folder / "c.md").write_text("left out\n\n")
    status, said, _ = make("--data", folder, "--hold-out", 2)
    found = f"not read in {folder}: 'c.md'\n2 documents: 5 training, 5 held_out tokens"
    assert status == 0 and said.startswith(found)


def test_json_lines_may_begin_with_the_mark_of_an_encoding(make, tmp_path):
    (tmp_path / "of_windows.jsonl").write_text('\ufeff{"text": "a"}\r\n{"text": "b"}\r\n')
    status, said, _ = make("--data", tmp_path / "of_windows.jsonl", "--hold-out", 2)
    assert status == 0 and said.startswith("2 documents: 3 training, 3 held_out tokens")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--dataset", "a/b"], "pip install datasets"),
        (["--dataset", "a/b", "--data", "x"], "use one of them"),
        (["--data", DEFAULT_TEXT, "--tokenizer", "nowhere.json"], "nowhere.json cannot be read"),
    ],
)
def test_what_cannot_be_read_is_named_with_the_way_out(words, sentence, make):
    status, said, folder = make(*words)
    assert status and sentence in f"{status} {said}" and not folder.exists()


# A gigabyte

MEASURE = """
import re, sys
sys.path.insert(0, sys.argv[2])
import torch
from extensions.pretraining.token_files import load_tokens
batch = load_tokens(sys.argv[1], 256, 128).batch(3, 32, 128)
anonymous = re.search(r"RssAnon:\\s+(\\d+) kB", open("/proc/self/status").read())[1]
print(int(anonymous) / 1024, *batch[0].shape)
"""


@pytest.mark.further
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for its memory")
@pytest.mark.processes
def test_with_1_gb_of_tokens_a_rank_has_at_most_50_mb_more_memory_of_its_own(tmp_path):
    anonymous = {}
    for name, size in (("small", 2**20), ("large", 2**30)):
        folder = tmp_path / name
        folder.mkdir()
        files = {"training": size // 2, "held_out": 1000}
        for part, count in files.items():
            with open(folder / f"{part}.bin", "wb") as file:
                file.truncate(2 * count)  # without blocks on the disk
        describe(
            folder, {name: {"numbers": files.get(name, 1), "sha256": ""} for name in TOKEN_FILES}
        )
        words = [sys.executable, "-c", MEASURE, str(folder), str(ROOT / "source_code")]
        said = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
        anonymous[name], *shape = map(float, said.split())
        assert shape == [32, 128]
    assert anonymous["large"] < anonymous["small"] + 50


def describe(folder, files):
    description = {
        "bytes_per_number": 2, "num_tokens": 256, "bytes_per_token": 1.0, "tokenizer": False,
        "files": files,
    }  # fmt: skip
    description["checksum"] = checksum_of_tokens_file(description)
    (folder / TOKENS_FILE).write_text(json.dumps(description))


# What is damaged, and what is rejected


def damaged(folder, how):
    """Spoil a folder in one way."""
    file, description = folder / "training.bin", folder / TOKENS_FILE
    if how == "truncated":
        os.truncate(file, file.stat().st_size - 2)
    elif how == "gone":
        file.unlink()
    elif how == "pipe":
        file.unlink()
        os.mkfifo(file)
    elif how == "description changed":
        description.write_text(
            description.read_text().replace('"num_tokens": 256', '"num_tokens": 9')
        )
    elif how == "no JSON":
        description.write_text("{")


@pytest.mark.parametrize("how", ["truncated", "gone", "pipe", "description changed", "no JSON"])
def test_a_damaged_folder_is_rejected_with_the_name_of_the_file(make, how):
    folder = make("--data", DEFAULT_TEXT)[2]
    damaged(folder, how)
    with pytest.raises(DataError, match="--data.*(training|tokens.json).*prepare_data"):
        load_tokens(folder, 256, 16)


def test_a_file_that_the_system_does_not_map_is_named(make, monkeypatch):
    folder = make("--data", DEFAULT_TEXT)[2]

    def refused(*_):
        raise RuntimeError("unable to mmap 99 bytes from file <x>: Cannot allocate memory (12)")

    monkeypatch.setattr(torch.UntypedStorage, "from_file", refused)
    with pytest.raises(DataError, match="training.bin of .* cannot be mapped into memory"):
        load_tokens(folder, 256, 16)


def test_a_folder_whose_name_is_no_utf_8_is_made_whole_and_named_when_it_cannot_be_read(
    make, monkeypatch
):
    monkeypatch.setattr(prepare_data, "print", lambda *_: None, raising=False)  # of such names
    words = ["--data", DEFAULT_TEXT, "--vocabulary", "300"]
    made, usual = (make(*words, out=name)[2] for name in (os.fsdecode(b"\xff"), "tokens"))
    for file in usual.iterdir():
        assert (made / file.name).read_bytes() == file.read_bytes()
    tokenizers.Tokenizer.from_file(str(usual / "tokenizer.json"))
    with pytest.raises(InputError, match="the name .* is not UTF-8"):
        check_folder(made)


def test_a_flipped_byte_is_found_by_check(make, monkeypatch, capsys):
    folder = make("--data", DEFAULT_TEXT)[2]
    assert check_folder(folder)["num_tokens"] == 256
    file = folder / "held_out.bin"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError, match="held_out"):
        check_folder(folder)
    status, said = prepare(monkeypatch, capsys, ["--check", folder])
    assert status == 2 and "held_out" in said and "Traceback" not in said


@pytest.mark.parametrize("more", ["a.txt", "texts/../a.txt", "texts"])
def test_a_text_that_is_named_twice_would_be_held_out_and_trained_with(make, tmp_path, more):
    (tmp_path / "a.txt").write_text(DEFAULT_TEXT.read_text())
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "b.txt").symlink_to("../a.txt")
    status, said, folder = make("--data", tmp_path / "a.txt", tmp_path / more)
    assert status == 2 and said.startswith("--data: ") and "more than once" in said
    assert not folder.exists()


def test_another_tokenizer_in_the_folder_is_found_by_check(make, monkeypatch, capsys):
    folder = make("--data", DEFAULT_TEXT, "--vocabulary", 300)[2]
    check_folder(folder)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"!": 0', '"!": 1'))
    status, said = prepare(monkeypatch, capsys, ["--check", folder])
    assert status == 2 and "tokenizer.json is not what was written" in said
    with pytest.raises(DataError, match="tokenizer.json is not what was written"):
        load_tokens(folder, 300, 16)


def test_check_takes_no_flag_of_another_task(make, monkeypatch, capsys):
    folder = make("--data", DEFAULT_TEXT)[2]
    status, said = prepare(monkeypatch, capsys, ["--check", folder, "--hold-out", "3"])
    assert status and "--hold-out" in said


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"text": 3}\n', ["line 1", "--field text"]),
        (b'{"body": "a"}\n', ["line 1", "name the key of the texts, such as --field body"]),
        (b'{"text": "a"}\n[1\n', ["line 2", "not JSON"]),
        (b"\xff\xfe\n", ["UTF-8", "leave it out of --data"]),
        (b'{"text": "one document"}\n', ["held_out", "--hold-out"]),
    ],
)
def test_a_file_that_cannot_be_learnt_from_is_rejected_in_one_sentence(
    make, tmp_path, content, words
):
    file = tmp_path / "a.jsonl"
    file.write_bytes(content)
    status, said, folder = make("--data", file)
    assert status == 2 and said.count("\n") == 1
    assert not folder.exists(), "nothing half-written is left"
    for word in words:
        assert word in said


@pytest.mark.parametrize("start", ["", "\ufeff", "\n\n"])
@pytest.mark.parametrize(
    "end", ['{"text": "a"}\n', '[{"text": "a"},\n', '[\n  {\n    "text": "a"\n']
)
def test_json_in_a_file_of_another_name_is_not_learnt_as_text(make, tmp_path, start, end):
    (tmp_path / "a.json").write_text(start + end, encoding="utf-8")
    status, said, folder = make("--data", tmp_path / "a.json")
    assert status == 2 and "a.json has JSON" in said and ".jsonl" in said
    assert not folder.exists()


def test_flags_that_do_not_fit_are_rejected_and_nothing_is_overwritten(make, tmp_path):
    assert make("--data", DEFAULT_TEXT)[0] == 0
    status, said, folder = make("--data", DEFAULT_TEXT)
    assert status == 2 and "already there" in said and check_folder(folder)
    assert "at least 256" in make("--data", DEFAULT_TEXT, "--vocabulary", 100, out="b")[1]
    assert "at least 2" in make("--data", DEFAULT_TEXT, "--hold-out", 1, out="c")[1]
    assert "cannot be read" in make("--data", tmp_path / "nothing.txt", out="d")[1]
    with pytest.raises(DataError, match="--vocabulary 100"):
        load_tokens(folder, 100, 16)
    with pytest.raises(DataError, match="--seq-len 5000"):
        load_tokens(folder, 256, 5000)


def test_a_folder_without_tokens_is_not_read_as_a_text(tmp_path):
    with pytest.raises(DataError, match="has no tokens.json; make tokens with prepare_data.py"):
        is_token_folder(tmp_path)
