# SPDX-License-Identifier: Apache-2.0
"""Ends this process with one sentence, also when the connection to another rank breaks."""

import os
import re
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

NO_MEMORY = MemoryError, torch.OutOfMemoryError
SAID_WITHOUT_MEMORY = (
    "can't allocate memory", "can't start new thread", "Resource temporarily unavailable"
)  # fmt: skip
ending = threading.Lock()
told = []  # functions called with the sentence with which this process ends


def end_process(sentence, before_leaving=lambda: None):
    """Print one sentence and end this process at once, without waiting for any other rank."""
    ending.acquire()  # never released: only one thread prints and ends the process
    sys.stderr.write(f"{sentence}\n")  # in one piece: other ranks may write at the same moment
    sys.stderr.flush()
    for tell in told:
        tell(sentence)
    sys.stdout.flush()
    before_leaving()
    time.sleep(0.3)  # other ranks may still read the reason from this rank's store
    os._exit(1)


def name_losses(job):
    """From now on a broken connection ends this rank, with a sentence that names the other rank."""

    @contextmanager
    def naming_loss(peer, what):
        try:
            yield
        except RuntimeError as error:
            if not is_loss(error):
                raise
            end_process(job.explain_loss(peer, what, error))

    job.explain_loss = partial(text_of_loss, job.rank)
    job.starting = job.waiting = naming_loss


def text_of_loss(rank, peer, what, error):
    # Gloo names its source file first and gives advice after the first sentence.
    reason = re.sub(r"^\[\S+:\d+\] ", "", str(error).splitlines()[0]).split(". ")[0]
    return f"rank {rank} lost rank {peer} while waiting for {what} ({reason})"


def is_loss(error):
    """Return whether an error or its cause says that the transport lost the other side."""
    while error.__cause__ is not None:
        error = error.__cause__
    words = "closed by peer", "reset by peer", "Timed out"
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


def lack_of_memory(error):
    """Return in words what memory, or thread, an error says is lacking; None for another error."""
    reason = str(error).rpartition("DefaultCPUAllocator: ")[2].split(". ")[0]
    if isinstance(error, NO_MEMORY) or reason.startswith(SAID_WITHOUT_MEMORY):
        return reason or "for Python itself"
    return None


def lack_of_kernels(error):
    """Return in words why torch cannot make or fill its folder of kernels; None for another error.

    Its compiler wraps what went wrong. torch makes the folder also where it compiles nothing, for
    example for AdamW.
    """
    cause = getattr(error, "inner_exception", error)
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if not isinstance(cause, OSError) or not cause.strerror or not folder:
        return None
    if cause is error and not Path(folder).is_relative_to(str(cause.filename)):
        return None
    return f"{cause.strerror}: {cause.filename or folder}"
