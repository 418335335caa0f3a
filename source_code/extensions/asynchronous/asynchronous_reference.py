# SPDX-License-Identifier: Apache-2.0
"""One process that follows an asynchronous pipeline's own update rule, written out.

The rule of weight stashing (PipeDream: Narayanan et al. 2019, section 3.3), with stages counted
from 1: w(t+1) = w(t) - learning_rate * gradient of f(w_1(t-n+1), w_2(t-n+2), ..., w_n(t)). This
module has no ranks, messages or stashes: it keeps every version of every stage's weights.
"""

import torch
from torch.func import functional_call

from extensions.asynchronous.weight_stash import forward_version
from pipeline.model import build_part, token_loss
from pipeline.one_process import build_model, build_optimizer
from pipeline.training import cut_layers


def train_by_rule(arguments, device="cpu"):
    """Return the loss of every mini-batch under the rule that `arguments.weights` names.

    A stage of r replicas takes the mean gradient of r consecutive mini-batches for an update.
    """
    model = build_model(arguments, device)
    parameters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    stages = [{name: parameters[name] for name in names} for names in names_of_stages(arguments)]
    optimizers = [
        build_optimizer(arguments.optimizer, stage.values(), arguments.learning_rate)
        for stage in stages
    ]
    history = [[copy_of(stage)] for stage in stages]  # history[stage][t]: after t updates
    gathered = [[] for _ in stages]  # gradients that the next update uses
    losses = []
    for step in range(arguments.steps):
        inputs, targets = arguments.text.batch(
            step, arguments.batch_size, arguments.seq_len, arguments.seed
        )
        weights = {}
        for stage, versions in enumerate(history):
            first_microbatch = step * arguments.microbatches
            version = forward_version(
                arguments.weights,
                first_microbatch,
                stage,
                arguments.replicas,
                arguments.microbatches,
            )
            for name, weight in versions[version].items():
                weights[name] = weight.clone().requires_grad_()
        loss = token_loss(functional_call(model, weights, inputs.to(device)), targets.to(device))
        if arguments.weights == "latest":
            for versions in history:
                for name, weight in versions[-1].items():
                    weights[name].data.copy_(weight)  # the backward uses the newest weights
        gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values()))))
        for stage, optimizer in enumerate(optimizers):
            gathered[stage].append(gradients)
            if len(gathered[stage]) < arguments.replicas[stage]:
                continue
            for name, parameter in stages[stage].items():
                parameter.grad = sum(each[name] for each in gathered[stage]) / len(gathered[stage])
            optimizer.step()
            history[stage].append(copy_of(stages[stage]))
            gathered[stage].clear()
        losses.append(loss.item())
    return losses


def names_of_stages(arguments):
    """The names of the parameters of each stage that are trained."""
    cut = cut_layers(arguments, len(arguments.replicas))
    parts = [build_part(arguments.config, first, last) for first, last in cut]
    return [[name for name, w in part.named_parameters() if w.requires_grad] for part in parts]


def copy_of(parameters):
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}
