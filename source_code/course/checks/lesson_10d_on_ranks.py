# SPDX-License-Identifier: Apache-2.0
"""Runs a reader's dispatch and combine on this rank; lesson_10d.py reads the report.

Each of two ranks has one expert, a matrix and a tanh, and 6 or 5 tokens of its own.
"""

from functools import partial

import torch
import torch.distributed as dist

from course.building import WAITING
from course.building.messages import tell
from extensions.experts.expert_group import ExpertGroup
from pipeline.job import Job

RANKS = 0, 1
TOKENS = 6, 5  # of each rank
# The expert of each token: each rank sends other numbers of rows than it receives, or expert 1 has
# no tokens.
CASES = ([1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0]), ([0] * 6, [0] * 5)
LOSSES = [1.0, 1.5, 2.0], [1.25]  # the auxiliary loss of each sequence
WIDTH = 4


def main(_, reader):
    """Call the reader's function between two ranks, and report what it returns on this one."""
    dist.init_process_group("gloo")
    job = Job(dist.get_rank(), len(RANKS), torch.device("cpu"), "gloo", WAITING)
    job.groups[RANKS] = dist.group.WORLD
    tell("report", value=[run_layer(job, reader, chosen) for chosen in CASES])


def run_layer(job, reader, chosen):
    """Compare result, share of the loss and gradients on this rank with those of one process.

    `chosen` has the experts of the tokens of each rank.
    """
    rank, group = job.rank, ExpertGroup(job, RANKS)
    tokens, weights, experts, slope = drawn()
    x, weight = tokens[rank].clone(), weights[rank].clone()
    expert = experts[rank].clone()
    leaves = [each.requires_grad_() for each in (x, weight, expert)]
    losses = torch.tensor(LOSSES[rank], dtype=torch.float64, requires_grad=True)
    made = reader(
        x, torch.tensor(chosen[rank]), weight, lambda rows: torch.tanh(rows @ expert),
        partial(exchange_counts, group), partial(exchange, group), losses, sum(map(len, LOSSES)),
    )  # fmt: skip
    if not (isinstance(made, (tuple, list)) and len(made) == 2 and all(map(torch.is_tensor, made))):
        return {"wrong": "return a pair of tensors: the results, and this rank's share of the loss"}
    mixed, share = made
    if mixed.shape != x.shape:
        return {"wrong": f"the results have the shape {list(mixed.shape)}, not {list(x.shape)}"}
    if share.dim():
        return {"wrong": "the share of the loss is not a single number"}
    # Both ranks run the same backward, also where nothing leads back to their own tokens.
    ((mixed * slope[rank]).sum() + share + 0 * sum(leaf.sum() for leaf in leaves)).backward()
    right, unusual, gradients = one_process(chosen)
    return {
        "same": close(mixed, right[rank]),
        "sorted": close(mixed.sort(0).values, right[rank].sort(0).values),
        "unweighted": close(mixed, right[rank] / weights[rank][:, None]),
        "weighted before": close(mixed, unusual[rank]),
        "share": round(share.item(), 9),
        "x": close(x.grad, gradients["x"][rank]),
        "weight": close(weight.grad, gradients["weight"][rank]),
        "no weight": not weight.grad.any(),
        "expert": close(expert.grad, gradients["expert"][rank]),
        "no losses": losses.grad is None or not losses.grad.any(),
        "losses": losses.grad is not None and close(losses.grad, 1 / sum(map(len, LOSSES)), 1e-12),
    }


def drawn():
    """Tokens and weights of each rank, the experts, and the gradients of the results."""
    draw = partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens = [draw(n, WIDTH) for n in TOKENS]
    weights = [0.5 + draw(n).sigmoid() / 2 for n in TOKENS]
    return tokens, weights, [draw(WIDTH, WIDTH) for _ in RANKS], [draw(n, WIDTH) for n in TOKENS]


def one_process(chosen):
    """The results of both ranks' tokens, those if the weights multiplied what goes into the experts,
    and the gradients, with both experts in one process."""
    tokens, weights, experts, slope = drawn()
    leaves = {"x": tokens, "weight": weights, "expert": experts}
    for each in sum(leaves.values(), []):
        each.requires_grad_()
    results, before = [], []
    for x, w, of_rank in zip(tokens, weights, chosen):
        rows = [(x[n], w[n], experts[e]) for n, e in enumerate(of_rank)]
        results.append(torch.stack([torch.tanh(row @ expert) * by for row, by, expert in rows]))
        before.append(torch.stack([torch.tanh(by * row @ expert) for row, by, expert in rows]))
    total = sum((result * of_it).sum() for result, of_it in zip(results, slope))
    (total + 0 * sum(each.sum() for each in experts)).backward()
    gradients = {name: [each.grad for each in parts] for name, parts in leaves.items()}
    return *([each.detach() for each in found] for found in (results, before)), gradients


def exchange_counts(group, counts):
    """The number of rows that arrive from each rank, for [to rank 0, to rank 1], as a list."""
    return group.exchange_counts(torch.as_tensor(counts)).flatten().tolist()


def exchange(group, rows, sent, received):
    """The rows that arrive. Raises ValueError if they are not as many as the reader expects."""
    sent, received = ([int(count) for count in counts] for counts in (sent, received))
    arriving = exchange_counts(group, sent)
    if received != arriving:
        raise ValueError(
            f"{received} rows are to arrive from ranks 0 and 1, and {arriving} arrive; "
            "exchange_counts returns how many"
        )
    return group.exchange(rows, sent, received)


def close(found, right, most=1e-9):
    return bool((found - right).abs().max() < most)
