# SPDX-License-Identifier: Apache-2.0
"""Trains the whole model in one process, and compares a pipeline's losses with it."""

import torch

from pipeline.model import build_part, token_loss

LEARNING_RATES = {"sgd": 0.2, "momentum": 0.05, "adamw": 0.003}
# Largest difference from one process: absolute in the first ten steps, relative to the loss up to
# step 200. For narrow types no digits are promised, only a tolerance.
TOLERANCES = {"float64": (1e-12, 1e-9), "float32": (1e-4, 1e-3), "bfloat16": (5e-2, 5e-2)}
# The tolerances hold within these settings. Beyond them, rounding may grow from layer to layer and
# from step to step until no digit is left: a model of width 2 gets other losses if only the cut of
# the batch changes.
NARROWEST, DEEPEST, FASTEST, LONGEST_RUN = 16, 32, 3, 200


def is_promised(arguments):
    """Return whether TOLERANCES hold for the model and the learning rate of these flags."""
    a = arguments
    fastest = FASTEST * LEARNING_RATES[a.optimizer]
    return a.dim >= NARROWEST and a.layers <= DEEPEST and a.learning_rate <= fastest


def losses_agree(dtype, losses, expected, first_step=0, promised=True):
    """Print the losses beside those of one process; return whether they agree as promised."""
    if not losses:
        print("no step was left, so there is no loss to compare with one process", flush=True)
        return True
    print("step  pipeline  one process  difference")
    agree, largest = True, 0.0
    early, late = TOLERANCES[dtype]
    for step, (ours, theirs) in enumerate(zip(losses, expected[first_step:]), first_step):
        difference = abs(ours - theirs)
        print(f"{step:4}  {ours:.6f}  {theirs:11.6f}  {difference:.1e}")
        largest = max(largest, difference)
        within = difference <= (early if step < 10 else late * abs(theirs))  # false for NaN
        agree &= within or step >= LONGEST_RUN
    verdict = "as promised" if agree else "MORE THAN PROMISED"
    if not promised:
        verdict = (
            f"and nothing is promised for these flags, only from --dim {NARROWEST} on, up to {DEEPEST} "
            f"layers and {FASTEST} times the optimizer's own --learning-rate"
        )
    elif first_step >= LONGEST_RUN:
        verdict = f"and nothing is promised from step {LONGEST_RUN} on"
    print(f"largest difference from one process: {largest:.1e}, {verdict}", flush=True)
    return agree or not promised


def train_one_process(
    arguments, device="cpu", before_update=None, build=None, loss_of=None, **options
):
    """Train the whole model on whole batches; return the loss of every step in nats.

    `before_update(arguments, model, optimizer, step)` runs between backward and update.
    `build(arguments, device)` may return another model, and `loss_of(model, inputs, targets)`
    another loss. `options` are passed to AdamW.
    """
    a, loss_of = arguments, loss_of or (lambda model, *batch: token_loss(model(batch[0]), batch[1]))
    model = (build or build_model)(a, device)
    optimizer = build_optimizer(a.optimizer, model.parameters(), a.learning_rate, **options)
    losses = []
    for step in range(a.steps):
        inputs, targets = a.text.batch(step, a.batch_size, a.seq_len, a.seed)
        loss = loss_of(model, inputs.to(device), targets.to(device))
        optimizer.zero_grad()
        if loss.requires_grad:  # not if all weights are frozen
            loss.backward()
        if before_update:
            before_update(a, model, optimizer, step)
        optimizer.step()
        losses.append(loss.item())
    return losses


def build_model(arguments, device="cpu"):
    """Build the whole model in one part."""
    a = arguments
    return build_part(a.config, 0, a.layers, a.seed, a.torch_dtype, device)


def build_optimizer(name, parameters, learning_rate, **options):
    """Return `sgd`, `momentum` (0.9) or `adamw` over `parameters`; AdamW takes `options`.

    On a GPU AdamW updates many weights in one kernel, without copies of them (`fused`).
    """
    parameters = list(parameters)
    if name == "sgd" or not parameters:  # torch's optimizers need at least one
        return SGD(parameters, learning_rate)
    if name == "momentum":
        return torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9)
    fused = all(weight.is_cuda for weight in parameters) or None
    return torch.optim.AdamW(parameters, lr=learning_rate, fused=fused, **options)


class SGD:
    """torch.optim.SGD without options, bit-equal, without the 1.8 s that its import takes."""

    def __init__(self, parameters, learning_rate):
        self.param_groups = [{"params": list(parameters), "lr": learning_rate}]
        self.state = {}  # stays empty

    def zero_grad(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-self.param_groups[0]["lr"])
