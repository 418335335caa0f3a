"""Broken on purpose: the traps of torch.distributed.pipelining, one a run (lesson 08).

    torchrun --standalone --nproc-per-node 2 source_code/broken_torch_pipelining.py --trap LIST
    torchrun --standalone --nproc-per-node 2 source_code/broken_torch_pipelining.py \\
        --trap tied-embeddings
    torchrun --standalone --nproc-per-node 2 source_code/broken_torch_pipelining.py \\
        --trap tied-embeddings --cured

Each trap is a function below, in its broken and its cured form. What raises ends with its
traceback; what is silently wrong prints how far it is from one process.
"""

import math
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    SplitPoint,
    build_stage,
    pipe_split,
    pipeline,
)
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn.functional import mse_loss

from pipeline.arguments import seconds
from pipeline.distributed import gather, join_job, leave_job, ranks_from_environment
from pipeline.refusal import Parser, refuse
from pipeline.torch_pipelining.library import (
    ONE_STAGE,
    forwards_only,
    stages_of_rank,
    watched,
    without_messages_to_itself,
)

WIDTH, BATCH = 8, 8


def main():
    arguments = parse_arguments()
    job = join_job("cpu", arguments.timeout, pairs=[])
    dist.barrier()  # a rank that fails at once would take the others down while they still join
    with watched(job, f"the trap {arguments.trap}"):
        TRAPS[arguments.trap](job, arguments.cured)
    leave_job(job)
    return 0


def parse_arguments():
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--trap", required=True, metavar="NAME", help="LIST prints all names")
    parser.add_argument("--cured", action="store_true", help="run the form that works")
    parser.add_argument("--timeout", type=seconds, default=2.0, metavar="S", help="longest wait")
    arguments = parser.parse_args()
    if arguments.trap not in TRAPS:
        refuse(f"--trap takes one of: {', '.join(TRAPS)}")
    ranks = RANKS.get(arguments.trap, 2)
    if ranks_from_environment()[1] != ranks:
        refuse(f"--trap {arguments.trap} is set for {ranks} ranks: use --nproc-per-node {ranks}")
    return arguments


# A model of two layers a rank, and a pipeline of it


def layer(index):
    """Layer `index`, whichever stage and rank it is on: a matrix and a tanh."""
    linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    generator = torch.Generator().manual_seed(index)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).double() / 3)
    return nn.Sequential(linear, nn.Tanh())


def whole_model(layers=4):
    return nn.Sequential(*(layer(index) for index in range(layers)))


