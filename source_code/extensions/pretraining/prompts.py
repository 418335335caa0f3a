# SPDX-License-Identifier: Apache-2.0
"""Prompts and their completions, of which only the completions are learnt.

A file has one JSON object per line, with the texts `prompt` and `completion`. A row of a batch has
both, one behind the other. The target of a token of the prompt is PADDING, which no loss counts;
that of the prompt's last token is the first token of the completion. A completion that shall end
with a special token, so that a model learns to stop, has its text at the end.
"""

from dataclasses import dataclass

import torch

from extensions.pretraining.padding import PADDING
from extensions.pretraining.tokens import Documents, encode, read_tokenizer
from guard.inputs import MEBIBYTE, InputError, open_input, parse_json, read_text
from pipeline.data import DataError

PARTS = "prompt", "completion"


@dataclass(frozen=True)
class Completions(Documents):
    """Documents of a prompt and a completion each; `lengths` are the tokens of the prompts, for the
    training part and the held-out part."""

    lengths: tuple = ()

    def rows_at(self, indices, seq_len):
        inputs, targets = super().rows_at(indices, seq_len)
        return inputs, without_prompts(targets, [self.lengths[0][index] for index in indices])

    def windows(self, seq_len, most):
        inputs, targets = super().windows(seq_len, most)
        return inputs, without_prompts(targets, self.lengths[1])


def without_prompts(targets, lengths):
    """Replace the targets (rows, length) that are tokens of the prompts, of `lengths` tokens."""
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
        for number, line in enumerate(read_text(path).splitlines(), 1):
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
    parts = tuple(rows[:cut]), tuple(rows[cut:])
    whole = [torch.cat(part) for part in parts]
    num_tokens = 1 + max(tokenizer.get_vocab().values()) if tokenizer else vocabulary
    lengths = tuple(lengths[:cut]), tuple(lengths[cut:])
    return Completions(*whole, tokenizer, num_tokens, 1.0, *parts, lengths)


def tokens_of(tokenizer, row, where):
    """Return the tokens of a row's prompt, and those of prompt and completion."""
    texts = [row.get(part) if isinstance(row, dict) else None for part in PARTS]
    for part, text in zip(PARTS, texts):
        if not isinstance(text, str) or not text:
            raise DataError(f"--data: {where} has no text named {part}; each line needs both")
    if tokenizer is None:
        prompt, completion = (list(text.encode()) for text in texts)
    else:
        prompt, completion = encode(tokenizer, texts[0]), encode(tokenizer, texts[1], begins=False)
    if not prompt or not completion:
        raise DataError(f"--data: {where}: the tokenizer makes no tokens of it; leave the line out")
    return prompt, prompt + completion
