# SPDX-License-Identifier: Apache-2.0
"""Traps of lesson 08: steps, losses and gradients (section "Steps, losses, evaluation")."""

import math
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from broken.torch_pipelining import small_pipeline as small
from extensions.torch_pipelining.library import forwards_only


def step_without_grad(job, cured):
    """step() needs gradients; under torch.no_grad() only eval() works.

    Broken: step(), then eval(). Cured: eval() alone.
    """
    schedule, stages = small.build_schedule(job, small.build_own_stages(job))
    if not cured:
        with torch.no_grad():
            small.run_step(schedule, stages, *small.draw_batch())
    small.evaluate(schedule, stages)


def eval_without_targets(job, cured):
    """If the schedule has a loss function, eval() needs targets.

    Broken: none. Cured: the targets of the batch.
    """
    schedule, stages = small.build_schedule(job, small.build_own_stages(job))
    small.evaluate(schedule, stages, with_targets=cured)


def eval_keeps_graphs(job, cured):
    """eval() runs forwards as they are, so autograd keeps what a backward would need.

    Broken: eval() alone. Cured: under torch.no_grad().
    """
    kept = []
    schedule, stages = small.build_schedule(job, small.build_own_stages(job))
    inputs, targets = small.draw_batch()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(0) or x, lambda x: x)
    with hooks, torch.no_grad() if cured else nullcontext():
        scores = schedule.eval(*([inputs] if job.rank == 0 else []), target=targets)
    if job.rank == 0:
        print(f"tensors that eval() keeps for a backward: {len(kept)}", flush=True)
    if stages[0].is_last:
        small.print_distance("output", [scores.detach()], [small.build_model()(inputs).detach()])


def step_without_targets(job, cured):
    """The last stage needs a loss function and targets.

    Broken: no targets. Cured: those of the batch.
    """
    parts = small.build_own_stages(job)
    schedule, stages = small.build_schedule(job, parts, shapes=False)
    inputs, targets = small.draw_batch()
    small.run_step(schedule, stages, inputs, targets if cured else None)
    small.compare_gradients(job, parts)


def targets_under_another_name(job, cured):
    """step() passes every argument that it does not know to the stage.

    Broken: targets=. Cured: target=.
    """
    parts = small.build_own_stages(job)
    schedule, _ = small.build_schedule(job, parts)
    inputs, targets = small.draw_batch()
    name = "target" if cured else "targets"
    schedule.step(*([inputs] if job.rank == 0 else []), **({name: targets} if job.rank else {}))
    small.compare_gradients(job, parts)


def losses_without_a_loss_function(job, cured):
    """A schedule without a loss function computes no losses.

    Broken: losses=[] and no loss function, in eval(). Cured: with the loss function.
    """
    options = {} if cured else {"loss_fn": None}
    schedule, stages = small.build_schedule(job, small.build_own_stages(job), **options)
    inputs, targets = small.draw_batch()
    losses = [] if stages[0].is_last else None
    with torch.no_grad():
        schedule.eval(*([inputs] if job.rank == 0 else []), target=targets, losses=losses)
    if losses:
        wanted = nn.functional.mse_loss(small.build_model()(inputs), targets)
        small.print_distance("output", [torch.stack(losses).mean()], [wanted.detach()])


def loss_off_the_last_rank(job, cured):
    """Only the rank of the last stage has losses.

    Broken: every rank prints the mean of its own list. Cured: the last rank sends it to all.
    """
    schedule, stages = small.build_schedule(job, small.build_own_stages(job))
    losses = small.run_step(schedule, stages, *small.draw_batch()) or []
    loss = torch.stack(losses).mean() if losses else torch.tensor(-1.0, dtype=torch.float64)
    if cured:
        dist.broadcast(loss, src=1)
    if job.rank == 0:
        print(f"loss on rank 0: {'a number' if loss > 0 else loss.item()}", flush=True)


class WithPenalty(nn.Module):
    """Adds the penalty of its output, a loss of its own, to that of the stages before it.

    With `hand_on` it returns (rows, WIDTH), and (rows, 1) with the penalty of each row so far.
    """

    def __init__(self, part, hand_on):
        super().__init__()
        self.part, self.hand_on, self.penalty = part, hand_on, 0.0

    def forward(self, x, before=0.0):
        x = self.part(x)
        own = before + x.pow(2).mean(1, keepdim=True)
        self.penalty = own.mean()
        return (x, own) if self.hand_on else x


