"""Several documents in a row give what each gives alone, and every rank knows where they end."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from token_folders import prepare

from course.launch import PRELOAD, run
from extensions.pretraining.batches import Batches
from extensions.pretraining.packing import PackedDocuments, document_mask, masked_loss
from extensions.pretraining.padding import PADDING
from extensions.pretraining.token_files import load_tokens
from pipeline.data import DataError
from pipeline.model import ModelConfig, build_part, token_loss

PRELOAD.extend(["torch._dynamo", "torch.distributed.checkpoint"])
SMALL = "--dim 16 --heads 2 --kv-heads 1 --seq-len 64 --batch-size 16 --microbatches 4"
EXACT = f"{SMALL} --device cpu --dtype float64 --evaluate-windows 8 --warm-up-steps 1 --verify"


@pytest.fixture
def corpus(tmp_path):
    return load_tokens(prepare(tmp_path / "tokens"), 256, 64, packed=True)


def test_a_batch_without_a_token_to_learn_is_named_and_is_no_divergence(corpus):
    every = torch.arange(1, len(corpus.training) + 1)  # documents of one token
    for ends, learnt in ((corpus.ends[0], 16), (every, 0)):
        text = replace(corpus, ends=(ends, corpus.ends[1]))
        sizes = SimpleNamespace(text=text, steps=1, batch_size=2, seq_len=8, seed=0)
        batches = Batches(sizes, lambda batch: [], (True, True), torch.device("cpu"))
        if learnt:
            assert 0 < batches.take(0)[1] <= learnt
    with pytest.raises(SystemExit, match="--data: no token of batch 0 .* larger --seq-len"):
        batches.take(0)


def documents_in(inputs, targets):
    """(inputs, targets) of each document of a row, cut behind every target that is PADDING."""
    places = [place + 1 for place, target in enumerate(targets.tolist()) if target == PADDING]
    ends = [0, *places, *([] if places and places[-1] == len(targets) else [len(targets)])]
    return [(inputs[a:b], targets[a:b]) for a, b in zip(ends, ends[1:])]


def test_packed_documents_have_the_logits_and_the_gradients_of_each_alone_to_1e_12(corpus):
    inputs, targets = corpus.batch(1, 8, 64)
    model = build_part(ModelConfig(layers=2, seq_len=64), 0, 2)
    loss, together = masked_loss(model, inputs, targets), model(inputs, document_mask(targets))
    loss.backward()
    gradients = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    real, cuts = (targets != PADDING).sum(), 0
    for row, scores in zip(zip(inputs, targets), together):
        start = 0
        for one, wanted in documents_in(*row):
            alone = model(one[None])[0]
            assert (alone - scores[start : start + len(one)]).abs().max() < 1e-12
            counted = wanted[wanted != PADDING]
            if len(counted):
                (token_loss(alone[: len(counted)], counted) * len(counted) / real).backward()
            start, cuts = start + len(one), cuts + 1
    assert cuts > len(inputs)  # some row has several
    for weight, expected in zip(model.parameters(), gradients):
        assert (weight.grad - expected).abs().max() < 1e-12
    assert (model(inputs) - together).abs().max() > 0.1  # without a mask


def test_a_target_is_left_out_where_a_document_ends_and_every_token_comes_in_order(corpus):
    inputs, targets = corpus.windows(64, 3)
    assert torch.equal(inputs.flatten(), corpus.held_out[: inputs.numel()])
    places = (targets.flatten() == PADDING).nonzero().flatten() + 1
    assert torch.equal(places, corpus.ends[1][corpus.ends[1] <= inputs.numel()])


def test_a_row_that_begins_or_ends_with_a_document_is_cut_there():
    tokens, ends = torch.tensor([3, 3, 3, 1, 4, 4, 4, 4]), torch.tensor([3, 4, 8])
    corpus = PackedDocuments(tokens, tokens, ends=(ends, ends))
    inputs, targets = corpus.rows(corpus.training, corpus.ends[0], [0, 2, 3], 4)
    assert inputs.tolist() == [[3, 3, 3, 1], [3, 1, 4, 4], [1, 4, 4, 4]]
    p = PADDING
    assert targets.tolist() == [[3, 3, p, p], [p, p, 4, 4], [p, 4, 4, 4]]
    assert document_mask(targets)[1, 0].tolist() == [
        [True, False, False, False],
        [False, True, False, False],
        [False, False, True, False],
        [False, False, True, True],
    ]


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (4, "--layers 4 --schedule 1f1b --replicas 2 --accumulate 2 --microbatches 4"),
        (2, "--layers 4 --schedule zb-v --recompute layer --sample 3"),
    ],
)
def test_pipelines_train_packed_documents_as_one_process_does(ranks, flags, tmp_path):
    data = prepare(tmp_path / "tokens")
    command = f"pretrain_llama.py {EXACT} --data {data} --packed --steps 3 {flags}"
    output = run(command, ranks, warm=True, show=False, limit=60).output
    assert "as promised" in output


# Documents in files of tokens


def test_token_files_say_where_their_documents_end(tmp_path):
    prepare(tmp_path / "tokens")
    corpus = load_tokens(tmp_path / "tokens", 256, 64, packed=True)
    assert isinstance(corpus, PackedDocuments)
    for tokens, ends in zip((corpus.training, corpus.held_out), corpus.ends):
        assert ends[-1] == len(tokens)
        starts = [0, *ends.tolist()]
        documents = [bytes(tokens[a:b].tolist()).decode() for a, b in zip(starts, starts[1:])]
        assert all(document.endswith("\n\n") and document[:-2].strip() for document in documents)
        assert not any("\n\n" in document[:-2] for document in documents)
    inputs, targets = corpus.batch(2, 8, 64)
    boundary = (inputs[:, 1:] == 10) & (inputs[:, :-1] == 10)
    assert torch.equal(boundary, targets[:, 1:] == PADDING) and boundary.any()
    output = run(
        f"pretrain_llama.py {EXACT} --data {tmp_path / 'tokens'} --packed --layers 4 --steps 2",
        2, warm=True, show=False, limit=60,
    ).output  # fmt: skip
    assert "as promised" in output


def test_a_folder_that_does_not_say_it_is_rejected(tmp_path):
    prepare(tmp_path / "tokens")
    (tmp_path / "tokens" / "training-ends.bin").write_bytes(b"1234567")
    load_tokens(tmp_path / "tokens", 256, 64)
    with pytest.raises(DataError, match="training-ends.bin has 7 bytes"):
        load_tokens(tmp_path / "tokens", 256, 64, packed=True)
