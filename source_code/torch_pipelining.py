"""The course's model through torch.distributed.pipelining, as a full training program (lesson 08).

    torchrun --standalone --nproc-per-node 4 source_code/torch_pipelining.py --verify

The stages are cut by hand (--split manual) or by torch's tracer (--split spec, --split calls); each
of the library's seven schedules performs them. The rest is what a training needs around it.
"""

import math
import sys
import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.pipelining import (
    PipelineStage,
    SplitPoint,
    build_stage,
    pipe_split,
    pipeline,
)
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from extensions.optimization.clipping import clip_gradients
from extensions.torch_pipelining.library import (
    ONE_STAGE,
    SCHEDULES,
    V_SHAPED,
    complaint_about,
    device_without_sharing,
    forwards_only,
    mean_of,
    recorded,
    schedule_as_data,
    stages_of_rank,
    watched,
    without_messages_to_itself,
)
from lab.report import Report
from pipeline.command_line import positive_integer, positive_number, reject
from pipeline.job import join_job, leave_job
from pipeline.model import VOCABULARY, ModelPart, materialise, token_loss
from pipeline.training import build_model, parse_training_arguments, training_parser

LINE_END = 10  # the byte; two in a row end a paragraph


def main():
    arguments = parse_arguments()
    job = join_job(arguments.device, arguments.timeout, pairs=[])
    recorder = Recorder(job, arguments.paced)
    stages = [recorded(stage, job, recorder) for stage in build_stages(arguments, job)]
    schedule = build_schedule(arguments, stages)
    parameters = [parameter for _, parameter in named_parameters(stages)]
    optimizer, rates = build_optimizer(arguments, parameters)
    expected = schedule_as_data(
        arguments.schedule, job.num_ranks, arguments.microbatches, arguments.chunks
    )
    report = Report(arguments, job, expected, recorder)

    for step in report.steps():
        inputs, targets, keywords = batch_of(arguments, job.device, step)
        optimizer.zero_grad()
        with watched(job, f"step {step} of {arguments.schedule}"):
            loss = run_step(schedule, stages, inputs, targets, keywords)
        if arguments.clip:
            clip_gradients(job, named_parameters(stages), arguments.clip)
        optimizer.step()
        rates.step()
        report.record_step(step, loss)

    report.finish()
    if arguments.evaluate:
        evaluate(arguments, job, schedule, stages, report)
    if arguments.generate:
        generate(arguments, job, schedule, stages, report)
    leave_job(job)
    return 0 if report.verify(train_one_process) else 1


def parse_arguments():
    parser = training_parser(__doc__.splitlines()[0])
    add = parser.add_argument
    add("--schedule", choices=SCHEDULES, default="1F1B", help="the library's name of it")
    add("--split", choices=["manual", "spec", "calls"], default="manual", help="who cuts the model")
    add("--chunks", type=positive_integer, metavar="V", help="stages a rank, else 1 or 2")
    add("--clip", type=positive_number, metavar="NORM", help="largest gradient norm of the model")
    add("--warm-up", type=positive_integer, metavar="N", help="steps to full rate, then a cosine")
    add("--documents", action="store_true", help="attend within a paragraph only")
    add("--evaluate", type=positive_integer, metavar="N", help="then: loss of N held-out batches")
    add("--generate", type=positive_integer, metavar="N", help="then: continue texts by N bytes")
    arguments = parse_training_arguments(parser, number_of_stages)
    arguments.device = device_without_sharing(arguments.device)
    check_combination(arguments)
    return arguments


def number_of_stages(arguments):
    if arguments.chunks is None:
        arguments.chunks = 1 if arguments.schedule in ONE_STAGE else 2
    return arguments.num_ranks * arguments.chunks


def check_combination(arguments):
    """Refuse what the library would refuse later, on some ranks, in a traceback."""
    complaint = complaint_about(
        arguments.schedule, arguments.num_ranks, arguments.microbatches, arguments.chunks
    )
    if complaint:
        reject(complaint)
    if arguments.documents and arguments.split != "manual":
        reject(
            f"--documents with --split {arguments.split}: the tracer would send the mask through "
            "all stages, and the library has no backward for that; use --split manual"
        )
    if arguments.warm_up and arguments.warm_up >= arguments.steps:
        reject(
            f"--warm-up {arguments.warm_up} leaves none of --steps {arguments.steps} for the "
            "cosine; use fewer, or more steps"
        )


def build_stages(arguments, job):
    """This rank's stages, as torch's own objects, in the order in which the model runs them."""
    indices = stages_of_rank(arguments.schedule, job.rank, job.num_ranks, arguments.chunks)
    if arguments.split == "manual":
        stages = [cut_by_hand(arguments, job, index) for index in indices]
    else:
        pipe = traced(arguments)
        stages = [stage_of(pipe, arguments, job, index) for index in indices]
    return [without_messages_to_itself(stage) for stage in stages]


