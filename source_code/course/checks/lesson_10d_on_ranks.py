# SPDX-License-Identifier: Apache-2.0
"""Runs a reader's dispatch and combine on this rank; lesson_10d.py reads the report.

Each of two ranks has one expert, a matrix and a tanh, and a few tokens of its own.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from course.building import WAITING
from course.building.messages import tell
from extensions.experts.expert_group import ExpertGroup
from pipeline.job import Job

RANKS = 0, 1
ROUNDED = 1e-6  # largest difference of a number that was a float32


class Case(NamedTuple):
    """One call: `chosen` and `losses` have a list for each rank, the expert of each of its tokens and
    the auxiliary loss of each of its sequences. A token has `width` numbers."""

    chosen: tuple
    losses: tuple
    width: int

    @property
    def sequences(self):
        return sum(map(len, self.losses))


# Each rank sends other numbers of rows than it receives. In the second case all sizes are different,
# because a function may have kept those of its first call; rank 0 has no tokens for expert 0. In the
# last case, no rank has tokens for expert 1.
CASES = (
    Case(([1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0]), ([1.1, 1.5, 2.0], [1.25]), 4),
    Case(([1, 1, 1, 1], [1, 0, 0, 1, 1, 0, 1]), ([0.7], [1.3, 0.9]), 3),
    Case(([0] * 6, [0] * 5), ([1.1, 1.5, 2.0], [1.25]), 4),
)


def main(_, reader):
    """Call the reader's function between two ranks, and report what it returns on this one."""
    dist.init_process_group("gloo")
    job = Job(dist.get_rank(), len(RANKS), torch.device("cpu"), "gloo", WAITING)
    job.groups[RANKS] = dist.group.WORLD
    tell("report", value=[run_layer(job, reader, case) for case in CASES])


def run_layer(job, reader, case):
    """Compare result, share of the loss and gradients on this rank with those of one process."""
    rank, group = job.rank, ExpertGroup(job, RANKS)
    tokens, weights, experts, slope = drawn(case)
    x, weight = tokens[rank].clone(), weights[rank].clone()
    expert = experts[rank].clone()
    leaves = [each.requires_grad_() for each in (x, weight, expert)]
    losses = torch.tensor(case.losses[rank], dtype=torch.float64, requires_grad=True)
    computed = []  # what has gone through the expert of this rank

    def expert_of(rows):
        computed.append(rows.detach())
        return torch.tanh(rows @ expert)

    made = reader(
        x, torch.tensor(case.chosen[rank]), weight, expert_of,
        partial(exchange_counts, group), partial(exchange, group), losses, case.sequences,
    )  # fmt: skip
    if not (isinstance(made, (tuple, list)) and len(made) == 2 and all(map(torch.is_tensor, made))):
        return {"wrong": "your function does not return a pair of tensors: the results, and this "
                "rank's share of the loss"}  # fmt: skip
    mixed, share = made
    if mixed.shape != x.shape:
        return {"wrong": f"the results have the shape {list(mixed.shape)}, not {list(x.shape)}"}
    if share.numel() != 1:
        return {"wrong": "the share of the loss is not a single number"}
    # Both ranks run the same backward, also if the results do not depend on a rank's tokens.
    ((mixed * slope[rank]).sum() + share + 0 * sum(leaf.sum() for leaf in leaves)).backward()
    right, unusual, gradients = one_process(case)
    right_share = losses.sum() / case.sequences
    return {
        "rank": rank,
        "same": close(mixed, right[rank]),
        "rounded": close(mixed, right[rank], ROUNDED),
        "sorted": close(mixed.sort(0).values, right[rank].sort(0).values),
        "unweighted": close(mixed, right[rank] / weights[rank][:, None]),
        "weighted before": close(mixed, unusual[rank]),
        "weighted twice": close(mixed, right[rank] * weights[rank][:, None]),
        "with x": close(mixed, right[rank] + tokens[rank]),
        "rows": [origin_of(row, n, rank, case) for n, row in enumerate(mixed.detach())],
        "share": close(share, right_share),
        "share rounded": close(share, right_share, ROUNDED),
        "share of own": close(share, losses.mean(), ROUNDED),
        "x": close(x.grad, gradients["x"][rank]),
        "weight": close(weight.grad, gradients["weight"][rank]),
        "no weight": not weight.grad.any(),
        "no result": not mixed.requires_grad,
        "expert": close(expert.grad, gradients["expert"][rank]),
        "no losses": losses.grad is None or not losses.grad.any(),
        "losses": losses.grad is not None and close(losses.grad, 1 / case.sequences, 1e-12),
        "not its own": number_of_others(computed, case, rank),
    }


def origin_of(row, place, rank, case):
    """How the result `row` was made, which `rank` returns for its token number `place`.

    Returns the "rank" and the "token" that went in, the "expert" that computed it, the expert that
    this token has "chosen", and "weight", the token of `rank` whose weight it was multiplied by.
    Returns None if no expert makes this result from any token.
    """
    tokens, weights, experts, _ = drawn(case)
    factors = sorted(enumerate(weights[rank]), key=lambda pair: pair[0] != place)
    for k, factor in factors:  # its own place first
        for r, x in enumerate(tokens):
            for e, expert in enumerate(experts):
                same = ((torch.tanh(x @ expert) * factor - row).abs() < 1e-9).all(1).nonzero()
                for m in same.flatten().tolist():
                    chosen = case.chosen[r][m]
                    return {"rank": r, "token": m, "expert": e, "chosen": chosen, "weight": k}


def number_of_others(computed, case, rank):
    """How many of the rows that an expert has computed are tokens which have chosen the other one."""
    tokens = zip(sum(case.chosen, []), torch.cat(drawn(case)[0]))
    others = [token for chosen, token in tokens if chosen != rank]
    rows = torch.cat([part.reshape(-1, case.width) for part in computed] or [torch.empty(0)])
    return sum(any(torch.equal(row, token) for token in others) for row in rows)


def drawn(case):
    """Tokens and weights of each rank, the experts, and the gradients of the results."""
    draw = partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts, width = list(map(len, case.chosen)), case.width
    tokens = [draw(n, width) for n in counts]
    weights = [0.5 + draw(n).sigmoid() / 2 for n in counts]
    return tokens, weights, [draw(width, width) for _ in RANKS], [draw(n, width) for n in counts]


def one_process(case):
    """The results of both ranks' tokens, the results if the weights multiplied the experts' inputs,
    and the gradients, with both experts in one process."""
    tokens, weights, experts, slope = drawn(case)
    leaves = {"x": tokens, "weight": weights, "expert": experts}
    for each in sum(leaves.values(), []):
        each.requires_grad_()
    results, before = [], []
    for x, w, of_rank in zip(tokens, weights, case.chosen):
        rows = [(x[n], w[n], experts[e]) for n, e in enumerate(of_rank)]
        results.append(torch.stack([torch.tanh(row @ expert) * by for row, by, expert in rows]))
        before.append(torch.stack([torch.tanh(by * row @ expert) for row, by, expert in rows]))
    total = sum((result * of_it).sum() for result, of_it in zip(results, slope))
    (total + 0 * sum(each.sum() for each in experts)).backward()
    gradients = {name: [each.grad for each in parts] for name, parts in leaves.items()}
    return *([each.detach() for each in found] for found in (results, before)), gradients


def exchange_counts(group, counts):
    """The number of rows that arrive from each rank, for [to rank 0, to rank 1], as a list.

    Raises ValueError if the counts are not two.
    """
    if len(counts) != len(RANKS):
        raise ValueError(f"{list(map(int, counts))} is not a count for each of {len(RANKS)} ranks")
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
