# SPDX-License-Identifier: Apache-2.0
"""Runs forwards only, with the training's schedule, for the held-out loss and generated text."""

import math
from contextlib import nullcontext

import torch
import torch.distributed as dist

from extensions.torch_pipelining.library import V_SHAPED, forwards_only, mean_of
from extensions.torch_pipelining.paragraphs import keywords_of


@torch.no_grad()
def evaluate(arguments, job, schedule, stages):
    """Print loss (nats per byte) and perplexity of the held-out text, on the last stage's rank."""
    has_first, has_last = ends_on_this_rank(stages)
    total = 0.0
    for number in range(arguments.evaluate):
        inputs, targets = (tokens.to(job.device) for tokens in held_out_batch(arguments, number))
        losses = [] if has_last else None
        with job.waiting_for_all(f"evaluation {number}"), evaluating(arguments, schedule):
            schedule.eval(
                *([inputs] if has_first else []),
                target=targets if has_last else None,
                losses=losses,
                return_outputs=False,
                **keywords_of(arguments, inputs),
            )
        total += mean_of(losses).item() if losses else 0.0
    if has_last:
        loss = total / arguments.evaluate
        print(f"held out  loss {loss:.6f}  perplexity {math.exp(min(loss, 700)):.3f}", flush=True)


def ends_on_this_rank(stages):
    """Return whether this rank has the first stage, and whether it has the last."""
    return any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)


def evaluating(arguments, schedule):
    return forwards_only(schedule) if arguments.schedule in V_SHAPED else nullcontext()


def held_out_batch(arguments, number):
    """Return inputs and targets of batch `number`, spread evenly over the held-out tenth."""
    text, length = arguments.text.held_out, arguments.seq_len
    wanted = arguments.evaluate * arguments.batch_size
    first = number * arguments.batch_size
    last_start = len(text) - length - 1
    starts = [last_start * (first + i) // wanted for i in range(arguments.batch_size)]
    rows = torch.stack([text[start : start + length + 1] for start in starts])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


@torch.no_grad()
def generate(arguments, job, schedule, stages, last_rank):
    """Continue held-out texts byte by byte, each time with the most likely byte.

    A whole batch of texts is continued at once; with a single text all ranks but one would idle.
    `last_rank`, which has the last stage, prints two texts. The whole window is computed again for
    each byte, without a cache of keys and values.
    """
    has_first, has_last = ends_on_this_rank(stages)
    texts = prompts_of(arguments).to(job.device)
    start = texts.shape[1]
    for _ in range(arguments.generate):
        window, end = window_of(texts, arguments.seq_len)
        with job.waiting_for_all(f"byte {texts.shape[1]}"), evaluating(arguments, schedule):
            scores = schedule.eval(
                *([window] if has_first else []),
                target=window if has_last else None,  # required, although the loss is not read
                **keywords_of(arguments, window),
            )
            if has_last:
                following = scores[:, end - 1].argmax(-1)
            else:
                following = torch.empty(len(texts), dtype=torch.int64, device=job.device)
            dist.broadcast(following, last_rank)  # the first stage reads it
        texts = torch.cat([texts, following[:, None]], dim=1)
    if has_last:
        for text in texts[:2].tolist():
            prompt, continuation = (
                bytes(part).decode(errors="replace") for part in (text[:start], text[start:])
            )
            print(f"generated  {prompt!r} -> {continuation!r}", flush=True)


def prompts_of(arguments):
    """Return a batch of prompts: half a sequence each, from different held-out positions."""
    text, length = arguments.text.held_out, max(1, arguments.seq_len // 2)
    last_start = len(text) - length
    starts = [last_start * i // arguments.batch_size for i in range(arguments.batch_size)]
    return torch.stack([text[start : start + length] for start in starts])


def window_of(texts, length):
    """Return the last `length` tokens, padded with zeros, and the index of their end.

    Stages have fixed shapes. The padding comes after the end, so causal attention does not read
    it.
    """
    texts = texts[:, -length:]
    window = torch.zeros((len(texts), length), dtype=texts.dtype, device=texts.device)
    window[:, : texts.shape[1]] = texts
    return window, texts.shape[1]
