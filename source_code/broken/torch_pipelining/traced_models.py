# SPDX-License-Identifier: Apache-2.0
"""Traps of lesson 08: models that the tracer cuts (section "The tracer")."""

import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipe_split, pipeline
from torch.nn.functional import mse_loss

from broken.torch_pipelining import small_pipeline as small
from extensions.torch_pipelining.library import stages_of_rank, without_messages_to_itself


class BranchingModel(nn.Module):
    """A forward that depends on the values of its input."""

    def __init__(self, cured):
        super().__init__()
        self.layers, self.cured = small.build_model(), cured

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
    pipe = small.trace_model(job, BranchingModel(cured), "layers.2")
    small.say(job, f"traced in {pipe.num_stages} stages")


def cache_in_the_output(job, cured):
    """A stage may not return a cache of keys and values.

    Broken: GPT-2 as it comes from Hugging Face. Cured: with use_cache=False.
    """
    small.allow_slow_start(job)
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=8, n_embd=8, n_layer=2, n_head=2,
                        bos_token_id=None, eos_token_id=None,
                        tie_word_embeddings=False, use_cache=not cured)  # fmt: skip
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    pipe = small.trace_model(job, GPT2LMHeadModel(config), "transformer.h.1", example=tokens)
    small.say(job, f"traced in {pipe.num_stages} stages")


class SkipConnection(nn.Module):
    """Three stages; the output of the first is added to that of the last."""

    def __init__(self, handed_on):
        super().__init__()
        self.first, self.second, self.third = small.build_model(3)
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
    """Only the stage after the one that made a result may use it.

    Broken: the last of three stages adds what the first made. Cured: the middle stage hands it on.
    """
    pipe = small.trace_model(job, SkipConnection(handed_on=cured))
    parts = {job.rank: pipe.get_stage_module(job.rank)}
    small.run_traced(job, pipe, parts)
    wanted = small.compute_reference_gradients(SkipConnection(cured))
    small.compare_gradients(job, parts, wanted)


class UsesSecondFirst(nn.Module):
    """A model of two inputs, whose first layer takes the second."""

    def __init__(self, cured):
        super().__init__()
        self.layers, self.cured = small.build_model(), cured

    def forward(self, x, z):
        if self.cured:  # use both, in the order of the arguments
            x, z = x.clone(), z.clone()
        return self.layers[2:](self.layers[:2](z) + 2 * x)


def traced_inputs_swapped(job, cured):
    """The tracer orders the inputs of a stage as the model uses them.

    Broken: the second input is used first. Cured: both are used in their order at once.
    """
    inputs, targets = small.draw_batch()
    other = inputs.flip(0)
    run_traced_on(job, UsesSecondFirst(cured), "layers.2", (inputs, other), targets)


class UsesInputAgain(nn.Module):
    """A model whose last layers use its second input."""

    def __init__(self, cured):
        super().__init__()
        self.layers, self.cured = small.build_model(), cured

    def forward(self, x, mask):
        x = self.layers[1](self.layers[0](x))
        if self.cured:
            mask = mask.clone()
        x = x + 0
        return self.layers[3](self.layers[2](x)) * mask


def traced_input_used_later(job, cured):
    """An input of the model reaches its first stage only.

    Broken: the second stage uses the mask. Cured: the first stage makes a copy, which is sent.
    """
    inputs, targets = small.draw_batch()
    mask = (inputs > 0).double()
    run_traced_on(job, UsesInputAgain(cured), "layers.2", (inputs, mask), targets)


def run_traced_on(job, model, cut, inputs, targets):
    """One step of the traced `model` on `inputs`, compared with one process."""
    small.allow_slow_start(job)
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)  # torch's own
    examples = tuple(each[:2] for each in inputs)
    pipe = pipeline(model, mb_args=examples, split_spec={cut: SplitPoint.BEGINNING})
    small.meet(job, "traced")
    stage = pipe.build_stage(job.rank, job.device)
    schedule = ScheduleGPipe(stage, 4, loss_fn=mse_loss)
    keywords = {"target": targets, "losses": []} if job.rank else {}
    nodes = pipe.get_stage_module(0).graph.nodes
    taken = inputs[: sum(node.op == "placeholder" for node in nodes)]  # by the first stage
    schedule.step(*(taken if job.rank == 0 else ()), **keywords)
    whole = type(model)(cured=True)
    mse_loss(whole(*inputs), targets).backward()
    wanted = [parameter.grad for parameter in whole.parameters()]
    small.compare_gradients(job, {job.rank: stage.submod}, wanted)


def traced_in_a_v(job, cured):
    """A traced stage whose neighbour is on the same rank sends to its own rank.

    Broken: ZB-V over traced stages. Cured: its messages to itself are left out.
    """
    name = "ZBVZeroBubble"
    pipe = small.trace_model(job, small.build_model(), "1", "2", "3")
    parts = {i: pipe.get_stage_module(i) for i in stages_of_rank(name, job.rank, 2, 2)}
    small.run_traced(job, pipe, parts, name, *([without_messages_to_itself] if cured else []))
    small.compare_gradients(job, parts)


def device_in_the_graph(job, cured):
    """The tracer makes a device that the model reads a constant of the graph.

    Broken: traced on the meta device, run on the CPU. Cured: traced on the CPU.
    """

    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = small.build_model()

        def forward(self, x):
            x = self.part(x)
            return x + self.part[0][0].bias.to(x.device)

    device = "cpu" if cured else "meta"
    model = Asks().to(device)
    example = torch.zeros(2, small.WIDTH, dtype=torch.float64, device=device)
    pipe = small.trace_model(job, model, "part.2", example=example)
    part = pipe.get_stage_module(1).to_empty(device="cpu")
    part(torch.zeros(2, small.WIDTH, dtype=torch.float64))
    small.say(job, "the stage runs where it was traced")


class TiedModel(nn.Module):
    """A model whose head has the matrix of its first layer."""

    def __init__(self):
        super().__init__()
        self.layers = small.build_model()
        self.head = nn.Linear(small.WIDTH, small.WIDTH, bias=False, dtype=torch.float64)
        self.head.weight = self.layers[0][0].weight

    def forward(self, x):
        return self.head(self.layers(x))


def tied_embeddings(job, cured):
    """A matrix on two stages has a copy on each, and each copy only its own gradient.

    Broken: the copies' gradients differ. Cured: both ranks add the two.
    """
    pipe = small.trace_model(job, TiedModel(), "layers.2")
    part = pipe.get_stage_module(job.rank)
    small.run_traced(job, pipe, {job.rank: part})
    names = ("layers.0.0.weight", "head.weight")  # the tracer may give either
    shared = next(p for name, p in part.named_parameters() if name in names)
    if cured:
        dist.all_reduce(shared.grad)
    if job.rank == 0:
        one = TiedModel()
        small.compute_reference_gradients(one)
        small.print_distance("gradient", [shared.grad], [one.head.weight.grad])
