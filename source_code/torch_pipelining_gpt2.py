"""Hugging Face models through torch.distributed.pipelining (lesson 08).

    torchrun --standalone --nproc-per-node 4 source_code/torch_pipelining_gpt2.py --verify

GPT-2 is cut by torch's tracer. A classifier and a Llama, which the tracer cannot train, are cut by
hand. Weights are random, drawn from the seed and their names; --pretrained takes those of a folder
on this machine. Nothing is ever downloaded.
"""

import os
import sys
import warnings
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    SplitPoint,
    build_stage,
    pipeline,
)
from torch.nn import functional as F

from extensions.torch_pipelining.library import (
    device_without_sharing,
    mean_of,
    recorded,
    schedule_as_data,
    watched,
)
from lab.report import Report
from pipeline.collectives import gather
from pipeline.command_line import reject
from pipeline.data import Text, load_text
from pipeline.job import join_job, leave_job
from pipeline.model import VOCABULARY, token_loss
from pipeline.training import build_optimizer, parse_training_arguments, training_parser

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
MODELS = ("gpt2", "gpt2-classifier", "llama")
PADDING = 0  # a byte that no text holds
INITIAL_SPREAD = 0.02  # standard deviation of the random weights, as in GPT-2

# Read when transformers is imported, which the functions below do: it asks no network for anything.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"


def main():
    arguments = parse_arguments()
    job = join_job(arguments.device, arguments.timeout, pairs=[])
    recorder = Recorder(job, arguments.paced)
    stage = recorded(build_own_stage(arguments, job), job, recorder)
    loss_function = sequence_loss if arguments.model == "gpt2-classifier" else token_loss
    schedule = SCHEDULES[arguments.schedule](stage, arguments.microbatches, loss_fn=loss_function)
    optimizer = build_optimizer(
        arguments.optimizer, stage.submod.parameters(), arguments.learning_rate
    )
    tie = Tie(job, stage) if arguments.tied else None
    expected = schedule_as_data(arguments.schedule, job.num_ranks, arguments.microbatches, 1)
    report = Report(arguments, job, expected, recorder)
    say_parameters(job, stage, report)

    for step in report.steps():
        inputs, targets, keywords = batch_of(arguments, job.device, step)
        optimizer.zero_grad()
        with watched(job, f"step {step} of {arguments.schedule}"):
            loss = run_step(schedule, stage, inputs, targets, keywords)
        if tie:
            tie.add_gradients()
        optimizer.step()
        report.record_step(step, loss)

    report.finish()
    leave_job(job)
    return 0 if report.verify(train_one_process) else 1


def parse_arguments():
    parser = training_parser(__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="gpt2", help="gpt2 is traced, the others cut by hand")
    add("--schedule", choices=list(SCHEDULES), default="1F1B", help="the library's name of it")
    add("--tied", action="store_true", help="one matrix for embedding and head, as in GPT-2")
    add("--pretrained", metavar="DIR", help="a local folder with the weights, and a tokenizer")
    # GPT-2 itself has 12 layers and width 768.
    parser.set_defaults(layers=12, dim=64, kv_heads=4, optimizer="adamw", learning_rate=0.001)
    arguments = parse_training_arguments(parser)
    arguments.device = device_without_sharing(arguments.device)
    if arguments.schedule == "1F1B" and arguments.microbatches < arguments.num_ranks:
        reject(
            f"--schedule 1F1B: --microbatches {arguments.microbatches} is less than the "
            f"{arguments.num_ranks} stages; use {arguments.num_ranks} or more"
        )
    if arguments.tied and arguments.model != "gpt2":
        reject(f"--tied with --model {arguments.model}: only --model gpt2 ties its matrices")
    arguments.model_config = model_config(arguments)
    if arguments.pretrained:
        take_pretrained(arguments)
    return arguments


def model_config(arguments):
    """The configuration from the flags: as small as the course's model, over bytes."""
    from transformers import GPT2Config, LlamaConfig

    common = {
        "vocab_size": VOCABULARY,
        "use_cache": False,  # a cache of keys and values is an output that no stage can send
        "tie_word_embeddings": False,  # two stages cannot share a matrix; see Tie
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": PADDING,
    }
    if arguments.model == "llama":
        return LlamaConfig(
            hidden_size=arguments.dim,
            intermediate_size=arguments.config.hidden_dim,
            num_hidden_layers=arguments.layers,
            num_attention_heads=arguments.heads,
            num_key_value_heads=arguments.kv_heads,
            max_position_embeddings=arguments.seq_len,
            **common,
        )
    return GPT2Config(
        n_positions=arguments.seq_len,
        n_embd=arguments.dim,
        n_layer=arguments.layers,
        n_head=arguments.heads,
        num_labels=2,
        resid_pdrop=0.0,  # with dropout no two cuts would draw alike
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **common,
    )


