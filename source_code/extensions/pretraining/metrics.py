"""The log of a long training: one JSON object a line, written as it goes, and what came of it.

A line is a step (loss, learning rate, norm of the gradient, tokens, seconds, tokens a second, MFU)
or an evaluation (held-out loss, perplexity). It can be read while the training runs, and one that
is continued goes on in the same file.
"""

import math
import statistics
import time

from extensions.pretraining.throughput import flops_per_token, peak_flops
from pipeline.files import json_line, say_not_written


class Metrics:
    """Follows one training on the ranks; the one with the losses writes.

    `file` may be None. `peak` is what all devices together could do in FLOP/s, or None to find out,
    for which all ranks must make this object.
    """

    def __init__(self, job, file, config, dtype, has_loss, continues, peak=None):
        self.file, self.has_loss = file if has_loss else None, has_loss
        self.flops_per_token = flops_per_token(config)
        self.peak, self.source = (peak, "--peak-flops") if peak else peak_flops(job, dtype)
        self.rates = []  # tokens a second of each step
        self.started = None
        if not continues:
            self.append("w", "")

    def start_step(self):
        self.started = time.perf_counter()

    def end_step(self, step, loss, learning_rate, norm, tokens):
        """After the update; `loss` is None on ranks without it. `tokens` are those of all ranks."""
        seconds = time.perf_counter() - self.started
        self.rates.append(tokens / seconds)
        if self.has_loss:
            self.write(
                step=step,
                loss=loss.item(),
                learning_rate=learning_rate,
                gradient_norm=norm,
                tokens=tokens,
                seconds=round(seconds, 6),
                tokens_per_second=round(tokens / seconds, 1),
                mfu=round(self.utilisation(tokens / seconds), 5),
            )

    def held_out(self, steps, loss, bytes_per_token):
        """Log and print an evaluation after so many steps; `loss` is None on ranks without it."""
        if not self.has_loss:
            return
        loss = loss.item()
        perplexity, bits = math.exp(min(loss, 700)), loss / math.log(2) / bytes_per_token
        self.write(steps=steps, held_out_loss=loss, perplexity=perplexity, bits_per_byte=bits)
        print(
            f"after {steps} steps  held-out loss {loss:.6f}  perplexity {perplexity:.2f}  "
            f"{bits:.3f} bits per byte",
            flush=True,
        )

    def write(self, **row):
        self.append("a", json_line(row))

    def append(self, mode, text):
        """Opened for each line, so that it is there whatever happens next."""
        if not self.file:
            return
        try:
            with open(self.file, mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:  # the disk is full: the training goes on without its log
            say_not_written("--metrics", self.file, error)
            self.file = None

    def utilisation(self, tokens_per_second):
        """MFU, a share of one."""
        return tokens_per_second * self.flops_per_token / self.peak

    def summary(self):
        """The median step, the first left out where there are others."""
        rate = statistics.median(self.rates[1:] or self.rates)
        return (
            f"{rate:,.0f} tokens/s  {rate * self.flops_per_token / 1e9:.2f} of "
            f"{self.peak / 1e9:.1f} GFLOP/s ({self.source})  MFU {self.utilisation(rate):.1%}"
        )
