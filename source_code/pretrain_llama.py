# SPDX-License-Identifier: Apache-2.0
"""Pretrain a small Llama: everything at once, in one program.

    torchrun --standalone --nproc-per-node 4 pretrain_llama.py --steps 200 --sample 100

By name from one million parameters to one billion; any synchronous schedule, replicas,
recomputation, bfloat16 with float32 master weights (the default on a GPU), accumulation over
several passes, held-out perplexity, checkpoints that continue on any number of ranks.

To begin a program of your own, copy this file. The model is built in `build_model_part`, and the
data are read in `read_corpus`; their docstrings say what the rest of the program relies on.
"""

import sys
from functools import partial

import torch

from extensions.checkpointing.checkpoint import Training
from extensions.checkpointing.checkpoint_arguments import (
    add_checkpoint_arguments,
    check_checkpoint_arguments,
    continue_training,
    save_when_due,
    status_of_end,
)
from extensions.checkpointing.stop_request import StopRequest
from extensions.data_parallel.replica_arguments import (
    add_replica_arguments,
    choose_replicated_schedule,
)
from extensions.data_parallel.replicas import (
    AllReduce,
    DataParallelWorker,
    form_replicas,
    own_microbatches,
)
from extensions.optimization.clipping import clip_gradients
from extensions.optimization.finite import find_not_finite
from extensions.optimization.learning_rate import WarmUpThenCosine
from extensions.optimization.update import check_rate, clip_and_set_rate
from extensions.pretraining.batches import Batches, needed_on
from extensions.pretraining.forward_only import ForwardOnly, show_sample
from extensions.pretraining.metrics import Metrics
from extensions.pretraining.packing import masked_loss
from extensions.pretraining.padding import ShareOfLoss, count_real_tokens
from extensions.pretraining.token_files import is_token_folder, load_tokens
from extensions.pretraining.tokens import BYTES, filled_up, load_corpus
from extensions.pretraining.trained_stages import build_stages, update_copies
from extensions.pretraining.training_flags import (
    add_training_flags,
    check_training_flags,
    choose_dtype,
    reject_packed,
)
from extensions.real_models.saved_part import empty_part, with_settings
from extensions.real_models.tied_ends import tie_ends_of
from guard.around_main import guarded
from lab import attach
from pipeline.command_line import positive_integer
from pipeline.data import load_text
from pipeline.model import build_part
from pipeline.one_process import build_optimizer, train_one_process
from pipeline.training import LossLog, complete_arguments, start_job, training_parser

MODELS = {  # layers, dim, heads, kv_heads, vocabulary
    "1m": (8, 104, 4, 2, 256),
    "10m": (8, 288, 6, 2, 4096),
    "60m": (8, 512, 8, 4, 32000),
    "125m": (12, 768, 12, 4, 32000),
    "350m": (24, 1024, 16, 8, 32000),
    "1b": (20, 2048, 32, 4, 32000),
}
MOST_SAMPLED = 10_000  # tokens; each is a forward of the whole pipeline
ADAMW = {"betas": (0.9, 0.95), "weight_decay": 0.1}  # Llama 2 (2307.09288), section 2.2


@guarded
def main():
    arguments, schedule = read_flags()
    job = start_job(arguments, schedule.pairs)
    replicas, share_of_loss = form_replicas(job, arguments.replicas), ShareOfLoss()
    stop_request = StopRequest() if arguments.checkpoints else None
    masters, stages = build_stages(arguments, job, schedule, build_model_part, share_of_loss)
    training = build_training(arguments, masters)
    tied = tie_ends_of(job, arguments.config, training.parameters, schedule, arguments.replicas)
    checkpoints = continue_training(arguments, job, training)
    update_copies(stages, masters)
    worker = build_worker(replicas, schedule, masters, stages)
    forward_only = ForwardOnly(worker, replicas, share_of_loss)
    log, metrics = build_logs(arguments, job, schedule, training.step)
    batches = build_batches(arguments, replicas, schedule)
    attach.observe(
        arguments,
        job,
        stages.values(),
        schedule,
        "step" if arguments.accumulate == 1 else "pass",
        training.step,
        held=(masters.values(), training.optimizer),
    )
    evaluate(arguments, forward_only, metrics, training.step)
    if training.step < arguments.steps:  # else the sample at the end is the same one
        show_sample(arguments, forward_only, training.step)
    ending = None  # why the training ends before its last step
    for step in range(training.step, arguments.steps):
        metrics.start_step()
        passes, share_of_loss.real_tokens = batches.take(training.batches)
        training.optimizer.zero_grad()
        loss = replicas.sum_loss(run_passes(passes, worker))
        tied.sum_gradients()
        norm = clip_gradients(job, tied.named_once(), arguments.clip)
        ending = find_not_finite(job, step, loss, norm)
        if not ending:
            training.optimizer.step()
            update_copies(stages, masters)
        metrics.end_step(step, loss, training.optimizer, norm, share_of_loss.real_tokens)
        training.advance()
        log.add(step, loss)
        if not ending:
            if training.step == arguments.steps or training.step % arguments.evaluate_every == 0:
                evaluate(arguments, forward_only, metrics, training.step)
            ending = save_when_due(arguments, job, training, checkpoints, stop_request)
        if ending:
            break
    if not ending:
        show_sample(arguments, forward_only, training.step)
    metrics.print_summary()
    status = status_of_end(job, training, checkpoints, ending)
    job.leave()
    return log.finish(job.device, one_process, not ending) or status or int(not metrics.is_whole)


