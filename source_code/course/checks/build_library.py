# SPDX-License-Identifier: Apache-2.0
"""Checks of whole programs with torch.distributed.pipelining, on real ranks (lesson 08)."""

import re
from pathlib import Path

from course.building.examining import examine
from course.checks.answer import NotAttempted, WrongAnswer, checked
from course.checks.build_text import holes
from course.checks.build_words import Words
from course.checks.library_mistakes import LIMIT, MICROBATCHES, STEPS, losses_of, mistake_in

PROGRAM = "course.checks.build_library_on_ranks.main"
COMPUTING = 10  # seconds; a program also imports what it needs
EXACT = 1e-11  # largest relative difference of losses in float64; in float32 it is above 1e-9


@checked("the losses of one process on four ranks and on two, with nothing between you and torch.")
def training_program(path):
    """Check the file `path`: a training run with the library that prints the loss of each step."""
    name, text = text_of(path)
    for num_ranks in (4, 2):
        found, _, used = printed_by(name, text, num_ranks)
        if complaint := mistake_in(found, num_ranks, clipped=False):
            return f"on {num_ranks} ranks {without_a_step(used) or complaint}"
        if complaint := other_use(used) or other_losses(used, found) or few_digits(used, num_ranks):
            return f"on {num_ranks} ranks {complaint}"
        for (step, loss), wanted in zip(found, losses_of(num_ranks)):
            if abs(loss - wanted) > 2e-6:  # a float32 has six decimals, too
                return (
                    f"on {num_ranks} ranks the losses are right, but that of step {step} is printed as "
                    f"{loss:g}; print six decimals, as in `{{loss:.6f}}`"
                )


@checked("one norm for the whole model, and a forward that nobody learns from.")
def clipping_program(path):
    """Check the file `path`: like `training_program`, with clipped gradients and a last line
    `held out  loss ...`."""
    name, text = text_of(path)
    for num_ranks, replaced in ((4, None), (2, STEPS + 1)):
        found, held_out, used = printed_by(name, text, num_ranks, replaced)
        if complaint := mistake_in(found, num_ranks, clipped=True):
            return f"on {num_ranks} ranks {without_a_step(used) or complaint}"
        if len(held_out) != 1:
            return (
                f"on {num_ranks} ranks the losses are right, but a line `held out  loss 3.123456`, "
                f"with nothing after the number, is printed {len(held_out)} times; the rank of the "
                "last stage prints it once"
            )
        is_replaced = any(rank["replaced"] for rank in used)
        *_, wanted = losses_of(clip="whole", held_out=replaced if is_replaced else STEPS)
        if abs(held_out[0] - wanted) > LIMIT:
            complaint = of_held_out(held_out[0], wanted, is_replaced)
            return f"on {num_ranks} ranks the losses are right, but {complaint}"
        if complaint := other_use(used) or other_losses(used, found):
            return f"on {num_ranks} ranks {complaint}"
        if not all(rank["evaluations"] and rank["steps"] == STEPS for rank in used):
            return (
                f"on {num_ranks} ranks the losses are right, but batch {STEPS} was not evaluated "
                "with `schedule.eval(...)`; `step` also runs a backward, which nobody needs here"
            )


def other_use(used):
    """The sentence for a program that uses the library in another way than the exercise asks, or None."""
    for rank, done in enumerate(used):
        if not done["schedules"]:
            return (
                "the losses are right, but no schedule of torch.distributed.pipelining was created"
            )
        if others := set(done["microbatches"]) - {MICROBATCHES}:
            return (
                f"the losses are right, but with {min(others)} micro-batches; the exercise asks for "
                f"{MICROBATCHES}"
            )
        if done["steps"] < STEPS:
            return (
                f"the losses are right, but rank {rank} ran `schedule.step(...)` {done['steps']} "
                f"times; each rank runs it in each of the {STEPS} steps"
            )


def wrong_stages(ranks):
    """The end of a sentence about stages of another rank, or that no rank makes, or None."""
    made = [[each["stage"] for each in rank.reports if "stage" in each] for rank in ranks]
    for rank, stages in enumerate(made):
        if len(stages) == 1 and stages[0][0] != rank:
            return (
                f" rank {rank} makes its stage with the index {stages[0][0]!r}: with one stage per "
                f"rank, the index is the rank, from 0 to {len(ranks) - 1}"
            )
    numbers = {index for stages in made for index, _ in stages}
    for index, announced in sum(made, []) if all(made) else []:
        if announced != len(numbers):
            return (
                f" stage {index} is made as one of {announced} stages, and all ranks together make "
                f"{len(numbers)}: with one stage per rank there are as many stages as ranks"
            )