def cut_by_hand(arguments, job, index):
    """Stage `index`: the whole model laid out without memory, and all but this stage deleted."""
    config, (first, last) = arguments.config, arguments.stage_layers[index]
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
    scores = torch.empty((*tokens.shape, VOCABULARY), dtype=arguments.torch_dtype)
    return PipelineStage(
        part,
        index,
        len(arguments.stage_layers),
        job.device,
        input_args=tokens if part.is_first else activation.requires_grad_(),
        output_args=scores.requires_grad_() if part.is_last else activation.requires_grad_(),
    )


class TraceablePart(ModelPart):
    """The same model in a form that torch's tracer can cut.

    A table that is cut to length once and handed to every layer would travel through every stage,
    and the library has no backward for that. Read whole, by each layer, it becomes a buffer of
    each stage. With `starts` the cuts are marked in the code, by pipe_split().
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


def traced(arguments):
    """The model as torch's tracer cuts it, on the meta device: shapes, names, and no memory."""
    starts = [first for first, _ in arguments.stage_layers[1:]]
    tokens = torch.empty(
        (arguments.microbatch_size, arguments.seq_len), dtype=torch.int64, device="meta"
    )
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)  # torch's own
    # The tracer notes the type of every message: trace in the type that will run.
    if arguments.split == "calls":
        part = TraceablePart(arguments.config, starts).to(arguments.torch_dtype)
        return pipeline(part, mb_args=(tokens,))
    part = TraceablePart(arguments.config).to(arguments.torch_dtype)
    split_spec = {f"layers.{first}": SplitPoint.BEGINNING for first in starts}
    return pipeline(part, mb_args=(tokens,), split_spec=split_spec)


def stage_of(pipe, arguments, job, index):
    """One traced stage with its memory and weights. Its parameters have kept their names."""
    part = pipe.get_stage_module(index)
    materialise(part, arguments.config, arguments.seed, arguments.torch_dtype, job.device)
    return build_stage(part, index, pipe.info(), job.device)


def build_schedule(arguments, stages):
    """The library's schedule over this rank's stages.

    It divides the gradients by the number of micro-batches after each step (scale_grads), which is
    right because each micro-batch's loss is a mean.
    """
    schedule_class = get_schedule_class(arguments.schedule)
    of_this_rank = stages[0] if arguments.schedule in ONE_STAGE else stages
    return schedule_class(of_this_rank, arguments.microbatches, loss_fn=token_loss)


def named_parameters(stages):
    """This rank's parameters, as pairs with their names in the whole model."""
    return [pair for stage in stages for pair in stage.submod.named_parameters()]


def build_optimizer(arguments, parameters):
    """The optimizer, and what sets its learning rate before each step.

    Both are torch's own, as in a program that one brings to the library. Lesson 07's script has the
    curve written out (WarmUpThenCosine), with a floor and in a form that a checkpoint can hold.
    """
    if arguments.optimizer == "adamw":
        optimizer = torch.optim.AdamW(parameters, lr=arguments.learning_rate)
    else:
        momentum = 0.9 if arguments.optimizer == "momentum" else 0.0
        optimizer = torch.optim.SGD(parameters, lr=arguments.learning_rate, momentum=momentum)

    def share_of_rate(step):
        if not arguments.warm_up:
            return 1.0
        if step < arguments.warm_up:
            return (step + 1) / arguments.warm_up
        way = (step - arguments.warm_up) / (arguments.steps - arguments.warm_up)
        return (1 + math.cos(math.pi * way)) / 2

    return optimizer, LambdaLR(optimizer, share_of_rate)


def batch_of(arguments, device, step):
    """Inputs, targets and keyword arguments of a step, for the whole batch, on every rank."""
    batch = arguments.text.batch(step, arguments.batch_size, arguments.seq_len, arguments.seed)
    inputs, targets = (tokens.to(device) for tokens in batch)
    return inputs, targets, keywords_of(arguments, inputs)


def keywords_of(arguments, inputs):
    """What every stage takes besides its activation: the mask, where one is asked for.

    Each rank makes it from the tokens, which all ranks have: keyword arguments do not travel. The
    library cuts them in micro-batches along their first dimension, as it does the inputs.
    """
    return {"mask": paragraph_mask(inputs)} if arguments.documents else {}


def paragraph_mask(tokens):
    """True where a position may look: itself and before, in its own paragraph.

    Tokens (batch, length); the mask is (batch, 1, length, length).
    """
    line_ends = tokens == LINE_END
    ends = torch.zeros_like(tokens)
    ends[:, 1:] = line_ends[:, 1:] & line_ends[:, :-1]
    paragraph = ends.cumsum(1) - ends
    same = paragraph[:, :, None] == paragraph[:, None, :]
    return same.tril()[:, None]