def read_flags():
    """The flags, and the schedule of all replicas."""
    parser = program_parser()
    attach.add_flags(parser)
    arguments = parser.parse_args()
    arguments.settings = None
    schedule = complete_flags(parser, arguments, read_corpus)
    # A continued run must have the same values of these flags, too; here are their defaults.
    warm_up = arguments.warm_up_steps or 10
    further = {"warm_up_steps": 10, "decay_steps": max(arguments.steps, warm_up + 1), "clip": 1.0}
    further |= dict.fromkeys(["vocabulary", "packed", "shuffle", "settings"])
    check_checkpoint_arguments(arguments, further)
    check_rate(arguments)
    if arguments.settings:
        take_settings(arguments)
    check_training_flags(arguments, schedule)
    return arguments, schedule


def program_parser():
    """The parser with the flags of this program, except the lab's."""
    parser = training_parser(__doc__)
    add, count = parser.add_argument, {"type": positive_integer, "metavar": "N"}
    add("--model", choices=list(MODELS), default="1m", help="sizes by name; flags override them")
    add("--vocabulary", help="tokens that the model knows; bytes are 256", **count)
    add_training_flags(parser, warm_up_steps=10)
    add_replica_arguments(parser)
    add("--accumulate", default=1, help="passes per update", **count)
    add("--evaluate-every", default=50, help="steps between evaluations", **count)
    add("--evaluate-windows", default=256, help="most rows of an evaluation", **count)
    add("--sample", help="write N tokens, before and after", **count)
    add("--metrics", metavar="FILE", help="log of the training, one JSON object per line")
    add_checkpoint_arguments(parser)
    parser.writes.append("--metrics")
    sizes = dict.fromkeys(["layers", "dim", "heads", "kv_heads", "vocabulary", "dtype"])
    parser.set_defaults(steps=100, optimizer="adamw", seq_len=128, batch_size=32, **sizes)
    return parser


def complete_flags(parser, arguments, read_data):
    """Check the flags, and add what follows from them. Returns the schedule of all replicas.

    `read_data` may read nothing, if only the sizes of a training run are needed.
    """
    complete_sizes(arguments)
    complete_arguments(parser, arguments, read_data)
    arguments.microbatch_size = arguments.batch_size // pieces_of_batch(arguments)
    return choose_replicated_schedule(arguments)


def take_settings(arguments):
    """Set the config to that of a model that convert.py has brought into --checkpoints."""
    try:
        arguments.config = with_settings(arguments.config, arguments.settings)
    except ValueError as error:
        raise SystemExit(
            f"--checkpoints {arguments.checkpoints}: {error}; bring the model in again with convert.py"
        ) from None
    if arguments.seq_len > arguments.config.longest:
        raise SystemExit(
            f"--seq-len {arguments.seq_len} is more than the {arguments.config.longest} positions of "
            f"the model in --checkpoints {arguments.checkpoints}; use fewer"
        )
    if arguments.verify:
        raise SystemExit(
            "--verify begins with drawn weights, and those of --checkpoints came in with convert.py; "
            "leave it out, or use finetune.py, which compares with transformers"
        )


def complete_sizes(arguments):
    """Fill in the sizes of --model and the machine's dtype; reject sizes that do not fit."""
    names = ("layers", "dim", "heads", "kv_heads", "vocabulary")
    for name, size in zip(names, MODELS[arguments.model]):
        if getattr(arguments, name) is None:
            setattr(arguments, name, size)
    choose_dtype(arguments)
    if arguments.batch_size % pieces_of_batch(arguments):
        raise SystemExit(
            f"--batch-size {arguments.batch_size} cannot be cut into --replicas "
            f"{arguments.replicas} times --accumulate {arguments.accumulate} times --microbatches "
            f"{arguments.microbatches} equal parts; use a multiple of {pieces_of_batch(arguments)}"
        )
    if arguments.vocabulary < BYTES:
        raise SystemExit(
            f"--vocabulary {arguments.vocabulary} has no room for all bytes; use at least 256"
        )
    if (arguments.sample or 0) > MOST_SAMPLED:
        raise SystemExit(f"--sample {arguments.sample}: {MOST_SAMPLED:,} tokens are the most")


def pieces_of_batch(arguments):
    return arguments.replicas * arguments.accumulate * arguments.microbatches


