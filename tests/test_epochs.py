"""With --shuffle every row of a text comes once per epoch, on any number of ranks, also resumed."""

import json
from collections import Counter
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from course.launch import run
from extensions.pretraining.epochs import InEpochs
from extensions.pretraining.packing import PackedDocuments
from extensions.pretraining.padding import PADDING
from extensions.pretraining.prompts import Completions
from extensions.pretraining.token_files import MappedTokens
from extensions.pretraining.tokens import Corpus

TOKENS, LENGTH = torch.arange(200), 7  # 28 rows of 7 tokens, and a rest of 4
PARTS = [torch.arange(first, first + length) for first, length in [(0, 9), (20, 3), (40, 12)] * 5]


def corpora():
    mapped = MappedTokens(TOKENS.to(torch.int32), Path())
    ends = torch.tensor(list(accumulate([20] * 10)))
    return {
        "a text": (Corpus(TOKENS, TOKENS), 28),
        "a file": (Corpus(mapped, mapped), 28),
        "packed": (PackedDocuments(TOKENS, TOKENS, ends=(ends, ends)), 28),
        "prompts": (Completions(TOKENS, TOKENS, rows=tuple(PARTS), lengths=(1,) * 15), 15),
    }


def batches(corpus, count, size, seed=0):
    """The first tokens of the rows of `count` batches, and the batches."""
    made = [InEpochs(corpus).batch(step, size, LENGTH, seed) for step in range(count)]
    return [row[0].item() for inputs, _ in made for row in inputs], made


@pytest.mark.parametrize("kind", list(corpora()))
def test_every_row_comes_once_per_epoch_in_an_order_of_its_own(kind):
    corpus, rows = corpora()[kind]
    assert corpus.num_rows(LENGTH) == rows
    seen, made = batches(corpus, 3 * rows, 5)  # 15 epochs; no batch ends with the first
    first, second = seen[:rows], seen[rows : 2 * rows]
    wanted = range(0, rows * LENGTH, LENGTH) if kind != "prompts" else [0, 20, 40] * 5
    assert Counter(first) == Counter(second) == Counter(wanted)
    assert first != second and batches(corpus, rows, 5, seed=1)[0][:rows] != first
    for inputs, targets in made:
        real = targets != PADDING
        assert torch.equal(targets[real], inputs[real] + 1)


@pytest.mark.parametrize("size", [1, 4, 28, 30, 57])
def test_the_order_does_not_depend_on_the_batch_size(size):
    corpus, _ = corpora()["a text"]
    assert batches(corpus, 200 // size, size)[0] == batches(corpus, 200, 1)[0][: 200 // size * size]


def losses_of(folder, flags, ranks):
    file = folder / f"{ranks}-{len(list(folder.iterdir()))}.jsonl"
    small = (
        "--layers 4 --dim 16 --heads 2 --kv-heads 2 --seq-len 32 --batch-size 24 --dtype float64"
    )
    command = f"pretrain_llama.py {small} --microbatches 4 --device cpu --shuffle --losses {file}"
    said = run(f"{command} {flags}", ranks, warm=True, show=False).output
    return [json.loads(line)["loss"] for line in file.read_text().splitlines()], said


@pytest.mark.further
@pytest.mark.processes
def test_a_run_that_stops_in_mid_epoch_goes_on_with_other_ranks_and_the_same_rows(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} is {number**2}\n" for number in range(400)))
    flags = f"--data {text} --optimizer sgd --decay-steps 20 --warm-up-steps 2 --clip 1"
    whole, said = losses_of(tmp_path, f"{flags} --steps 9 --verify", 2)
    assert "as promised" in said and "an epoch has" in said
    saved = f"{flags} --checkpoints {tmp_path / 'saved'}"
    first, _ = losses_of(tmp_path, f"{saved} --steps 4", 2)
    second, _ = losses_of(tmp_path, f"{saved} --steps 9", 4)
    assert len(first + second) == len(whole) == 9
    assert max(abs(a - b) for a, b in zip(first + second, whole)) <= 1e-12
