"""The update that turns gradients into new weights."""

import torch


class SGD:
    """Plain gradient descent, w <- w - learning_rate * gradient.

    It is torch.optim.SGD without options, to the last digit. The reason that it stands here is its
    start: the first optimizer of torch.optim in a process loads the compiler (torch._dynamo), about
    1.8 s of processor time on every rank, which is longer than the default training run.
    """

    def __init__(self, parameters, learning_rate):
        # Named as in torch.optim, so that a learning-rate schedule and a checkpoint treat all alike.
        self.param_groups = [{"params": list(parameters), "lr": learning_rate}]
        self.state = {}  # for ever empty: plain descent remembers nothing

    def zero_grad(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:  # frozen, or not used
                continue
            parameter.add_(parameter.grad, alpha=-self.param_groups[0]["lr"])


def build_optimizer(name, parameters, learning_rate, **options):
    """`sgd`, `momentum` (0.9) or `adamw` over `parameters`; `options` are those of AdamW."""
    if name == "sgd":
        return SGD(parameters, learning_rate)
    if name == "momentum":
        return torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=learning_rate, **options)