def read_corpus(arguments):
    """Return the text to learn: the bytes of a file, or a folder of prepare_data.py, or your own.

    What the rest relies on: `batch(number, batch_size, seq_len, seed)` returns inputs and targets,
    both (batch_size, seq_len), int64, from its arguments alone, the same on every rank and after a
    restart; targets that are PADDING do not count. `windows(seq_len, most)` returns rows of the
    held-out part in the same form, at most `most`. `training` and `held_out`, int64, tell one text
    from another when a checkpoint is continued; `encode`, `decode` and `num_tokens` are for the
    sample, and `bytes_per_token` for the bits per byte. If the targets do not mark where documents
    end, call `reject_packed`, because --packed would have no effect.
    """
    if is_token_folder(arguments.data):
        sizes = arguments.vocabulary, arguments.seq_len
        return load_tokens(arguments.data, *sizes, arguments.packed)
    reject_packed(arguments)
    return load_corpus(load_text(arguments.data, arguments.seq_len))


def build_model_part(arguments, first, last, device="cpu"):
    """The module of layers `first` to `last` - 1: build your own model here.

    What the rest relies on: it takes tokens (rows, seq_len) where `first` is 0, else an activation
    (rows, seq_len, dim), and returns an activation, or scores (rows, seq_len, vocabulary) where
    `last` is --layers. Its parameters are named as in the whole model and start from the same
    values however it is cut. --recompute stage and layer also need `layers`, and forward(x,
    start=0, end=None), which runs only these layers; selective needs attention.mix. With --packed,
    forward also gets `mask`, which keeps the documents of a row apart.
    """
    dtype = torch.float32 if arguments.dtype == "bfloat16" else arguments.torch_dtype
    if arguments.settings:  # all weights will be those of the checkpoint
        return empty_part(arguments.config, first, last, dtype, device)
    return build_part(arguments.config, first, last, arguments.seed, dtype, device)


def build_training(arguments, masters):
    """All that a checkpoint holds of this rank: one optimizer for the parameters of all its stages."""
    a = arguments
    parameters = dict(pair for part in masters.values() for pair in part.named_parameters())
    rule = build_optimizer(a.optimizer, parameters.values(), a.learning_rate, **ADAMW)
    rate = WarmUpThenCosine(rule, a.learning_rate, a.warm_up_steps, a.decay_steps)
    return Training(parameters, rule, rate, a.configuration, a.seed)


def build_worker(replicas, schedule, masters, stages):
    """The worker, which sums the gradients of the parts that are updated over the replicas."""
    reduction = AllReduce(replicas, schedule)
    for index, stage in stages.items():
        reduction.wrap(masters[index], index)
        if stage.part is not masters[index]:
            reduction.follow(stage.part, masters[index])
    return DataParallelWorker(replicas.job, schedule, stages, reduction)


def build_logs(arguments, job, schedule, first_step):
    """The log of the losses and the one of --metrics, which the rank with the losses writes."""
    a, has_loss = arguments, job.rank == schedule.rank_of(schedule.num_stages - 1, 0)
    model = a.config, a.torch_dtype
    metrics = Metrics(job, a.metrics, *model, has_loss, first_step)
    return LossLog(a, has_loss, first_step), metrics


def build_batches(arguments, replicas, schedule):
    """The Batches: for each batch, this replica's passes and the number of all replicas' tokens."""
    needed = needed_on(schedule, replicas.job.rank, arguments.packed)
    cut = partial(passes_of, arguments, replicas)
    return Batches(arguments, cut, needed, replicas.job.device)


def passes_of(arguments, replicas, batch, device="cpu"):
    """This replica's micro-batches of `batch`, for each pass through the schedule that it takes."""
    rows = arguments.replicas * arguments.microbatches * arguments.microbatch_size
    return [
        own_microbatches(part, replicas, arguments.microbatches, device)
        for part in zip(*(tokens.split(rows) for tokens in batch))
    ]


def run_passes(passes, worker):
    """The passes of one update: their gradients add up, and so do their shares of the loss."""
    losses = []
    for number, (inputs, targets) in enumerate(passes, 1):
        worker.sums = number == len(passes)  # replicas exchange gradients once they are whole
        losses.append(worker.run_step(inputs, targets))
    return None if losses[0] is None else sum(losses)


def evaluate(arguments, forward_only, metrics, step):
    """Say how well the held-out text is predicted after `step` updates."""
    rows = arguments.replicas * arguments.microbatches * arguments.microbatch_size
    windows = filled_up(arguments.text.windows(arguments.seq_len, arguments.evaluate_windows), rows)
    passes = passes_of(arguments, forward_only.replicas, windows, forward_only.job.device)
    loss = forward_only.mean_loss(passes, count_real_tokens([windows[1]]))
    metrics.held_out(step, loss, arguments.text.bytes_per_token)


def one_process(arguments, device):
    """The losses of one process with the same model, batches, clipping and rates."""

    def build_whole(arguments, device):
        return build_model_part(arguments, 0, arguments.layers, device)

    loss_of = masked_loss if arguments.packed else None
    return train_one_process(arguments, device, clip_and_set_rate, build_whole, loss_of, **ADAMW)


if __name__ == "__main__":
    sys.exit(main())
