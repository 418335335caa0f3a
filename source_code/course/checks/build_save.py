# SPDX-License-Identifier: Apache-2.0
"""The check of a save and a restore that survive a SIGKILL at any moment (lesson 07)."""

import tempfile
from functools import cache

from course.building.examining import examine
from course.checks.answer import checked, many
from course.checks.build_text import request_of
from course.checks.build_words import Words
from course.checks.reader_on_ranks import as_on_a_rank

PROGRAM = "course.checks.build_save_on_ranks.main"
STEPS = 12
KILLED = "was ended by SIGKILL"
HINTS = {
    "Error(s) in loading state_dict": "is this the state of the other rank, or of the optimizer?",
}
OF_FILES = {  # behind the error, which names the file
    "File exists": "has the other rank, or an earlier start, made it?",
    "No such file or directory": "is it not there yet, or has the other rank renamed or removed it?",
}
WORDS = {
    "write": "before it wrote its file",
    "half": "with its file half written",
    "rename": "before its last rename",
    "opened": "when it had just opened a file that was there, which empties it",
    "removed": "when it had just removed something",
    "end": "right after its save, while the other may still be at it",
}


def moments(share):
    """Six moments of a SIGKILL: (rank, save of that run, operation before which it comes).

    One comes after this share of the operations of a save of rank 0.
    """
    return [
        (1, 1, "half"),
        (0, 1, "rename"),
        (1, 1, "rename"),  # right after the save if it renames nothing
        (0, 1, share),
        (0, 1, "opened"),  # right after the save if it opens no such file
        (0, 1, "removed"),  # right after the save if it removes nothing
    ]


@checked(
    "killed at six moments, and the losses are those of a training run that nothing disturbed."
)
def save_and_restore(save, restore):
    """Check `save(folder, step, model, optimizer, rank, wait_for_all)` and
    `restore(folder, model, optimizer, rank)`."""
    return survives(save, restore, moments(0.45))  # rank 0 has not yet written its file


def survives(save, restore, kills):
    """The error in a training run that is killed at each of these moments in turn, or None.

    The training then runs to its end and is started once more.
    """
    request = request_of(save, restore, program=PROGRAM, hints=HINTS)
    wanted, saved, killed = undisturbed(), 0, None
    with tempfile.TemporaryDirectory() as folder:
        for following in [*kills, None, None]:
            told, failed = one_run(request, folder, following)
            case = after(killed, saved)
            if complaint := wrong_start(told, saved, case):
                return complaint
            if complaint := wrong_losses(told, wanted, case):
                return complaint
            if failed:
                more = next((f"; {hint}" for part, hint in OF_FILES.items() if part in failed), "")
                return f"{case}{failed}{more}"
            done = [[e["saved"] for e in told if "saved" in e and e["rank"] == r] for r in (0, 1)]
            saved = min(max(steps, default=saved) for steps in done)
            killed = next((event for event in told if "killed" in event), None)
    return None


def after(killed, saved):
    """The beginning of a sentence about the start after a SIGKILL, or after a whole training."""
    if killed is None:
        return f"started again after all {saved} steps, " if saved else ""
    when = WORDS.get(killed["killed"], "in the middle of a save")
    return f"rank {killed['rank']} got SIGKILL {when}; started again, "


def one_run(request, folder, kill):
    """(the ranks' reports, the error at the end or None) of one start with this folder."""
    asked = request | {"folder": folder, "steps": STEPS, "kill": kill or (-1, -1, "end")}
    observed = examine(asked, 2)
    told = [report for rank in observed.ranks for report in rank.reports]
    expected = kill and KILLED in (observed.crash or "")
    return told, None if expected else Words(observed, request).transport()


def wrong_start(told, saved, case):
    """The error in the steps at which the ranks start, as a sentence, or None."""
    starts = {event["rank"]: event["starts"] for event in told if "starts" in event}
    for rank, start in starts.items():
        if type(start) is not int:
            return (
                f"{case}restore returns {start} on rank {rank}; it returns the number of steps "
                "that are saved, 0 when there are none"
            )
        if start == 0 < saved:
            return f"{case}rank {rank} begins anew, and {many(saved, 'step')} had been saved"
        if start < saved and str(start) > str(saved):
            return (
                f"{case}rank {rank} goes back to step {start}, and {many(saved, 'step')} had been saved: "
                f"as text, {start} comes behind {saved}; compare the steps as numbers"
            )
        if start < saved:
            return (
                f"{case}rank {rank} goes back to step {start}, and {many(saved, 'step')} had been saved; "
                "what was whole has to stay until the next is whole"
            )
        if start > saved + 1:
            return f"{case}rank {rank} continues with step {start}, which nobody has reached"
    if len(set(starts.values())) > 1:
        return f"{case}rank 0 continues with step {starts[0]} and rank 1 with step {starts[1]}"


def wrong_losses(told, wanted, case):
    """The error in the losses of one start, as a sentence, or None."""
    losses = {event["step"]: event["loss"] for event in told if event.get("loss") is not None}
    for number, (step, loss) in enumerate(sorted(losses.items())):
        if abs(loss - wanted[step]) <= 1e-9:
            continue
        if abs(loss - wanted[step]) <= 1e-5:
            return (
                f"{case}the loss of step {step} is off by {abs(loss - wanted[step]):.0e}: were the "
                "saved numbers rounded to float32?"
            )
        found = (
            f"{case}step {step} has the loss {loss:.6f}, and undisturbed it is {wanted[step]:.6f}"
        )
        if number == 0:
            return f"{found}: these are not the weights of that step"
        return f"{found}: the weights were right, so something else was not restored"


@cache
@as_on_a_rank()
def undisturbed():
    """The losses of a training run in one process without interruption."""
    from small.pipeline import batch, build_stage, loss_of  # torch comes with it

    model, losses = build_stage(0, 1), []
    speed = [0] * len(list(model.parameters()))
    for step in range(STEPS):
        tokens, targets = batch(step)
        model.zero_grad()
        loss = loss_of(model(tokens), targets)
        loss.backward()
        losses.append(loss.item())
        for number, weight in enumerate(model.parameters()):
            speed[number] = 0.9 * speed[number] + weight.grad
            weight.data -= 0.2 * speed[number]
    return losses
