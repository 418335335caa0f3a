"""Several documents in a row give what each gives alone, and every rank knows where they end."""

import sys
from unittest import mock

import prepare_data
import pytest
import torch

from course.launch import PRELOAD, run
from extensions.pretraining.packing import PackedDocuments, document_mask, masked_loss, packed
from extensions.pretraining.padding import PADDING
from extensions.pretraining.token_files import load_tokens
from extensions.pretraining.tokens import Documents, load_corpus
from pipeline.data import DEFAULT_TEXT, DataError, load_text
from pipeline.model import ModelConfig, build_part, token_loss

PRELOAD.extend(["torch._dynamo", "torch.distributed.checkpoint"])
SMALL = "--dim 16 --heads 2 --kv-heads 1 --seq-len 64 --batch-size 16 --microbatches 4"
EXACT = f"{SMALL} --device cpu --dtype float64 --evaluate-windows 8 --warm-up-steps 1 --verify"


@pytest.fixture
def documents():
    return load_corpus(load_text(), documents=True, seq_len=64)


def documents_in(inputs, targets):
    """(inputs, targets) of each document of a row, cut behind every target that is PADDING."""
    places = [place + 1 for place, target in enumerate(targets.tolist()) if target == PADDING]
    ends = [0, *places, *([] if places and places[-1] == len(targets) else [len(targets)])]
    return [(inputs[a:b], targets[a:b]) for a, b in zip(ends, ends[1:])]


def test_packed_documents_have_the_logits_and_the_gradients_of_each_alone_to_1e_12(documents):
    inputs, targets = packed(documents, 64).batch(1, 8, 64)
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


def test_a_document_ends_where_its_last_token_is_and_every_token_comes_in_order(documents):
    corpus = packed(documents, 64)
    for part, tokens, ends in zip(
        (documents.training_documents, documents.held_out_documents),
        (corpus.training, corpus.held_out),
        corpus.ends,
    ):
        starts = [0, *ends.tolist()]
        found = [tokens[a:b].tolist() for a, b in zip(starts, starts[1:])]
        assert found == [document.tolist() for document in part]
    inputs, targets = corpus.windows(64, 3)
    assert torch.equal(inputs.flatten(), corpus.held_out[: inputs.numel()])
    places = (targets.flatten() == PADDING).nonzero().flatten() + 1
    assert torch.equal(places, corpus.ends[1][corpus.ends[1] <= inputs.numel()])


def test_a_row_that_begins_or_ends_with_a_document_is_cut_there():
    parts = tuple(torch.full((length,), length) for length in (3, 1, 4))
    corpus = packed(Documents(torch.cat(parts), torch.cat(parts), None, 256, 1.0, parts, parts), 4)
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
    with pytest.raises(DataError, match="--seq-len 8"):
        packed(Documents(torch.cat(parts), torch.cat(parts), None, 256, 1.0, parts, parts), 8)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (4, "--layers 4 --schedule 1f1b --replicas 2 --accumulate 2 --microbatches 4"),
        (2, "--layers 4 --schedule zb-v --recompute layer --sample 3"),
    ],
)
def test_pipelines_train_packed_documents_as_one_process_does(ranks, flags):
    command = f"pretrain_llama.py {EXACT} --packed --steps 3 {flags}"
    output = run(command, ranks, warm=True, show=False, limit=60).output
    assert "as promised" in output


def test_rows_of_documents_are_as_long_as_the_longest_of_each_batch(documents):
    lengths = set()
    for step in range(6):
        inputs, targets = documents.batch(step, 2, 2000)
        real = (targets != PADDING).sum(1)
        assert inputs.shape == targets.shape == (2, real.max())
        lengths.add(inputs.shape[1])
    assert len(lengths) > 3
    assert documents.batch(0, 2, 16)[0].shape == (2, 16)


def test_a_pipeline_trains_rows_of_another_length_in_every_step(tmp_path):
    """The longest of two documents, of 2 to 40 bytes, is another one in each of six steps."""
    text = "\n\n".join(
        "abcdefghij klm nop qrstu vwx yz and the rest"[: 2 + n % 39] for n in range(300)
    )
    (tmp_path / "text.txt").write_text(text)
    flags = f"{EXACT} --documents --layers 4 --steps 6 --batch-size 2 --microbatches 2"
    command = (
        f"pretrain_llama.py {flags} --data {tmp_path / 'text.txt'} --schedule interleaved-1f1b"
    )
    output = run(f"{command} --chunks 2", 2, warm=True, show=False, limit=60).output
    assert "as promised" in output
    corpus = load_corpus(load_text(tmp_path / "text.txt", 64), documents=True, seq_len=64)
    assert len({corpus.batch(step, 2, 64)[0].shape[1] for step in range(6)}) > 3


# Documents in files of tokens


def prepare(folder, *words):
    with mock.patch.object(sys, "argv", ["prepare_data.py", "--out", str(folder), *words]):
        assert prepare_data.main() == 0


def test_token_files_say_where_their_documents_end(tmp_path):
    prepare(tmp_path / "tokens", "--data", str(DEFAULT_TEXT), "--shard-tokens", "7001")
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
    import json

    from extensions.pretraining.token_files import TOKENS_FILE, checksum_of_tokens_file

    prepare(tmp_path / "tokens", "--data", str(DEFAULT_TEXT))
    path = tmp_path / "tokens" / TOKENS_FILE
    said = json.loads(path.read_text())
    ends = said.pop("ends")
    said["checksum"] = checksum_of_tokens_file(said)
    path.write_text(json.dumps(said))
    load_tokens(tmp_path / "tokens", 256, 64)
    with pytest.raises(DataError, match="where its documents end"):
        load_tokens(tmp_path / "tokens", 256, 64, packed=True)
    (tmp_path / "tokens" / ends["training"]["file"]).write_bytes(b"1234567")
    said["ends"] = ends
    said["checksum"] = checksum_of_tokens_file(said)
    path.write_text(json.dumps(said))
    with pytest.raises(DataError, match="training-ends.bin has 7 bytes"):
        load_tokens(tmp_path / "tokens", 256, 64, packed=True)
