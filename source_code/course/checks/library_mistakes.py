# SPDX-License-Identifier: Apache-2.0
"""Finds the mistake that explains the losses printed by a program with the library (lesson 08).

Each typical mistake is made here in a training run of one process. If the program has printed the
losses of a mistake, it makes that mistake.
"""

from functools import cache

from course.checks.reader_on_ranks import as_on_a_rank

STEPS, RATE, MICROBATCHES, LARGEST = 6, 0.5, 8, 1.3
LIMIT = 3e-5  # torch's clip_grad_norm_ divides by norm + 1e-6, which changes the sixth digit

MISTAKES = [
    ({"zeroed": False}, "the gradients of the step before are still in .grad: step() adds to them, "
     "and nothing sets them to zero"),
    ({"rate": 0}, "nothing learns: does every rank call its optimizer's step(), and are the gradients "
     "of this step still there then?"),
    ({"still": 0}, "the first stage does not learn: does its rank call its optimizer's step()?"),
    ({"still": -1}, "the last stage does not learn: does its rank call its optimizer's step()?"),
    ({"rate": RATE * MICROBATCHES}, f"gradients are {MICROBATCHES} times too large: each "
     "micro-batch's loss is a mean, so step() has to divide their sum (scale_grads)"),
    ({"rate": RATE / MICROBATCHES}, f"gradients are divided by {MICROBATCHES} twice: step() has "
     "divided them already (scale_grads)"),
    ({"first": 1}, "the losses are those of the next batch: step 0 learns batch(0)"),
    ({"always": 0}, "every step learns batch(0); step k learns batch(k)"),
    ({"shown": "sum"}, "the printed loss is the sum over the micro-batches, not their mean"),
    ({"shown": "first"}, "the printed loss is that of the first micro-batch alone"),
    ({"shown": "last"}, "the printed loss is that of the last micro-batch alone"),
]  # fmt: skip
CLIPS = [
    ({"clip": None}, "nothing has been clipped before an update: does the clip come before the "
     "optimizer's step(), does it change .grad itself, and is the norm the whole model's?"),
    ({"clip": "stage"}, "each rank has clipped by the norm of its own stage, so each scaled by "
     "another factor: add up the squares of all ranks"),
    ({"clip": "sum"}, "the factor comes from the sum of the norms; norms of parts do not add, "
     "their squares do"),
    ({"clip": "largest"}, "the factor comes from the largest norm of a stage, and the whole is longer"),
    ({"clip": "always"}, "the gradients have been scaled to the limit in every step, also where they "
     "are shorter: is the factor at most 1, and has step() divided them before (scale_grads)?"),
    ({"clip": "square"}, "the factor comes from the square of the norm: take its root"),
]  # fmt: skip


def mistake_in(found, num_ranks, clipped):
    """The mistake behind the printed `found`, [(step, loss)], as a sentence, or None."""
    if not found:
        return (
            "no line `step 0  loss 5.123456`, with nothing after the number, was printed; the rank of "
            "the last stage prints one per step"
        )
    numbers = [step for step, _ in found]
    if numbers != list(range(STEPS)):
        return (
            f"the lines are those of steps {numbers}; the rank of the last stage prints one for each "
            f"of steps 0 to {STEPS - 1}, and no other rank prints any"
        )
    losses = [loss for _, loss in found]
    right = {"clip": "whole"} if clipped else {}
    wanted = losses_of(num_ranks, **right)[:STEPS]
    if agree(losses, wanted):
        return None
    for changed, sentence in [*MISTAKES, *(CLIPS if clipped else [])]:
        if agree(losses, losses_of(num_ranks, **(right | changed))[:STEPS]):
            return sentence
    step = next(k for k in range(STEPS) if not agree(losses[k : k + 1], wanted[k : k + 1]))
    case = f"step {step} has the loss {losses[step]:.6f}, and one process has {wanted[step]:.6f}"
    if step == 0:
        return f"{case}: before the first update, so the forward or the printed number is different"
    clip = f", after the gradients of all ranks were clipped to {LARGEST}" if clipped else ""
    return (
        f"{case}: step {step - 1} is right, so the update after it or the batch of step {step} is "
        f"different; on every rank the update is plain SGD with a learning rate of {RATE}{clip}"
    )


def agree(found, wanted):
    return all(abs(a - b) <= LIMIT * max(1, abs(b)) for a, b in zip(found, wanted))


@cache
@as_on_a_rank()
def losses_of(
    num_ranks=4,
    zeroed=True,
    rate=RATE,
    first=0,
    always=None,
    shown="mean",
    clip=None,
    steps=STEPS,
    still=None,
    held_out=None,
):
    """The losses of `steps` steps in one process, and then that of `held_out` or the next batch.

    The weights of the stage with the number `still` never change.
    """
    from small.pipeline import batch, build_stage, loss_of  # torch comes with it

    model, printed = build_stage(0, 1), []
    stages = stages_of(model, num_ranks)
    for step in range(steps + 1):
        number = first + step if always is None else always
        number = held_out or number if step == steps else number
        parts = [x.chunk(MICROBATCHES) for x in batch(number)]
        if step == 0 or zeroed:
            model.zero_grad()
        else:  # step() also divides the gradients of earlier steps
            for weight in model.parameters():
                weight.grad /= MICROBATCHES
        losses = [loss_of(model(tokens), targets) for tokens, targets in zip(*parts)]
        mean = sum(losses) / MICROBATCHES
        mean.backward()
        chosen = {"mean": mean, "sum": sum(losses), "first": losses[0], "last": losses[-1]}
        printed.append(chosen[shown].item())
        for stage, factor in zip(stages, factors(stages, clip)):
            for weight in stage if still is None or stage is not stages[still] else []:
                weight.data -= rate * factor * weight.grad
                weight.grad *= factor
    return printed


def stages_of(model, num_ranks):
    """The weights of each rank's stage: the embedding goes with the first, the scores with the last."""
    layers = [list(part.parameters()) for part in model]
    layers = [layers[0] + layers[1], *layers[2:-2], layers[-2] + layers[-1]]
    per_rank = len(layers) // num_ranks
    return [sum(layers[rank * per_rank : (rank + 1) * per_rank], []) for rank in range(num_ranks)]


def factors(stages, clip):
    """The factor by which each rank scales its gradients; `clip` names the norm that it uses."""
    norms = [sum((weight.grad**2).sum().item() for weight in stage) ** 0.5 for stage in stages]
    whole = sum(norm**2 for norm in norms) ** 0.5
    if clip is None:
        return [1.0] * len(stages)
    if clip == "always":
        return [LARGEST / whole] * len(stages)
    lengths = {
        "whole": [whole] * len(stages),
        "stage": norms,
        "sum": [sum(norms)] * len(stages),
        "largest": [max(norms)] * len(stages),
        "square": [whole**2] * len(stages),
    }
    return [min(1.0, LARGEST / length) for length in lengths[clip]]
