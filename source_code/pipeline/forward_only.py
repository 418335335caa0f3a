"""Runs a pipeline forward only: the loss of a text that is held out, and text of its own.

The forward actions of a schedule, in their order, are a schedule, too. The stages and the worker
are those of the training; what changes is that nothing is kept for a backward, and for generation
what the last stage returns.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist

from pipeline.distributed import waiting_for_all
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
def nothing_kept(stages, recorder, last_result):
    """Around forwards without backwards; `last_result(scores, targets)` stands for the loss."""
    before = [(stage, stage.loss_function) for stage in stages.values()]
    active, recorder.meter.active = recorder.meter.active, False
    for stage, _ in before:
        stage.loss_function = last_result
    try:
        with torch.no_grad():
            yield
    finally:
        for stage, loss_function in before:
            stage.loss_function = loss_function
            stage.held.clear()
        recorder.records, recorder.free_at = [], None
        recorder.meter.active = active


def held_out_loss(worker, recorder, replicas, batches, share_of_loss):
    """The mean loss of the tokens in `batches` on the rank that has losses, None elsewhere.

    `worker` performs forwards only; a batch is (inputs, targets) as its `run_step` takes them.
    `share_of_loss(scores, targets)` are shares of the mean over all of them.
    """
    total = None
    with nothing_kept(worker.stages, recorder, share_of_loss):
        for inputs, targets in batches:
            loss = replicas.sum_loss(worker.run_step(inputs, targets))
            total = loss if total is None or loss is None else total + loss
    return total


def generate(job, schedule, stages, recorder, config, dtype, prompt, count, num_tokens, seed=0):
    """`prompt`, a list of tokens, continued by `count` tokens, on every rank the same.

    Each token is drawn from the model's probabilities at temperature 0.8, among the first
    `num_tokens`. The whole window is computed anew for each: what a stage could keep of the tokens
    before (a cache of keys and values) is left out. Replicas all do the same, with the first
    micro-batch of each.
    """
    first_of = {min(a.microbatch for a in order) for order in schedule.orders}
    forwards = forwards_of(schedule, first_of)
    worker = Worker(job, forwards, stages, (1, config.seq_len, config.dim), dtype)
    last_rank = schedule.rank_of(schedule.num_stages - 1, 0)
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    with nothing_kept(stages, recorder, lambda scores, targets: scores):
        for _ in range(count):
            window = tokens[-config.seq_len :]
            # Stages have one shape. What fills it up comes later, and nobody looks ahead.
            row = torch.tensor([window + [0] * (config.seq_len - len(window))], device=job.device)
            worker.run_step(dict.fromkeys(first_of, row), dict.fromkeys(first_of))
            following = torch.zeros(1, dtype=torch.int64)
            if job.rank == last_rank:
                scores = worker.losses[0][0, len(window) - 1, :num_tokens].float().cpu()
                following = torch.multinomial((scores / 0.8).softmax(-1), 1, generator=generator)
            with waiting_for_all(job, "the next token"):
                dist.broadcast(following, last_rank)
            tokens.append(following.item())
    return tokens
