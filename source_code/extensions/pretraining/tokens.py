# SPDX-License-Identifier: Apache-2.0
"""A text in the tokens of a tokenizer, or in bytes.

Its batches depend on (seed, step) alone like those of a Text (data.py), so that every rank can make
every batch, also after a restart.
"""

import hashlib
import json
import string
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from extensions.pretraining.padding import PADDING
from files.inputs import MEBIBYTE, InputError, read_text
from pipeline.data import DataError, Text

BYTES = 256  # a vocabulary of this size needs no tokenizer
LARGEST_TOKENIZER = 64 * MEBIBYTE
LARGEST_TOKEN = 2**24  # the library fills a list up to it
MOST_STEPS = 500  # of a tokenizer that replaces text; they are tried in a second or two
MOST_GROWTH = 64  # letters that they may make of one


@dataclass(frozen=True)
class Corpus(Text):
    """A Text whose tokens come from `tokenizer`, or are bytes if that is None.

    `num_tokens` is one more than the largest token, and at most the model's vocabulary.
    `fingerprint` tells one text from another; without it, the tokens themselves do.

    For data of your own, return an object of a subclass with another `batch`: from its arguments
    alone it returns inputs and targets, both (batch_size, at most seq_len), int64. Targets that are
    PADDING do not count. If they do not mark where documents end (packing.py), let `read_corpus` call
    `reject_packed`, because --packed would have no effect.
    """

    tokenizer: object = None
    num_tokens: int = BYTES
    bytes_per_token: float = 1.0  # of the held-out part
    fingerprint: str = ""

    def windows(self, seq_len, most):
        """Return the held-out part once: inputs and targets, each (at most `most`, seq_len)."""
        count = min(most, (len(self.held_out) - 1) // seq_len)
        row = self.held_out[: count * seq_len + 1]
        return row[:-1].view(count, seq_len), row[1:].view(count, seq_len)

    def num_rows(self, seq_len):
        """Return how many rows the training part has if no two rows overlap."""
        return (len(self.training) - 1) // seq_len

    def rows_at(self, indices, seq_len):
        """Return inputs and targets of these rows, counted from 0."""
        starts = [index * seq_len for index in indices]
        rows = torch.stack([self.training[start : start + seq_len + 1] for start in starts])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def encode(self, text):
        return as_tokens(self.tokenizer, text).tolist()

    @property
    def vocabulary_digest(self):
        """See `digest_of_vocabulary`; None if the tokens are bytes."""
        return self.tokenizer and digest_of_vocabulary(self.tokenizer)

    def is_made_with(self, tokenizer_file):
        """Return whether a tokenizer.json still has the vocabulary of these tokens."""
        try:
            now = digest_of_vocabulary(read_tokenizer(tokenizer_file)) if tokenizer_file else None
        except DataError:
            return False
        return self.vocabulary_digest in (None, now)

    def decode(self, tokens):
        if self.tokenizer is None:
            # A token above 255 is not a byte. UTF-8 never uses byte 255, so it is shown as U+FFFD.
            return bytes(min(token, 255) for token in tokens).decode(errors="replace")
        return self.tokenizer.decode(tokens)


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


def load_corpus(content, vocabulary=BYTES, tokenizer_file=None, seq_len=32):
    """Return a Corpus from a Text in bytes. Raises DataError if too short or no tokenizer fits."""
    plain = content.training, content.held_out
    if not tokenizer_file:
        return Corpus(*plain)
    tokenizer = read_tokenizer(tokenizer_file)
    num_tokens = numbers_of(tokenizer)
    if num_tokens > vocabulary:
        raise DataError(
            f"--vocabulary {vocabulary} is less than the {num_tokens} tokens of the tokenizer; "
            f"use at least {num_tokens}, or, with a saved model, its own tokenizer"
        )
    texts = [part.to(torch.uint8).numpy().tobytes().decode(errors="replace") for part in plain]
    tokens = [as_tokens(tokenizer, text) for text in texts]
    if min(map(len, tokens)) < seq_len + 1:
        raise DataError(
            f"--data: the text has {len(tokens[1])} held-out tokens, and --seq-len {seq_len} needs "
            "one more than itself; use a longer text or a smaller --seq-len"
        )
    return Corpus(*tokens, tokenizer, num_tokens, len(plain[1]) / len(tokens[1]))


def as_tokens(tokenizer, text):
    """Return `text` as int64 tokens, or bytes if `tokenizer` is None. Raises DataError."""
    tokens = encode(tokenizer, text) if tokenizer else list(text.encode())
    return torch.tensor(tokens, dtype=torch.int64)


def encode(tokenizer, text, begins=True):
    """Return the tokens of `text`. Raises DataError for one outside the vocabulary.

    Without `begins` it continues a document, and gets none of the tokenizer's special tokens.
    """
    with complaints_of_library("the tokenizer cannot encode the text"):
        tokens = tokenizer.encode(text, add_special_tokens=begins).ids
    if tokens and tokenizer.id_to_token(max(tokens)) is None:  # get_vocab() takes milliseconds
        raise DataError(
            f"the tokenizer encodes the text as {max(tokens)}, which is not a token; use another"
        )
    return tokens


def read_tokenizer(file):
    """Return a tokenizer from a file of the tokenizers library, such as tokenizer.json.

    The whole text is encoded, always alike: the file's truncation, padding and dropout are switched
    off.
    """
    from tokenizers import Tokenizer

    try:
        text = read_text(file, LARGEST_TOKENIZER)
    except InputError as error:
        raise DataError(f"the tokenizer {error}; it has to be a tokenizer.json") from None
    with complaints_of_library(f"the tokenizer {file} cannot be read"):
        tokenizer = Tokenizer.from_str(text)
        check_growth(file, tokenizer)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):  # each rank would draw other tokens
        tokenizer.model.dropout = None
    if not tokenizer.get_vocab():
        raise DataError(f"the tokenizer {file} has no tokens; use another")
    if (largest := numbers_of(tokenizer) - 1) > LARGEST_TOKEN:
        raise DataError(
            f"the tokenizer {file} has the token {largest:,}, which is too large; use another"
        )
    return tokenizer