def batch(rows=BATCH, seed=0):
    """Inputs and targets, both (rows, WIDTH)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, rows, WIDTH, generator=generator, dtype=torch.float64).unbind()


def cut_evenly(job, name="GPipe", indices=None):
    """{stage: its layers} on this rank: one stage of two layers, or two of one."""
    chunks = 1 if name in ONE_STAGE else 2
    indices = stages_of_rank(name, job.rank, job.num_ranks, chunks) if indices is None else indices
    size = 2 // chunks
    return {
        index: nn.Sequential(*(layer(i) for i in range(index * size, (index + 1) * size)))
        for index in indices
    }


def schedule_of(job, parts, name="GPipe", microbatches=4, shapes=True, **options):
    """The library's stages over `parts`, and its schedule over the stages."""
    chunks = 1 if name in ONE_STAGE else 2
    example = torch.zeros(BATCH // microbatches, WIDTH, dtype=torch.float64, requires_grad=True)
    given = {"input_args": example, "output_args": example} if shapes else {}
    stages = [
        PipelineStage(part, index, job.num_ranks * chunks, job.device, **given)
        for index, part in parts.items()
    ]
    of_this_rank = stages[0] if name in ONE_STAGE else stages
    options = {"loss_fn": mse_loss, **options}
    return get_schedule_class(name)(of_this_rank, microbatches, **options), stages


def step(schedule, stages, inputs, targets, **keywords):
    """One step; returns the list of losses on the rank of the last stage."""
    losses = [] if any(stage.is_last for stage in stages) else None
    schedule.step(
        *([inputs] if any(stage.is_first for stage in stages) else []),
        target=targets if losses is not None else None,
        losses=losses,
        **keywords,
    )
    return losses


def gradients_of_one_process(model=None, rows=BATCH, batches=1):
    """The gradients of the whole model, in the order of its parameters."""
    model = model or whole_model()
    for seed in range(batches):
        inputs, targets = batch(rows, seed)
        mse_loss(model(inputs), targets).backward()
    return [parameter.grad for parameter in model.parameters()]


def compare(job, parts, wanted):
    """Say how far the gradients of all ranks are from one process, as a share of the largest."""
    own = {
        index: [parameter.grad for parameter in part.parameters()] for index, part in parts.items()
    }
    ranks = gather(job, own)
    if ranks is not None:
        stages = {index: grads for some in ranks for index, grads in some.items()}
        ours = [gradient for index in sorted(stages) for gradient in stages[index]]
        say_distance("gradient", ours, wanted)


def say_distance(what, ours, wanted):
    largest = max(tensor.abs().max().item() for tensor in wanted)
    distance = max((a - b).abs().max().item() for a, b in zip(ours, wanted, strict=True)) / largest
    verdict = "right" if distance < 1e-12 else "SILENTLY WRONG"
    print(f"{what}: {verdict}, {distance:.1e} of the largest off one process", flush=True)


def train_once(job, name, microbatches=4, indices=None):
    parts = cut_evenly(job, name, indices)
    schedule, stages = schedule_of(job, parts, name, microbatches)
    step(schedule, stages, *batch())
    compare(job, parts, gradients_of_one_process(whole_model(2 * job.num_ranks)))


# Traps of the schedules


def few_microbatches(job, cured):
    """1F1B with fewer micro-batches than stages."""
    train_once(job, "1F1B", microbatches=2 if cured else 1)


def uneven_rounds(job, cured):
    """Interleaved 1F1B with a number of micro-batches that is no multiple of its rounds."""
    parts = cut_evenly(job, "Interleaved1F1B")
    schedule_of(job, parts, "Interleaved1F1B", microbatches=4 if cured else 5)
    if cured:
        train_once(job, "Interleaved1F1B", 4)


def one_stage_in_a_v(job, cured):
    """ZB-V with one stage a rank."""
    if cured:
        return train_once(job, "ZBVZeroBubble", 4)
    stage = PipelineStage(layer(job.rank), job.rank, job.num_ranks, job.device)
    get_schedule_class("ZBVZeroBubble")([stage], 4, loss_fn=mse_loss)


def few_microbatches_in_dualpipev(job, cured):
    """DualPipeV with fewer micro-batches than stages."""
    parts = cut_evenly(job, "DualPipeV")
    schedule_of(job, parts, "DualPipeV", microbatches=4 if cured else 3)
    if cured:
        train_once(job, "DualPipeV", 4)


def wrong_placement(job, cured):
    """ZB-V with its stages dealt out in a loop: rank 0 has 0 and 4 instead of 0 and 7."""
    train_once(job, "ZBVZeroBubble", 8, None if cured else [job.rank, job.rank + job.num_ranks])


def microbatches_differ(job, cured):
    """Rank 1 cuts the batch in two micro-batches, rank 0 in four."""
    parts = cut_evenly(job)
    example = torch.zeros(2, WIDTH, dtype=torch.float64, requires_grad=True)
    stage = PipelineStage(parts[job.rank], job.rank, 2, job.device, example, example)
    count = 4 if cured or job.rank == 0 else 2
    schedule = get_schedule_class("GPipe")(stage, count, loss_fn=mse_loss)
    inputs, targets = batch()
    step(schedule, [stage], inputs, targets[: 2 * count])
    compare(job, parts, gradients_of_one_process())


def step_on_one_rank(job, cured):
    """Only the rank that wants the loss evaluates; the others have no part in it."""
    parts = cut_evenly(job)
    schedule, stages = schedule_of(job, parts)
    inputs, targets = batch()
    scores = None
    if cured or job.rank == 1:
        with torch.no_grad():
            scores = schedule.eval(*([inputs] if job.rank == 0 else []), target=targets)
    if scores is not None:
        say_distance("output", [scores], [whole_model()(inputs)])
    compare_nothing(job)


def loss_on_the_wrong_rank(job, cured):
    """With a V the last stage, and so the loss, is on rank 0; here rank 1 is given the targets."""
    parts = cut_evenly(job, "ZBVZeroBubble")
    schedule, stages = schedule_of(job, parts, "ZBVZeroBubble")
    inputs, targets = batch()
    has_loss = job.rank == (0 if cured else job.num_ranks - 1)
    schedule.step(*([inputs] if job.rank == 0 else []), target=targets if has_loss else None)
    compare(job, parts, gradients_of_one_process())


def uneven_batch(job, cured):
    """Ten rows in four micro-batches: three rows, three, two and two."""
    rows = 8 if cured else 10
    parts = cut_evenly(job)
    example = torch.zeros(-(-rows // 4), WIDTH, dtype=torch.float64, requires_grad=True)
    stage = PipelineStage(parts[job.rank], job.rank, 2, job.device, example, example)

    def loss_of_all_rows(outputs, targets):  # of as many rows as there are targets
        return (outputs[: len(targets)] - targets).pow(2).mean()

    schedule = get_schedule_class("GPipe")(stage, 4, loss_fn=loss_of_all_rows)
    step(schedule, [stage], *batch(rows))
    compare(job, parts, gradients_of_one_process(rows=rows))


def too_many_stages(job, cured):
    """More ranks than stages."""
    if cured:
        return train_once(job, "GPipe")
    PipelineStage(layer(0), 0, 1, job.device)


def listed_order_of_1f1b(job, cured):
    """The library's list of 1F1B's actions, which it does not perform, leaves a forward out."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
    from torch.distributed.pipelining.schedules import _validate_schedule

    rows = get_schedule_ops("GPipe" if cured else "1F1B", 2, 4)
    _validate_schedule(dict(enumerate(rows)), 2, 2, 4)
    if job.rank == 0:
        print("the list is complete", flush=True)


# Traps of a step


def step_without_grad(job, cured):
    """step() under torch.no_grad(); eval() is what works there."""
    parts = cut_evenly(job)
    schedule, stages = schedule_of(job, parts)
    inputs, targets = batch()
    arguments = [inputs] if job.rank == 0 else []
    with torch.no_grad():
        if not cured:
            schedule.step(*arguments, target=targets)
        scores = schedule.eval(*arguments, target=targets)
    if job.rank == 1:
        say_distance("output", [scores], [whole_model()(inputs)])
    compare_nothing(job)


def compare_nothing(job):
    gather(job, None)  # so that ranks leave together, whatever each has said


def eval_of_a_v(job, cured):
    """eval() of a schedule that has two neighbouring stages on one rank."""
    parts = cut_evenly(job, "ZBVZeroBubble")
    schedule, stages = schedule_of(job, parts, "ZBVZeroBubble")
    inputs, targets = batch()
    arguments = [inputs] if job.rank == 0 else []
    with torch.no_grad():
        if cured:
            with forwards_only(schedule):
                scores = schedule.eval(*arguments, target=targets)
        else:
            scores = schedule.eval(*arguments, target=targets)
    if job.rank == 0:
        say_distance("output", [scores], [whole_model()(inputs)])
    compare_nothing(job)


def eval_without_targets(job, cured):
    """A schedule with a loss function wants targets from eval(), too."""
    parts = cut_evenly(job)
    schedule, stages = schedule_of(job, parts)
    inputs, targets = batch()
    with torch.no_grad():
        scores = schedule.eval(
            *([inputs] if job.rank == 0 else []), target=targets if cured else None
        )
    if job.rank == 1:
        say_distance("output", [scores], [whole_model()(inputs)])
    compare_nothing(job)


def loss_per_row(job, cured):
    """A loss function that returns one number a row instead of one in all."""

    def each_row(outputs, targets):
        rows = (outputs - targets).pow(2).mean(1)
        return rows.mean() if cured else rows

    parts = cut_evenly(job)
    schedule, stages = schedule_of(job, parts, loss_fn=each_row)
    step(schedule, stages, *batch())
    compare(job, parts, gradients_of_one_process())


def gradients_kept(job, cured):
    """Two steps without zero_grad(): the second adds to the first."""
    parts = cut_evenly(job)
    schedule, stages = schedule_of(job, parts)
    for _ in range(2):
        if cured:
            for part in parts.values():
                part.zero_grad()
        step(schedule, stages, *batch())
    compare(job, parts, gradients_of_one_process())


def accumulation(job, cured):
    """Two steps for one update: scale_grads divides the first step's gradients twice."""
    parts = cut_evenly(job)
    schedule, stages = schedule_of(job, parts, scale_grads=not cured)
    for seed in range(2):
        step(schedule, stages, *batch(seed=seed))
    if cured:
        for part in parts.values():
            for parameter in part.parameters():
                parameter.grad /= 4  # once, by the number of micro-batches
    compare(job, parts, gradients_of_one_process(batches=2))


def sum_loss(job, cured):
    """A loss that is a sum over rows, with the division that is right for means."""

    def sum_of_rows(outputs, targets):
        return (outputs - targets).pow(2).sum() / (BATCH * WIDTH)

    parts = cut_evenly(job)
    schedule, stages = schedule_of(job, parts, loss_fn=sum_of_rows, scale_grads=not cured)
    step(schedule, stages, *batch())
    compare(job, parts, gradients_of_one_process())


def clipping(job, cured):
    """clip_grad_norm_ on each rank knows the norm of that rank's stages only."""
    parts = cut_evenly(job)
    schedule, stages = schedule_of(job, parts)
    step(schedule, stages, *batch())
    parameters = list(parts[job.rank].parameters())
    if cured:
        squares = sum(parameter.grad.pow(2).sum() for parameter in parameters)
        dist.all_reduce(squares)
        factor = min(1.0, 0.01 / (math.sqrt(squares) + 1e-6))
        for parameter in parameters:
            parameter.grad *= factor
    else:
        nn.utils.clip_grad_norm_(parameters, 0.01)
    model = whole_model()
    gradients_of_one_process(model)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    compare(job, parts, [parameter.grad for parameter in model.parameters()])


def all_scores_kept(job, cured):
    """Without return_outputs=False the last stage keeps the output of every micro-batch."""
    parts = cut_evenly(job)
    schedule, stages = schedule_of(job, parts)
    step(schedule, stages, *batch(), return_outputs=not cured)
    if job.rank == 1:
        print(f"outputs kept after the step: {len(stages[0].output_chunks)}", flush=True)
    compare_nothing(job)


def batch_norm(job, cured):
    """BatchNorm takes the statistics of a micro-batch; with LayerNorm the cut does not matter."""

    def with_norm(index):
        norm = nn.LayerNorm(WIDTH) if cured else nn.BatchNorm1d(WIDTH)
        return nn.Sequential(layer(index), norm.double())

    parts = {job.rank: nn.Sequential(with_norm(2 * job.rank), with_norm(2 * job.rank + 1))}
    schedule, stages = schedule_of(job, parts)
    step(schedule, stages, *batch())
    whole = nn.Sequential(*(with_norm(index) for index in range(4)))
    compare(job, parts, gradients_of_one_process(whole))


# Traps of a stage's arguments


class Masked(nn.Module):
    """A stage with a second argument: what the mask leaves out is zero."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x, mask=None):
        x = self.part(x)
        return x if mask is None else x * mask


def mask_on_one_rank(job, cured):
    """Keyword arguments do not travel: a mask that only rank 0 passes reaches stage 0 only."""
    inputs, targets = batch()
    mask = (inputs > 0).double()
    parts = {job.rank: Masked(cut_evenly(job)[job.rank])}
    schedule, stages = schedule_of(job, parts)
    step(schedule, stages, inputs, targets, **({"mask": mask} if cured or job.rank == 0 else {}))
    first, second = Masked(nn.Sequential(layer(0), layer(1))), nn.Sequential(layer(2), layer(3))
    mse_loss(Masked(second)(first(inputs, mask), mask), targets).backward()
    wanted = [*first.parameters(), *second.parameters()]
    compare(job, parts, [parameter.grad for parameter in wanted])


def mask_without_a_batch(job, cured):
    """A keyword argument with a first dimension of 1 cannot be cut in four micro-batches."""
    parts = {job.rank: Masked(cut_evenly(job)[job.rank])}
    schedule, stages = schedule_of(job, parts)
    mask = torch.ones(1, WIDTH, dtype=torch.float64)
    step(schedule, stages, *batch(), mask=mask.expand(BATCH, WIDTH) if cured else mask)
    compare(job, parts, gradients_of_one_process())


class Tuple(nn.Module):
    """A stage that returns what Hugging Face layers like to: a tuple with None in it."""

    def __init__(self, part, cured):
        super().__init__()
        self.part, self.cured = part, cured

    def forward(self, x):
        return self.part(x) if self.cured else (self.part(x), None)


def tuple_with_none(job, cured):
    """A stage that returns (activation, None)."""
    part = cut_evenly(job)[job.rank]
    parts = {job.rank: Tuple(part, cured) if job.rank == 0 else part}
    schedule, stages = schedule_of(job, parts, shapes=False)
    step(schedule, stages, *batch())
    compare(job, parts, gradients_of_one_process())


# Traps of the tracer


class Skip(nn.Module):
    """What the first layer made is added again after the last."""

    def __init__(self, handed_on):
        super().__init__()
        self.first, self.second, self.third = layer(0), layer(1), layer(2)
        self.handed_on = handed_on

    def forward(self, x):
        kept = self.first(x)
        pipe_split()
        x = self.second(kept)
        if self.handed_on:
            kept = kept.clone()  # something the middle stage has made, so it is the one to send it
        pipe_split()
        return self.third(x) + kept


def traced(job, model, example=None, **options):
    job.watch.wait = None  # tracing takes longer than a trap may wait
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)  # torch's own
    example = torch.zeros(2, WIDTH, dtype=torch.float64) if example is None else example
    return pipeline(model, mb_args=(example,), **options)


def skip_connection(job, cured):
    """A result that a later stage than the next one uses; handed on by each stage it works."""
    pipe = traced(job, Skip(handed_on=cured))
    part = pipe.get_stage_module(job.rank)
    stage = build_stage(part, job.rank, pipe.info(), job.device)
    schedule = get_schedule_class("GPipe")(stage, 4, loss_fn=mse_loss)
    step(schedule, [stage], *batch())
    compare(job, {job.rank: part}, gradients_of_one_process(Skip(cured)))


class Branch(nn.Module):
    """A way through the network that depends on the data."""

    def __init__(self, cured):
        super().__init__()
        self.layers, self.cured = whole_model(), cured

    def forward(self, x):
        if self.cured:
            x = torch.where(x.sum() > 0, x, -x)
        elif x.sum() > 0:
            x = -x
        return self.layers(x)


def branch_on_data(job, cured):
    """An `if` on the values of a tensor."""
    split = {"layers.2": SplitPoint.BEGINNING}
    pipe = traced(job, Branch(cured), split_spec=split)
    if job.rank == 0:
        print(f"traced in {pipe.num_stages} stages", flush=True)


def cache_in_the_output(job, cured):
    """GPT-2 as it comes from Hugging Face, with a cache of keys and values in its output."""
    job.watch.wait = None  # the import takes longer than a trap may wait
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=8, n_embd=8, n_layer=2, n_head=2,
                        bos_token_id=None, eos_token_id=None,
                        tie_word_embeddings=False, use_cache=not cured)  # fmt: skip
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    split = {"transformer.h.1": SplitPoint.BEGINNING}
    pipe = traced(job, GPT2LMHeadModel(config), tokens, split_spec=split)
    if job.rank == 0:
        print(f"traced in {pipe.num_stages} stages", flush=True)


def traced_in_another_type(job, cured):
    """Traced in float32, run in float64: the tracer has noted the type of every message."""
    model = whole_model() if cured else whole_model().float()
    example = torch.zeros(2, WIDTH, dtype=torch.float64 if cured else torch.float32)
    pipe = traced(job, model, example, split_spec={"2": SplitPoint.BEGINNING})
    part = pipe.get_stage_module(job.rank).double()
    stage = build_stage(part, job.rank, pipe.info(), job.device)
    schedule = get_schedule_class("GPipe")(stage, 4, loss_fn=mse_loss)
    step(schedule, [stage], *batch())
    compare(job, {job.rank: part}, gradients_of_one_process())


def traced_in_a_v(job, cured):
    """A traced model in a schedule with neighbours on one rank: it writes to itself."""
    name = "ZBVZeroBubble"
    pipe = traced(job, whole_model(), split_spec={str(i): SplitPoint.BEGINNING for i in (1, 2, 3)})
    parts = {i: pipe.get_stage_module(i) for i in stages_of_rank(name, job.rank, 2, 2)}
    stages = [build_stage(part, i, pipe.info(), job.device) for i, part in parts.items()]
    if cured:
        stages = [without_messages_to_itself(stage) for stage in stages]
    schedule = get_schedule_class(name)(stages, 4, loss_fn=mse_loss)
    step(schedule, stages, *batch())
    compare(job, parts, gradients_of_one_process())


class Tied(nn.Module):
    """The first matrix again at the end."""

    def __init__(self):
        super().__init__()
        self.layers = whole_model()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.head.weight = self.layers[0][0].weight

    def forward(self, x):
        return self.head(self.layers(x))


def tied_embeddings(job, cured):
    """One matrix on two stages: each has a copy, and each copy only its own gradient."""
    pipe = traced(job, Tied(), split_spec={"layers.2": SplitPoint.BEGINNING})
    part = pipe.get_stage_module(job.rank)
    stage = build_stage(part, job.rank, pipe.info(), job.device)
    schedule = get_schedule_class("GPipe")(stage, 4, loss_fn=mse_loss)
    step(schedule, [stage], *batch())
    shared = next(p for name, p in part.named_parameters() if name in SHARED)
    if cured:
        dist.all_reduce(shared.grad)
    if job.rank == 0:
        one = Tied()
        gradients_of_one_process(one)
        say_distance("gradient", [shared.grad], [one.head.weight.grad])
    compare_nothing(job)


SHARED = ("layers.0.0.weight", "head.weight")


# Traps of the meta device


class Table(nn.Module):
    """A layer with a table that is computed, not learnt, as that of a rotary embedding."""

    def __init__(self, index):
        super().__init__()
        self.part = layer(index)
        self.register_buffer("table", self.computed(), persistent=False)

    def computed(self):
        return torch.linspace(0, 1, WIDTH, dtype=torch.float64)

    def forward(self, x):
        return self.part(x) * self.table


def stale_buffers(job, cured):
    """to_empty() gives buffers memory with whatever was in it; no checkpoint has them."""
    with torch.device("meta"):
        parts = {job.rank: nn.Sequential(Table(2 * job.rank), Table(2 * job.rank + 1))}
    whole = nn.Sequential(*(Table(index) for index in range(4)))
    part = parts[job.rank].to_empty(device=job.device)
    state = nn.Sequential(*whole[2 * job.rank : 2 * job.rank + 2]).state_dict()
    assert str(part.load_state_dict(state)) == "<All keys matched successfully>"
    for module in part:
        # What the memory holds is chance; a number that is no number makes the chance certain.
        module.table.fill_(torch.nan)
        if cured:
            module.table.copy_(module.computed())
    schedule, stages = schedule_of(job, parts)
    losses = step(schedule, stages, *batch())
    if job.rank == 1:
        print(f"loss is a number: {bool(torch.stack(losses).isfinite().all())}", flush=True)
    compare_nothing(job)


def buffers_left_on_meta(job, cured):
    """load_state_dict(assign=True) leaves what no checkpoint has without memory."""
    with torch.device("meta"):
        part = Table(0)
    part.load_state_dict(Table(0).state_dict(), assign=True)
    if cured:
        part.table = part.computed()
    output = part(batch()[0])
    if job.rank == 0:
        say_distance("output", [output], [Table(0)(batch()[0])])
    compare_nothing(job)


def moved_from_meta(job, cured):
    """.to("cpu") of a module without memory."""
    with torch.device("meta"):
        part = layer(0)
    part = part.to_empty(device="cpu") if cured else part.to("cpu")
    if job.rank == 0:
        print(f"the module is on {next(part.parameters()).device}", flush=True)


def one_seed_a_stage(job, cured):
    """Every rank seeds alike and draws the weights of its own stage: all stages start equal."""
    torch.manual_seed(0)
    part = cut_evenly(job)[job.rank] if cured else nn.Linear(WIDTH, WIDTH)
    first = next(part.parameters()).detach().double()
    both = gather(job, first)
    if both:
        print(f"both stages start with equal weights: {torch.equal(*both)}", flush=True)


def part_of_a_checkpoint(job, cured):
    """The state of one rank's stage is not the state of the model."""
    part = cut_evenly(job)[job.rank]
    state = part.state_dict()
    if cured:
        states = [None, None]
        dist.all_gather_object(states, state)
        state = {f"{2 * rank + int(name[0])}{name[1:]}": tensor
                 for rank, own in enumerate(states) for name, tensor in own.items()}  # fmt: skip
    whole_model().load_state_dict(state)
    if job.rank == 0:
        print("the whole model is loaded", flush=True)


# Traps with data parallelism, and of the machine


def replicas(job, name, shapes, by_hand=False):
    """Two pipelines of two ranks: 0 and 1, 2 and 3. Each has a batch; DDP averages over the two."""
    pipelines = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    copies = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    replica, rank = divmod(job.rank, 2)
    chunks = 1 if name in ONE_STAGE else 2
    parts = {}
    for index in stages_of_rank(name, rank, 2, chunks):
        size = 2 // chunks
        part = nn.Sequential(*(layer(i) for i in range(index * size, (index + 1) * size)))
        ddp = nn.parallel.DistributedDataParallel
        parts[index] = part if by_hand else ddp(part, process_group=copies[rank])
    example = torch.zeros(2, WIDTH, dtype=torch.float64, requires_grad=True)
    given = {"input_args": example, "output_args": example} if shapes else {}
    stages = [
        PipelineStage(part, index, 2 * chunks, job.device, group=pipelines[replica], **given)
        for index, part in parts.items()
    ]
    of_this_rank = stages[0] if chunks == 1 else stages
    schedule = get_schedule_class(name)(of_this_rank, 4, loss_fn=mse_loss)
    for _ in range(2):  # what DDP learns in the first step, it uses in the second
        for part in parts.values():
            part.zero_grad()
        step(schedule, stages, *batch(seed=replica))
    if by_hand:
        for part in parts.values():
            for parameter in part.parameters():
                dist.all_reduce(parameter.grad, group=copies[rank])
                parameter.grad /= 2
    mine = parts if replica == 0 else {}
    compare(job, mine, [gradient / 2 for gradient in gradients_of_one_process(batches=2)])


def ddp_without_shapes(job, cured):
    """DDP around a stage whose shapes the library has to find out."""
    replicas(job, "GPipe", shapes=cured)


def ddp_with_split_backward(job, cured):
    """DDP around stages whose backward is split: its hooks never fire. Reduce by hand."""
    replicas(job, "ZBVZeroBubble", shapes=True, by_hand=cured)


def token_out_of_range(job, cured):
    """A token that the embedding has no row for: on a GPU this is a device-side assert."""
    embedding = nn.Embedding(WIDTH, WIDTH, dtype=torch.float64)
    token = torch.tensor([WIDTH - 1 if cured else WIDTH])
    assert not cured or embedding(token).shape == (1, WIDTH)
    embedding(token)
    if job.rank == 0:
        print("the embedding has that row", flush=True)


def device_in_the_graph(job, cured):
    """Traced on one device, run on another: the tracer keeps a device that the model asks for."""

    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = whole_model()

        def forward(self, x):
            x = self.part(x)
            return x + self.part[0][0].bias.to(x.device)

    device = "cpu" if cured else "meta"
    model = Asks().to(device)
    example = torch.zeros(2, WIDTH, dtype=torch.float64, device=device)
    pipe = traced(job, model, example, split_spec={"part.2": SplitPoint.BEGINNING})
    part = pipe.get_stage_module(1).to_empty(device="cpu")
    part(torch.zeros(2, WIDTH, dtype=torch.float64))
    if job.rank == 0:
        print("the stage runs where it was traced", flush=True)


def dead_rank(job, cured):
    """A rank that is gone: its neighbours lose the connection, and a barrier would wait."""
    if job.rank == 1 and not cured:
        os._exit(0)
    train_once(job, "GPipe")


FUNCTIONS = [
    few_microbatches, uneven_rounds, one_stage_in_a_v, few_microbatches_in_dualpipev,
    wrong_placement, microbatches_differ, step_on_one_rank, loss_on_the_wrong_rank, uneven_batch, too_many_stages, listed_order_of_1f1b,
    step_without_grad, eval_of_a_v, eval_without_targets, loss_per_row, gradients_kept,
    accumulation, sum_loss, clipping, all_scores_kept, batch_norm, mask_on_one_rank,
    mask_without_a_batch, tuple_with_none, skip_connection, branch_on_data, cache_in_the_output,
    traced_in_another_type, traced_in_a_v, tied_embeddings, stale_buffers, buffers_left_on_meta,
    moved_from_meta, one_seed_a_stage, part_of_a_checkpoint, ddp_without_shapes,
    ddp_with_split_backward, token_out_of_range, device_in_the_graph, dead_rank,
]  # fmt: skip
RANKS = {"wrong-placement": 4, "skip-connection": 3, "ddp-without-shapes": 4}
RANKS["ddp-with-split-backward"] = 4
TRAPS = {function.__name__.replace("_", "-"): function for function in FUNCTIONS}


if __name__ == "__main__":
    sys.exit(main())
