# SPDX-License-Identifier: Apache-2.0
"""The log of a long training run: one JSON object per line, written during the run, and a summary.

A line is a step (loss, learning rate, norm of the gradient, tokens, seconds, tokens per second,
MFU) or an evaluation (held-out loss, perplexity). The log can be read while the training runs. A
continued training appends to the same file.
"""

import errno
import math
import os
import statistics
import sys
import time
from contextlib import suppress

from extensions.pretraining.throughput import flops_per_token, peak_flops
from files.inputs import InputError
from files.outputs import json_line, place_of, say_not_written


def open_for_one(path):
    """Open a log that this run alone may write until it ends; reject one that another run writes."""
    try:
        claim = open_in_place(path, "a")
    except OSError:  # reported when the first line cannot be written
        return None
    try:
        import fcntl

        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(
            f"--metrics {path}: another run is writing it; name another file"
        ) from None
    except (ImportError, OSError):  # a system or a file system without locks
        pass
    return claim


def is_torn(path):
    """Return whether the last line of a file has no end, as after a full disk."""
    try:
        if not os.path.isfile(path) or not os.path.getsize(path):
            return False
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n"
    except OSError:  # reported when the first line cannot be written
        return False


def open_in_place(path, mode):
    """Open a text file at its `place_of`; reject a link that others may have put there since."""

    def opener(place, flags):
        return os.open(place, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)

    return open(place_of(path), mode, encoding="utf-8", opener=opener)


class Metrics:
    """Logs one training run; the rank that has the losses writes the file.

    `file` may be None. `peak` is the peak of all devices together in FLOP/s; if it is None, it is
    looked up or measured. All ranks must create this object.
    """

    def __init__(self, job, file, config, dtype, has_loss, continues, peak=None):
        self.file, self.has_loss = file if has_loss else None, has_loss
        self.is_whole = True  # every line could be written
        self.flops_per_token = flops_per_token(config)
        self.peak, self.source = (peak, "given") if peak else peak_flops(job, dtype)
        self.rates = []  # tokens per second of each step
        self.started = None
        # The open, locked file. All lines go there: its name may be given to another file.
        self.claim = self.file and open_for_one(self.file)
        self.has_its_name = True
        if not continues:
            self.append("", begins=True)
        elif self.file and is_torn(self.file):
            self.append("\n")

    def start_step(self):
        self.started = time.perf_counter()

    def end_step(self, step, loss, optimizer, norm, tokens):
        """Log a step after its update; `loss` is None on ranks without it, `tokens` is a total."""
        seconds = time.perf_counter() - self.started
        self.rates.append(tokens / seconds)
        if self.has_loss:
            self.write(
                step=step,
                loss=loss.item(),
                learning_rate=optimizer.param_groups[0]["lr"],
                gradient_norm=norm,
                tokens=tokens,
                seconds=round(seconds, 6),
                tokens_per_second=round(tokens / seconds, 1),
                mfu=round(self.utilisation(tokens / seconds), 5),
            )

    def held_out(self, steps, loss, bytes_per_token):
        """Log and print an evaluation after `steps` steps; `loss` is None on ranks without it."""
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
        self.append(json_line(row))

    def append(self, text, begins=False):
        """Write one line to the end of the file at once, so that a crash loses no earlier line."""
        if not self.file:
            return
        try:
            self.claim = self.claim or open_in_place(self.file, "a")  # says why it has failed
            self.look_at_name()
            if begins:
                self.claim.truncate(0)
            self.claim.write(text)
            self.claim.flush()
            os.close(os.dup(self.claim.fileno()))  # a network file system writes what is closed
        except OSError as error:  # the disk is full: the training goes on without its log
            say_not_written("--metrics", self.file, error)
            with suppress(OSError):  # what is not written yet would be tried again
                self.claim and self.claim.close()
            self.file, self.is_whole = None, False

    def look_at_name(self):
        """Say once that the log has another name by now. Raises OSError if it has none any more."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self.claim.fileno()), os.stat(self.file)):
                return
        if not os.fstat(self.claim.fileno()).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "somebody has removed or replaced it")
        if self.has_its_name:
            sentence = "has been moved; the log continues in the moved file"
            print(f"--metrics {self.file} {sentence}", file=sys.stderr, flush=True)
        self.has_its_name = False

    def utilisation(self, tokens_per_second):
        """Return the model FLOPs utilisation (MFU), 1 at the peak."""
        return tokens_per_second * self.flops_per_token / self.peak

    def print_summary(self):
        if self.has_loss and self.rates:
            print(self.summary(), flush=True)

    def summary(self):
        """Return a line on the median step; the first is left out if there are others."""
        rate = statistics.median(self.rates[1:] or self.rates)
        return (
            f"{rate:,.0f} tokens/s  {rate * self.flops_per_token / 1e9:.2f} of "
            f"{self.peak / 1e9:.1f} GFLOP/s ({self.source})  MFU {self.utilisation(rate):.1%}"
        )