def digest_of_vocabulary(tokenizer):
    """Return in words a SHA-256 of all tokens: of their numbers and what each stands for."""
    meanings = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    return f"a vocabulary with SHA-256 {hashlib.sha256(meanings).hexdigest()[:12]}"


def check_growth(file, tokenizer):
    """Raise DataError for replacements that together make an endless text of a few letters.

    No signal interrupts the library once it replaces, so its steps are tried one by one, on single
    letters and on what is replaced. The replacements of a decoder are those of a normalizer.
    """
    normalizing = steps_in(tokenizer.normalizer)
    decoding = [one for one in steps_in(tokenizer.decoder) if one["type"] == "Replace"]
    for found in (normalizing, decoding):
        pieces = {pattern for one in found for pattern in one.get("pattern", {}).values()}
        steps = [as_normalizer(one) for one in found[:MOST_STEPS]]
        tried = pieces.union(string.printable)
        if len(found) > MOST_STEPS or any(grows(steps, piece) for piece in tried):
            raise DataError(
                f"the tokenizer {file} replaces text in more than {MOST_STEPS} steps, or one letter "
                f"by more than {MOST_GROWTH}; use another tokenizer.json"
            )


def steps_in(part):
    """Return the single steps of a normalizer or a decoder as JSON objects, in their order."""
    waiting, found = [json.loads(part.__getstate__())] if part else [], []
    while waiting:
        one = waiting.pop()
        parts = one.get("normalizers", one.get("decoders"))
        if parts is None:
            found.append(one)
        else:
            waiting += reversed(parts)
    return found


def as_normalizer(step):
    from tokenizers.normalizers import Sequence

    normalizer = Sequence([])
    normalizer.__setstate__(json.dumps(step).encode())
    return normalizer


def grows(steps, piece):
    """Whether the steps, one after the other, make too many letters of `piece`."""
    text = piece
    for step in steps:
        text = step.normalize_str(text)
        if len(text) > MOST_GROWTH * max(1, len(piece)):
            return True
    return False


@contextmanager
def complaints_of_library(what):
    """Raise DataError for the tokenizers library's errors: plain Exceptions, and panics of Rust."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException" and type(error) is not Exception:
            raise
        reason = str(error).splitlines()[0][:200] if str(error) else "it says no more"
        raise DataError(f"{what} ({reason}); use another tokenizer.json") from None
