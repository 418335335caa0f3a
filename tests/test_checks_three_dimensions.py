"""Lesson 10b's checks answer wrong collectives on real ranks, each with the sum and its factor."""

import numpy
import pytest

from course.checks import lesson_10b as check
from course.launch import PRELOAD

PRELOAD.extend(["torch._dynamo", "torch.distributed.checkpoint"])


def right(all_reduce):
    class Enter(torch.autograd.Function):  # noqa: F821 - the ranks have it
        @staticmethod
        def forward(context, x):
            return x.view_as(x)

        @staticmethod
        def backward(context, gradient):
            return all_reduce(gradient)

    class Leave(torch.autograd.Function):  # noqa: F821
        @staticmethod
        def forward(context, x):
            return all_reduce(x)

        @staticmethod
        def backward(context, gradient):
            return gradient

    return Enter.apply, Leave.apply


def stub(all_reduce):
    class Enter(torch.autograd.Function):  # noqa: F821
        @staticmethod
        def forward(context, x): ...

        @staticmethod
        def backward(context, gradient): ...

    class Leave(torch.autograd.Function):  # noqa: F821
        @staticmethod
        def forward(context, x): ...

        @staticmethod
        def backward(context, gradient): ...

    return Enter.apply, Leave.apply


def half_done(all_reduce):
    class Enter(torch.autograd.Function):  # noqa: F821
        @staticmethod
        def forward(context, x):
            return x[..., :]

        @staticmethod
        def backward(context, gradient): ...

    return Enter.apply, Enter.apply


def a_hook_on_a_view(all_reduce):
    def enter(x):
        x = x.view_as(x)
        x.register_hook(all_reduce)
        return x

    return enter, lambda y: y + (all_reduce(y) - y).detach()


def a_hook_on_the_input(all_reduce):
    def enter(x):
        x.register_hook(all_reduce)
        return x.view_as(x)

    return enter, ends(all_reduce)[1]  # noqa: F821


def a_hook_for_leaves(all_reduce):
    def sum_gradient(leaf):
        leaf.grad = all_reduce(leaf.grad)

    def enter(x):
        x.register_post_accumulate_grad_hook(sum_gradient)
        return x

    return enter, ends(all_reduce)[1]  # noqa: F821


def sums_without_the_given_function(all_reduce):
    def sum_of(x):
        x = x.clone()
        dist.all_reduce(x)  # noqa: F821
        return x

    return ends(sum_of)  # noqa: F821


def all_gather_forward(all_reduce):
    def sum_of(x):
        parts = [torch.empty_like(x) for _ in range(2)]  # noqa: F821
        dist.all_gather(parts, x)  # noqa: F821
        return sum(parts)

    return ends(all_reduce, leave=[sum_of, same])  # noqa: F821


def summed_twice_backward(all_reduce):
    twice = lambda x: all_reduce(all_reduce(x)) / 2  # noqa: E731
    return ends(all_reduce, enter=[same, twice])  # noqa: F821


def no_sum_forward(all_reduce):
    return ends(all_reduce, leave=[same, same])  # noqa: F821


def no_sum_backward(all_reduce):
    return ends(all_reduce, enter=[same, same])  # noqa: F821


def both_ways(all_reduce):
    return ends(all_reduce, leave=[all_reduce, all_reduce])  # noqa: F821


def sum_where_all_is_whole(all_reduce):
    return ends(all_reduce, enter=[all_reduce, all_reduce])  # noqa: F821


def twice_on_the_way_back(all_reduce):
    twice = lambda x: all_reduce(all_reduce(x))  # noqa: E731
    return ends(all_reduce, enter=[same, twice])  # noqa: F821


def one_rank_sums(all_reduce):
    rank = torch.distributed.get_rank()  # noqa: F821
    return ends(all_reduce, leave=[all_reduce if rank == 0 else same, same])  # noqa: F821


def mean_on_the_way_back(all_reduce):
    return ends(all_reduce, enter=[same, lambda gradient: all_reduce(gradient) / 2])  # noqa: F821


def rounded_forward(all_reduce):
    rounded = lambda x: all_reduce(x.float().double())  # noqa: E731
    return ends(all_reduce, leave=[rounded, same])  # noqa: F821


def rounded_backward(all_reduce):
    rounded = lambda gradient: all_reduce(gradient.float().double())  # noqa: E731
    return ends(all_reduce, enter=[same, rounded])  # noqa: F821


def nothing_returned(all_reduce):
    return ends(all_reduce, enter=[lambda x: None, all_reduce])  # noqa: F821


def all_reduce_alone(all_reduce):
    return lambda x: x, all_reduce


def no_apply(all_reduce):
    return tuple(end.__self__ for end in ends(all_reduce))  # noqa: F821


def no_gradient(all_reduce):
    return ends(all_reduce, enter=[same, lambda gradient: None])  # noqa: F821


def zeros(all_reduce):
    return ends(all_reduce, leave=[lambda x: 0 * x, same])  # noqa: F821


def the_other_way_round(all_reduce):
    return ends(all_reduce)[::-1]  # noqa: F821


