# SPDX-License-Identifier: Apache-2.0
"""When a training run saves: every --save-every updates, after the last one, and when it has to stop."""


def save_when_due(arguments, job, training, checkpoints, stop_request):
    """Save after an update if it is time. All ranks call it.

    Returns (the signal that asks the job to stop, what is not finite); each may be None. Without
    `checkpoints` nothing is saved, and both are None.
    """
    if not checkpoints:
        return None, None
    stopped = stop_request.agreed(job)
    last = training.step == arguments.steps
    if stopped or last or training.step % arguments.save_every == 0:
        return stopped, checkpoints.save(training)
    return stopped, None
