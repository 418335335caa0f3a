# SPDX-License-Identifier: Apache-2.0
"""The check of lesson 01's backward in two pieces. build_steps.py has the lesson's other checks."""

from course.checks.answer import WrongAnswer, call, checked

DOES_NOT_ASK = (
    "the activation that crossed has no gradient: the second stage got a tensor that does not ask "
    "for one; call requires_grad_() on what arrived"
)
NOT_CUT = (
    "autograd found its way through the cut by itself; between two processes it cannot: detach() "
    "what is sent"
)
NO_GRADIENT = (
    "the backward of the first stage got no gradient: after the backward of the loss, hand the one "
    "of the activation back, output.backward(received.grad)"
)


@checked("both stages have the gradients of the whole model, and only one tensor crossed the cut.")
def backward_in_two_pieces(gradients_by_hand):
    """Check `gradients_by_hand(first, second, tokens, targets)`, which gives both stages gradients.

    It returns the activation that crossed the cut, as a leaf with its gradient. All gradients are
    compared with those of the whole model in float64, to 1e-12.
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
    try:
        crossed = call(gradients_by_hand, first, second, tokens, targets)
    except WrongAnswer as error:
        # If the activation has no gradient, output.backward(None) raises, with another message.
        if received and not received[-1].requires_grad:
            return DOES_NOT_ASK
        if received and not received[-1].is_leaf:
            return NOT_CUT
        if "grad can be implicitly created" in str(error):
            return NO_GRADIENT
        raise

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
        return DOES_NOT_ASK
    if missing:
        return (
            "the first stage has no gradients: hand the gradient of the activation back to it, "
            "output.backward(gradient)"
        )
    if not crossed.is_leaf:
        return NOT_CUT
    wanted = dict(whole.named_parameters())
    sources = {
        second: "a backward of the loss gives it, one only, from all that the first stage made",
        first: "the first stage must go on from the gradient that came back, not from another one",
    }
    for part, source in sources.items():
        for name, parameter in part.named_parameters():
            difference = (parameter.grad - wanted[name].grad).abs().max().item()
            if not difference <= 1e-12:
                return f"the gradient of {name} is off by {difference:.1e}: {source}"
