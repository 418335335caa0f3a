"""A vocabulary at the ends of a pipeline or spread over all ranks: one process's losses, less work."""

import functools
import re
from unittest import mock

import pytest
import torch
import vocabulary_parallel as script
from allocator import Allocator
from further import first_of
from observed import ListedActions, attach_instruments
from ranks import run_on_ranks

from course.failed_run import RunFailed
from course.launch import run
from extensions.vocabulary_parallel.fan import needs_in_fan, vocabulary_parallel
from extensions.vocabulary_parallel.fan_worker import FanWorker
from extensions.vocabulary_parallel.tied_weights import build_end_stage, build_tied_model
from extensions.vocabulary_parallel.vocabulary_stages import JoinedLoss, softmax_sums
from lab.longest_path import longest_path
from lab.simulator import Costs, simulate
from lab.story import stories_of
from pipeline.message import Message
from pipeline.model import token_loss
from pipeline.schedule import ScheduleError
from pipeline.schedules import one_f_one_b
from pipeline.training import cut_layers, microbatches_of, start_job
from pipeline.worker import Worker

SMALL = (
    "--device cpu --layers 4 --dim 16 --heads 2 --kv-heads 1 --seq-len 8 --batch-size 8 "
    "--microbatches 4 --vocabulary 301"
)


def train(flags, ranks, sizes=SMALL):
    return run(f"vocabulary_parallel.py {sizes} {flags}", ranks, warm=True, show=False, limit=60)


def arguments_of(flags, num_ranks=1):
    with (
        mock.patch("sys.argv", ["vocabulary_parallel.py", *flags.split()]),
        mock.patch.dict("os.environ", {"WORLD_SIZE": str(num_ranks), "RANK": "0"}),
    ):
        return script.read_flags()


# The losses of one process


@pytest.mark.parametrize(
    ("ranks", "flags"),
    first_of(
        [
            (4, "--tied --spread --steps 10 --optimizer adamw"),
            (4, "--spread --rehearse strict --steps 3"),
            (2, "--tied --rehearse strict --steps 3"),
            (3, "--cut 2,1,1 --steps 3"),
            (4, "--spread --steps 10"),
            (4, "--tied --steps 10 --optimizer adamw"),
            (3, "--spread --cut 1,2,1 --microbatches 1 --steps 3"),
            (1, "--spread --tied --steps 3"),
            (1, "--tied --steps 3"),
        ],
        4,
    ),
)
def test_losses_equal_one_process_to_1e_12(ranks, flags):
    output = train(f"{flags} --verify", ranks).output
    difference = re.search(r"largest difference from one process: (\S+), as promised", output)[1]
    assert float(difference) < 1e-12


def gradients(rank, flags, num_ranks):
    """{name: gradient} of this rank after one step; rows of a table under (name, first row)."""
    with mock.patch("sys.argv", ["vocabulary_parallel.py", *flags.split()]):
        arguments = script.read_flags()
    schedule = vocabulary_parallel(num_ranks, arguments.microbatches)
    job = start_job(arguments, schedule.pairs)
    cut = cut_layers(arguments, num_ranks)
    stages = script.build_spread_stages(arguments, schedule, rank, cut, job.device)
    actions = ListedActions()
    attach_instruments(job, stages.values(), actions)
    worker = FanWorker(job, schedule, stages)
    worker.run_step(*microbatches_of(arguments, job.device, 0))
    assert actions.steps == [schedule.orders[rank]]
    job.leave()
    return {
        name: weight.grad
        for stage in stages.values()
        for name, weight in stage.part.named_parameters()
    }


@pytest.mark.parametrize("tied", ["", "--tied"])
def test_every_gradient_of_the_spread_pipeline_is_that_of_one_process_to_1e_12(tied):
    found = run_on_ranks(gradients, 3, f"{SMALL} {tied}", 3)
    arguments = arguments_of(f"{SMALL} {tied}")
    model = build_tied_model(arguments)
    inputs, targets = microbatches_of(arguments, "cpu", 0)
    token_loss(model(torch.cat(inputs)), torch.cat(targets)).backward()
    for name, weight in model.named_parameters():
        parts = [of_rank[name] for of_rank in found if name in of_rank]
        assert (torch.cat(parts) - weight.grad).abs().max() <= 1e-12, name
        assert len(parts) == (3 if name.startswith(("embedding", "head")) else 1)


