# SPDX-License-Identifier: Apache-2.0
"""Prompts and their completions, of which only the completions are learnt.

A file has one JSON object per line, with the texts `prompt` and `completion`. A row of a batch has
both, one behind the other. The target of a token of the prompt is PADDING, which no loss counts;
that of the prompt's last token is the first token of the completion. For a model that learns to
stop, each completion ends with the text of a special token.

The rows of a batch are as long as its longest one, so the length differs from step to step.
"""

from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from extensions.pretraining.padding import PADDING
from extensions.pretraining.tokens import Corpus, encode, numbers_of, read_tokenizer
from files.inputs import MEBIBYTE, InputError, open_input, parse_json, read_text
from pipeline.data import DataError

PARTS = "prompt", "completion"


@dataclass(frozen=True)
class Completions(Corpus):
    """A Corpus with a prompt and its completion per row, cut at the end of the row or padded.

    `rows` has the tokens of prompt and completion, `lengths` the number of the prompt's tokens.
    """

    rows: tuple = ()
    lengths: tuple = ()

    def batch(self, step, batch_size, seq_len, seed=0):
        """As that of Text, with rows as long as the longest one, and at most `seq_len`."""
        generator = torch.Generator().manual_seed((seed * 2654435769 + step) % 2**32)
        drawn = torch.randint(len(self.rows), (batch_size,), generator=generator).tolist()
        return self.rows_at(drawn, seq_len)

    def num_rows(self, seq_len):
        return len(self.rows)

    def rows_at(self, indices, seq_len):
        rows = [self.rows[index] for index in indices]
        longest = max(map(len, rows)) - 1  # of the tokens that have a next one
        inputs, targets = in_rows(rows, max(1, min(seq_len, longest)))
        return inputs, without_prompts(targets, [self.lengths[index] for index in indices])


def in_rows(rows, seq_len):
    """Return inputs and targets, both (rows, seq_len), from one-dimensional token tensors.

    Padding comes last and attention is causal, so attention needs no mask for the padding.
    """

    def padded(parts, filler):
        whole = torch.full((seq_len,), filler)  # so that all become as long as this
        return pad_sequence([whole, *parts], batch_first=True, padding_value=filler)[1:]

    inputs = [row[:seq_len][: len(row) - 1] for row in rows]
    targets = [row[1 : seq_len + 1] for row in rows]
    return padded(inputs, 0), padded(targets, PADDING)


def without_prompts(targets, lengths):
    """Replace targets (rows, length) that are prompt tokens; `lengths` counts those of each row."""
    for row, length in zip(targets, lengths):
        row[: length - 1] = PADDING
    return targets


def has_prompts(path):
    """Return whether a file has JSON lines with prompts, by its first line."""
    try:
        with open_input(path) as file:
            row = parse_json(file.readline(MEBIBYTE).decode("utf-8-sig"), path)
    except (OSError, TypeError, ValueError):  # another reader says what is wrong with it
        return False
    return isinstance(row, dict) and "prompt" in row


def load_prompts(path, vocabulary, tokenizer_file, seq_len):
    """Return the Completions in a file, of which the last tenth is held out. Raises DataError."""
    tokenizer = read_tokenizer(tokenizer_file) if tokenizer_file else None
    rows, lengths = [], []
    try:
        for number, line in enumerate(read_text(path).split("\n"), 1):  # U+2028 ends no line
            if line.strip():
                where = f"{path}, line {number}"
                prompt, both = tokens_of(tokenizer, parse_json(line, where), where)
                if len(prompt) > seq_len:
                    raise DataError(
                        f"--data: {where}: the prompt has {len(prompt)} tokens, so --seq-len "
                        f"{seq_len} leaves no room for its completion; use a larger one"
                    )
                if max(both) >= vocabulary:
                    raise DataError(f"--data: {where}: {max(both)} is not a token of the model")
                rows.append(torch.tensor(both))
                lengths.append(len(prompt))
    except InputError as error:
        raise DataError(f"--data: {error}") from None
    if len(rows) < 10:
        raise DataError(f"--data: {path} has {len(rows)} prompts; use at least 10, one per line")
    cut = len(rows) - len(rows) // 10
    whole = torch.cat(rows[:cut]), torch.cat(rows[cut:])
    num_tokens = numbers_of(tokenizer) if tokenizer else vocabulary
    learnt = {"rows": tuple(rows[:cut]), "lengths": tuple(lengths[:cut])}
    return Completions(*whole, tokenizer, num_tokens, **learnt)


def tokens_of(tokenizer, row, where):
    """Return the tokens of a row's prompt, and those of prompt and completion."""
    texts = [row.get(part) if isinstance(row, dict) else None for part in PARTS]
    for part, text in zip(PARTS, texts):
        if not isinstance(text, str) or not text:
            raise DataError(f"--data: {where} has no text named {part}; each line needs both")
    try:
        prompt, completion = (list(text.encode()) for text in texts)
    except UnicodeEncodeError:  # half a pair of surrogates, which JSON may have
        raise DataError(f"--data: {where} has text that is not Unicode; leave it out") from None
    if tokenizer is not None:
        prompt, completion = encode(tokenizer, texts[0]), encode(tokenizer, texts[1], begins=False)
    if not prompt or not completion:
        raise DataError(f"--data: {where}: the tokenizer makes no tokens of it; leave the line out")
    return prompt, prompt + completion
