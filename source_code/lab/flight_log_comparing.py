# SPDX-License-Identifier: Apache-2.0
"""Compares two recordings and finds their first difference in the order of cause and effect."""

from typing import NamedTuple

from files.inputs import is_number
from lab.flight_log_reader import (
    RecordingError,
    describe_unanswered_waits,
    maker_of,
    recorded_as,
)
from lab.timeline import Event


class Difference(NamedTuple):
    """The first difference of two recordings: `step`, `event` of the first recording, a sentence.

    `event` is None if no action differs, only the weights before the step or the update after it.
    """

    step: int
    ranks: tuple
    event: Event | None
    sentence: str


def compare(one, other, tolerance=0.0):
    """The first Difference between two Recordings in the order of cause and effect, or None.

    An action that differs is a cause if no action that it depends on differs; of the causes, the
    one that ended first is returned. With `tolerance` 0 the bits must be equal. With 1e-9, tensors
    count as equal if their fingerprints are that close, as fractions of their norms: another cut or
    device rounds differently. Times and held bytes are not compared. Raises RecordingError if the
    two have different stages, ranks or micro-batches. In logs of programs without a schedule, the
    stages may be on different ranks, for example if one of the two ran in one process.
    """
    _check_comparable(one, other)
    if not is_number(tolerance, 0):
        raise RecordingError(f"tolerance is a number of at least 0, not {tolerance!r}")
    for number in range(max(len(one.steps), len(other.steps))):
        if number >= len(one.steps) or number >= len(other.steps):
            return _missing_step(number, one, other)
        found = (
            _first_weights(one, other, number, tolerance)
            or _first_action(one, other, number, tolerance)
            or _first_update(one, other, number, tolerance)
            or _first_end(one, other, number)
        )
        if found:
            return found
    return None


def _check_comparable(one, other):
    if not (one.steps or other.steps):
        raise RecordingError("neither run has recorded an action; record both anew")
    passages = [recording.schedule.rank_of_passage for recording in (one, other)]
    if one.seen or other.seen:  # a run that stopped early may lack some stages
        stages = [sorted({stage for stage, _ in each}) for each in passages]
        if not set(stages[0]) & set(stages[1]):
            raise RecordingError(
                f"one has stages {stages[0]} and the other {stages[1]}; give the same part of the "
                "model the same number in both programs"
            )
    elif passages[0] != passages[1]:
        raise RecordingError(
            f"{one.schedule.name} and {other.schedule.name} put other stages or micro-batches on "
            "their ranks; record two runs of the same cut"
        )
    for stage, names in _names_of_weights(one).items():
        others = _names_of_weights(other).get(stage, names)
        if names != others:
            raise RecordingError(
                f"stage {stage} has {_layers(names)} here and {_layers(others)} in the other; their "
                "messages have to differ, so compare losses or times, or record two runs with the "
                "same cut"
            )


def _names_of_weights(recording):
    """The names of each stage's weights that are in the recording."""
    if not recording.steps:
        return {}
    step = recording.steps[0]
    return {stage: set(prints) for (stage, _), prints in step.weights.items()}


def _layers(names):
    layers = {name.split(".")[1] for name in names if name.startswith("layers.")}
    if not layers:  # the model's names have no layer numbers
        return "weights " + ", ".join(sorted(names))
    return "layers " + ", ".join(sorted(layers, key=lambda layer: (len(layer), layer)))


def _missing_step(number, one, other):
    shorter = one if number >= len(one.steps) else other
    name = "the first" if shorter is one else "the second"
    return Difference(number, (), None, f"{name} recording ends before step {number}")


def _apart(one, other, tolerance):
    """Whether two Fingerprints belong to different tensors; each may be None."""
    if one is None or other is None:
        return False  # a rank that has both stages gets no message
    return one.distance(other) > tolerance if tolerance else one.digest != other.digest


def _numbers_apart(one, other, tolerance):
    if one is None or other is None:
        return one is not other
    return abs(one - other) > max(tolerance, 1e-15) * max(abs(one), abs(other))


def _first_weights(one, other, number, tolerance):
    """The Difference of weights before any action of the step has used them, or None."""
    ours, theirs = one.steps[number].weights, other.steps[number].weights
    first = min((version for _, version in ours), default=0)
    for (stage, version), prints in sorted(ours.items()):
        for name, mine in prints.items():
            yours = theirs.get((stage, version), {}).get(name)
            if version == first and yours and _apart(mine, yours, tolerance):
                ranks = _ranks_of(one, stage)
                where = f"rank {ranks[0]}" if ranks else f"stage {stage}"
                sentence = (
                    f"step {number} begins with another {name} on {where}: {mine} here, {yours} in "
                    "the other"
                )
                return Difference(number, ranks, None, sentence)
    return None