@pytest.mark.parametrize("forgotten", ["sum_tied_gradients"])
def test_a_forgotten_sum_of_the_tied_gradients_is_found_by_verify(forgotten):
    statuses = run_on_ranks(status_without, 2, forgotten)
    assert statuses[1] == 1


def status_without(rank, forgotten):
    flags = f"vocabulary_parallel.py {SMALL} --steps 3 --tied --verify"
    with (
        mock.patch.object(script, forgotten, lambda *_: None),
        mock.patch("sys.argv", flags.split()),
    ):
        return script.main()


@pytest.mark.parametrize(("size", "scale"), [(512, 1), (4096, 1), (4096, 50), (512, 1000)])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_the_joined_loss_and_its_gradient_are_those_of_cross_entropy(p, size, scale):
    generator = torch.Generator().manual_seed(0)
    scores = scale * torch.randn(2, 6, size, dtype=torch.float64, generator=generator)
    targets = torch.randint(size, (2, 6), generator=generator)
    expected = scores.clone().requires_grad_()
    token_loss(expected, targets).backward()
    ours, width = scores.clone().requires_grad_(), size // p
    found = [
        softmax_sums(ours[..., r * width :][..., :width], targets, r * width) for r in range(p)
    ]
    loss = JoinedLoss()(torch.stack(found)).mean()
    loss.backward()
    assert loss.item() == pytest.approx(token_loss(scores, targets).item(), rel=1e-14)
    assert (ours.grad - expected.grad).abs().max() < 1e-15


# The schedule


def costs_of(p, head):
    """Layers cost 1 and 2; S and T are `head` / p each, the loss and the embedding nothing."""
    nothing = [0] * (p + 1)
    return Costs([1] * p + [head / p] * p + nothing, [2] * p + [head / p] * p + nothing)


def test_4_ranks_and_8_microbatches_take_41_which_is_optimal_and_65_with_the_head_on_one_rank():
    spread = simulate(vocabulary_parallel(4, 8), costs_of(4, 2))
    assert spread.makespan == 41  # arXiv 2411.05288, Algorithm 1: proven for p + 2 held
    one_rank = simulate(one_f_one_b(4, 8), Costs([1, 1, 1, 3], [2, 2, 2, 4]))
    assert one_rank.makespan == 65


def held_per_rank(schedule):
    """The most micro-batches whose layers a rank holds, in its own order."""
    peaks = []
    for rank, order in enumerate(schedule.orders):
        now = peak = 0
        for stage, kind, _ in order:
            now += (stage == rank) * (1 if kind == "F" else -1)
            peak = max(peak, now)
        peaks.append(peak)
    return peaks


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 8), (3, 2), (4, 8), (4, 16), (8, 16)])
def test_algorithm_1_holds_p_plus_2_minus_rank_and_every_action_once_2411_05288(p, m):
    schedule = vocabulary_parallel(p, m)
    assert held_per_rank(schedule) == [min(m, p + 2 - rank) for rank in range(p)]
    actions = [action for order in schedule.orders for action in order]
    assert len(actions) == len(set(actions)) == m * 2 * (3 * p + 1)
    assert len(schedule.playable_order) == len(actions)
    # Each way, per micro-batch: p - 1 hops of the line, and 3 fans of p - 1 messages.
    assert len(schedule.messages) == 8 * (p - 1) * m
    places = [place for place, _ in schedule.placed_messages]
    assert places == sorted(places)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_fewer_microbatches_held_take_longer(ahead):
    took = simulate(vocabulary_parallel(4, 8, ahead), costs_of(4, 2)).makespan
    assert (took > 41) == (ahead < 2)
    assert held_per_rank(vocabulary_parallel(4, 8, ahead)) == [4 + ahead - r for r in range(4)]


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (4, 8, -1)])
def test_a_schedule_without_ranks_or_microbatches_is_rejected(sizes):
    with pytest.raises(ScheduleError):
        vocabulary_parallel(*sizes)


