"""Checks of lesson 12c: the loss of an update, and the MFU. build_llama.py has its other checks."""

import math

from course.checks.answer import call_for_number, checked, close


@checked("sum everything, divide once: then no cut of the batch can change the loss.")
def loss_of_an_update(loss):
    """Check `loss(passes)`: the loss of an update, as the mean over all its real tokens.

    A pass is a list of (mean loss, real tokens), one pair per micro-batch.
    """
    cases = [
        [[(2.0, 10), (4.0, 10)]],
        [[(2.0, 30), (4.0, 10)]],
        [[(2.0, 30), (4.0, 10)], [(6.0, 5), (3.0, 15)]],
        [[(2.0, 4), (0.0, 0)], [(5.0, 8), (1.0, 4)]],
    ]
    for passes in cases:
        answer = call_for_number(loss, passes)
        total = sum(mean * count for one in passes for mean, count in one)
        wanted = total / sum(count for one in passes for _, count in one)
        if close(answer, wanted):
            continue
        means = [mean for one in passes for mean, _ in one]
        of_passes = [sum(m * n for m, n in one) / sum(n for _, n in one) for one in passes]
        hint = f"the mean over all its tokens is {wanted:.4f}"
        if close(answer, sum(means) / len(means)):
            hint = "that is a mean of means, in which a token of a short micro-batch weighs more"
        elif close(answer, sum(of_passes) / len(of_passes)):
            hint = "right within each pass, and then each pass counts the same, however many tokens"
        elif close(answer, sum(of_passes)):
            hint = "the passes' losses are added, so twice as many passes have twice the loss"
        elif close(answer, total):
            hint = "that is the sum over the tokens; divide it by how many there are"
        return f"passes {passes}: not {answer:.4f}; {hint}"
    return None


@checked("useful work over possible work: what is done twice, or for padding, counts once or not.")
def utilisation(mfu):
    """`mfu(weights, layers, dim, length, tokens_per_second, peak, recompute)`, a share of one.

    `weights` are those in matrices, `recompute` says whether every forward runs twice.
    """
    cases = [
        (1_000_000, 8, 104, 128, 10_000, 2e11, False),
        (1_000_000, 8, 104, 2048, 10_000, 2e11, False),
        (7_000_000_000, 32, 4096, 4096, 2_000, 3.12e14, True),
    ]
    for case in cases:
        weights, layers, dim, length, rate, peak, recompute = case
        answer = call_for_number(mfu, *case)
        dense, attention = 6 * weights, 12 * layers * dim * length
        share = rate / peak
        if close(answer, (dense + attention) * share):
            continue
        hint = f"it is {(dense + attention) * share:.4f}"
        if close(answer, dense * share):
            hint = "every position also looks at the others: 12 L d T for a token"
        elif close(answer, (2 * weights + attention / 3) * share) or close(
            answer, 2 * weights * share
        ):
            hint = "2 N is a forward; the backward does it twice more"
        elif recompute and any(
            close(answer, work * share)
            for work in ((dense + attention) * 4 / 3, dense * 4 / 3 + attention)
        ):
            hint = "a forward run again is work, and not useful work: the model asks for it once"
        elif close(answer, 100 * (dense + attention) * share):
            hint = "that is in per cent; return the share of one"
        elif math.isclose(answer * (dense + attention) * share, 1, rel_tol=1e-6):
            hint = "that is possible work over useful work"
        return f"{length} tokens a row, recompute {recompute}: not {answer:.4g}; {hint}"
    return None
