# SPDX-License-Identifier: Apache-2.0
"""The check of lesson 10: the weight of a token."""

from course.checks.answer import WrongAnswer, call_for_number, checked, close, drawn


def _drawn_losses(choose):
    """The losses of up to six micro-batches, whose shares float32 has without rounding."""
    counts = [0] * choose.randint(1, 6)
    for _ in range(2 ** choose.randint(0, 6)):
        counts[choose.randrange(len(counts))] += 1
    return [[choose.randint(1, 80) * count / 16 for _ in range(count)] for count in counts]


CASES = [[[2.0, 4.0], [9.0]], [[1.0], [], [5.0, 6.0, 7.0]], [[0.0625, 0.0625], [4.0, 4.0]]]
CASES += drawn(_drawn_losses)


@checked("one divisor for the whole batch, and every real token weighs the same.")
def share_of_loss(share):
    """Check `share(losses, counts)`: what one micro-batch adds to the loss of the whole batch.

    `losses` is the list of the losses of its real tokens; `counts` has the number of real tokens of
    every micro-batch of every replica.
    """
    for pieces in CASES:
        counts = [len(piece) for piece in pieces]
        right = sum(map(sum, pieces)) / sum(counts)
        shares = []
        for piece in pieces:
            try:
                shares.append(call_for_number(share, [*piece], [*counts]))
            except WrongAnswer as error:
                hint = "" if all(pieces) else " (a micro-batch may be all padding, and then adds 0)"
                raise WrongAnswer(f"{error}{hint}") from None
        answer = sum(shares)
        if close(answer, right):
            continue
        given = (
            f"token losses {pieces}" if sum(counts) <= 8 else f"micro-batches of {counts} tokens"
        )
        case = f"{given}: your shares add up to {answer:.6g}"
        means = [sum(piece) / max(len(piece), 1) for piece in pieces]
        if close(answer, sum(means) / len(means)):
            return f"{case}, a mean of means: the tokens of a short micro-batch weigh more there"
        if close(answer, sum(means)):
            return f"{case}, as if each micro-batch were a whole batch; divide all of them by one number"
        if close(answer, sum(map(sum, pieces))):
            return f"{case}, a sum: a batch with more tokens would take a longer step"
        if close(answer, sum(map(sum, pieces)) / len(pieces)):
            case += ", divided by the number of micro-batches"
        return f"{case}, and one process with the whole batch has {right:.6g}"
