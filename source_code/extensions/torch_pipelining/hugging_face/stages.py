# SPDX-License-Identifier: Apache-2.0
"""One stage of a Hugging Face model: GPT-2 traced, a Llama and a classifier cut by hand."""

import warnings

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline

from extensions.torch_pipelining.hugging_face.weights import build_layout, fill
from pipeline.collectives import gather


def build_own_stage(arguments, job, cut):
    """Build this rank's stage, as torch's own object."""
    if arguments.model == "gpt2":
        return traced_stage(arguments, job, cut)
    return stage_cut_by_hand(arguments, job, cut)


def traced_stage(arguments, job, cut):
    """Build this rank's stage of GPT-2, traced and cut before some of its blocks.

    For a moment each rank holds the whole model in memory. The tracer writes the device into its
    graph wherever the model reads it, as GPT-2 does, so the meta device cannot be used here.
    """
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)  # torch's own
    shape = arguments.microbatch_size, arguments.seq_len
    tokens = torch.zeros(shape, dtype=torch.int64, device=job.device)
    whole = build_layout(arguments).to_empty(device=job.device)
    let_attention_be_causal(whole)
    split_spec = {f"transformer.h.{first}": SplitPoint.BEGINNING for first, _ in cut[1:]}
    pipe = pipeline(whole, mb_args=(tokens,), split_spec=split_spec)
    fill(pipe.get_stage_module(job.rank), arguments, job.device)
    return pipe.build_stage(job.rank, job.device)


def let_attention_be_causal(model):
    """Let the kernel of attention leave out later positions, without a mask.

    A mask is made once and read by every block. A traced model would send it through all stages,
    and torch 2.11 has no backward for that. For a registered kernel, transformers makes no mask.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("causal", sdpa_attention_forward)
    model.set_attn_implementation("causal")


def stage_cut_by_hand(arguments, job, cut):
    """Build this rank's stage of a model that cannot be trained when traced."""
    first, last = cut[job.rank]
    make = LlamaStage if arguments.model == "llama" else ClassifierStage
    with torch.device("meta"):
        part = make(build_layout(arguments), arguments.model_config, first, last)
    fill(part, arguments, job.device)
    part.fill_buffers(job.device)
    tokens = torch.empty((arguments.microbatch_size, arguments.seq_len), dtype=torch.int64)
    activation = torch.empty((*tokens.shape, arguments.dim), dtype=arguments.torch_dtype)
    shape = part.shape_of_scores(tokens.shape)
    scores = torch.empty(shape, dtype=arguments.torch_dtype)
    return PipelineStage(
        part,
        job.rank,
        job.num_ranks,
        job.device,
        input_args=tokens if part.is_first else activation.requires_grad_(),
        output_args=scores.requires_grad_() if part.is_last else activation.requires_grad_(),
    )


class LlamaStage(nn.Module):
    """Layers `first` to `last` - 1 of a LlamaForCausalLM, under their names in that model.

    Every stage computes its own rotary embedding. The first stage of a traced Llama would send it
    to all other stages, and could not receive a gradient for it.
    """

    def __init__(self, whole, config, first, last):
        super().__init__()
        self.config = config
        self.is_first, self.is_last = first == 0, last == config.num_hidden_layers
        self.model = nn.Module()
        if self.is_first:
            self.model.embed_tokens = whole.model.embed_tokens
        self.model.layers = nn.ModuleDict(
            {str(i): whole.model.layers[i] for i in range(first, last)}
        )
        if self.is_last:
            self.model.norm = whole.model.norm
            self.lm_head = whole.lm_head

    def fill_buffers(self, device):
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        with device:
            self.rotary = LlamaRotaryEmbedding(self.config)

    def shape_of_scores(self, shape):
        return (*shape, self.config.vocab_size)

    def forward(self, x):
        if self.is_first:
            x = self.model.embed_tokens(x)
        positions = torch.arange(x.shape[1], device=x.device)[None]
        rotary = self.rotary(x, position_ids=positions)
        for layer in self.model.layers.values():
            x = layer(x, attention_mask=None, position_embeddings=rotary)
        return self.lm_head(self.model.norm(x)) if self.is_last else x


class ClassifierStage(nn.Module):
    """Layers `first` to `last` - 1 of a GPT2ForSequenceClassification, under their names.

    The scores are read at the last token of each sequence. Only the first stage has the tokens, so
    each stage gets the index of the last token, `ends` (batch,), as a keyword argument.
    """

    def __init__(self, whole, config, first, last):
        super().__init__()
        self.config = config
        self.is_first, self.is_last = first == 0, last == config.n_layer
        self.transformer = nn.Module()
        if self.is_first:
            self.transformer.wte = whole.transformer.wte
            self.transformer.wpe = whole.transformer.wpe
        self.transformer.h = nn.ModuleDict(
            {str(i): whole.transformer.h[i] for i in range(first, last)}
        )
        if self.is_last:
            self.transformer.ln_f = whole.transformer.ln_f
            self.score = whole.score

    def fill_buffers(self, device):
        pass

    def shape_of_scores(self, shape):
        return shape[0], self.config.num_labels

    def forward(self, x, ends):
        if self.is_first:
            positions = torch.arange(x.shape[1], device=x.device)
            x = self.transformer.wte(x) + self.transformer.wpe(positions)
        for block in self.transformer.h.values():
            x = block(x)
        if not self.is_last:
            return x
        scores = self.score(self.transformer.ln_f(x))
        return scores[torch.arange(len(scores), device=x.device), ends]


def describe_stages(job, stage):
    """Print a line per stage: its number of parameters, and the names of the first and last."""
    names = [name for name, _ in stage.submod.named_parameters()]
    count = sum(parameter.numel() for parameter in stage.submod.parameters())
    lines = gather(job, f"{count:9,} parameters, {names[0]} to {names[-1]}")
    for rank, line in enumerate(lines or []):
        print(f"stage {rank}  {line}", flush=True)
