"""What an action leaves for others, and what it needs before it can start.

These results are plain tuples (stage, kind, micro-batch): equal to the Action of schedule.py, and
ten times as fast to make. Playing a large schedule asks for a million of them.
"""


def result_of(action):
    """What others wait for. A full backward and a backward for the input both make a gradient."""
    return (action.stage, "I", action.microbatch) if action.kind == "B" else action


def needs_of(action, num_stages, replicas=1):
    """The results (in the sense of `result_of`) that must exist before `action` can start.

    `replicas` is the number of ranks that have the stage: each update adds up the gradients of as
    many consecutive micro-batches, one from each replica.
    """
    stage, kind, microbatch = action
    if kind == "F":
        return [(stage - 1, "F", microbatch)] if stage > 0 else []
    if kind == "W":
        return [(stage, "I", microbatch)]
    if kind == "U":
        return [(stage, "I", k) for k in update_group(microbatch, replicas)]
    if stage == num_stages - 1:
        return [(stage, "F", microbatch)]
    return [(stage, "F", microbatch), (stage + 1, "I", microbatch)]


def update_group(microbatch, replicas):
    """The micro-batches whose gradients go into the same update of a stage with replicas."""
    first = microbatch - microbatch % replicas
    return range(first, first + replicas)
