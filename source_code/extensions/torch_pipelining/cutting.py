# SPDX-License-Identifier: Apache-2.0
"""Cuts the course's model into stages of the library: by hand, or by torch's tracer."""

import warnings

import torch
from torch.distributed.pipelining import (
    PipelineStage,
    SplitPoint,
    pipe_split,
    pipeline,
)

from extensions.torch_pipelining.library import stages_of_rank, without_messages_to_itself
from pipeline.model import ModelPart, materialise


def build_stages(arguments, job, cut):
    """Return this rank's stages, as torch's own objects, in the order of the model."""
    indices = stages_of_rank(arguments.schedule, job.rank, job.num_ranks, arguments.chunks)
    if arguments.split == "manual":
        stages = [cut_by_hand(arguments, job, cut, index) for index in indices]
    else:
        pipe = traced(arguments, cut)
        stages = [stage_of(pipe, arguments, job, index) for index in indices]
    return [without_messages_to_itself(stage) for stage in stages]


def cut_by_hand(arguments, job, cut, index):
    """Build stage `index`: lay out the whole model without memory, then delete all other stages."""
    config, (first, last) = arguments.config, cut[index]
    with torch.device("meta"):
        part = ModelPart(config, 0, config.layers)
    for name in list(part.layers):
        if not first <= int(name) < last:
            del part.layers[name]
    if first > 0:
        part.is_first = False
        del part.embedding
    if last < config.layers:
        part.is_last = False
        del part.norm, part.head
    materialise(part, config, arguments.seed, arguments.torch_dtype, job.device)
    # Given its shapes, the library need not run a micro-batch to find them out.
    tokens = torch.empty((arguments.microbatch_size, config.seq_len), dtype=torch.int64)
    activation = torch.empty((*tokens.shape, config.dim), dtype=arguments.torch_dtype)
    scores = torch.empty((*tokens.shape, config.vocabulary), dtype=arguments.torch_dtype)
    return PipelineStage(
        part,
        index,
        len(cut),
        job.device,
        input_args=tokens if part.is_first else activation.requires_grad_(),
        output_args=scores.requires_grad_() if part.is_last else activation.requires_grad_(),
    )


class TraceablePart(ModelPart):
    """The same model in a form that torch's tracer can cut.

    A table that is cut to length once and handed to every layer would travel through every stage,
    and the library has no backward for that. If each layer reads the whole table, it becomes a
    buffer of each stage. With `starts` the cuts are marked in the code, by pipe_split().
    """

    def __init__(self, config, starts=()):
        super().__init__(config, 0, config.layers)
        self.starts = starts

    def forward(self, tokens):
        x = self.embedding(tokens)
        for name, layer in self.layers.items():
            if int(name) in self.starts:
                pipe_split()
            x = layer(x, (self.cosine, self.sine))
        return self.head(self.norm(x))


def traced(arguments, cut):
    """Trace and cut the model on the meta device: shapes and names without memory."""
    starts = [first for first, _ in cut[1:]]
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)  # torch's own
    with torch.device("meta"):
        tokens = torch.empty((arguments.microbatch_size, arguments.seq_len), dtype=torch.int64)
        part = TraceablePart(arguments.config, starts if arguments.split == "calls" else ())
    part.to(arguments.torch_dtype)  # the tracer notes the type of every message
    if arguments.split == "calls":
        return pipeline(part, mb_args=(tokens,))
    split_spec = {f"layers.{first}": SplitPoint.BEGINNING for first in starts}
    return pipeline(part, mb_args=(tokens,), split_spec=split_spec)


def stage_of(pipe, arguments, job, index):
    """Return one traced stage with memory and weights, under its parameters' original names."""
    part = pipe.get_stage_module(index)
    materialise(part, arguments.config, arguments.seed, arguments.torch_dtype, job.device)
    return pipe.build_stage(index, job.device)


def named_parameters(stages):
    """Return this rank's parameters as (name in the whole model, parameter) pairs."""
    return [pair for stage in stages for pair in stage.submod.named_parameters()]
