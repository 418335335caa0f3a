"""A schedule is data: what the generators write, the text form, and what is refused and why."""

import itertools

import pytest

from pipeline.message import Message
from pipeline.schedule import Action, Schedule, ScheduleError, message_of
from pipeline.schedules import (
    build_schedule,
    gpipe,
    naive,
    noam,
    pipedream,
    pipedream_round_robin,
    round_robin_warm_up,
)
from pipeline.schedules.legal import check_legal
from pipeline.schedules.text_form import from_csv, read_csv, to_csv

SIZES = [(1, 1), (1, 5), (2, 1), (2, 3), (4, 8), (5, 2), (8, 16)]


def rows(schedule):
    return to_csv(schedule).splitlines()


# Generators


def test_naive_of_2_ranks_and_2_microbatches_written_out():
    assert rows(naive(2, 2)) == ["0F0,0B0,0F1,0B1", "1F0,1B0,1F1,1B1"]


def test_gpipe_of_2_ranks_and_3_microbatches_written_out_gpipe_figure_2c():
    assert rows(gpipe(2, 3)) == ["0F0,0F1,0F2,0B0,0B1,0B2", "1F0,1F1,1F2,1B0,1B1,1B2"]


def test_naive_has_one_microbatch_unless_told():
    assert rows(naive(3)) == ["0F0,0B0", "1F0,1B0", "2F0,2B0"]


@pytest.mark.parametrize("num_ranks, num_microbatches", SIZES)
def test_naive_ends_each_microbatch_before_the_next_starts(num_ranks, num_microbatches):
    for rank, order in enumerate(naive(num_ranks, num_microbatches).orders):
        assert order == tuple(
            Action(rank, kind, k) for k in range(num_microbatches) for kind in "FB"
        )


@pytest.mark.parametrize("num_ranks, num_microbatches", SIZES)
def test_gpipe_runs_all_forwards_before_any_backward_gpipe_section_2_3(num_ranks, num_microbatches):
    for rank, order in enumerate(gpipe(num_ranks, num_microbatches).orders):
        assert order == tuple(
            Action(rank, kind, k) for kind in "FB" for k in range(num_microbatches)
        )


# Stages on several ranks: PipeDream's 1F1B-RR

REPLICAS = [
    replicas
    for num_stages in range(1, 5)
    for replicas in itertools.product(range(1, 5), repeat=num_stages)
]


def test_pipedream_of_2_1_1_replicas_written_out():
    assert rows(pipedream_round_robin((2, 1, 1), 5)) == [
        "0F0,0F2,0B0,0U0,0F4,0B2,0U2,0B4",
        "0F1,0F3,0B1,0U1,0B3,0U3",
        "1F0,1F1,1B0,1U0,1F2,1B1,1U1,1F3,1B2,1U2,1F4,1B3,1U3,1B4,1U4",
        "2F0,2B0,2U0,2F1,2B1,2U1,2F2,2B2,2U2,2F3,2B3,2U3,2F4,2B4,2U4",
    ]


@pytest.mark.parametrize("num_ranks, num_minibatches", SIZES)
def test_with_one_replica_of_each_stage_round_robin_is_pipedream(num_ranks, num_minibatches):
    assert pipedream_round_robin([1] * num_ranks, num_minibatches) == pipedream(
        num_ranks, num_minibatches
    )


@pytest.mark.parametrize("beyond_the_least", [0, 1, 7, 24])
def test_round_robin_of_every_replication_can_be_played_to_its_end(beyond_the_least):
    for replicas in REPLICAS:
        num_minibatches = max(replicas) + beyond_the_least
        schedule = pipedream_round_robin(replicas, num_minibatches)
        assert len(schedule.playable_order) == sum(map(len, schedule.orders))
        ranks = iter(range(sum(replicas)))
        assert schedule.ranks_of_stage == {
            stage: tuple(itertools.islice(ranks, count)) for stage, count in enumerate(replicas)
        }


def test_a_replica_never_waits_for_others_between_its_backward_and_its_update():
    # So that ranks that stop at an update until all replicas are there cannot block each other.
    for replicas in REPLICAS:
        for order in pipedream_round_robin(replicas, 2 * max(replicas) + 1).orders:
            for before, action in zip(order, order[1:]):
                assert action.kind != "U" or before == action._replace(kind="B")