def _ranks_of(recording, stage):
    """The ranks of a stage. In a program without a schedule these are the ranks that have taken an
    action of it, in any step; there may be none, if the run ended before."""
    events = (entry.event for step in recording.steps for entry in step.entries)
    seen = tuple(sorted({event.rank for event in events if event.action.stage == stage}))
    return recording.schedule.ranks_of_stage.get(stage, seen)


def causes_among(differing, one, other, number):
    """Those of the `differing` actions that build on no other differing action."""
    taken, before = one.steps[number].by_result, {}
    for recording in (one, other):
        for earlier, result in _followed(recording.timeline(number)):
            if recording is one or earlier not in taken or result not in taken:
                before.setdefault(result, set()).add(earlier)

    def builds_on(result):
        return {*before.get(result, ()), *map(maker_of, one.schedule.needs_of(result))}

    return [result for result in differing if not builds_on(result) & set(differing)]


def _followed(timeline):
    """Pairs (earlier, later) of results: the previous action of the rank, and the previous backward
    of the stage."""
    for events in timeline.by_rank:
        results = [recorded_as(event.action) for event in events]
        yield from zip(results, results[1:])
        last = {}  # stage -> its last backward: gradients add up from one to the next
        for result in results:
            if result.kind != "F":
                if result.stage in last:
                    yield last[result.stage], result
                last[result.stage] = result


def _first_action(one, other, number, tolerance):
    ours, theirs = _in_both_kinds(one.steps[number], other.steps[number])
    ours, theirs = _without_idle_backwards(ours, theirs), _without_idle_backwards(theirs, ours)
    differing = {
        result: sentences
        for result, entry in ours.items()
        if (sentences := _differences(entry, theirs.get(result), one, number, tolerance))
    }
    differing |= {result: ["the other took it"] for result in theirs if result not in ours}
    if not differing:
        return None
    roots = causes_among(differing, one, other, number) or list(differing)

    def when(result):
        entry = ours.get(result)
        return entry.event.end if entry else float("inf")

    root = min(roots, key=when)
    if root not in ours:
        return _never_taken(one, other, number, roots)
    event = ours[root].event
    sentence = f"step {number}, {event.action} on rank {event.rank}: " + "; ".join(differing[root])
    sentence += _factor_of_all(ours, theirs, root)
    return Difference(number, (event.rank,), event, sentence)


def _factor_of_all(ours, theirs, root):
    """A hint if every micro-batch of a stage has the other's tensor times one factor, or ""."""
    alike = [r for r in ours if (r.kind, r.stage) == (root.kind, root.stage) and r in theirs]
    for verb in ("used", "made"):
        pairs = [(getattr(ours[r], verb), getattr(theirs[r], verb)) for r in alike]
        pairs = [(here, there) for here, there in pairs if here and there and there.norm]
        factors = [here.norm / there.norm for here, there in pairs]
        if len(factors) < 2 or abs(factors[0] - 1) < 1e-3:
            continue
        if all(_is_times(here, there, factors[0]) for here, there in pairs):
            return (
                f"; for every micro-batch, what stage {root.stage} {verb} is {factors[0]:.6g} times "
                "that of the other, as if one of the two did not divide its loss by the number of "
                "micro-batches"
            )
    return ""


def _is_times(here, there, factor):
    """Whether a tensor is `factor` times another, as far as their Fingerprints tell."""
    close = 1e-4 * abs(here.norm)
    norm, weighted = here.norm - factor * there.norm, here.weighted - factor * there.weighted
    return abs(norm) <= close and abs(weighted) <= close


def _in_both_kinds(one, other):
    """The entries of two steps by result; a W is left out if the other step has a full backward."""

    def whole(step, result):
        entry = step.by_result.get(result._replace(kind="I"))
        return entry is not None and entry.event.action.kind == "B"

    return (
        {r: entry for r, entry in step.by_result.items() if r.kind != "W" or not whole(against, r)}
        for step, against in ((one, other), (other, one))
    )