def model_class(arguments):
    import transformers

    return {
        "gpt2": transformers.GPT2LMHeadModel,
        "gpt2-classifier": transformers.GPT2ForSequenceClassification,
        "llama": transformers.LlamaForCausalLM,
    }[arguments.model]


def take_pretrained(arguments):
    """Take configuration, weights and, if there is one, the tokenizer from a local folder.

    Every rank reads the whole checkpoint and keeps its part. A tied head is stored once; the
    loaded model knows it under both names.
    """
    from transformers import AutoConfig, AutoTokenizer

    folder = Path(arguments.pretrained)
    if not (folder / "config.json").is_file():
        reject(f"--pretrained {folder}: there is no config.json; name a folder with a saved model")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    wanted = {"gpt2-classifier": "gpt2"}.get(arguments.model, arguments.model)
    if config.model_type != wanted:
        reject(f"--pretrained {folder} holds a {config.model_type}; it fits no --model {wanted}")
    sizes = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    if sizes != (arguments.layers, arguments.dim, arguments.heads):
        reject(
            f"--pretrained {folder} has other sizes than the flags; "
            "use --layers {} --dim {} --heads {}".format(*sizes)
        )
    if arguments.seq_len > config.max_position_embeddings:
        reject(
            f"--seq-len {arguments.seq_len} is more than the {config.max_position_embeddings} "
            f"positions of --pretrained {folder}; use fewer"
        )
    loaded = model_class(arguments).from_pretrained(folder, local_files_only=True)
    arguments.weights = loaded.state_dict()
    arguments.model_config = config
    config.use_cache = False
    config.tie_word_embeddings = False
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    if any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        arguments.text = tokenized(arguments, tokenizer)
    elif config.vocab_size < VOCABULARY:
        reject(f"--pretrained {folder} has no tokenizer, and its vocabulary holds no bytes")


def tokenized(arguments, tokenizer):
    """The text in the tokenizer's tokens instead of bytes; the last tenth is held out again."""
    text = load_text(arguments.data, arguments.seq_len)
    content = bytes(torch.cat([text.training, text.held_out]).tolist()).decode(errors="replace")
    tokens = torch.tensor(tokenizer(content)["input_ids"])
    cut = len(tokens) - len(tokens) // 10
    if len(tokens) // 10 <= arguments.seq_len:
        reject(
            f"--data has {len(tokens)} tokens, too few for --seq-len {arguments.seq_len}; "
            "use a longer text or a smaller --seq-len"
        )
    return Text(tokens[:cut], tokens[cut:])


def build_whole(arguments):
    """The whole model laid out without memory: shapes and names."""
    with torch.device("meta"):
        model = model_class(arguments)(arguments.model_config)
    return model.to(arguments.torch_dtype)


def fill(module, arguments, device):
    """Give a laid out module its memory and its weights, each by its name in the whole model."""
    for path, part in module.named_modules():
        for name, layout in list(part.named_parameters(recurse=False)):
            weight = weight_of(arguments, f"{path}.{name}", layout.shape)
            setattr(part, name, nn.Parameter(weight.to(device, arguments.torch_dtype)))
    return module


def weight_of(arguments, name, shape):
    """The starting value of one parameter: from the checkpoint, or drawn from seed and name."""
    if arguments.pretrained:
        return arguments.weights[name]
    if arguments.tied and name == "lm_head.weight":
        name = "transformer.wte.weight"
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=torch.float64)
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.float64)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), arguments.seed))
    return INITIAL_SPREAD * torch.randn(shape, generator=generator, dtype=torch.float64)


def build_own_stage(arguments, job):
    if arguments.model == "gpt2":
        return traced_stage(arguments, job)
    return stage_cut_by_hand(arguments, job)


def traced_stage(arguments, job):
    """This rank's stage of GPT-2, traced and cut in front of some of its blocks.

    For a moment each rank has memory for the whole model. The tracer writes the device into its
    graph wherever the model asks for it, as GPT-2 does, so the meta device will not do here.
    """
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)  # torch's own
    shape = arguments.microbatch_size, arguments.seq_len
    tokens = torch.zeros(shape, dtype=torch.int64, device=job.device)
    whole = build_whole(arguments).to_empty(device=job.device)
    split_spec = {
        f"transformer.h.{first}": SplitPoint.BEGINNING for first, _ in arguments.stage_layers[1:]
    }
    pipe = pipeline(whole, mb_args=(tokens,), split_spec=split_spec)
    part = fill(pipe.get_stage_module(job.rank), arguments, job.device)
    return build_stage(part, job.rank, pipe.info(), job.device)