def test_needs_of_the_fan():
    gradients = [Message("gradient", 2 + rank, 5) for rank in range(2)]
    assert needs_in_fan((1, "B", 5), 2) == [Message("activation", 1, 5), *gradients]
    assert needs_in_fan((4, "F", 5), 2) == [Message("activation", 2 + rank, 5) for rank in range(2)]
    assert needs_in_fan((3, "B", 5), 2) == [Message("activation", 3, 5), Message("gradient", 4, 5)]
    assert needs_in_fan((0, "F", 5), 2) == [Message("activation", 5 + rank, 5) for rank in range(2)]
    assert needs_in_fan((6, "F", 5), 2) == []


def test_a_figure_of_the_fan_knows_what_its_actions_waited_for():
    schedule = vocabulary_parallel(2, 2)
    timeline = schedule.explains(simulate(schedule, costs_of(2, 2)))
    stories = dict(zip((str(event.action) for event in timeline.events), stories_of(timeline, "")))
    assert "the activation of micro-batch 0 from rank 1" in stories["2F0"][1]
    path = longest_path(timeline)
    assert path[-1].event.end - path[0].event.start == timeline.makespan


# The script


def test_a_pace_is_that_of_one_layer_and_the_head_is_paced_by_its_weights():
    arguments = arguments_of("--pace 4 8 --layers 8 --vocabulary 12288 --dim 32", 4)
    script.pace_by_work(arguments, [(0, 2), (2, 4), (4, 6), (6, 8)])
    # A layer of width 32 has 12,288 weights that multiply, so a token's row is 1/384 of a layer.
    assert arguments.pace_costs.forward == [8, 8, 8, 8 + 4 * 32]
    arguments = arguments_of("--pace 4 8 --layers 8 --vocabulary 12288 --dim 32 --spread", 4)
    script.pace_by_work(arguments, [(0, 2), (2, 4), (4, 6), (6, 8)])
    assert arguments.pace_costs.backward == [16] * 4 + [64] * 4 + [0] * 5


def test_a_vocabulary_without_room_for_all_bytes_is_rejected():
    with pytest.raises(RunFailed, match="--vocabulary 200 has no room for all bytes"):
        train("--vocabulary 200", 2)


# Memory


WIDE = (
    "--device cpu --layers 4 --dim 16 --heads 2 --kv-heads 1 --seq-len 16 --batch-size 8 "
    "--microbatches 8 --vocabulary 8192 --steps 1"
)


def peak_of_step(rank, flags):
    """The most that the allocator has had in a step on this rank, beside what was there before."""
    with mock.patch("sys.argv", ["vocabulary_parallel.py", *flags.split()]):
        arguments = script.read_flags()
    num_ranks = arguments.num_ranks
    make = vocabulary_parallel if arguments.spread else one_f_one_b
    schedule = make(num_ranks, arguments.microbatches)
    job = start_job(arguments, schedule.pairs)
    cut = cut_layers(arguments, num_ranks)
    if arguments.spread:
        stages = script.build_spread_stages(arguments, schedule, rank, cut, job.device)
    else:
        stages = {rank: build_end_stage(arguments, rank, cut, job.device)}
    for stage in stages.values():
        for weight in stage.part.parameters():
            weight.grad = torch.zeros_like(weight)
    worker = (FanWorker if arguments.spread else Worker)(job, schedule, stages)
    inputs, targets = microbatches_of(arguments, job.device, 0)
    with Allocator() as allocator:
        worker.run_step(inputs, targets)
    job.leave()
    return allocator.peak


@functools.cache
def peaks(flags):
    return run_on_ranks(peak_of_step, 4, f"{WIDE} {flags}")


def test_the_last_rank_never_has_the_scores_of_the_whole_vocabulary_when_it_is_spread():
    scores = 16 * 8192 * 8  # bytes of a micro-batch's scores: 16 tokens
    *_, last = peaks("")
    assert last > 3 * scores  # scores, their softmax, and the gradient of either
    spread = peaks("--spread")
    # A rank keeps a quarter of the exponentials, of at most 3 micro-batches between S and T.
    assert max(spread) < 0.7 * last
    assert max(spread) < 1.1 * min(spread)
