# SPDX-License-Identifier: Apache-2.0
"""The check of lesson 01's backward in two pieces. build_steps.py has the lesson's other checks."""

import re

from course.checks.answer import WrongAnswer, call, checked

DOES_NOT_ASK = (
    "the activation that crossed has no gradient: the second stage got a tensor that did not ask "
    "for one; call requires_grad_() on what arrived, before the second stage gets it"
)
NOT_CUT = (
    "autograd found its way through the cut by itself; between two processes it cannot: detach() "
    "what is sent"
)
NONE_OF_THE_FIRST = (
    "the first stage has no gradients: hand the gradient of the activation back to the very tensor "
    "that first(tokens) returned, output.backward(gradient); what detach() or no_grad() makes leads "
    "to no weights, and detach_() cuts the output itself"
)
NO_GRADIENT = (
    "the backward of the first stage got no gradient: after the backward of the loss, hand the one "
    "of the activation back, output.backward(received.grad)"
)


@checked("both stages have the gradients of the whole model, and no graph crossed the cut.")
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
    received = watch(second)
    try:
        crossed = call(gradients_by_hand, first, second, tokens, targets)
    except WrongAnswer as error:
        # If the activation has no gradient, output.backward(None) raises, with another message.
        if not re.search("raised (NameError|UnboundLocalError)", str(error)):
            if received and not any(asked for _, asked in received):
                return DOES_NOT_ASK
            if was_not_cut(received):
                return NOT_CUT
        if "log_softmax" in str(error):
            return f"{error}; the scores come first, as in token_loss(scores, targets)"
        if "grad can be implicitly created" in str(error):
            return NO_GRADIENT
        raise
    complaint = complaint_of_cut(received, crossed) or complaint_of_missing(first, second, crossed)
    if complaint:
        return complaint

    wanted = dict(whole.named_parameters())
    sources = {
        second: "a backward of token_loss(scores, targets) gives it, one only, from all that the first "
        "stage made",
        first: "the first stage must go on from the gradient that came back, once, and not from "
        "another one",
    }
    for part, source in sources.items():
        for name, parameter in part.named_parameters():
            difference = (parameter.grad - wanted[name].grad).abs().max().item()
            if not difference <= 1e-12:
                if difference < 1e-6:
                    source = "was a tensor rounded to float32 on its way?"
                return f"the gradient of {name} is off by {difference:.1e}: {source}"


def watch(stage):
    """A list that gets (tensor, whether it asks for a gradient) in each forward of `stage`.

    Its first layer gets the very tensor, however the reader calls the stage.
    """
    import torch

    received = []

    def look(layer, arguments):
        (tensor, *_) = arguments
        if tensor.is_floating_point() and torch.is_grad_enabled():  # none crosses under no_grad
            received.append((tensor, tensor.requires_grad))
            if tensor.requires_grad:
                tensor.retain_grad()  # shows whether a backward goes on into the first stage

    next(iter(stage.layers.values())).register_forward_pre_hook(look)
    return received


def complaint_of_cut(received, crossed):
    """The sentence on an input of the second stage that is not the tensor `crossed`; or None."""
    if not received:
        return "the second stage was not called: second(received) gives its scores"
    asks = [asked for tensor, asked in received if tensor is crossed]
    if not asks:
        return (
            "return the very tensor that the second stage was called with, neither what the first "
            "stage made nor a gradient"
        )
    if not any(asks):
        return DOES_NOT_ASK
    if was_not_cut(received):
        return NOT_CUT


def was_not_cut(received):
    """Whether a backward went on from the second stage into what the first stage made."""
    return any(not tensor.is_leaf and tensor.grad is not None for tensor, _ in received)


def complaint_of_missing(first, second, crossed):
    """The sentence about the stage that has no gradients, or None."""
    lacking = [
        any(parameter.grad is None for parameter in part.parameters()) for part in (first, second)
    ]
    if lacking[1] and crossed.grad is not None:
        return "the second stage has no gradients at the end: has zero_grad() removed them?"
    if lacking[1]:
        return "the second stage has no gradients: run the backward of the loss"
    if lacking[0]:
        return NONE_OF_THE_FIRST
