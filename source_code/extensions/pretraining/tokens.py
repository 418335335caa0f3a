# SPDX-License-Identifier: Apache-2.0
"""Texts for pretraining: files or a streamed data set, bytes or a tokenizer, rows or documents.

Each is a `Corpus`, whose batches depend on (seed, step) alone like those of a Text (data.py), so
that every rank can make every batch, also after a restart. The last tenth is held out.
"""

import os
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from extensions.pretraining.padding import PADDING
from guard.inputs import LARGEST, MEBIBYTE, InputError, read_bytes, read_text
from pipeline.data import DataError, Text, check_is_text, load_text, split_text

BYTES = 256  # a vocabulary of this size needs no tokenizer
LARGEST_TOKENIZER = 64 * MEBIBYTE


@dataclass(frozen=True)
class Corpus(Text):
    """A Text whose tokens come from `tokenizer`, or are bytes if that is None.

    `num_tokens` is one more than the largest token, and at most the model's vocabulary.
    """

    tokenizer: object = None
    num_tokens: int = BYTES
    bytes_per_token: float = 1.0  # of the held-out part

    def windows(self, seq_len, most):
        """Return the held-out part once: inputs and targets, each (at most `most`, seq_len)."""
        count = min(most, (len(self.held_out) - 1) // seq_len)
        row = self.held_out[: count * seq_len + 1]
        return row[:-1].view(count, seq_len), row[1:].view(count, seq_len)

    def num_rows(self, seq_len):
        """How many rows the training part has, none of which contains a part of another."""
        return (len(self.training) - 1) // seq_len

    def rows_at(self, indices, seq_len):
        """Return inputs and targets of these rows, counted from 0."""
        starts = [index * seq_len for index in indices]
        rows = torch.stack([self.training[start : start + seq_len + 1] for start in starts])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def encode(self, text):
        return as_tokens(self.tokenizer, text).tolist()

    def decode(self, tokens):
        if self.tokenizer is None:
            return bytes(tokens).decode(errors="replace")
        return self.tokenizer.decode(tokens)


@dataclass(frozen=True)
class Documents(Corpus):
    """A Corpus with one document per row, cut at the end of the row or padded."""

    training_documents: tuple = ()
    held_out_documents: tuple = ()

    def batch(self, step, batch_size, seq_len, seed=0):
        """Return a batch as Text does; targets after the end of a document are PADDING.

        The rows are as long as the longest document, and at most `seq_len`.
        """
        generator = torch.Generator().manual_seed((seed * 2654435769 + step) % 2**32)
        count = len(self.training_documents)
        drawn = torch.randint(count, (batch_size,), generator=generator).tolist()
        return self.rows_at(drawn, seq_len)

    def num_rows(self, seq_len):
        return len(self.training_documents)

    def rows_at(self, indices, seq_len):
        documents = [self.training_documents[index] for index in indices]
        longest = max(len(document) for document in documents) - 1  # of what has a next token
        return in_rows(documents, max(1, min(seq_len, longest)))

    def windows(self, seq_len, most):
        return in_rows(self.held_out_documents[:most], seq_len)


def in_rows(documents, seq_len):
    """Return inputs and targets, both (documents, seq_len), from one-dimensional token tensors.

    Padding comes last and attention is causal, so attention needs no mask for the padding.
    """

    def padded(rows, filler):
        whole = torch.full((seq_len,), filler)  # so that all become as long as this
        return pad_sequence([whole, *rows], batch_first=True, padding_value=filler)[1:]

    inputs = [document[:seq_len][: len(document) - 1] for document in documents]
    targets = [document[1 : seq_len + 1] for document in documents]
    return padded(inputs, 0), padded(targets, PADDING)


def filled_up(batch, rows):
    """Return inputs and targets with rows of padding added up to a multiple of `rows`.

    A row of targets may have any shape: tokens, or one label.
    """
    missing = -len(batch[0]) % rows
    return tuple(
        torch.cat([tokens, tokens.new_full((missing, *tokens.shape[1:]), filler)])
        for tokens, filler in zip(batch, (0, PADDING))
    )


def numbers_of(tokenizer):
    """One more than the largest token; not the number of tokens, since numbers may be left out."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1) if tokenizer else BYTES


def load_corpus(content, vocabulary=BYTES, tokenizer_file=None, documents=False, seq_len=32):
    """Return a Corpus from a Text in bytes. Raises DataError if too short or no tokenizer fits."""
    plain = content.training, content.held_out
    texts = [part.to(torch.uint8).numpy().tobytes().decode(errors="replace") for part in plain]
    tokenizer = None
    if tokenizer_file:
        tokenizer = read_tokenizer(tokenizer_file)
    elif vocabulary > BYTES:
        tokenizer = train_tokenizer(texts[0], vocabulary)
    num_tokens = numbers_of(tokenizer)
    if num_tokens > vocabulary:
        raise DataError(
            f"--vocabulary {vocabulary} is less than the {num_tokens} tokens of the tokenizer; "
            f"use at least {num_tokens}"
        )
    tokens = [as_tokens(tokenizer, text) for text in texts] if tokenizer else plain
    if min(map(len, tokens)) < seq_len + 1:
        raise DataError(
            f"--data: the text has {len(tokens[1])} held-out tokens, and --seq-len {seq_len} needs "
            "one more than itself; use a longer text, a smaller --seq-len or --vocabulary"
        )
    further = (tokenizer, num_tokens, len(plain[1]) / len(tokens[1]))
    if not documents:
        return Corpus(*tokens, *further)
    cut = [[as_tokens(tokenizer, one) for one in documents_of(text)] for text in texts]
    for part, found in zip(("training", "held-out"), cut):
        if not found:
            raise DataError(
                f"--documents: the {part} text has no documents, which blank lines separate; "
                "leave the flag out, or use another text"
            )
    return Documents(*tokens, *further, *map(tuple, cut))


def as_tokens(tokenizer, text):
    """Return `text` as int64 tokens, or bytes if `tokenizer` is None. Raises DataError."""
    tokens = encode(tokenizer, text) if tokenizer else list(text.encode())
    return torch.tensor(tokens, dtype=torch.int64)


def encode(tokenizer, text, begins=True):
    """Return the tokens of `text`. Raises DataError for one outside the vocabulary.

    Without `begins` it continues a document, and gets none of the tokenizer's special tokens.
    """
    with complaints_of_library("--tokenizer: it cannot encode the text"):
        tokens = tokenizer.encode(text, add_special_tokens=begins).ids
    if tokens and max(tokens) > max(tokenizer.get_vocab().values()):
        raise DataError(f"--tokenizer: it encodes the text as {max(tokens)}, which is not a token")
    return tokens


def documents_of(text):
    """Return the parts of a text between blank lines that have at least one next token."""
    parts = (part.strip("\n") for part in text.replace("\r\n", "\n").split("\n\n"))
    return [f"{part}\n" for part in parts if part.strip()]


def read_content(path, seq_len):
    """Return a Text in bytes: the course's own (None), a file, or a folder's .txt files by name."""
    if path is None or not os.path.isdir(path):
        return load_text(path, seq_len)
    try:
        names = sorted(name for name in os.listdir(path) if name.endswith(".txt"))
    except OSError as error:
        raise DataError(f"--data: {path} cannot be read ({error.strerror})") from None
    if not names:
        raise DataError(
            f"--data: {path} has no .txt files; name a folder that does, or a file, and a folder of "
            "the library datasets with --dataset"
        )
    parts, left = [], LARGEST
    try:
        for name in names:
            parts.append(read_bytes(os.path.join(path, name), left))
            check_is_text(parts[-1], os.path.join(path, name))
            left -= len(parts[-1])
    except InputError as error:
        raise DataError(f"--data: {error}") from None
    return split_text(b"\n\n".join(parts), seq_len, path)


def stream_content(name, characters, seq_len):
    """Return a Text in bytes: the first `characters` of a Hugging Face data set's column `text`.

    `name` names a data set of the hub or a local folder, also one that save_to_disk has written,
    followed by a colon and a configuration if it needs one. Only what is read is downloaded.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"--dataset {name} needs the package datasets; install it with `pip install datasets`, "
            "or name text files with --data"
        ) from None
    path, _, configuration = name.partition(":")
    library_error = getattr(getattr(datasets, "exceptions", None), "DatasetsError", OSError)
    texts, length = [], 0
    try:
        for row in training_rows(datasets, path, configuration):
            if not isinstance(row.get("text"), str):
                raise DataError(f"--dataset {name} has no column named text; use one that has")
            texts.append(row["text"])
            length += len(row["text"]) + 2
            if length >= characters:
                break
    except DataError:
        raise
    except (OSError, RuntimeError, ValueError, library_error) as error:  # a network, a hub, a file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"--dataset {name} cannot be read ({reason}); check the name and the network, or name "
            "a local copy"
        ) from None
    return split_text("\n\n".join(texts)[:characters].encode(), seq_len, name, "--dataset")


