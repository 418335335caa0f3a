"""Traps of lesson 08: models that the tracer cuts (section "The tracer").

Each function runs one trap; `cured` selects the form that works.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import SplitPoint, build_stage, pipe_split
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.functional import mse_loss

from broken.torch_pipelining.small_pipeline import (
    WIDTH,
    allow_slow_start,
    build_layer,
    build_model,
    compare_gradients,
    compute_reference_gradients,
    draw_batch,
    print_distance,
    run_step,
    trace_model,
    wait_for_all_ranks,
)
from extensions.torch_pipelining.library import stages_of_rank, without_messages_to_itself


class BranchingModel(nn.Module):
    """A forward that depends on the values of its input."""

    def __init__(self, cured):
        super().__init__()
        self.layers, self.cured = build_model(), cured

    def forward(self, x):
        if self.cured:
            x = torch.where(x.sum() > 0, x, -x)
        elif x.sum() > 0:
            x = -x
        return self.layers(x)


def branch_on_data(job, cured):
    """The tracer cannot follow an `if` on the values of a tensor.

    Broken: the `if`. Cured: torch.where.
    """
    split = {"layers.2": SplitPoint.BEGINNING}
    pipe = trace_model(job, BranchingModel(cured), split_spec=split)
    if job.rank == 0:
        print(f"traced in {pipe.num_stages} stages", flush=True)


def cache_in_the_output(job, cured):
    """A stage may not return a cache of keys and values.

    Broken: GPT-2 as it comes from Hugging Face. Cured: with use_cache=False.
    """
    allow_slow_start(job)
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=8, n_embd=8, n_layer=2, n_head=2,
                        bos_token_id=None, eos_token_id=None,
                        tie_word_embeddings=False, use_cache=not cured)  # fmt: skip
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    split = {"transformer.h.1": SplitPoint.BEGINNING}
    pipe = trace_model(job, GPT2LMHeadModel(config), tokens, split_spec=split)
    if job.rank == 0:
        print(f"traced in {pipe.num_stages} stages", flush=True)


class SkipConnection(nn.Module):
    """Three stages; the output of the first is added to that of the last."""

    def __init__(self, handed_on):
        super().__init__()
        self.first, self.second, self.third = build_layer(0), build_layer(1), build_layer(2)
        self.handed_on = handed_on

    def forward(self, x):
        kept = self.first(x)
        pipe_split()
        x = self.second(kept)
        if self.handed_on:
            kept = kept.clone()  # made by the middle stage, which therefore sends it
        pipe_split()
        return self.third(x) + kept


def skip_connection(job, cured):
    """A result may only be used on the stage after the one that made it.

    Broken: the last of three stages adds what the first made. Cured: the middle stage hands it on.
    """
    pipe = trace_model(job, SkipConnection(handed_on=cured))
    part = pipe.get_stage_module(job.rank)
    stage = build_stage(part, job.rank, pipe.info(), job.device)
    schedule = get_schedule_class("GPipe")(stage, 4, loss_fn=mse_loss)
    run_step(schedule, [stage], *draw_batch())
    compare_gradients(job, {job.rank: part}, compute_reference_gradients(SkipConnection(cured)))


def traced_in_a_v(job, cured):
    """A traced stage whose neighbour is on the same rank sends to its own rank.

    Broken: ZB-V over traced stages. Cured: its messages to itself are left out.
    """
    name = "ZBVZeroBubble"
    pipe = trace_model(
        job, build_model(), split_spec={str(i): SplitPoint.BEGINNING for i in (1, 2, 3)}
    )
    parts = {i: pipe.get_stage_module(i) for i in stages_of_rank(name, job.rank, 2, 2)}
    stages = [build_stage(part, i, pipe.info(), job.device) for i, part in parts.items()]
    if cured:
        stages = [without_messages_to_itself(stage) for stage in stages]
    schedule = get_schedule_class(name)(stages, 4, loss_fn=mse_loss)
    run_step(schedule, stages, *draw_batch())
    compare_gradients(job, parts, compute_reference_gradients())


def device_in_the_graph(job, cured):
    """The tracer notes a device that the model asks for.

    Broken: traced on the meta device, run on the CPU. Cured: traced on the CPU.
    """

    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = build_model()

        def forward(self, x):
            x = self.part(x)
            return x + self.part[0][0].bias.to(x.device)

    device = "cpu" if cured else "meta"
    model = Asks().to(device)
    example = torch.zeros(2, WIDTH, dtype=torch.float64, device=device)
    pipe = trace_model(job, model, example, split_spec={"part.2": SplitPoint.BEGINNING})
    part = pipe.get_stage_module(1).to_empty(device="cpu")
    part(torch.zeros(2, WIDTH, dtype=torch.float64))
    if job.rank == 0:
        print("the stage runs where it was traced", flush=True)


class TiedModel(nn.Module):
    """A model whose head has the matrix of its first layer."""

    def __init__(self):
        super().__init__()
        self.layers = build_model()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.head.weight = self.layers[0][0].weight

    def forward(self, x):
        return self.head(self.layers(x))


def tied_embeddings(job, cured):
    """A matrix on two stages has a copy on each, and each copy only its own gradient.

    Broken: the copies' gradients differ. Cured: both ranks add the two.
    """
    pipe = trace_model(job, TiedModel(), split_spec={"layers.2": SplitPoint.BEGINNING})
    part = pipe.get_stage_module(job.rank)
    stage = build_stage(part, job.rank, pipe.info(), job.device)
    schedule = get_schedule_class("GPipe")(stage, 4, loss_fn=mse_loss)
    run_step(schedule, [stage], *draw_batch())
    shared = next(p for name, p in part.named_parameters() if name in TIED_WEIGHTS)
    if cured:
        dist.all_reduce(shared.grad)
    if job.rank == 0:
        one = TiedModel()
        compute_reference_gradients(one)
        print_distance("gradient", [shared.grad], [one.head.weight.grad])
    wait_for_all_ranks(job)


TIED_WEIGHTS = ("layers.0.0.weight", "head.weight")  # the tracer may give either name

TRAPS = [
    branch_on_data,
    cache_in_the_output,
    skip_connection,
    traced_in_a_v,
    device_in_the_graph,
    tied_embeddings,
]
