"""Runs a pipeline forward only: the loss of a text that is held out, and text of its own.

The forward actions of a schedule, in their order, are a schedule, too. The stages and the worker
are those of the training; what changes is that nothing is kept for a backward, and for generation
what the last stage returns.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist

from pipeline.schedule import Schedule
from pipeline.worker import Worker


def forwards_of(schedule, microbatches=None):
    """The forwards of `schedule` as a schedule, or of some of its micro-batches."""
    wanted = range(schedule.num_microbatches) if microbatches is None else microbatches
    orders = [
        tuple(action for action in order if action.kind == "F" and action.microbatch in wanted)
        for order in schedule.orders
    ]
    return Schedule(f"{schedule.name}, forward only", tuple(orders))


@contextmanager
def nothing_kept(stages, last_result=None):
    """Around forwards without backwards; `last_result(scores, targets)` may stand for the loss."""
    before = {index: stage.loss_function for index, stage in stages.items()}
    for stage in stages.values():
        stage.loss_function = last_result or stage.loss_function
    try:
        with torch.no_grad():
            yield
    finally:
        for index, stage in stages.items():
            stage.loss_function = before[index]
            stage.held.clear()


@contextmanager
def activations_of(job, shape):
    """Around passes whose activations have another shape than the training's, on all ranks."""
    before, job.shape = job.shape, shape
    try:
        yield
    finally:
        job.shape = before


class ForwardOnly:
    """The stages of `worker`, the training's, without backwards.

    `loss_function` is what its last stage calls: a ShareOfLoss (padding.py).
    """

    def __init__(self, worker, replicas, loss_function):
        self.job, self.schedule = worker.job, worker.schedule
        self.stages, self.replicas, self.loss_function = worker.stages, replicas, loss_function

    def worker(self, microbatches=None):
        return Worker(self.job, forwards_of(self.schedule, microbatches), self.stages)

    def mean_loss(self, passes, real_tokens):
        """The mean loss of the `real_tokens` in `passes`, on the ranks of the last stage.

        A pass is (inputs, targets) as a worker's `run_step` takes them. None on other ranks.
        """
        self.loss_function.real_tokens = real_tokens
        worker = self.worker()
        with nothing_kept(self.stages):
            losses = [worker.run_step(inputs, targets) for inputs, targets in passes]
        return None if losses[0] is None else self.replicas.sum_loss(sum(losses))

    def generate(self, prompt, count, num_tokens, seed=0, temperature=0.8):
        """`prompt`, a list of tokens, continued by `count`, on every rank the same.

        Each is drawn from the model's probabilities among the first `num_tokens` tokens. The whole
        window is computed anew for each: what a stage could keep of those before (a cache of keys
        and values) is left out. All replicas do the same, with the first micro-batch of each.
        """
        _, length, dim = self.job.shape
        first_of = {min(action.microbatch for action in order) for order in self.schedule.orders}
        worker = self.worker(first_of)
        last_rank = self.schedule.rank_of(self.schedule.num_stages - 1, 0)
        generator = torch.Generator().manual_seed(seed)
        tokens = list(prompt)
        with (
            nothing_kept(self.stages, last_result=lambda scores, targets: scores),
            activations_of(self.job, (1, length, dim)),
        ):
            for _ in range(count):
                window = tokens[-length:]
                # Stages have one shape. What fills it up comes later, and nobody looks ahead.
                row = torch.tensor([window + [0] * (length - len(window))], device=self.job.device)
                worker.run_step(dict.fromkeys(first_of, row), dict.fromkeys(first_of))
                following = torch.zeros(1, dtype=torch.int64)
                if self.job.rank == last_rank:
                    scores = worker.losses[0][0, len(window) - 1, :num_tokens].double().cpu()
                    likely = (scores / temperature).softmax(-1)
                    following = torch.multinomial(likely, 1, generator=generator)
                with self.job.waiting_for_all("the next token"):
                    dist.broadcast(following, last_rank)
                tokens.append(following.item())
        return tokens
