"""Checks of lesson 06: the activation memory with recomputation, and the number of checkpoints."""

from course.checks.answer import call_for_number, checked, close
from lab.simulator import Costs, simulate
from pipeline.schedules import gpipe, one_f_one_b

SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b}


@checked("an input for each micro-batch that waits, and the inside of the one at work.")
def held_with_recompute(held):
    """Check `held(schedule, rank, num_ranks, num_microbatches, input_bytes, inside_bytes)`.

    It returns the peak activation memory of a rank in bytes. `schedule` is "gpipe" or "1f1b".
    `inside_bytes` is what one forward saves without recomputation, including its input.
    """
    for num_ranks, m, inp, inside in [(4, 8, 16, 400), (4, 2, 10, 300), (8, 32, 1, 50)]:
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
                if close(answer, waiting * inp + inside):
                    return f"{case}; the input of the micro-batch at work is part of its inside"
                if close(answer, waiting * inp):
                    return f"{case}, the inputs alone; a backward needs the inside of its own"
                if close(answer, waiting * inside):
                    return f"{case}, which is the bill without recomputation"
                if close(answer, (waiting - 1) * inp + inside / m):
                    return (
                        f"{case}; the inside is already that of one micro-batch, not of the batch"
                    )
                if name == "1f1b" and close(answer, (m - 1) * inp + inside):
                    return f"{case}, as in GPipe; in 1F1B fewer micro-batches wait on this rank"
                return (
                    f"{case}; at its peak the rank has {waiting} micro-batches between forward and "
                    "backward, each with its input"
                )


@checked("the square root of what an inside costs over what an input costs, and never past l.")
def best_checkpoints(best):
    """Check `best(layers, input_bytes, inside_bytes, waiting)`: how many inputs a stage keeps.

    With c checkpoints in a stage of `layers` layers, each of `waiting` micro-batches keeps c
    inputs; the micro-batch in its backward also has the inside of layers / c layers.
    """
    cases = [(16, 16, 64, 1), (24, 1, 24, 4), (24, 1, 24, 16), (8, 1, 32, 1)]
    cases += [(8, 1, 17, 64), (16, 1, 5, 16)]  # roots of 1.46 and 2.24; 2 is best for both
    for layers, inp, inside, waiting in cases:
        counts, root = range(1, layers + 1), (layers * inside / (waiting * inp)) ** 0.5
        answer = call_for_number(best, layers, inp, inside, waiting)
        case = (
            f"{layers} layers, input {inp}, inside {inside}, {waiting} waiting: you say {answer:g}"
        )
        if not answer >= 1 or answer % 1:
            return f"{case}, and a checkpoint is there or it is not: return a whole number from 1"
        if answer > layers:
            return f"{case}, but there are only {layers} layers to keep the inputs of"
        least = min(held_bytes(c, layers, inp, inside, waiting) for c in counts)
        yours = held_bytes(answer, layers, inp, inside, waiting)
        if close(yours, least):
            continue
        found = f"{case}, which holds {yours:g}, and {least:g} is possible"
        if waiting > 1 and answer == min(counts, key=lambda c: held_bytes(c, layers, inp, inside)):
            return f"{found}; the inputs are kept for each of the {waiting} micro-batches"
        if abs(answer - root) < 1:
            return f"{found}; the root is {root:.2f}, so compare the whole numbers on both sides"
        if answer == layers:
            return f"{found}; with an input for every layer the inputs are most of it"
        if answer == 1:
            return f"{found}; with one input the inside of the whole stage is most of it"
        if answer == round(layers**0.5):
            return f"{found}; the square root of the layers is right only if an inside is an input"
        return found


def held_bytes(checkpoints, layers, inp, inside, waiting=1):
    """The bytes that a stage holds: the inputs of `waiting` micro-batches, one piece's inside."""
    return waiting * checkpoints * inp + layers / checkpoints * inside