def test_every_complete_group_of_minibatches_is_updated_and_no_other():
    for replicas in REPLICAS:
        num_minibatches = max(replicas) + 5
        updates = [
            (action.stage, action.microbatch)
            for order in pipedream_round_robin(replicas, num_minibatches).orders
            for action in order
            if action.kind == "U"
        ]
        assert sorted(updates) == [
            (stage, k)
            for stage, count in enumerate(replicas)
            for k in range(num_minibatches // count * count)
        ]


def test_an_update_of_replicas_needs_the_gradients_of_the_whole_group():
    schedule = pipedream_round_robin((2, 1, 1), 4)
    assert schedule.needs_of(Action(0, "U", 2)) == [("gradient", 0, 2), ("gradient", 0, 3)]
    assert schedule.needs_of(Action(0, "U", 3)) == [("gradient", 0, 2), ("gradient", 0, 3)]
    assert schedule.needs_of(Action(1, "U", 3)) == [("gradient", 1, 3)]


@pytest.mark.parametrize(
    "replicas, in_flight",
    [((1, 1, 1, 1), 4), ((2, 1, 1), 2), ((3, 1), 2), ((1, 3), 4), ((2, 2, 1), 3), ((4,), 1)],
)
def test_noam_is_the_ranks_over_the_replicas_of_the_input_stage_pipedream_section_3_2(
    replicas, in_flight
):
    assert noam(replicas) == in_flight == round_robin_warm_up(replicas, 0) + 1
    for order in pipedream_round_robin(replicas, 30).orders[: replicas[0]]:
        kinds = "".join(action.kind for action in order)
        assert kinds.index("B") == in_flight


def test_a_message_goes_to_the_replica_whose_turn_the_minibatch_is():
    schedule = pipedream_round_robin((2, 3), 6)
    ways = {(route.message, route.source, route.destination) for route in schedule.messages}
    assert ways == {
        way
        for k in range(6)
        for way in (
            (Message("activation", 0, k), k % 2, 2 + k % 3),
            (Message("gradient", 1, k), 2 + k % 3, k % 2),
        )
    }


def test_fewer_minibatches_than_replicas_are_refused():
    with pytest.raises(ScheduleError) as refused:
        pipedream_round_robin((1, 3), 2)
    assert str(refused.value) == (
        "a stage on 3 ranks needs at least 3 mini-batches, one for each, not 2"
    )


@pytest.mark.parametrize("replicas", [(), (1, 0), (2, -1)])
def test_a_stage_without_a_rank_is_refused(replicas):
    with pytest.raises(ScheduleError, match="^a schedule needs at least one rank"):
        pipedream_round_robin(replicas, 4)


# Messages


@pytest.mark.parametrize("name", ["naive", "gpipe"])
@pytest.mark.parametrize("num_ranks, num_microbatches", SIZES)
def test_a_straight_pipeline_sends_2m_times_p_minus_1_messages(name, num_ranks, num_microbatches):
    messages = build_schedule(name, num_ranks, num_microbatches).messages
    assert len(messages) == len(set(messages)) == 2 * num_microbatches * (num_ranks - 1)


def test_activations_go_one_rank_up_and_gradients_one_rank_down():
    for message, source, destination, consumer_stage in gpipe(4, 3).messages:
        step = 1 if message.what == "activation" else -1
        assert destination == source + step
        assert consumer_stage == message.stage + step


def test_messages_of_a_sender_stand_in_the_order_in_which_it_makes_them():
    schedule = from_csv("0F1,0F0,0B1,0B0\n1F1,1F0,1B1,1B0\n")
    from_rank_0 = [route.message for route in schedule.messages if route.source == 0]
    assert from_rank_0 == [Message("activation", 0, 1), Message("activation", 0, 0)]


def test_a_message_says_what_it_is():
    activation, gradient = gpipe(2, 1).messages
    assert str(activation) == "the activation of micro-batch 0 from stage 0"
    assert str(gradient) == str(Message("gradient", 1, 0))
    assert str(gradient) == "the gradient of micro-batch 0 from stage 1"


def test_stages_of_one_rank_and_weight_gradients_need_no_message():
    one_rank = from_csv("0F0,1F0,1B0,0B0\n")
    assert one_rank.messages == []
    split = from_csv("0F0,0I0,0W0\n1F0,1I0,1W0\n")
    sent = [route.message for route in split.messages]
    assert sent == [Message("activation", 0, 0), Message("gradient", 1, 0)]


def test_a_full_backward_makes_the_same_message_as_a_backward_for_the_input():
    whole, half = message_of(Action(1, "B", 2)), message_of(Action(1, "I", 2))
    assert whole == half == Message("gradient", 1, 2)
    assert str(whole) == "the gradient of micro-batch 2 from stage 1"
    assert message_of(Action(1, "W", 2)) is message_of(Action(1, "U", 2)) is None


# Text form


def test_every_kind_of_action_comes_back_from_the_text_form():
    text = "0F0,2F0,2I0,2W0,2U0,0B0,0U0\n1F0,1B0,1U0\n"
    schedule = check_legal(from_csv(text))
    assert schedule.orders[0][2] == Action(2, "I", 0)
    assert to_csv(schedule) == text


def test_a_file_is_read_and_named_after_itself(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(gpipe(3, 4)))
    assert read_csv(path) == Schedule("mine", gpipe(3, 4).orders)
    path.write_text("0B0,0X0\n")
    with pytest.raises(ScheduleError, match="'0X0' is not an action"):
        read_csv(path)
    path.write_text("0B0,0F0\n")
    with pytest.raises(ScheduleError, match="^rank 0 runs the backward"):
        check_legal(read_csv(path))


def test_spaces_and_empty_cells_are_ignored():
    text = "\n 0F0 ,, 0F1,0B0,0B1\n,1F0,1F1 ,1B0,,1B1,\n\n"
    assert from_csv(text).orders == gpipe(2, 2).orders


def test_torch_reads_the_same_cells_in_the_same_sense():
    from torch.distributed.pipelining.schedules import _Action

    names = {"F": "FORWARD", "B": "FULL_BACKWARD", "I": "BACKWARD_INPUT", "W": "BACKWARD_WEIGHT"}
    for kind, name in names.items():
        action = Action(12, kind, 34)
        theirs = _Action.from_str(str(action))
        assert (theirs.stage_index, theirs.microbatch_index) == (12, 34)
        assert theirs.computation_type.name == name
        assert str(theirs) == str(action)


@pytest.mark.parametrize("cell", ["F0", "0F", "0X0", "0f0", "0 F0", "-1F0", "0F-1", "0F0B", "0Z0"])
def test_a_cell_that_is_no_action_is_named_with_its_rank_and_step(cell):
    with pytest.raises(ScheduleError) as refused:
        from_csv(f"0F0,0B0\n1F0,,{cell},1B0\n")
    assert str(refused.value) == (
        f"rank 1, step 1: '{cell}' is not an action; "
        "write stage, kind (F, B, I, W or U) and micro-batch, as in 0F3"
    )


# What is refused, each with its whole sentence

ILLEGAL = {
    "an action of a kind that does not exist": (
        Schedule("custom", ((Action(0, "F", 0), Action(0, "X", 0)),)),
        "rank 0, step 1 (0X0): the kind is one of F, B, I, W, U",
    ),
    "a stage before the first": (
        Schedule("custom", ((Action(-1, "F", 0),),)),
        "rank 0, step 0 (-1F0): stages and micro-batches are counted from 0",
    ),
    "a micro-batch before the first": (
        Schedule("custom", ((Action(0, "F", 0), Action(0, "F", -1)),)),
        "rank 0, step 1 (0F-1): stages and micro-batches are counted from 0",
    ),
    "a stage on two ranks": (
        "0F0,0B0\n1F0,0B0,1B0",
        "rank 1, step 1 (0B0): stage 0 already belongs to rank 0",
    ),
    "a stage on two ranks that do not take turns": (
        "0F0,0F1,0B0,0U0,0B1,0U1\n0F2,0F3,0B2,0U2,0B3,0U3",
        "rank 0, step 1 (0F1): stage 0 belongs to ranks 0, 1, which take its micro-batches in "
        "turn, and this one is rank 1's",
    ),
    "one action on another rank": (
        "0F0,0B0,0U0,1F1\n1F0,1B0,1U0,1B1,1U1,0F1,0B1,0U1",
        "rank 0, step 3 (1F1): stage 1 belongs to rank 1",
    ),
    "an update by one replica alone": (
        "0F0,0B0,0U0\n0F1,0B1",
        "rank 1 never runs the update of micro-batch 1 on stage 0, which the 2 replicas of the "
        "stage make together",
    ),
    "an update of an incomplete group": (
        "0F0,0B0,0U0,0F2,0B2,0U2\n0F1,0B1,0U1",
        "rank 0 runs the update of micro-batch 2 on stage 0 at step 5, but there is no "
        "micro-batch 3 to complete the group of 2",
    ),
    "a stage on no rank": (
        "0F0,0B0\n2F0,2B0",
        "stage 1 belongs to no rank",
    ),
    "an action taken twice": (
        "0F0,0F1,0F0,0B0,0B1",
        "rank 0 runs the forward of micro-batch 0 on stage 0 twice, at steps 0 and 2",
    ),
    "a forward that is missing": (
        "0F0,0F1,0B0,0B1\n1F0,1B0,1B1",
        "rank 1 runs the backward of micro-batch 1 on stage 1 at step 2, but never the forward of "
        "micro-batch 1 on stage 1",
    ),
    "a micro-batch that leaves out a stage": (
        "0F0,0F1,0B0,0B1\n1F0,1B0",
        "rank 1 never runs the forward of micro-batch 1 on stage 1",
    ),
    "a backward that is missing": (
        "0F0,0F1,0B0,0B1\n1F0,1F1,1B1",
        "rank 1 never runs the backward of micro-batch 0 on stage 1",
    ),
    "a backward of which only the weights' part is there": (
        "0F0,0W0",
        "rank 0 never runs the backward of micro-batch 0 on stage 0",
    ),
    "a backward of which the weights' part is missing": (
        "0F0,0I0",
        "rank 0 never runs the backward for the weights of micro-batch 0 on stage 0",
    ),
    "a full backward and its input part": (
        "0F0,0B0,0I0,0W0",
        "rank 0 runs the backward of micro-batch 0 on stage 0 in full at step 1 and a part of it "
        "again at step 2 (0I0)",
    ),
    "a full backward and its weights' part": (
        "0F0,0W0,0B0",
        "rank 0 runs the backward of micro-batch 0 on stage 0 in full at step 2 and a part of it "
        "again at step 1 (0W0)",
    ),
    "a backward before its forward": (
        "0F0,0F1,0B0,0B1\n1F0,1B1,1B0,1F1",
        "rank 1 runs the backward of micro-batch 1 on stage 1 at step 1, but the forward of "
        "micro-batch 1 on stage 1 comes at step 3",
    ),
    "an input part before its forward": (
        "0I0,0F0,0W0",
        "rank 0 runs the backward for the input of micro-batch 0 on stage 0 at step 0, but the "
        "forward of micro-batch 0 on stage 0 comes at step 1",
    ),
    "a weights' part before its input part": (
        "0F0,0W0,0I0",
        "rank 0 runs the backward for the weights of micro-batch 0 on stage 0 at step 1, but the "
        "backward for the input of micro-batch 0 on stage 0 comes at step 2",
    ),
    "an update before its backward": (
        "0F0,0U0,0B0",
        "rank 0 runs the update of micro-batch 0 on stage 0 at step 1, but the backward of "
        "micro-batch 0 on stage 0 comes at step 2",
    ),
    "an update before the weights' part of its backward": (
        "0F0,0I0,0U0,0W0",
        "rank 0 runs the update of micro-batch 0 on stage 0 at step 2, but the backward for the "
        "weights of micro-batch 0 on stage 0 comes at step 3",
    ),
    "no rank": (Schedule("custom", ()), "the schedule has no actions"),
    "no action on any rank": (Schedule("custom", ((), ())), "the schedule has no actions"),
    "no action on one rank": ("0F0,0B0\n\n1F0,1B0", "rank 1 has no actions"),
    "no action on the last rank": ("0F0,0B0\n,,", "rank 1 has no actions"),
}


@pytest.mark.parametrize("what", ILLEGAL)
def test_an_illegal_schedule_gets_a_sentence_that_says_what_is_wrong(what):
    schedule, sentence = ILLEGAL[what]
    if isinstance(schedule, str):
        schedule = from_csv(schedule)
    with pytest.raises(ScheduleError) as refused:
        check_legal(schedule)
    assert str(refused.value) == sentence


# Deadlock

DEADLOCKS = {
    "two ranks in opposite orders": (
        "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1",
        "deadlock: rank 0 cannot take step 1 (0B0) before the backward of micro-batch 0 on stage "
        "1, which rank 1 still has ahead of it; rank 1 cannot take step 1 (1F1) before the forward "
        "of micro-batch 1 on stage 0, which rank 0 still has ahead of it",
    ),
    "ranks 1 and 2 block each other, rank 0 and rank 3 only wait": (
        "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F0,2F1,2B0,2B1\n3F0,3F1,3B0,3B1",
        "deadlock: rank 1 cannot take step 1 (1B0) before the backward of micro-batch 0 on stage "
        "2, which rank 2 still has ahead of it; rank 2 cannot take step 1 (2F1) before the forward "
        "of micro-batch 1 on stage 1, which rank 1 still has ahead of it",
    ),
    "a rank that waits for itself": (
        "1F0,0F0,1B0,0B0",
        "deadlock: rank 0 cannot take step 0 (1F0) before the forward of micro-batch 0 on stage "
        "0, which rank 0 still has ahead of it",
    ),
    "three ranks in a ring": (
        "0F0,3F1,0F1,3F0,3B1,3B0,0B1,0B0\n1F1,1F0,1B1,1B0\n2F1,2F0,2B1,2B0",
        "deadlock: rank 0 cannot take step 1 (3F1) before the forward of micro-batch 1 on stage "
        "2, which rank 2 still has ahead of it; rank 2 cannot take step 0 (2F1) before the forward "
        "of micro-batch 1 on stage 1, which rank 1 still has ahead of it; rank 1 cannot take step "
        "0 (1F1) before the forward of micro-batch 1 on stage 0, which rank 0 still has ahead of "
        "it",
    ),
    "replicas that wait for each other's gradients before an update": (
        "0F0,0B0,0U0,0F2,0B2,0U2\n0F1,0F3,0B3,0B1,0U1,0U3\n1F0,1B0,1F1,1F2,1B2,1B1,1F3,1B3",
        "deadlock: rank 0 cannot take step 2 (0U0) before the backward of micro-batch 1 on stage "
        "0, which rank 1 still has ahead of it; rank 1 cannot take step 2 (0B3) before the "
        "backward of micro-batch 3 on stage 1, which rank 2 still has ahead of it; rank 2 cannot "
        "take step 3 (1F2) before the forward of micro-batch 2 on stage 0, which rank 0 still has "
        "ahead of it",
    ),
    "a split backward whose input part comes too late": (
        "0F0,0I0,0F1,0I1,0W0,0W1\n1F0,1F1,1I0,1W0,1I1,1W1",
        "deadlock: rank 0 cannot take step 1 (0I0) before the backward of micro-batch 0 on stage "
        "1, which rank 1 still has ahead of it; rank 1 cannot take step 1 (1F1) before the forward "
        "of micro-batch 1 on stage 0, which rank 0 still has ahead of it",
    ),
}


@pytest.mark.parametrize("what", DEADLOCKS)
def test_a_deadlock_sentence_names_the_ranks_of_the_cycle_and_no_other(what):
    text, sentence = DEADLOCKS[what]
    with pytest.raises(ScheduleError) as refused:
        check_legal(from_csv(text))
    assert str(refused.value) == sentence


def test_a_schedule_that_lacks_an_action_is_played_up_to_there():
    with pytest.raises(ScheduleError) as refused:
        from_csv("0F0,0B0\n1F0").playable_order  # noqa: B018
    assert str(refused.value) == (
        "rank 0 cannot take step 1 (0B0) before the backward of micro-batch 0 on stage 1, which "
        "no rank takes"
    )


@pytest.mark.parametrize("name", ["naive", "gpipe"])
@pytest.mark.parametrize("num_ranks, num_microbatches", SIZES)
def test_the_playable_order_has_every_action_once_after_all_it_needs(
    name, num_ranks, num_microbatches
):
    schedule = build_schedule(name, num_ranks, num_microbatches)
    done = set()
    next_step = [0] * num_ranks
    for rank, action, needs in schedule.playable_order:
        assert action is schedule.orders[rank][next_step[rank]]
        assert needs == schedule.needs_of(action)
        assert done.issuperset(needs)
        done.add(message_of(action))
        next_step[rank] += 1
    assert next_step == [len(order) for order in schedule.orders]
