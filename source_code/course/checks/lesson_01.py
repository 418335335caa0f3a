"""Checks of lesson 01: the idle fraction of a naive pipeline, and a backward in two pieces."""

from course.checks.answer import WrongAnswer, call, call_for_number, checked, close, many
from lab.simulator import Costs, simulate
from pipeline.schedules import naive


@checked("one rank works at a time, so of p ranks p - 1 wait, however the batch is cut.")
def naive_idle(idle_fraction):
    """`idle_fraction(num_ranks, num_microbatches)` of naive model parallelism, as the simulator."""
    for num_ranks, num_microbatches in [(4, 1), (2, 1), (8, 1), (4, 8), (1, 3)]:
        answer = call_for_number(idle_fraction, num_ranks, num_microbatches)
        timeline = simulate(naive(num_ranks, num_microbatches), Costs(10, 20))
        right = timeline.idle_fraction
        if close(answer, right):
            continue
        case = f"{many(num_ranks, 'rank')}, {many(num_microbatches, 'micro-batch')}: you say {answer:.4g}"
        if close(answer, 1 - right):
            return f"{case}, which is the share of the time that a rank works, not that it waits"
        if num_microbatches > 1 and close(
            answer, (num_ranks - 1) / (num_microbatches + num_ranks - 1)
        ):
            return f"{case}; that would need two micro-batches under way at once, here it is one"
        if close(answer, num_ranks - 1):
            return f"{case}: idle over busy; the question is idle over all the time"
        return f"{case}, and the simulator says {right:.4g}"


@checked("both stages have the gradients of the whole model, and only one tensor crossed the cut.")
def backward_in_two_pieces(gradients_by_hand):
    """`gradients_by_hand(first, second, tokens, targets)` leaves gradients in both stages.

    It returns the activation that crossed the cut, as a leaf with its gradient. Compared with the
    whole model in float64, to 1e-12.
    """
    from pipeline.data import load_text
    from pipeline.model import ModelConfig, build_part, token_loss

    config = ModelConfig(layers=2)
    first, second = build_part(config, 0, 1), build_part(config, 1, 2)
    whole = build_part(config, 0, config.layers)
    tokens, targets = load_text().batch(0, 2, config.seq_len)
    token_loss(whole(tokens), targets).backward()
    received = []
    second.register_forward_pre_hook(lambda part, inputs: received.append(inputs[0]))
    crossed = call(gradients_by_hand, first, second, tokens, targets)

    if not received:
        raise WrongAnswer("the second stage was not called: second(received) gives its scores")
    if crossed is not received[-1]:
        raise WrongAnswer(
            "return the very tensor that the second stage was called with, neither what the first "
            "stage made nor a gradient"
        )
    missing = [
        name for part in (first, second) for name, p in part.named_parameters() if p.grad is None
    ]
    if any(name.startswith(("layers.1", "norm", "head")) for name in missing):
        return "the second stage has no gradients: run the backward of the loss"
    if not crossed.requires_grad:
        return (
            "the activation that crossed has no gradient: the second stage got a tensor that does "
            "not ask for one; call requires_grad_() on what arrived"
        )
    if missing:
        return (
            "the first stage has no gradients: hand the gradient of the activation back to it, "
            "output.backward(gradient)"
        )
    if not crossed.is_leaf:
        return (
            "the gradients are there, but autograd found its way through the cut by itself; "
            "between two processes it cannot: detach() what is sent"
        )
    wanted = dict(whole.named_parameters())
    for part in (first, second):
        for name, parameter in part.named_parameters():
            difference = (parameter.grad - wanted[name].grad).abs().max().item()
            if not difference <= 1e-12:
                return (
                    f"the gradient of {name} is off by {difference:.1e}: the first stage must "
                    "go on from the gradient that came back, not from another one"
                )
