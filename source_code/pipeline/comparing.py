"""Compares two recordings: the first action at which they differ, in the order of cause and effect."""

from typing import NamedTuple

from pipeline.recorded_run import RecordingError, tell_unanswered
from pipeline.schedule import Action, result_of
from pipeline.timeline import Event


class Difference(NamedTuple):
    """Where two recordings first differ: in `step`, at `event` of the first of them, and how.

    `event` is None where no action differs: the weights before the step, or the update after it.
    """

    step: int
    ranks: tuple
    event: Event | None
    sentence: str


def compare(one, other, tolerance=0.0):
    """The first Difference between two Recordings in the order of cause and effect, or None.

    Of the actions that differ, those count of which nothing that they build on differs, and of
    these the one that ended first. `tolerance` 0 asks for the same bits; 1e-9 lets tensors pass
    whose fingerprints are that close, as fractions of their norms: another cut or another device
    rounds differently. Times and held bytes are not compared. Raises RecordingError when the two
    have different stages, ranks or micro-batches.
    """
    _check_comparable(one, other)
    for number in range(max(len(one.steps), len(other.steps))):
        if number >= len(one.steps) or number >= len(other.steps):
            return _missing_step(number, one, other)
        found = (
            _first_weights(one, other, number, tolerance)
            or _first_action(one, other, number, tolerance)
            or _first_update(one, other, number, tolerance)
        )
        if found:
            return found
    return None


def _check_comparable(one, other):
    passages = [recording.schedule.rank_of_passage for recording in (one, other)]
    if passages[0] != passages[1]:
        raise RecordingError(
            f"{one.schedule.name} and {other.schedule.name} put other stages or micro-batches on "
            "their ranks; record two runs of the same cut"
        )


def _missing_step(number, one, other):
    shorter = one if number >= len(one.steps) else other
    name = "the first" if shorter is one else "the second"
    return Difference(number, (), None, f"{name} recording ends before step {number}")


def _apart(one, other, tolerance):
    """Whether two Fingerprints, or None, stand for different tensors."""
    if one is None or other is None:
        return False  # a rank that has a neighbour on board gets no message from it
    return one.distance(other) > tolerance if tolerance else one.digest != other.digest


def _numbers_apart(one, other, tolerance):
    if one is None or other is None:
        return one is not other
    return abs(one - other) > max(tolerance, 1e-15) * max(abs(one), abs(other))


def _first_weights(one, other, number, tolerance):
    """Weights that differ before any action of the step used them."""
    ours, theirs = one.steps[number].weights, other.steps[number].weights
    first = min((version for _, version in ours), default=0)
    for (stage, version), prints in sorted(ours.items()):
        for name, mine in prints.items():
            yours = theirs.get((stage, version), {}).get(name)
            if version == first and yours and _apart(mine, yours, tolerance):
                ranks = one.schedule.ranks_of_stage[stage]
                sentence = (
                    f"step {number} begins with another {name} on rank {ranks[0]}: {mine} here, "
                    f"{yours} in the other"
                )
                return Difference(number, ranks, None, sentence)
    return None


def _first_action(one, other, number, tolerance):
    ours, theirs = one.steps[number].by_result, other.steps[number].by_result
    differing = {
        result: sentences
        for result, entry in ours.items()
        if (sentences := _differences(entry, theirs.get(result), one, number, tolerance))
    }
    differing |= {result: ["the other took it"] for result in theirs if result not in ours}
    before = {}
    for recording in (other, one):
        for events in recording.timeline(number).by_rank:
            results = [Action(*result_of(event.action)) for event in events]
            before |= dict(zip(results[1:], results))
    roots = [
        result
        for result in differing
        if before.get(result) not in differing
        and not any(Action(*need) in differing for need in one.schedule.needs_of(result))
    ]
    if not roots:
        return None

    def when(result):
        entry = ours.get(result)
        return entry.event.end if entry else float("inf")

    root = min(roots, key=when)
    if root not in ours:
        return _never_taken(one, number, roots)
    event = ours[root].event
    sentence = f"step {number}, {event.action} on rank {event.rank}: " + "; ".join(differing[root])
    return Difference(number, (event.rank,), event, sentence)


def _differences(mine, yours, one, number, tolerance):
    """What differs between two Entries of the same action, as half-sentences."""
    if yours is None:
        return ["the other never came to it"]
    found = []
    travelled = [(e.received and e.received.what, e.sent and e.sent.what) for e in (mine, yours)]
    pairs = {
        "received": (travelled[0][0], travelled[1][0]),
        "used": (mine.used, yours.used),
        "made": (mine.made, yours.made),
        "sent": (travelled[0][1], travelled[1][1]),
    }
    for verb, (here, there) in pairs.items():
        if not _apart(here, there, tolerance):
            continue
        other_name = one.name_of(here, number)
        same = " of the same norm to six digits" if here.distance(there) < 1e-6 else ""
        words = f"{verb} {here}, and {there} in the other"
        if same:
            words += f", no further apart than {max(here.distance(there), 1e-16):.0e} of the norm"
        if verb in ("received", "used", "sent") and other_name:
            words += f"; here that is {other_name}"
        found.append(words)
    if mine.version != yours.version:
        found.append(
            f"used version {mine.version} of the weights, and {yours.version} in the other"
        )
    if _numbers_apart(mine.gradient, yours.gradient, tolerance):
        found.append(
            f"has gathered a gradient of norm {mine.gradient:.6g}, and {yours.gradient:.6g} in "
            "the other"
        )
    return found


def _never_taken(one, number, roots):
    """Some rank of the first recording stopped before the other did."""
    result = min(roots, key=lambda r: (one.schedule.rank_of(r.stage, r.microbatch), r))
    rank = one.schedule.rank_of(result.stage, result.microbatch)
    sentence = (
        f"step {number}: rank {rank} never came to {result.describe()}, and in the other it did"
    )
    if waits := tell_unanswered(one):
        sentence += ". " + ". ".join(waits)
    return Difference(number, tuple(one.unanswered) or (rank,), None, sentence)


def _first_update(one, other, number, tolerance):
    ours, theirs = one.steps[number].updated, other.steps[number].updated
    stages = [
        stage
        for stage in sorted(ours)
        if stage in theirs and _numbers_apart(ours[stage], theirs[stage], tolerance)
    ]
    if not stages:
        return None
    ranks = tuple(sorted({rank for s in stages for rank in one.schedule.ranks_of_stage[s]}))
    norms = ", ".join(
        f"{ours[stage]:.6g} on stage {stage} (in the other {theirs[stage]:.6g})" for stage in stages
    )
    sentence = (
        f"every action of step {number} is the same, and the update after it is not: it took a "
        f"gradient of norm {norms}"
    )
    return Difference(number, ranks, None, sentence)
