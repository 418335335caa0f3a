"""Of JSON lines with prompts and completions only the completions are learnt."""

import json

import pytest
import torch
from saved_models import save_library_model

from course.launch import run
from extensions.pretraining.epochs import InEpochs
from extensions.pretraining.padding import PADDING
from extensions.pretraining.prompts import has_prompts, in_rows, load_prompts
from pipeline.data import DataError

ROWS = [{"prompt": f"{n} times {n} is ", "completion": f"{n * n}.\n"} for n in range(3, 43)]


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return path


def length(row):
    return len(row["prompt"] + row["completion"])


def test_every_target_is_a_token_of_a_completion_and_each_of_them_is_one(tmp_path):
    corpus = load_prompts(write(tmp_path / "a.jsonl", ROWS), 256, None, 32)
    assert corpus.num_rows(32) == 36 and len(corpus.held_out) == sum(map(length, ROWS[36:]))
    inputs, targets = InEpochs(corpus).batch(0, 36, 32)
    learnt = [bytes(row[row != PADDING].tolist()).decode() for row in targets]
    assert sorted(learnt) == sorted(row["completion"] for row in ROWS[:36])
    for tokens, row in zip(inputs, targets):
        for here in (row != PADDING).nonzero().flatten().tolist():  # each is the next token
            assert here + 1 == len(tokens) or tokens[here + 1] in (row[here], 0)
    _, drawn = corpus.batch(0, 8, 32)
    assert not torch.isin(drawn, torch.tensor(list(b" times"))).any()


def test_rows_are_padded_behind_and_as_long_as_the_longest_of_each_batch(tmp_path):
    rows = [torch.arange(1, n + 1) for n in (3, 5, 9)]
    inputs, targets = in_rows(rows, 4)
    assert inputs.tolist() == [[1, 2, 0, 0], [1, 2, 3, 4], [1, 2, 3, 4]]
    assert targets.tolist() == [[2, 3, PADDING, PADDING], [2, 3, 4, 5], [2, 3, 4, 5]]
    rows = [{"prompt": "x" * (1 + n % 20), "completion": "yes"} for n in range(60)]
    corpus, lengths = load_prompts(write(tmp_path / "a.jsonl", rows), 256, None, 32), set()
    for step in range(20):
        inputs, targets = corpus.batch(step, 2, 32)
        last = (targets != PADDING).nonzero()[:, 1].max().item()
        assert inputs.shape == targets.shape == (2, last + 1)
        lengths.add(last + 1)
    assert len(lengths) > 3 and corpus.batch(0, 40, 8)[0].shape == (40, 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"completion": None}, "line 3 has no text named completion"),
        ({"prompt": ""}, "line 3 has no text named prompt"),
        ({"prompt": "x" * 40}, "line 3: the prompt has 40 tokens"),
        ({"prompt": "\ud800"}, "line 3 has text that is not Unicode"),
    ],
)
def test_a_line_that_cannot_be_learnt_is_named(change, words, tmp_path):
    rows = [*ROWS[:2], {**ROWS[2], **change}, *ROWS[3:]]
    with pytest.raises(DataError, match=words):
        load_prompts(write(tmp_path / "a.jsonl", rows), 256, None, 32)


def test_a_line_ends_where_json_lines_end_and_nowhere_else(tmp_path):
    rows = [{**row, "completion": "a\u2028b\x85c"} for row in ROWS]
    (tmp_path / "a").write_text("\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    assert load_prompts(tmp_path / "a", 256, None, 32).num_rows(32) == 36


def test_other_files_have_no_prompts(tmp_path):
    assert has_prompts(write(tmp_path / "a.jsonl", ROWS))
    assert not has_prompts(write(tmp_path / "b.jsonl", [{"text": "x"}]))
    (tmp_path / "c.txt").write_text("{ prompt")
    assert not has_prompts(tmp_path / "c.txt") and not has_prompts(tmp_path / "d")
    assert not has_prompts(None) and not has_prompts(tmp_path)
    with pytest.raises(DataError, match="has 9 prompts; use at least 10"):
        load_prompts(write(tmp_path / "a.jsonl", ROWS[:9]), 256, None, 32)


@pytest.mark.processes
def test_a_pipeline_has_the_losses_of_transformers_and_each_completion_counts_once(tmp_path):
    model = save_library_model(tmp_path / "model", "llama")
    data = write(tmp_path / "a.jsonl", ROWS)
    flags = f"--model {model} --data {data} --seq-len 32 --batch-size 8 --microbatches 4 --steps 4"
    command = f"finetune.py {flags} --shuffle --dtype float64 --device cpu --verify"
    assert "as promised" in run(command, 2, warm=True, show=False).output