def run_step(schedule, stages, inputs, targets, keywords):
    """Forward and backward of a batch. Returns the loss on the rank of the last stage, else None."""
    has_first = any(stage.is_first for stage in stages)
    losses = [] if any(stage.is_last for stage in stages) else None
    schedule.step(
        *([inputs] if has_first else []),
        target=targets if losses is not None else None,
        losses=losses,
        return_outputs=False,  # or the last stage keeps the scores of every micro-batch
        **keywords,
    )
    return mean_of(losses)


@torch.no_grad()
def evaluate(arguments, job, schedule, stages, report):
    """Say the loss on the held-out text: forwards only, through the same schedule."""
    total = 0.0
    for number in range(arguments.evaluate):
        inputs, targets = held_out_batch(arguments, number)
        losses = [] if report.has_loss else None
        with watched(job, f"evaluation {number}"), evaluating(arguments, schedule):
            schedule.eval(
                *([inputs.to(job.device)] if any(stage.is_first for stage in stages) else []),
                target=targets.to(job.device) if report.has_loss else None,
                losses=losses,
                return_outputs=False,
                **keywords_of(arguments, inputs.to(job.device)),
            )
        total += mean_of(losses).item() if losses else 0.0
    if report.has_loss:
        loss = total / arguments.evaluate
        report.say(f"held out  loss {loss:.6f}  perplexity {math.exp(loss):.3f}")


def evaluating(arguments, schedule):
    return forwards_only(schedule) if arguments.schedule in V_SHAPED else nullcontext()


def held_out_batch(arguments, number):
    """Inputs and targets of batch `number`, spread evenly over the held-out tenth."""
    text, length = arguments.text.held_out, arguments.seq_len
    wanted = arguments.evaluate * arguments.batch_size
    first = number * arguments.batch_size
    last_start = len(text) - length - 1
    starts = [last_start * (first + i) // wanted for i in range(arguments.batch_size)]
    rows = torch.stack([text[start : start + length + 1] for start in starts])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


@torch.no_grad()
def generate(arguments, job, schedule, stages, report):
    """Continue held-out texts byte by byte, each time with the most likely one.

    Forward only, as many texts at once as a batch has: with a single one every rank but one would
    wait. Two are printed. The whole window is computed anew for each byte; what a stage could keep
    of the bytes before (a cache of keys and values) is left out.
    """
    has_first = any(stage.is_first for stage in stages)
    texts = prompts_of(arguments).to(job.device)
    last_rank = report.schedule.rank_of(report.schedule.num_stages - 1, 0)
    start = texts.shape[1]
    for _ in range(arguments.generate):
        window, end = window_of(texts, arguments.seq_len)
        with watched(job, f"byte {texts.shape[1]}"), evaluating(arguments, schedule):
            scores = schedule.eval(
                *([window] if has_first else []),
                target=window if report.has_loss else None,  # it wants one; nobody reads the loss
                **keywords_of(arguments, window),
            )
            if job.rank == last_rank:
                following = scores[:, end - 1].argmax(-1)
            else:
                following = torch.empty(len(texts), dtype=torch.int64, device=job.device)
            dist.broadcast(following, last_rank)  # the first stage reads it
        texts = torch.cat([texts, following[:, None]], dim=1)
    if report.has_loss:
        for text in texts[:2].tolist():
            prompt, continuation = (bytes(part).decode(errors="replace") for part in
                                    (text[:start], text[start:]))  # fmt: skip
            report.say(f"generated  {prompt!r} -> {continuation!r}")
    return texts


def prompts_of(arguments):
    """Half a sequence from as many places of the held-out text as a batch has rows."""
    text, length = arguments.text.held_out, max(1, arguments.seq_len // 2)
    last_start = len(text) - length
    starts = [last_start * i // arguments.batch_size for i in range(arguments.batch_size)]
    return torch.stack([text[start : start + length] for start in starts])


def window_of(texts, length):
    """The last `length` tokens, filled up with zeros, and where they end.

    Stages have fixed shapes. What is filled up comes after the end and is seen by no position
    before it.
    """
    texts = texts[:, -length:]
    window = torch.zeros((len(texts), length), dtype=texts.dtype, device=texts.device)
    window[:, : texts.shape[1]] = texts
    return window, texts.shape[1]


def train_one_process(arguments, device="cpu"):
    """The loss of every step without ranks, stages and schedule: what --verify compares with."""
    return one_process(arguments, device)[1]


def one_process(arguments, device="cpu"):
    """The whole model trained on the whole batches, and the loss of every step."""
    model = build_model(arguments.config, arguments.seed, arguments.torch_dtype, device)
    optimizer, rates = build_optimizer(arguments, model.parameters())
    losses = []
    for step in range(arguments.steps):
        inputs, targets, keywords = batch_of(arguments, device, step)
        loss = token_loss(model(inputs, **keywords), targets)
        optimizer.zero_grad()
        loss.backward()
        if arguments.clip:
            clip_grad_norm_(model.parameters(), arguments.clip)
        optimizer.step()
        rates.step()
        losses.append(loss.item())
    return model, losses


if __name__ == "__main__":
    sys.exit(main())
