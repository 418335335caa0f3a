"""Checks of lesson 12c: bytes of a weight, tokens that count once, useful work."""

import math

from course.checks.answer import call_for_number, checked, close

STATES = {"sgd": 0, "momentum": 1, "adamw": 2}


@checked("a weight costs 16 to 18 bytes with AdamW, and only two of them compute in 16 bits.")
def bytes_of_a_weight(count):
    """`count(width, optimizer)`: bytes that one weight costs in training, without activations.

    `width` is that of the numbers that compute, 2, 4 or 8. With 2 there is a master in float32,
    whose gradient has 4 bytes, too.
    """
    for width, optimizer in [(4, "adamw"), (8, "momentum"), (4, "sgd"), (2, "adamw"), (2, "sgd")]:
        answer = call_for_number(count, width, optimizer)
        wide, states = max(width, 4), STATES[optimizer]
        wanted = width + wide * (1 + states) + (wide if wide > width else 0)
        if close(answer, wanted):
            continue
        hint = f"the tensors of a run have {wanted}"
        if close(answer, wanted - wide):
            hint = "one number of the master's width is missing: " + (
                "the gradient, or the master itself" if width == 2 else "what of the gradient?"
            )
        elif width == 2 and close(answer, 2 * (2 + states)):
            hint = "what the optimizer remembers is in 32 bits, and so are master and gradient"
        elif width == 2 and close(answer, wanted - 2):
            hint = "that has a gradient of 2 bytes; those of many micro-batches add up here, in 4 bytes"
        elif optimizer != "adamw" and close(answer, wanted + wide * (2 - states)):
            hint = f"{optimizer} remembers {('nothing', 'one number')[states]} for each weight"
        elif width > 2 and close(answer, wanted + wide):
            hint = "a weight that is as wide as its update has no master: it is its own"
        return f"width {width}, {optimizer}: not {answer:g} bytes; {hint}"
    return None


@checked("sum everything, divide once: then no cut of the batch can change the loss.")
def loss_of_an_update(loss):
    """`loss(passes)`: of an update. A pass is a list of (mean loss, real tokens) of micro-batches."""
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
        elif recompute and close(answer, (dense + attention) * 4 / 3 * share):
            hint = "a forward run again is work, and not useful work: the model asks for it once"
        elif close(answer, 100 * (dense + attention) * share):
            hint = "that is in per cent; return the share of one"
        elif math.isclose(answer * (dense + attention) * share, 1, rel_tol=1e-6):
            hint = "that is possible work over useful work"
        return f"{length} tokens a row, recompute {recompute}: not {answer:.4g}; {hint}"
    return None