def loss_of_a_middle_stage(job, cured):
    """A loss of an earlier stage never reaches the loss function.

    Broken: the stage keeps its penalty for itself. Cured: it is passed on with the activation.
    """
    part = small.build_own_stages(job)[job.rank]
    parts = {job.rank: WithPenalty(part, hand_on=cured)}

    def with_penalty(outputs, targets):
        if not isinstance(outputs, (tuple, list)):
            return nn.functional.mse_loss(outputs, targets) + parts[1].penalty
        return nn.functional.mse_loss(outputs[0], targets) + outputs[1].mean()

    schedule, stages = small.build_schedule(job, parts, shapes=False, loss_fn=with_penalty)
    inputs, targets = small.draw_batch()
    small.run_step(schedule, stages, inputs, targets)
    whole = small.build_model()
    first, second = WithPenalty(whole[:2], True), WithPenalty(whole[2:], True)
    x, penalty = second(*first(inputs))
    (nn.functional.mse_loss(x, targets) + penalty.mean()).backward()
    small.compare_gradients(job, parts, [parameter.grad for parameter in whole.parameters()])


class Hooked(nn.Module):
    """A stage that puts a hook on its input, and counts how often hooks run."""

    def __init__(self, part, on_a_copy):
        super().__init__()
        self.part, self.on_a_copy, self.calls = part, on_a_copy, 0

    def forward(self, x):
        x = x.view_as(x) if self.on_a_copy else x
        if x.requires_grad:
            x.register_hook(self.count)
        return self.part(x)

    def count(self, gradient):
        self.calls += 1


def hooks_pile_up(job, cured):
    """The buffers for inputs stay the same, and so do the hooks on them.

    Broken: a hook on the input in every forward. Cured: on a view of it, which is new each time.
    """
    part = small.build_own_stages(job)[job.rank]
    parts = {job.rank: Hooked(part, cured) if job.rank else part}
    schedule, stages = small.build_schedule(job, parts)
    for _ in range(3):
        if job.rank:
            parts[1].calls = 0
        small.run_step(schedule, stages, *small.draw_batch())
    if job.rank:
        print(f"hooks that ran in step 3, with 4 micro-batches: {parts[1].calls}", flush=True)


def loss_on_the_wrong_rank(job, cured):
    """In a V the last stage, and so the loss, is on rank 0.

    Broken: the targets go to rank 1. Cured: to rank 0.
    """
    parts = small.build_own_stages(job, "ZBVZeroBubble")
    schedule, _ = small.build_schedule(job, parts, "ZBVZeroBubble")
    inputs, targets = small.draw_batch()
    has_loss = job.rank == (0 if cured else job.num_ranks - 1)
    schedule.step(*([inputs] if job.rank == 0 else []), target=targets if has_loss else None)
    small.compare_gradients(job, parts)


def eval_of_a_v(job, cured):
    """eval() fails when two neighbouring stages are on one rank.

    Broken: eval() of ZB-V. Cured: eval() while its list of actions has forwards only.
    """
    parts = small.build_own_stages(job, "ZBVZeroBubble")
    schedule, stages = small.build_schedule(job, parts, "ZBVZeroBubble")
    with forwards_only(schedule) if cured else nullcontext():
        small.evaluate(schedule, stages)


def gradients_kept(job, cured):
    """A second step adds its gradients to those of the first.

    Broken: two steps without zero_grad(). Cured: zero_grad() before each.
    """
    parts = small.build_own_stages(job)
    schedule, stages = small.build_schedule(job, parts)
    for _ in range(2):
        if cured:
            parts[job.rank].zero_grad()
        small.run_step(schedule, stages, *small.draw_batch())
    small.compare_gradients(job, parts)


def accumulation(job, cured):
    """scale_grads divides all accumulated gradients in every step: the first step's twice.

    Broken: two steps for one update, with scale_grads. Cured: one division after both steps.
    """
    parts = small.build_own_stages(job)
    schedule, stages = small.build_schedule(job, parts, scale_grads=not cured)
    for seed in range(2):
        small.run_step(schedule, stages, *small.draw_batch(seed=seed))
    if cured:
        for parameter in parts[job.rank].parameters():
            parameter.grad /= 4  # once, by the number of micro-batches
    small.compare_gradients(job, parts, small.compute_reference_gradients(batches=2))


def sum_loss(job, cured):
    """scale_grads is right for a loss that is a mean over the rows.

    Broken: a sum over the rows, divided once more. Cured: scale_grads=False.
    """

    def sum_of_rows(outputs, targets):
        return (outputs - targets).pow(2).sum() / (small.BATCH * small.WIDTH)

    small.run_and_compare(job, loss_fn=sum_of_rows, scale_grads=not cured)