def without_a_step(used):
    """The sentence for a program that only evaluates, or None."""
    if any(rank["evaluations"] and not rank["steps"] for rank in used):
        return "nothing learns: `schedule.eval(...)` runs no backward, `schedule.step(...)` does"


def other_losses(used, found):
    """The sentence for right losses that are not those of the program's schedule, or None.

    A schedule may compute them with another factor, as if its loss function is a sum.
    """
    own = computed_by(used)
    for (step, loss), computed in zip(found, own):
        if abs(loss * own[0] - computed * found[0][1]) > 1e-4 * abs(loss * own[0]):
            return (
                f"the printed losses are right, but the schedule computed other losses: "
                f"{computed:.6f} in step {step}. Train the stages with `schedule.step(...)` alone"
            )


def few_digits(used, num_ranks):
    """The sentence for losses of one process that the schedule computed in too few digits, or None.

    The printed ones have six decimals, in which float32 and float64 look alike.
    """
    own, wanted = computed_by(used), losses_of(num_ranks)
    for step, (computed, right) in enumerate(zip(own, wanted)):
        computed *= wanted[0] / own[0]  # a schedule may compute them with another factor
        if abs(computed - right) > EXACT * abs(right):
            return (
                "the losses are those of one process in their first digits only: step "
                f"{step} has {computed:.12f}, and one process has {right:.12f}; was something rounded "
                "to float32? `build_stage` makes float64"
            )


def computed_by(used):
    """The mean losses of the steps that a schedule computed, on the rank of the last stage."""
    return next((rank["losses"] for rank in used if rank["losses"]), [])


def of_held_out(found, wanted, is_replaced):
    """The sentence about a wrong loss on held-out text, which may be another batch's text."""
    if is_replaced:
        return (
            f"where `batch({STEPS})` gives other text than on four, its loss is {wanted:.6f}, and the "
            f"program prints {found:.6f}: is the printed loss computed from this batch?"
        )
    case = f"that of batch {STEPS} is {found:.6f}, and one process has {wanted:.6f}"
    if abs(found - 8 * wanted) < 10 * LIMIT:
        return f"{case}: that is the sum over its 8 micro-batches"
    if abs(found - wanted) < 1e-3:
        return f"{case}: was it rounded? Print six decimals, as in `{{loss:.6f}}`"
    if abs(found - losses_of(clip="whole", steps=STEPS - 1)[-1]) < LIMIT:
        return f"{case}: that is batch {STEPS - 1}, before the last update"
    return f"{case}; which batch was it, and had every update been made?"


def text_of(path):
    """(name, text) of the reader's file. Raises NotAttempted while it still has only the `...`."""
    path = Path(path)
    text = path.read_text(encoding="utf-8") if path.is_file() else "..."
    try:
        left = holes(text)
    except SyntaxError as error:
        raise WrongAnswer(
            f"line {error.lineno} of {path.name} is not Python: {error.msg}"
        ) from None
    if left and len(text.split()) <= 1:
        raise NotAttempted
    if left:
        raise WrongAnswer(f"line {left[0]} of {path.name} still has its ...")
    return path.name, text


def printed_by(name, text, num_ranks, replaced=None):
    """([(step, loss)], [held-out losses], [each rank's use of the library]) of the program.

    With a number as `replaced`, `batch(STEPS)` gives it the batch of that number.
    """
    request = {"program": PROGRAM, "functions": [], "sources": [(name, text)], "seconds": COMPUTING}
    request["replaced"] = [[STEPS, replaced]] if replaced else []
    observed = examine(request, num_ranks, show=False)
    if complaint := Words(observed, request).transport():
        complaint = wrong_stages(observed.ranks) or f": {complaint}"
        raise WrongAnswer(f"on {num_ranks} ranks{complaint}")
    output, used = observed.printed, [rank.reports[-1] for rank in observed.ranks]
    steps = re.findall(r"^step +(\d+) +loss +(\S+) *$", output, re.MULTILINE)
    held_out = re.findall(r"^held out +loss +(\S+) *$", output, re.MULTILINE)
    try:
        losses = [(int(step), float(loss)) for step, loss in steps]
        return losses, [float(x) for x in held_out], used
    except ValueError:
        raise WrongAnswer("a line of the form `step 0  loss 5.123456` ends in no number") from None
