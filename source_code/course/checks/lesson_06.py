# SPDX-License-Identifier: Apache-2.0
"""The check of lesson 06 without ranks: the activation memory with recomputation."""

from itertools import product

from course.checks.answer import call_for_number, checked, close, drawn, many
from lab.simulator import Costs, simulate
from pipeline.schedules import gpipe, one_f_one_b

SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}
# Ranks, micro-batches, and the bytes of an input and of an inside.
CASES = [(4, 8, 16, 400), (4, 2, 10, 300), (8, 32, 1, 50)]
CASES += product(range(1, 7), range(1, 7), (3,), (50,))
CASES += drawn(
    lambda c: (c.randint(1, 9), c.randint(1, 40), c.randint(1, 99), c.randint(99, 999)), 20
)


@checked("an input for each micro-batch that waits, and the inside of the one at work.")
def held_with_recompute(held):
    """Check `held(schedule, rank, num_ranks, num_microbatches, input_bytes, inside_bytes)`.

    It returns the peak activation memory of a rank in bytes. `schedule` is "gpipe" or "1f1b".
    `inside_bytes` is what one forward saves without recomputation, including its input.
    """
    for num_ranks, m, inp, inside in CASES:
        for name, make in SCHEDULES.items():
            peaks = simulate(make(num_ranks, m), Costs()).peak_held_per_rank
            for rank, waiting in enumerate(peaks):
                answer = call_for_number(held, name, rank, num_ranks, m, inp, inside)
                if close(answer, (waiting - 1) * inp + inside):
                    continue
                case = (
                    f"{name}, rank {rank} of {num_ranks}, m = {m}, an input of {inp} and an inside "
                    f"of {inside} bytes: you say {answer:g}"
                )
                if name == "1f1b" and rank and close(answer, (peaks[0] - 1) * inp + inside):
                    return f"{case}, as on rank 0; fewer micro-batches wait on this rank"
                if close(answer, waiting * inp + inside):
                    return f"{case}; the input of the micro-batch at work is part of its inside"
                if close(answer, waiting * inp) or close(answer, (waiting - 1) * inp):
                    return f"{case}, the inputs alone; a backward needs the inside of its own"
                if close(answer, (waiting - 1) * inside + inp):
                    return f"{case}; those that wait keep an input each, and the one at work its inside"
                if close(answer, waiting * inside):
                    return f"{case}, which is what it holds without recomputation"
                if close(answer, (waiting - 1) * inp + inside / m):
                    return (
                        f"{case}; the inside is already that of one micro-batch, not of the batch"
                    )
                if name == "1f1b" and close(answer, (m - 1) * inp + inside):
                    return f"{case}, as in GPipe; in 1F1B fewer micro-batches wait on this rank"
                return (
                    f"{case}; at its peak the rank has {many(waiting, 'micro-batch')} between forward and "
                    "backward, each with its input"
                )