def clipping(job, cured):
    """clip_grad_norm_ on a rank sees the norm of that rank's stages only.

    Broken: each rank clips by its own norm. Cured: all clip by the norm of the whole model.
    """
    parts = small.build_own_stages(job)
    schedule, stages = small.build_schedule(job, parts)
    small.run_step(schedule, stages, *small.draw_batch())
    parameters = list(parts[job.rank].parameters())
    if cured:
        squares = sum(parameter.grad.pow(2).sum() for parameter in parameters)
        dist.all_reduce(squares)
        factor = min(1.0, 0.01 / (math.sqrt(squares) + 1e-6))
        for parameter in parameters:
            parameter.grad *= factor
    else:
        nn.utils.clip_grad_norm_(parameters, 0.01)
    model = small.build_model()
    small.compute_reference_gradients(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    small.compare_gradients(job, parts, [parameter.grad for parameter in model.parameters()])


def all_scores_kept(job, cured):
    """The last stage keeps the output of every micro-batch unless told otherwise.

    Broken: the default. Cured: return_outputs=False.
    """
    schedule, [stage] = small.build_schedule(job, small.build_own_stages(job))
    small.run_step(schedule, [stage], *small.draw_batch(), return_outputs=not cured)
    if stage.is_last:
        print(f"outputs kept after the step: {len(stage.output_chunks)}", flush=True)


def batch_norm(job, cured):
    """BatchNorm takes the statistics of one micro-batch.

    Broken: BatchNorm, which depends on the cut. Cured: LayerNorm, which does not.
    """

    def with_norm(index):
        norm = nn.LayerNorm(small.WIDTH) if cured else nn.BatchNorm1d(small.WIDTH)
        return nn.Sequential(small.build_layer(index), norm.double())

    part = nn.Sequential(with_norm(2 * job.rank), with_norm(2 * job.rank + 1))
    whole = nn.Sequential(*(with_norm(index) for index in range(4)))
    small.run_and_compare(job, parts={job.rank: part}, model=whole)


class Counted(nn.Module):
    """A stage that counts its forwards; `checkpointed`, it runs them again in the backward."""

    def __init__(self, part, checkpointed=False):
        super().__init__()
        self.part, self.checkpointed, self.forwards = part, checkpointed, 0

    def run(self, x):
        self.forwards += 1
        return self.part(x)

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False) if self.checkpointed else self.run(x)


def checkpointed_in_halves(job, cured):
    """A split backward recomputes in each of its halves.

    Broken: ZB-V. Cured: interleaved 1F1B. Both are right; one runs each forward three times.
    """
    name = "Interleaved1F1B" if cured else "ZBVZeroBubble"
    parts = small.build_own_stages(job, name)
    parts = {index: Counted(part, checkpointed=True) for index, part in parts.items()}
    small.run_and_compare(job, name, parts=parts)
    if 1 in parts:
        print(f"forwards of stage 1 for 4 micro-batches: {parts[1].forwards}", flush=True)


def one_forward_more(job, cured):
    """Without example tensors, the library runs one more forward to infer the shapes.

    Broken: no example tensors. Cured: input_args and output_args.
    """
    parts = {index: Counted(part) for index, part in small.build_own_stages(job).items()}
    small.run_and_compare(job, parts=parts, shapes=cured)
    if 0 in parts:
        print(f"forwards of stage 0 for 4 micro-batches: {parts[0].forwards}", flush=True)


def eval_between_passes(job, cured):
    """A change from step() to eval() drops the gradients of an FSDP module.

    Broken: two passes for one update, with eval() between them. Cured: eval() before both.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    replicas = init_device_mesh("cpu", (job.num_ranks, 1), mesh_dim_names=("stage", "replica"))
    parts = small.build_own_stages(job)
    fully_shard(parts[job.rank], mesh=replicas["replica"], reshard_after_forward=False)
    schedule, stages = small.build_schedule(job, parts, scale_grads=False)
    for seed in (None, 0, 1) if cured else (0, None, 1):
        if seed is None:
            small.evaluate(schedule, stages)
        else:
            small.run_step(schedule, stages, *small.draw_batch(seed=seed))
    gradients = {
        index: [parameter.grad.to_local() / 4 for parameter in part.parameters()]
        for index, part in parts.items()
    }
    small.compare_gathered(job, gradients, small.compute_reference_gradients(batches=2))