def of_one_shape(all_reduce):
    return ends(all_reduce, leave=[lambda x: all_reduce(x.view(6, 8)).view(2, 3, 8), same])  # noqa: F821


def not_a_pair(all_reduce):
    return all_reduce


HELPERS = """
def same(x):
    return x.view_as(x)


def ends(all_reduce, enter=None, leave=None):
    def function(there, back):
        class End(torch.autograd.Function):
            @staticmethod
            def forward(context, x, do=there):
                return do(x)

            @staticmethod
            def backward(context, gradient, do=back):
                return do(gradient)

        return End.apply

    return function(*(enter or (same, all_reduce))), function(*(leave or (all_reduce, same)))
"""


@pytest.fixture(autouse=True)
def with_helpers(monkeypatch):
    from course.checks import build_text

    plain = build_text.collect

    def with_more(function):
        (*helpers, (name, text)), imports = plain(function)
        return [*helpers, (name, text + HELPERS)], imports

    monkeypatch.setattr(build_text, "collect", with_more)


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        (right, ["Right", "one sum forward and one backward"]),
        (a_hook_on_a_view, ["Right"]),
        (sums_without_the_given_function, ["Right"]),
        (a_hook_on_the_input, ["another use, such as a residual, is summed, too", "x.view_as(x)"]),
        (a_hook_for_leaves, ["Not yet: ", "post accumulate"]),
        (stub, ["Not attempted yet"]),
        (half_done, ["Not yet: line 8 of half_done still has its ..."]),
        (all_gather_forward, ["all is right, but with 0 calls of all_reduce forward"]),
        (summed_twice_backward, ["all is right, but with 2 calls of all_reduce backward"]),
        (no_sum_forward, ["rank 0", "output", "own share", "missing in forward"]),
        (no_sum_backward, ["gradient of the layer's input", "own share", "entering"]),
        (both_ways, ["second matrix", "2 times the right one", "leaving"]),
        (zeros, ["the layer's output is zero", "forward"]),
        (sum_where_all_is_whole, ["output", "2 times the right one", "forward"]),
        (twice_on_the_way_back, ["layer's input", "2 times the right one", "entering"]),
        (
            one_rank_sums,
            ["Not yet: rank 0 waits", "all_reduce, and rank 1 has returned without it"],
        ),
        (mean_on_the_way_back, ["layer's input", "0.5 times the right one", "nothing is divided"]),
        (rounded_forward, ["the layer's output is not a multiple of the right one"]),
        (rounded_backward, ["gradient of the layer's input is not a multiple of the right one"]),
        (nothing_returned, ["what enters the layer is not a tensor", "NoneType"]),
        (no_apply, ["what enters the layer is not a tensor", "Enter.apply"]),
        (all_reduce_alone, ["no gradient leads back from what leaves the layer"]),
        (no_gradient, ["layer's input is missing", "return a tensor"]),
        (of_one_shape, ["on 3 ranks, with other sizes, line", "shape '[6, 8]' is invalid"]),
        (not_a_pair, ["return a pair"]),
        (the_other_way_round, ["output is 2 times", "the sum is at the layer's entrance"]),
    ],
)
def test_the_ends_of_a_layer_are_answered_by_what_two_ranks_computed(ends, words, capsys):
    check.layer_ends(ends)
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    for word in words:
        assert word in said


ANSWER = {
    "one node of 8": (2, 1, 4),
    "two nodes of 4": (1, 2, 4),
    "eight nodes of 1": (1, 8, 1),
}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, "Right"),
        (dict.fromkeys(ANSWER, ...), "Not attempted"),
        ({"two nodes of 4": ...}, "two nodes of 4: give three numbers"),
        ({"eight nodes of 1": (1, 1, 8)}, "1728 ms, and 396 ms can be had; the collectives of its"),
        ({"two nodes of 4": (2, 1, 4)}, "its sums of gradients cross the network"),
        ({"one node of 8": (2, 4, 1)}, "its pipelines of 4 stages have a bubble"),
        ({"one node of 8": (1, 1, 8)}, "as long as with fewer ranks"),
        ({"two nodes of 4": (1, 1, 4)}, "4 ranks, and there are 8"),
        ({"two nodes of 4": (8, 1, 1)}, "over 1 rank, and it needs 4"),
        ({"two nodes of 4": 4}, "three numbers"),
        ({"one node of 8": numpy.array((2, 1, 4)), "two nodes of 4": (1.0, 2.0, 4.0)}, "Right"),
        ({"one node of 8": (0.5, 4, 4)}, "0.5 x 4 x 4 is not made of whole numbers from 1 to 8"),
    ],
)
def test_a_mesh_is_held_against_the_fastest_for_its_machine(changed, words, capsys):
    check.chosen_meshes(ANSWER | changed)
    assert words in capsys.readouterr().out


def test_each_machine_has_a_mesh_of_its_own_and_the_next_is_3_percent_slower():
    for name, machine in check.MACHINES.items():
        best, second, *_ = sorted(check.meshes(machine).items(), key=lambda pair: pair[1])
        assert best[0] == ANSWER[name]
        assert second[1] > 1.03 * best[1]
