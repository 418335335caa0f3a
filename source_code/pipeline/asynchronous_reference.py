"""One process that follows an asynchronous pipeline's own update rule, written out.

The rule of weight stashing (PipeDream: Narayanan et al. 2019, section 3.3), with stages counted
from 1: w(t+1) = w(t) - learning_rate * gradient of f(w_1(t-n+1), w_2(t-n+2), ..., w_n(t)). Here are
no ranks, messages or stashes: a list of all versions of every stage, and the rule.
"""

import torch
from torch.func import functional_call

from pipeline.model import build_model, build_part, token_loss
from pipeline.optimizer import build_optimizer
from pipeline.weight_stash import forward_version


def train_by_rule(arguments, device="cpu"):
    """The loss of every mini-batch under the rule of `arguments.weights`."""
    model = build_model(arguments.config, arguments.seed, arguments.torch_dtype, device)
    num_stages = len(arguments.stage_layers)
    names = names_of_stages(arguments)
    parameters = dict(model.named_parameters())
    optimizer = build_optimizer(arguments.optimizer, parameters.values(), arguments.learning_rate)
    history = [copy_of(parameters)]  # history[t]: every weight after t updates
    losses = []
    for step in range(arguments.steps):
        inputs, targets = arguments.text.batch(
            step, arguments.batch_size, arguments.seq_len, arguments.seed
        )
        versions = [
            forward_version(
                arguments.weights,
                step * arguments.microbatches,
                stage,
                num_stages,
                arguments.microbatches,
            )
            for stage in range(num_stages)
        ]
        weights = {
            name: history[versions[stage]][name].clone().requires_grad_()
            for stage in range(num_stages)
            for name in names[stage]
        }
        loss = token_loss(functional_call(model, weights, inputs.to(device)), targets.to(device))
        if arguments.weights == "latest":
            for name, weight in weights.items():
                weight.data.copy_(history[step][name])  # what the backward finds in its place
        gradients = torch.autograd.grad(loss, list(weights.values()))
        for name, gradient in zip(weights, gradients):
            parameters[name].grad = gradient
        optimizer.step()
        history.append(copy_of(parameters))
        losses.append(loss.item())
    return losses


def names_of_stages(arguments):
    """The parameter names of each stage."""
    return [
        [name for name, _ in build_part(arguments.config, first, last).named_parameters()]
        for first, last in arguments.stage_layers
    ]


def copy_of(parameters):
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}