def training_rows(datasets, path, configuration):
    """Return the rows of a data set's part `train`; the library reads its two kinds of folders by
    two functions."""
    if os.path.isfile(os.path.join(path, "dataset_dict.json")):
        parts = datasets.load_from_disk(path)
        if "train" not in parts:
            raise DataError(
                f"--dataset {path} has the parts {', '.join(parts)} and no train; name the folder "
                "of one of them"
            )
        return parts["train"]
    if os.path.isfile(os.path.join(path, "state.json")):
        return datasets.load_from_disk(path)
    return datasets.load_dataset(path, configuration or None, split="train", streaming=True)


def train_tokenizer(text, vocabulary):
    """Train a byte-pair tokenizer with at most `vocabulary` tokens, including the 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocabulary, BYTES + len(text)),  # it makes room for as many at once
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def read_tokenizer(file):
    """Return a tokenizer from a file of the tokenizers library, such as tokenizer.json.

    The whole text is encoded: the file's truncation and padding are switched off.
    """
    from tokenizers import Tokenizer

    try:
        text = read_text(file, LARGEST_TOKENIZER)
    except InputError as error:
        raise DataError(f"--tokenizer: {error}; name a tokenizer.json") from None
    with complaints_of_library(f"--tokenizer: {file} cannot be read"):
        tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if not tokenizer.get_vocab():
        raise DataError(f"--tokenizer: {file} has no tokens; name another")
    return tokenizer


@contextmanager
def complaints_of_library(what):
    """Raise DataError for the tokenizers library's errors: plain Exceptions, and panics of Rust."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException" and type(error) is not Exception:
            raise
        reason = str(error).splitlines()[0][:200] if str(error) else "it says no more"
        raise DataError(f"{what} ({reason})") from None
