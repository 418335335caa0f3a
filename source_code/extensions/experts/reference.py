# SPDX-License-Identifier: Apache-2.0
"""What --verify of experts.py compares with: one process with all experts, and its counts."""

import torch

from extensions.experts.expert_group import ExpertGroup
from extensions.experts.expert_layer import build_expert_part, expert_layers
from extensions.experts.expert_stage import auxiliary_loss, mark_padding
from extensions.pretraining.padding import ShareOfLoss, count_real_tokens
from pipeline.collectives import gather, share
from pipeline.one_process import train_one_process


def train_with_all_experts(arguments, device, expected_counts):
    """As `train_one_process`, with all experts; also compare `tokens_per_expert` of the ranks.

    The losses are NaN, which agrees with nothing, if an expert had another number of tokens.
    """
    models = []

    def build(a, device):
        sizes = a.config, 0, a.layers, a.routing, ExpertGroup(), a.seed, a.torch_dtype, device
        models.append(build_expert_part(*sizes))
        return models[0]

    def loss_of(model, inputs, targets):
        loss_function = ShareOfLoss()
        loss_function.real_tokens = count_real_tokens([targets])
        mark_padding(model, targets)
        loss = loss_function(model(inputs), targets)
        return loss + arguments.auxiliary / len(inputs) * auxiliary_loss(model)

    losses = train_one_process(arguments, device, build=build, loss_of=loss_of)
    equal = counts_of(models) == expected_counts
    print(f"tokens of each expert: {'as' if equal else 'NOT AS'} in one process", flush=True)
    return losses if equal else [float("nan")] * len(losses)


def counts_of(parts):
    """{layer: the number of tokens that went to each expert} of some parts, as lists."""
    layers = {n: layer for part in parts for n, layer in expert_layers(part).items()}
    return {n: torch.as_tensor(layer.counts).tolist() for n, layer in sorted(layers.items())}


def tokens_per_expert(job, parts):
    """Return on every rank the `counts_of` the whole model, over all ranks. All ranks call it."""
    totals = {}
    for counts in gather(job, counts_of(parts)) or []:
        for number, of_layer in counts.items():
            before = totals.get(number, [0] * len(of_layer))
            totals[number] = [a + b for a, b in zip(before, of_layer)]
    return share(job, dict(sorted(totals.items())))


def describe(arguments, job, group, counts):
    """Print the layout, the tokens of each expert, and the bytes that rank 0 has sent."""
    if job.rank == 0 and arguments.steps:
        own = arguments.experts // group.size
        print(f"{arguments.experts} experts on {group.size} ranks, {own} on each")
        for number, of_layer in counts.items():
            print(f"layer {number}: tokens of each expert {' '.join(map(str, of_layer))}")
        bytes_sent = ", ".join(f"{what} {count:,}" for what, count in sorted(group.sent.items()))
        print(f"bytes sent by all-to-all by rank 0: {bytes_sent or 0}", flush=True)
