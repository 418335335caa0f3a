# SPDX-License-Identifier: Apache-2.0
"""Calls a reader's decode loop on this rank and reports its result, which lesson_11b.py reads."""

import torch
import torch.distributed as dist

from course.building.messages import tell
from extensions.inference.cached_stage import CachedStage
from extensions.inference.passes import Pass, Row
from extensions.inference.requests import choose_token
from pipeline.model import ModelConfig, build_part, cut_evenly

CONFIG = ModelConfig(layers=4, dim=16, heads=2, kv_heads=1, seq_len=32)


def main(request, decode):
    """Give the reader's function its tools, and report what it returns and which of them it used."""
    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    first = first_tokens(request["groups"])
    tools = Tools(rank, last + 1, len(first))
    result = decode(rank, last, first, request["count"], tools.forward, tools.send, tools.receive)
    for message in tools.sent:
        message.wait()
    texts = None
    if isinstance(result, dict):
        texts = {str(group): numbers_in(tokens) for group, tokens in result.items()}
    tell("report", value={"texts": texts, "did": tools.did})


def numbers_in(tokens):
    """The tokens as a list of int, from any sequence; anything else is returned as it is."""
    try:
        return [int(token) if not isinstance(token, str) else token for token in tokens]
    except (TypeError, ValueError):
        return tokens


def first_tokens(groups):
    return {group: 65 + 7 * group for group in range(groups)}


class Tools:
    """The functions that the reader's loop calls; `did` lists the calls of this rank."""

    def __init__(self, rank, num_ranks, groups):
        self.rank, self.num_ranks = rank, num_ranks
        self.did, self.sent = [], []
        self.lengths = dict.fromkeys(range(groups), 0)  # tokens that have passed, by group
        part = build_part(CONFIG, *cut_evenly(CONFIG.layers, num_ranks)[rank])
        self.stage = CachedStage(part, rank, num_ranks, groups, 1, CONFIG.seq_len)

    def forward(self, group, x):
        """Run this rank's layers on `x` and return the output; on the last rank, the next token."""
        self.did.append(["forward", group])
        start = self.lengths[group]
        self.lengths[group] += 1
        one = Pass(group, 0, 0, (Row(group, 0, start, start + 1, True),))
        output = self.stage.forward(0, torch.tensor([x]) if self.stage.is_first else x, one)
        return choose(output[0], group, start + 1) if self.stage.is_last else output

    def send(self, x, destination):
        """Send `x` to rank `destination`: the next rank, or rank 0 from the last rank."""
        following = (self.rank + 1) % self.num_ranks
        if destination != following:
            raise ValueError(
                f"rank {self.rank} sends to rank {destination}, but its output is for rank "
                f"{following}"
            )
        self.did.append(["send", destination])
        tensor = torch.tensor([x]) if self.stage.is_last else x
        self.sent.append(dist.isend(tensor.clone(), destination))

    def receive(self, source):
        """Receive from rank `source`: a token on rank 0, an activation on the other ranks."""
        before = (self.rank - 1) % self.num_ranks
        if source != before:
            raise ValueError(
                f"rank {self.rank} receives from rank {source}, but its input comes from rank "
                f"{before}"
            )
        self.did.append(["receive", source])
        if self.stage.is_first:
            token = torch.empty(1, dtype=torch.int64)
            dist.recv(token, source)
            return token.item()
        activation = torch.empty(1, CONFIG.dim, dtype=torch.float64)
        dist.recv(activation, source)
        return activation


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