def _without_idle_backwards(entries, others):
    """`entries` without the backwards of frozen stages that the other recording does not have.

    Whether such a stage, which gathers no gradient, has backwards depends on the program: a
    schedule takes them, and autograd in one process does not.
    """
    stages = {result.stage for result in entries}
    idle = {
        stage
        for stage in stages
        if not any(r.stage == stage and r.kind != "F" for r in others)
        and any(r.stage == stage for r in others)
        and all(e.gradient is None for r, e in entries.items() if r.stage == stage)
    }
    return {r: e for r, e in entries.items() if r.kind == "F" or r.stage not in idle}


def _differences(mine, yours, one, number, tolerance):
    """The differences between two Entries of the same action, as a list of half-sentences."""
    if yours is None:
        return ["the other never came to it"]
    found = []
    for verb, here, there in _pairs(mine, yours):
        if _apart(here, there, tolerance):
            found.append(f"{verb} {here}, and {there} in the other{_how_far(here, there)}")
            name = one.name_of(here, number)
            if name and here != mine.made:
                found[-1] += f"; what it {verb} here is {name}"
    if mine.version != yours.version:
        found.append(
            f"used version {mine.version} of the weights, and {yours.version} in the other"
        )
    # After an I the weights' part is still to come; a B has it.
    same_kind = mine.event.action.kind == yours.event.action.kind
    if same_kind and _numbers_apart(mine.gradient, yours.gradient, tolerance):
        found.append(
            f"has gathered a gradient of norm {short_norm(mine.gradient)}, and "
            f"{short_norm(yours.gradient)} in the other"
        )
    return found


def _pairs(mine, yours):
    """The pairs of tensors to compare for an action, in the order of the data flow, each once."""
    received, sent = (
        [getattr(entry, name) and getattr(entry, name).what for entry in (mine, yours)]
        for name in ("received", "sent")
    )
    pairs = [("received", *received)]
    if [mine.used, yours.used] != received:
        pairs.append(("used", mine.used, yours.used))
    pairs.append(("made", mine.made, yours.made))
    if [mine.made, yours.made] != sent:
        pairs.append(("sent", *sent))
    return pairs


def _how_far(here, there):
    """How far two nearly equal tensors are apart, as the end of a sentence."""
    distance = here.distance(there)
    if distance > 1e-6:
        return ""
    return f" (nearly the same: they are about {max(distance, 1e-17):.0e} of their norm apart)"


def _never_taken(one, other, number, roots):
    """The Difference if a rank of the first recording stopped before an action of the other."""
    ranks, theirs = one.schedule.rank_of_passage, other.steps[number].by_result
    events = {result: theirs[result].event for result in roots}
    # A program without a schedule may have passages that are not in its longest step.
    rank, result = min(
        (ranks.get((result.stage, result.microbatch), event.rank), result)
        for result, event in events.items()
    )
    action = events[result].action
    sentence = (
        f"step {number}: rank {rank} never came to {action.describe()}, and in the other it did"
    )
    if waits := describe_unanswered_waits(one):
        sentence += ". " + ". ".join(waits)
    return Difference(number, (rank,), None, sentence)


def _first_update(one, other, number, tolerance):
    ours, theirs = one.steps[number].updated, other.steps[number].updated
    stages = [
        stage
        for stage in sorted(ours)
        if stage in theirs and _numbers_apart(ours[stage], theirs[stage], tolerance)
    ]
    if not stages:
        return None
    ranks = tuple(sorted({rank for stage in stages for rank in _ranks_of(one, stage)}))
    norms = ", ".join(
        f"{short_norm(ours[stage])} on stage {stage} (in the other {short_norm(theirs[stage])})"
        for stage in stages
    )
    sentence = (
        f"every action of step {number} is the same, and the update after it is not: it took a "
        f"gradient of norm {norms}"
    )
    return Difference(number, ranks, None, sentence)


def _first_end(one, other, number):
    """The Difference of a step that a rank has ended in one of the recordings only, or None."""
    ends = one.steps[number].ended, other.steps[number].ended
    if one.seen or other.seen or ends[0] == ends[1]:
        return None
    rank = min(ends[0] ^ ends[1])
    name = "the second" if rank in ends[0] else "the first"
    sentence = f"{name} recording ends before rank {rank} has ended step {number}"
    return Difference(number, (rank,), None, sentence)


def short_norm(norm):
    """A norm with six digits; the recording has None without a gradient, or with no finite one."""
    return "none (or not finite)" if norm is None else f"{norm:.6g}"
