# SPDX-License-Identifier: Apache-2.0
"""Requests to a model: prompts, each to be continued by a number of tokens."""

from dataclasses import dataclass

import torch

from files.inputs import InputError


@dataclass(frozen=True)
class Request:
    """A prompt, as tokens, that is to be continued by `count` tokens."""

    prompt: tuple
    count: int

    @property
    def positions(self):
        """How many positions of the cache it needs: the last chosen token needs none."""
        return len(self.prompt) + self.count - 1


def read_requests(arguments):
    """The requests of a run: those of --prompt, or passages of the held-out text.

    `arguments.text` is a Corpus. Rejects a request that does not fit into the cache.
    """
    a = arguments
    if a.prompt:
        for number, text in enumerate(a.prompt):
            if not is_unicode(text):
                raise SystemExit(
                    f"--prompt: request {number} is not text in UTF-8; type it in UTF-8"
                )
        prompts = [tuple(a.text.encode(text)) for text in a.prompt]
    else:  # different lengths, so that the requests end at different times
        held_out = a.text.held_out
        starts = [number * len(held_out) // a.requests for number in range(a.requests)]
        prompts = [tuple(held_out[s : s + 5 + 3 * (k % 4)].tolist()) for k, s in enumerate(starts)]
    requests = [Request(prompt, a.tokens) for prompt in prompts]
    for number, request in enumerate(requests):
        if not request.prompt:
            raise SystemExit(f"--prompt: request {number} is empty; give it at least one character")
        if request.positions > a.seq_len:
            raise SystemExit(
                f"request {number} needs {request.positions} positions for its prompt and --tokens "
                f"{a.tokens}, and the cache has --seq-len {a.seq_len}; use fewer tokens or a "
                "larger --seq-len"
            )
    return requests


def is_unicode(text):
    """Return whether a text of the command line was valid in the encoding of the locale."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def choose_token(scores, seed, request, position, temperature):
    """Choose the token at `position`, from the `scores` (vocabulary) of the token before it.

    The choice depends only on these arguments, not on the requests that share a pass. At
    temperature 0 it is the token with the highest score.
    """
    scores = scores.double().cpu()
    if not scores.isfinite().all():
        raise InputError(
            f"request {request}: the model's scores are not numbers; its weights are damaged"
        )
    if temperature == 0:
        return int(scores.argmax())
    number = (seed * 2654435769 + request * 40503 + position) % 2**32
    generator = torch.Generator().manual_seed(number)
    below = scores - scores.max()  # so that no number becomes too large
    likely = (below / temperature).softmax(-1)
    return int(torch.multinomial(likely, 1, generator=generator))
