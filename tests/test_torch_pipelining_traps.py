"""Each message of the page of errors is what its trap prints, and each cure works.

The page is docs/torch-distributed-pipelining-errors.md, the traps are the functions of
source_code/broken/torch_pipelining/, one file per section.
"""

import re
import time
from pathlib import Path

import broken_torch_pipelining
import pytest
import torch
from ranks import PRELOAD

from course.failed_run import RunFailed
from course.launch import run
from extensions.torch_pipelining.hugging_face import LATE_IMPORTS

pytestmark = pytest.mark.further  # many runs of one library

PRELOAD.extend(["torch.distributed.pipelining", "extensions.torch_pipelining.library"])
PRELOAD.extend(LATE_IMPORTS)
PAGE = Path(__file__).resolve().parents[1] / "docs/torch-distributed-pipelining-errors.md"
ENTRIES = re.split(r"^### ", PAGE.read_text(), flags=re.M)[1:]
NOT_REPRODUCED = [entry for entry in ENTRIES if "GPU only, not reproduced." in entry]
BY_TRAP = {
    re.search(r"Trap: `([a-z0-9-]+)`\.", entry)[1]: entry
    for entry in ENTRIES
    if entry not in NOT_REPRODUCED
}
HANGS = (
    "wrong-placement",
    "microbatches-differ",
    "step-on-one-rank",
    "input-example-without-gradient",
)
OLDEST, NEWEST = (2, 11), (2, 15)  # of the versions of torch with which the traps were run
SINCE_2_15 = {  # what a trap says where its entry has ended, and whether it fails
    "wrong-placement": ("KeyError: ", True),
    "stages-in-blocks": ("KeyError: ", True),
    "traced-in-a-v": ("gradient: right, ", False),
    "hooks-pile-up": ("hooks that ran in step 3, with 4 micro-batches: 4", False),
}
SAYS_SINCE_2_15 = {  # what an entry's trap says there instead, as the entry tells
    "examples-without-gradient": "A GradientEdge root requires a gradient but got",
}
BEFORE_2_13 = {  # what a trap says where an older torch says something else
    "stages-in-blocks": "Pair is not connected",
}
RIGHT = {  # what the cured form prints, where it is not a gradient or an output that is right
    "listed-order-of-1f1b": "the list is complete",
    "all-scores-kept": "outputs kept after the step: 0",
    "branch-on-data": "traced in 2 stages",
    "cache-in-the-output": "traced in 2 stages",
    "stale-buffers": "loss is a number: True",
    "moved-from-meta": "the module is on cpu",
    "one-seed-a-stage": "both stages start with equal weights: False",
    "part-of-a-checkpoint": "the whole model is loaded",
    "token-out-of-range": "the embedding has that row",
    "list-in-place-of-a-stage": "the schedule is built",
    "no-target-in-a-microbatch": "loss is a number: True",
    "eval-keeps-graphs": "tensors that eval() keeps for a backward: 0",
    "loss-off-the-last-rank": "loss on rank 0: a number",
    "hooks-pile-up": "hooks that ran in step 3, with 4 micro-batches: 4",
    "device-in-the-graph": "the stage runs where it was traced",
}


def said(trap, flags=""):
    """What a trap prints, or what its ranks said when they failed, and whether they did."""
    ranks = broken_torch_pipelining.RANKS.get(trap, 2)
    wait = 2 if trap in HANGS and not flags else 8  # a busy machine may take long
    command = f"broken_torch_pipelining.py --trap {trap} {flags} --timeout {wait}"
    try:
        return run(command, ranks, warm=True, show=False, limit=60).output, False
    except RunFailed as failure:
        return str(failure), True


def test_on_the_pinned_torch_every_trap_is_run():
    assert torch.__version__ < (2, 13) or sorted(named_for_this_torch()) == sorted(BY_TRAP)


def test_the_page_and_the_script_have_the_same_traps_and_at_least_20():
    assert sorted(BY_TRAP) == sorted(broken_torch_pipelining.TRAPS)
    assert len(BY_TRAP) == len(ENTRIES) - len(NOT_REPRODUCED) >= 20
    for entry in ENTRIES:
        assert "**Cause.**" in entry and "**Cure.**" in entry, entry


def versions_of(entry):
    """From which to which version of torch a trap exists, as two pairs of numbers."""
    first, last = re.search(r"Trap: `[a-z0-9-]+`\. In torch (\S+) to (\S+)\.", entry).groups()
    return [tuple(map(int, version.split("."))) for version in (first, last)]


def test_each_entry_says_from_which_to_which_version_of_torch_it_exists():
    ends = {trap: versions_of(entry) for trap, entry in BY_TRAP.items()}
    assert {trap for trap, (_, last) in ends.items() if last == (2, 14)} == set(SINCE_2_15)
    assert all(
        first >= OLDEST and last in (NEWEST, (2, 14), (2, 13)) for first, last in ends.values()
    )


def test_what_needs_a_gpu_stands_apart_and_is_marked():
    last = PAGE.read_text().split("## Only with GPUs")[1]
    assert len(re.findall(r"^### ", last, re.M)) == len(NOT_REPRODUCED) == 5


def named_for_this_torch():
    """The traps whose entries name this version of torch, and those that it has ended."""
    first_last = {trap: versions_of(entry) for trap, entry in BY_TRAP.items()}
    ended = [trap for trap in SINCE_2_15 if torch.__version__ >= (2, 15)]
    return ended + [
        trap
        for trap, (first, last) in first_last.items()
        if trap not in ended
        and torch.__version__ >= first
        and torch.__version__ < (last[0], last[1] + 1)
    ]


@pytest.mark.parametrize("trap", named_for_this_torch())
def test_the_message_on_the_page_is_what_the_trap_says(trap):
    heading, _, text = BY_TRAP[trap].partition("\n")
    message = re.search(r"`([^`]+)`", heading if heading.startswith("`") else text)[1]
    silent = BY_TRAP[trap].startswith(("No message", "The loss is"))
    fails = not silent
    if torch.__version__ >= (2, 15) and trap in SINCE_2_15:
        message, fails = SINCE_2_15[trap]
    if torch.__version__ >= (2, 15):
        message = SAYS_SINCE_2_15.get(trap, message)
    if torch.__version__ < (2, 13) and trap in BEFORE_2_13:
        message = BEFORE_2_13[trap]
    start = time.monotonic()
    text, failed = said(trap)
    assert message in text
    assert failed == fails
    assert trap not in HANGS or time.monotonic() - start < 30


@pytest.mark.parametrize("trap", named_for_this_torch())
def test_the_cured_form_works(trap):
    text, failed = said(trap, "--cured")
    assert not failed, text
    assert RIGHT.get(trap, ": right, ") in text
    assert "SILENTLY WRONG" not in text
