# SPDX-License-Identifier: Apache-2.0
"""Cuts a model by a short measurement on the ranks, before the first step.

cut_by_work.py counts multiplications. The time on a device also depends on the shapes of the
matrices, on look-ups and on additions. So each rank times the forward and backward of the first
layer with the embedding, of an inner layer, and of the last layer with the head. The ranks add up
their times, so all of them find the same cut.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist

from extensions.pretraining.cut_by_work import best_cut, cut_by_work
from pipeline.stage import Stage
from pipeline.training import cut_layers, layer_counts

REPEATS = 5  # after one run that is not counted


def add_cut_flag(parser):
    """Let --cut take `auto` as well."""

    def counts_or_auto(text):
        return text if text == "auto" else layer_counts(text)

    counts_or_auto.__name__ = "layer_counts"  # argparse prints this name in its errors
    [cut] = [action for action in parser._actions if action.dest == "cut"]
    cut.type, cut.metavar = counts_or_auto, "A,B,...|auto"
    cut.help += "; auto: measured on this machine; default: counted work, the head included"


def complete_cut(arguments, num_stages):
    """Reject an impossible --cut; without --cut, cut by counted work. `auto` stays as it is."""
    a = arguments
    a.cut = a.cut or cut_by_work(a.config, num_stages)
    counts = None if a.cut == "auto" else a.cut
    cut_layers(argparse.Namespace(layers=a.layers, cut=counts), num_stages)


def cut_model(arguments, job, num_stages, build, loss_function):
    """(first, last) layer of each stage: as --cut says, after `complete_cut`, or by measurement.

    `build(first, last)` returns two versions of these layers: the one that is updated and the one
    that computes. All ranks make this call together. `loss_function` is a ShareOfLoss.
    """
    a = arguments
    if a.cut == "auto":
        tokens = torch.zeros(a.microbatch_size, a.seq_len, dtype=torch.int64)
        loss_function.real_tokens = tokens.numel()
        sizes = a.layers, num_stages
        a.cut = cut_by_time(job, lambda *ends: build(*ends)[1], *sizes, tokens, loss_function)
    return cut_layers(a, num_stages)


def cut_by_time(job, build, layers, num_stages, tokens, loss_function):
    """The number of layers of each stage, the same on every rank.

    All ranks make this call together.

    `build(first, last)` returns the part of the model with these layers, as it will compute.
    `tokens` are those of a micro-batch, (rows, length). `loss_function` is that of the last stage.
    """
    if num_stages in (1, layers) or layers < num_stages:
        return best_cut(layers, num_stages)
    ends = (0, 1), (1, 2), (layers - 1, layers)
    times = torch.tensor([
        seconds_of(job, build(*layer), index, tokens, loss_function)
        for index, layer in enumerate(ends)
    ], dtype=torch.float64)  # fmt: skip
    if job.num_ranks > 1:
        with job.waiting_for_all("its times of a layer"):
            dist.all_reduce(times)
    first, layer, last = times.tolist()
    embedding, head = (max(0.0, end / layer - 1) for end in (first, last))
    cut = best_cut(layers, num_stages, embedding, head)
    if job.rank == 0:
        counts = ",".join(map(str, cut))
        print(
            f"--cut {counts}: measured here, the embedding takes as long as {embedding:.2f} layers "
            f"and the head as {head:.2f}",
            flush=True,
        )
    return cut


def seconds_of(job, part, index, tokens, loss_function):
    """Median seconds of a forward and backward of a part.

    `index` is 0 for the first part of the model, 1 for an inner one, and 2 for the last.
    """
    stage = Stage(part, index, 3, loss_function)
    tokens, times = tokens.to(job.device), []
    shape = (*tokens.shape, job.shape[-1])
    for repeat in range(1 + REPEATS):
        inputs = tokens if index == 0 else torch.ones(shape, dtype=job.dtype, device=job.device)
        gradient = None if index == 2 else torch.ones(shape, dtype=job.dtype, device=job.device)
        wait_for(job.device)
        started = time.perf_counter()
        stage.forward(0, inputs, tokens)
        stage.backward(0, gradient)
        wait_for(job.device)
        if repeat:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def wait_for(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
