"""A sent tensor lives until its send has completed, and no longer.

Torch keeps the tensor of a send until somebody waits for it. Here each rank counts its sends that
have begun and have not been waited for: as many tensors are in memory only because they were sent.
"""

import contextlib
import importlib
import io
import runpy
import sys
from unittest import mock

import pytest
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from further import first_of, further
from ranks import run_on_ranks

from course.launch import ROOT
from lab import attach

pytestmark = pytest.mark.processes

RANKS = 4
TINY = "--layers 8 --dim 4 --heads 1 --kv-heads 1 --seq-len 2 --device cpu --learning-rate 0.01"
SMALL = ROOT / "source_code" / "small"


class CountedSends:
    """In place of `isend`: `peak` is the most sends at once that nobody has waited for yet."""

    def __init__(self):
        self.live, self.peak, self.isend = 0, 0, c10d.isend

    def __call__(self, *arguments, **more):
        self.live += 1
        self.peak = max(self.peak, self.live)
        return CountedWork(self, self.isend(*arguments, **more))


class CountedWork:
    def __init__(self, sends, work):
        self.sends, self.work = sends, work

    def wait(self, *arguments):
        if self.work is not None:
            self.work.wait(*arguments)
            self.work = None
            self.sends.live -= 1
        return True


def peak_of(rank, call):
    """The peak of one call of a script of the course."""
    script, *flags = call.split()
    program = importlib.import_module(script)
    sends = CountedSends()
    with (
        mock.patch.object(dist, "isend", sends),
        mock.patch.object(c10d, "isend", sends),
        mock.patch.object(attach, "observe", lambda *_, **__: None),
        mock.patch.object(sys, "argv", [script, *flags]),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        assert program.main() == 0
    assert sends.live == 0, "at the end of a run nothing is on its way"
    return sends.peak


def measured(flags, counts, per_microbatch=1):
    """For each of `counts` = (micro-batches, steps), the peak of each rank.

    Each in processes of its own: a rank could join the store of the job before, which is closing.
    """
    script, _, more = flags.partition(" ")
    calls = [
        f"{script} {TINY} --microbatches {m} --batch-size {m * per_microbatch} --steps {steps} {more}"
        for m, steps in counts
    ]
    return [run_on_ranks(peak_of, RANKS, call, timeout=150) for call in calls]


COUNTS = [(8, 2), (64, 1), (256, 1)]


@pytest.mark.parametrize("flags", first_of(["one_f_one_b", "train --schedule 1f1b"], 1))
def test_in_1f1b_rank_r_has_at_most_p_minus_r_plus_2_sent_tensors_for_any_m(flags):
    # At most p - 1 - r activations have no gradient yet, after which one more is sent; and of the
    # gradients the last two may not have been taken.
    for found in measured(flags, COUNTS):
        assert all(peak <= RANKS - rank + 2 for rank, peak in enumerate(found)), found


@further
def test_in_gpipe_a_rank_has_at_most_the_m_activations_that_the_schedule_holds():
    for (m, _), found in zip(COUNTS, measured("gpipe", COUNTS)):
        assert max(found) <= m, found


@further
@pytest.mark.parametrize(
    "flags",
    ["zero_bubble --schedule zb-h1", "zero_bubble --schedule zb-h2", "interleaved_1f1b --chunks 2"],
)
def test_zero_bubble_and_interleaved_have_no_more_for_256_micro_batches_than_for_64(flags):
    eight, more, many = measured(flags, COUNTS)
    assert more == many
    # ZB-H2 holds 2p - 1 micro-batches on rank 0, interleaved 1F1B (v - 1)p + 2(p - 1) + 1 = 11.
    assert max(many) <= 11 + 2, many


@further
@pytest.mark.parametrize(
    "flags",
    [
        "activation_checkpointing --schedule 1f1b",
        "vocabulary_parallel --spread --tied",
        "tensor_parallel --replicas 1 --tensor 2 --schedule 1f1b",
        "pipeline_with_data_parallel --replicas 2 --schedule 1f1b",
    ],
)
def test_with_recomputation_a_spread_vocabulary_and_replicas_more_micro_batches_send_no_more(flags):
    more = "--dim 8 --heads 2 --kv-heads 2"
    few, many = measured(f"{flags} {more}", [(8, 1), (64, 1)], per_microbatch=2)
    # A spread vocabulary sends each activation of the ends to all other ranks.
    most = 6 * RANKS if "spread" in flags else RANKS + 2
    assert max(few) <= max(many) <= most, (few, many)


@further
def test_1f1b_has_no_more_after_200_steps_than_after_10():
    few, many = measured("one_f_one_b", [(2, 10), (2, 200)])
    assert few == many


@further
def test_in_pipedream_rank_r_has_at_most_p_minus_r_plus_2_after_200_mini_batches_as_after_10():
    few, many = measured("pipedream", [(1, 10), (1, 200)])
    assert few == many
    assert all(peak <= RANKS - rank + 2 for rank, peak in enumerate(many)), many


@further
def test_pipedream_with_replicas_and_double_buffers_has_no_more_after_200_than_after_40():
    for flags, m in (("pipedream --replicas 2-1-1", 1), ("pipedream --weights double-buffered", 4)):
        few, many = measured(flags, [(m, 40), (m, 200)])
        assert few == many, flags


def small_peaks(rank, program, flags, changed):
    sends = CountedSends()
    with (
        mock.patch.object(dist, "isend", sends),
        mock.patch.object(c10d, "isend", sends),
        mock.patch.object(sys, "argv", [program, *flags]),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        names = runpy.run_path(str(SMALL / program))
        names["main"].__globals__.update(changed)
        names["main"]()
    return sends.peak


@pytest.mark.parametrize("name", first_of(["gpipe", "1f1b", "interleaved"], 1))
def test_the_one_file_has_only_the_messages_of_one_batch_on_their_way(name):
    for m in (8, 64, 256):
        changed = {"MICROBATCHES": m, "BATCH": m}
        found = run_on_ranks(small_peaks, RANKS, "pipeline.py", [name, "--steps", "2"], changed)
        assert min(found) > 0 and max(found) <= (2 if name == "interleaved" else 1), found


def test_the_small_pipedream_has_at_most_p_minus_r_plus_3_for_any_number_of_mini_batches():
    for count in (10, 200):
        found = run_on_ranks(small_peaks, RANKS, "weight_stash.py", [], {"MINIBATCHES": count})
        assert all(peak <= RANKS - rank + 3 for rank, peak in enumerate(found)), found
