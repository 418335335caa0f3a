# SPDX-License-Identifier: Apache-2.0
"""Runs a pipeline forward only, for the held-out loss and for generated text.

The forward actions of a schedule, in their order, are also a schedule. The stages and the worker
are those of the training, but nothing is kept for a backward. For generation the last stage returns
scores instead of the loss.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist

from pipeline.schedule import Schedule
from pipeline.worker import Worker


def forwards_of(schedule, microbatches=None):
    """Return the forwards of `schedule`, or of some of its micro-batches, as a Schedule."""
    wanted = range(schedule.num_microbatches) if microbatches is None else microbatches
    orders = [
        tuple(action for action in order if action.kind == "F" and action.microbatch in wanted)
        for order in schedule.orders
    ]
    return Schedule(f"{schedule.name}, forward only", tuple(orders))


@contextmanager
def nothing_kept(stages, last_result=None):
    """Return the context of forwards without backwards, in evaluation mode: dropout does nothing.

    `last_result(scores, targets)`, if given, replaces the loss function.
    """
    before = {index: stage.loss_function for index, stage in stages.items()}
    for stage in stages.values():
        stage.loss_function = last_result or stage.loss_function
        stage.part.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for index, stage in stages.items():
            stage.loss_function = before[index]
            stage.part.train()
            stage.held.clear()
            getattr(stage, "generators", {}).clear()


@contextmanager
def activations_of(job, shape):
    """Return the context of passes whose activations have another shape, on all ranks."""
    before, job.shape = job.shape, shape
    try:
        yield
    finally:
        job.shape = before


class ForwardOnly:
    """Runs the stages of the training's `worker` without backwards.

    `loss_function` is the one that the last stage calls, a ShareOfLoss (padding.py).
    """

    def __init__(self, worker, replicas, loss_function):
        self.job, self.schedule = worker.job, worker.schedule
        self.stages, self.replicas, self.loss_function = worker.stages, replicas, loss_function

    def worker(self, microbatches=None):
        return Worker(self.job, forwards_of(self.schedule, microbatches), self.stages)

    def mean_loss(self, passes, real_tokens):
        """Return the mean loss of the `real_tokens` tokens in `passes`, in nats.

        A pass is (inputs, targets) as a worker's `run_step` takes them. Returns None on ranks
        without the last stage.
        """
        self.loss_function.real_tokens = real_tokens
        worker = self.worker()
        with nothing_kept(self.stages):
            losses = [worker.run_step(inputs, targets) for inputs, targets in passes]
        return None if losses[0] is None else self.replicas.sum_loss(sum(losses))

    def generate(self, prompt, count, num_tokens, seed=0, temperature=0.8):
        """Return `prompt`, a list of tokens, continued by `count` tokens, the same on every rank.

        Each token is drawn from the model's probabilities of the first `num_tokens` tokens. The
        whole window is computed again for each token, without a cache of keys and values. All
        replicas do the same work, each with its first micro-batch.
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
                # Stages have a fixed shape. The filler comes after all tokens, so the causal
                # mask hides it.
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


def show_sample(arguments, forward_only, step):
    """Print the sample after `step` updates if --sample is given. All ranks call it."""
    if arguments.sample:
        prompt = arguments.text.held_out[: max(1, arguments.seq_len // 4)].tolist()
        tokens = forward_only.generate(
            prompt, arguments.sample, arguments.text.num_tokens, arguments.seed
        )
        if forward_only.job.rank == 0:
            begin, continuation = map(arguments.text.decode, (prompt, tokens[len(prompt) :]))
            print(f"after {step} steps  {begin!r} -> {continuation!r}", flush=True)
