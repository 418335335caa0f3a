# SPDX-License-Identifier: Apache-2.0
"""Calls a reader's decode loop on this rank and prints its result, which lesson_11b.py reads.

One argument: the file of the request.
"""

import sys

import torch

from course.building import WAITING
from course.building.request import errors_told, read_request, report
from extensions.inference.cached_stage import CachedStage
from extensions.inference.passes import Pass, Row
from extensions.inference.requests import choose_token
from guard.around_main import guarded
from pipeline.job import join_job
from pipeline.model import ModelConfig, build_part, cut_evenly

CONFIG = ModelConfig(layers=4, dim=16, heads=2, kv_heads=1, seq_len=32)


@guarded
def main():
    """Give the reader's function its tools, and report from rank 0."""
    request, (decode,) = read_request(sys.argv[1])
    first, count = first_tokens(request["groups"]), request["count"]
    pairs = [(0, 1), (1, 2), (2, 0)]
    job = join_job("cpu", WAITING, pairs)
    tools = Tools(job, len(first))
    result = decode(
        job.rank, job.num_ranks - 1, first, count, tools.forward, tools.send, tools.receive
    )
    job.complete_sends()
    if job.rank == 0:
        texts = result if isinstance(result, dict) else None
        report({"texts": texts, "did": tools.did})
    job.leave()


def first_tokens(groups):
    return {group: 65 + 7 * group for group in range(groups)}


class Tools:
    """The functions that the reader's loop calls; `did` lists the calls of this rank."""

    def __init__(self, job, groups):
        self.job, self.did = job, []
        self.lengths = dict.fromkeys(range(groups), 0)  # tokens that have passed, by group
        cut = cut_evenly(CONFIG.layers, job.num_ranks)[job.rank]
        part = build_part(CONFIG, *cut)
        self.stage = CachedStage(part, job.rank, job.num_ranks, groups, 1, CONFIG.seq_len)

    def forward(self, group, x):
        """Run this rank's layers on `x` and return the output; on the last rank, the next token."""
        self.did.append(["forward", group])
        start = self.lengths[group]
        self.lengths[group] += 1
        one = Pass(group, 0, 0, (Row(group, 0, start, start + 1, True),))
        output = self.stage.forward(0, torch.tensor([x]) if self.job.rank == 0 else x, one)
        return choose(output[0], group, start + 1) if self.stage.is_last else output

    def send(self, x, destination):
        """Send `x` to rank `destination`, which must have the next stage, or the first one."""
        following = (self.job.rank + 1) % self.job.num_ranks
        if destination != following:
            raise ValueError(
                f"rank {self.job.rank} sends to rank {destination}, but its output is for rank "
                f"{following}"
            )
        self.did.append(["send", destination])
        tensor = torch.tensor([x]) if self.stage.is_last else x
        self.job.send(tensor, destination, f"what rank {self.job.rank} made")

    def receive(self, source):
        """Receive from rank `source`: a token from the last rank, else an activation."""
        before = (self.job.rank - 1) % self.job.num_ranks
        if source != before:
            raise ValueError(
                f"rank {self.job.rank} receives from rank {source}, but its input comes from rank "
                f"{before}"
            )
        self.did.append(["receive", source])
        name = f"what rank {source} made"
        if self.stage.is_first:
            return self.job.receive(source, name, (1,), torch.int64).wait().item()
        return self.job.receive(source, name, (1, CONFIG.dim), torch.float64).wait()


def choose(scores, group, position):
    return choose_token(scores, 0, group, position, 0.8)


def texts_of_one_process(groups, count):
    """The tokens that the reader's function should return on rank 0, from one process."""
    model, texts = build_part(CONFIG, 0, CONFIG.layers), {}
    for group, token in first_tokens(groups).items():
        tokens = [token]
        for _ in range(count):
            with torch.no_grad():
                scores = model(torch.tensor([tokens]))[0, -1]
            tokens.append(choose(scores, group, len(tokens)))
        texts[group] = tokens[1:]
    return texts


if __name__ == "__main__":
    with errors_told():
        main()