def stage_cut_by_hand(arguments, job):
    """This rank's stage of a model that the tracer cannot train."""
    first, last = arguments.stage_layers[job.rank]
    make = LlamaStage if arguments.model == "llama" else ClassifierStage
    with torch.device("meta"):
        part = make(build_whole(arguments), arguments.model_config, first, last)
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
    """Layers `first` to `last` - 1 of a LlamaForCausalLM, under the names that they have there.

    Every stage works its rotary embedding out by itself: that is what makes the difference to a
    traced Llama, whose first stage sends it to all others and cannot take a gradient back.
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

    The scores are read at the last token of each sequence. Only the first stage sees the tokens,
    so every stage is told where they end: `ends` (b,), a keyword argument of each rank.
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


def say_parameters(job, stage, report):
    """One line a stage: how many parameters, and which are the first and the last."""
    names = [name for name, _ in stage.submod.named_parameters()]
    count = sum(parameter.numel() for parameter in stage.submod.parameters())
    lines = gather(job, f"{count:9,} parameters, {names[0]} to {names[-1]}")
    for rank, line in enumerate(lines or []):
        report.say(f"stage {rank}  {line}")


class Tie:
    """One matrix in two places: the embedding of the first stage is the head of the last.

    The tracer gives each stage its own copy and says nothing; each copy then learns from its own
    gradient only. Copies that start equal stay equal if both take the sum of the two gradients.
    """

    def __init__(self, job, stage):
        self.ends = dist.new_group(sorted({0, job.num_ranks - 1}))
        named = dict(stage.submod.named_parameters())
        names = ("transformer.wte.weight", "lm_head.weight")
        self.copies = [named[name] for name in names if name in named]

    def add_gradients(self):
        if len(self.copies) == 2:  # one rank has both
            total = self.copies[0].grad + self.copies[1].grad
            for copy in self.copies:
                copy.grad = total.clone()
        elif self.copies:
            dist.all_reduce(self.copies[0].grad, group=self.ends)


def batch_of(arguments, device, step):
    """Inputs, targets and keyword arguments of a step, for the whole batch, on every rank."""
    batch = arguments.text.batch(step, arguments.batch_size, arguments.seq_len, arguments.seed)
    inputs, targets = (tokens.to(device) for tokens in batch)
    if arguments.model != "gpt2-classifier":
        return inputs, targets, {}
    return sequences_to_classify(inputs)


def sequences_to_classify(tokens):
    """Every second text is read backwards: which ones? They are of different lengths.

    Tokens (b, length). Returns the tokens with padding, the labels (b,), and where each text ends.
    """
    rows = torch.arange(len(tokens), device=tokens.device)
    labels = rows % 2
    tokens = torch.where(labels[:, None] == 1, tokens.flip(1), tokens)
    ends = tokens.shape[1] - 1 - rows % min(4, tokens.shape[1])
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    tokens = torch.where(positions[None] <= ends[:, None], tokens, PADDING)
    return tokens, labels, {"ends": ends}


def sequence_loss(scores, labels):
    """Mean cross-entropy in nats per sequence. Scores (b, classes), labels (b,)."""
    return F.cross_entropy(scores, labels)


def run_step(schedule, stage, inputs, targets, keywords):
    """Forward and backward of a batch. Returns the loss on the last rank, else None."""
    losses = [] if stage.is_last else None
    schedule.step(
        *([inputs] if stage.is_first else []),
        target=targets if stage.is_last else None,
        losses=losses,
        return_outputs=False,
        **keywords,
    )
    return mean_of(losses)


def train_one_process(arguments, device="cpu"):
    """The loss of every step of the unchanged Hugging Face model: what --verify compares with."""
    arguments.model_config.tie_word_embeddings = arguments.tied
    model = model_class(arguments)(arguments.model_config).to(device, arguments.torch_dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weight_of(arguments, name, parameter.shape))
    optimizer = build_optimizer(arguments.optimizer, model.parameters(), arguments.learning_rate)
    losses = []
    for step in range(arguments.steps):
        inputs, targets, _ = batch_of(arguments, device, step)
        scores = model(inputs).logits
        loss = (sequence_loss if scores.dim() == 2 else token_loss)(scores, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    sys.exit(main())
