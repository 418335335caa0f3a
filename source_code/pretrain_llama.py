"""Pretrain a small Llama: what the lessons built, in one program (lesson 12).

    torchrun --standalone --nproc-per-node 4 source_code/pretrain_llama.py --steps 200 --sample 100

By name from one million parameters to one billion; any synchronous schedule, replicas,
recomputation, bfloat16 with float32 master weights (the default on a GPU), accumulation over
several passes, held-out perplexity, checkpoints that continue on any number of ranks.

    python source_code/pretrain_llama.py --model 1b --plan 8 --recompute layer --dtype bfloat16

says what each of eight ranks would have to hold, and starts none.

To begin a program of your own, copy this file. The model is built in `build_model_part`, the data
are read in `read_corpus`: both say what they promise to the rest.
"""

import sys
from contextlib import nullcontext

import torch

from pipeline.arguments import (
    check_rate,
    choose_schedule,
    parse_training_arguments,
    positive_integer,
    positive_number,
    refuse,
    training_parser,
)
from pipeline.checkpointing.checkpoint import Training
from pipeline.checkpointing.checkpoint_arguments import (
    add_checkpoint_arguments,
    check_checkpoint_arguments,
    continue_training,
    end_diverged,
    export_newest,
)
from pipeline.checkpointing.checkpoint_folder import mark_stopped
from pipeline.checkpointing.stop_request import STOPPED, StopRequest
from pipeline.data_parallel.replica_arguments import (
    add_replica_arguments,
    choose_replicated_schedule,
    pipeline_ranks,
)
from pipeline.data_parallel.replicas import AllReduce, form_replicas, own_microbatches
from pipeline.distributed import gather, join_job, leave_job
from pipeline.memory.footprint import count_weights, measure_memory, memory_table, predict_memory
from pipeline.memory.recompute import MODES, build_recomputing_stage
from pipeline.model import build_part
from pipeline.optimization.clipping import clip_gradients, norm_of, scale_gradients, squares_of
from pipeline.optimization.finite import find_not_finite
from pipeline.optimization.learning_rate import WarmUpThenCosine, share_of_peak
from pipeline.optimization.mixed_precision import computing_copy, hand_over_put_off, refresh
from pipeline.optimizer import build_optimizer
from pipeline.pretraining.forward_only import ForwardOnly
from pipeline.pretraining.metrics import Metrics
from pipeline.pretraining.padding import ShareOfLoss, count_real_tokens
from pipeline.pretraining.tokens import BYTES, filled_up, load_corpus, read_content, stream_content
from pipeline.recorder import Recorder
from pipeline.reference import train_one_process
from pipeline.report import Report
from pipeline.schedules import synchronous_schedules
from pipeline.worker import Worker

MODELS = {  # layers, dim, heads, kv_heads, vocabulary
    "1m": (8, 104, 4, 2, 256),
    "10m": (8, 288, 6, 2, 4096),
    "60m": (8, 512, 8, 4, 32000),
    "125m": (12, 768, 12, 4, 32000),
    "350m": (24, 1024, 16, 8, 32000),
    "1b": (20, 2048, 32, 4, 32000),
}
ADAMW = {"betas": (0.9, 0.95), "weight_decay": 0.1}  # Llama 2 (2307.09288), section 2.2


def main():
    arguments = parse_arguments()
    if arguments.plan:
        return print_plan(arguments)
    if arguments.export:
        return export_newest(arguments)
    schedule = arguments.built_schedule
    job = join_job(arguments.device, arguments.timeout, schedule.pairs)
    replicas = form_replicas(job, arguments.replicas)
    stop_request = StopRequest() if arguments.checkpoints else None
    recorder = Recorder(job, arguments.paced)
    loss_function = ShareOfLoss()
    reduction = AllReduce(replicas, schedule)
    masters, stages = build_stages(arguments, job, schedule, recorder, loss_function, reduction)
    training = build_training(arguments, masters)
    checkpoints = continue_training(arguments, job, training)
    update_copies(stages, masters)
    shape = (arguments.microbatch_size, arguments.seq_len, arguments.dim)
    worker = Worker(job, schedule, stages, shape, arguments.torch_dtype)
    forward_only = ForwardOnly(worker, replicas, loss_function)
    what = "step" if arguments.accumulate == 1 else "pass"
    report = Report(arguments, job, schedule, recorder, what, first_step=training.step)
    metrics = build_metrics(arguments, job, report)

    evaluate(arguments, forward_only, metrics, training.step)
    show_sample(arguments, forward_only, training.step)
    stopped = diverged = None
    for step in report.steps():
        metrics.start_step()
        batch = batch_of(arguments, training.batches)
        # Every rank draws the whole batch, so each knows how many tokens all of them have.
        loss_function.real_tokens = count_real_tokens([batch[1]])
        training.optimizer.zero_grad()
        loss = run_passes(passes_of(arguments, replicas, batch), worker, reduction, report)
        loss = replicas.sum_loss(loss)
        norm = clip_gradients(job, training.parameters.items(), arguments.clip)
        training.optimizer.step()
        update_copies(stages, masters)
        metrics.end_step(
            step, loss, training.optimizer.param_groups[0]["lr"], norm, loss_function.real_tokens
        )
        training.advance()
        report.record_step(step, loss)
        diverged = find_not_finite(job, step, loss, norm)
        if diverged:
            break
        last = training.step == arguments.steps
        if last or training.step % arguments.evaluate_every == 0:
            evaluate(arguments, forward_only, metrics, training.step)
        if checkpoints:
            stopped = stop_request.agreed(job)
            if stopped or last or training.step % arguments.save_every == 0:
                diverged = checkpoints.save(training)
        if stopped or diverged:
            break
    if not stopped and not diverged:
        show_sample(arguments, forward_only, training.step)

    memory = measure_memory(stages, masters, training.optimizer, recorder.meter)
    ended_early = stopped, diverged
    status = finish(arguments, job, training, memory, checkpoints, report, metrics, *ended_early)
    leave_job(job)
    if stopped or diverged:
        return status
    return status if report.verify(one_process) else 1


def parse_arguments():
    parser = training_parser(__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=list(MODELS), default="1m", help="sizes by name; flags override them")
    add("--vocabulary", type=positive_integer, metavar="N", help="256: bytes; more: byte pairs")
    add("--tokenizer", metavar="FILE", help="a tokenizer.json, else one is trained on the text")
    add("--documents", action="store_true", help="a row is one document, between blank lines")
    add("--dataset", metavar="NAME", help="a Hugging Face data set to stream, instead of --data")
    add("--characters", type=positive_integer, default=10_000_000, metavar="N", help="of --dataset")
    names = synchronous_schedules()
    add("--schedule", choices=names, default="1f1b", help="order of the work in a pipeline")
    add("--chunks", type=positive_integer, metavar="V", help="stages on each rank")
    add_replica_arguments(parser)
    add("--recompute", choices=list(MODES), default="none", help="what runs forward a second time")
    add("--accumulate", type=positive_integer, default=1, metavar="A", help="passes an update")
    add("--warm-up-steps", type=positive_integer, metavar="N", help="updates to the peak, else 10")
    add("--decay-steps", type=positive_integer, metavar="N", help="end of the cosine, else --steps")
    add("--clip", type=positive_number, metavar="X", help="largest norm of the gradient, else 1")
    add("--evaluate-every", type=positive_integer, default=50, metavar="N", help="steps")
    add("--evaluate-windows", type=positive_integer, default=256, metavar="N", help="most rows")
    add("--sample", type=positive_integer, metavar="N", help="write N tokens, before and after")
    add("--metrics", metavar="FILE", help="log of the training, one JSON object a line")
    add("--peak-flops", type=positive_number, metavar="X", help="FLOP/s of all devices, for MFU")
    add("--plan", type=positive_integer, metavar="RANKS", help="say what each would hold, and end")
    add_checkpoint_arguments(parser)
    sizes = dict.fromkeys(["layers", "dim", "heads", "kv_heads", "vocabulary", "dtype"])
    parser.set_defaults(steps=100, optimizer="adamw", seq_len=128, batch_size=32, **sizes)
    arguments = parse_training_arguments(parser, number_of_stages, complete, read_corpus)
    arguments.microbatch_size = arguments.batch_size // pieces_of_batch(arguments)
    arguments.built_schedule = choose_replicated_schedule(arguments)
    if not arguments.plan:
        further = {"warm_up_steps": 10, "decay_steps": max(arguments.steps, 11), "clip": 1.0}
        check_checkpoint_arguments(arguments, {"vocabulary": 0, "documents": 0, **further})
        check_rate(arguments)
    return arguments


def complete(arguments):
    """Fill in what --model and the machine say, and refuse what does not fit together."""
    names = ("layers", "dim", "heads", "kv_heads", "vocabulary")
    for name, size in zip(names, MODELS[arguments.model]):
        if getattr(arguments, name) is None:
            setattr(arguments, name, size)
    if arguments.dtype is None:
        on_gpu = arguments.device != "cpu" and torch.cuda.is_available()
        arguments.dtype = "bfloat16" if on_gpu else "float32"
    if arguments.plan and arguments.num_ranks > 1:
        refuse("--plan is the work of one process; start it with python instead of torchrun")
    arguments.num_ranks = arguments.plan or arguments.num_ranks
    if arguments.batch_size % pieces_of_batch(arguments):
        refuse(
            f"--batch-size {arguments.batch_size} cannot be cut into --replicas "
            f"{arguments.replicas} times --accumulate {arguments.accumulate} times --microbatches "
            f"{arguments.microbatches} equal parts; use a multiple of {pieces_of_batch(arguments)}"
        )
    if arguments.vocabulary < BYTES:
        refuse(f"--vocabulary {arguments.vocabulary} has no room for all bytes; use at least 256")
    if arguments.dataset and arguments.data:
        refuse("--dataset and --data both say what to learn; use one of them")


def pieces_of_batch(arguments):
    return arguments.replicas * arguments.accumulate * arguments.microbatches


def number_of_stages(arguments):
    return choose_schedule(arguments, pipeline_ranks(arguments)).num_stages


def read_corpus(arguments):
    """What is learnt: read your own data here.

    What the rest relies on: `batch(number, batch_size, seq_len, seed)` returns inputs and targets,
    both (batch_size, seq_len), int64, from its arguments alone, the same on every rank and after a
    restart; targets that are PADDING do not count. `windows(seq_len, most)` returns as much of the
    held-out part, at most `most` rows. `training` and `held_out`, int64, tell one text from another
    when a checkpoint is continued; `encode`, `decode` and `num_tokens` are for the sample, and
    `bytes_per_token` for the bits a byte.
    """
    if arguments.plan:
        return None
    if arguments.dataset:
        content = stream_content(arguments.dataset, arguments.characters, arguments.seq_len)
    else:
        content = read_content(arguments.data, arguments.seq_len)
    return load_corpus(
        content, arguments.vocabulary, arguments.tokenizer, arguments.documents, arguments.seq_len
    )


def build_model_part(arguments, first, last, device="cpu"):
    """The module of layers `first` to `last` - 1: build your own model here.

    What the rest relies on: it takes tokens (rows, seq_len) where `first` is 0, else an activation
    (rows, seq_len, dim), and returns an activation, or scores (rows, seq_len, vocabulary) where
    `last` is --layers. Its parameters are named as in the whole model and start from the same
    values however it is cut. --recompute stage and layer also want `layers`, and
    forward(x, start=0, end=None), which runs only these of them; selective wants attention.mix.
    """
    dtype = torch.float32 if arguments.dtype == "bfloat16" else arguments.torch_dtype
    return build_part(arguments.config, first, last, arguments.seed, dtype, device)


def build_stages(arguments, job, schedule, recorder, loss_function, reduction):
    """By index, the parts that are updated and the stages that compute with them or a copy."""

    def share_of_loss(scores, targets):
        # Of bfloat16 no sum over a vocabulary can be made.
        return loss_function(scores.float() if arguments.dtype == "bfloat16" else scores, targets)

    masters, stages = {}, {}
    for index in schedule.stages_of(job.rank):
        master = build_model_part(arguments, *arguments.stage_layers[index], job.device)
        masters[index] = reduction.wrap(master, index)
        stages[index] = build_recomputing_stage(
            arguments.recompute,
            1,
            computing_copy(master, arguments.torch_dtype),
            index,
            schedule.num_stages,
            recorder,
            share_of_loss,
        )
        hand_over_put_off(stages[index], master)
    return masters, stages


def build_training(arguments, masters):
    """All that a checkpoint holds of this rank: one optimizer for the parameters of all its stages."""
    parameters = dict(pair for part in masters.values() for pair in part.named_parameters())
    optimizer = build_optimizer(
        arguments.optimizer, parameters.values(), arguments.learning_rate, **ADAMW
    )
    rate = WarmUpThenCosine(
        optimizer, arguments.learning_rate, arguments.warm_up_steps, arguments.decay_steps
    )
    return Training(parameters, optimizer, rate, arguments.configuration, arguments.seed)


def update_copies(stages, masters):
    for index, stage in stages.items():
        refresh(stage.part, masters[index])


def batch_of(arguments, number):
    """Inputs and targets of batch `number`, (batch size, length) tokens each, of all replicas."""
    return arguments.text.batch(number, arguments.batch_size, arguments.seq_len, arguments.seed)


def passes_of(arguments, replicas, batch):
    """This replica's micro-batches of `batch`, for each pass through the schedule that it takes."""
    rows = arguments.replicas * arguments.microbatches * arguments.microbatch_size
    return [
        own_microbatches(part, replicas, arguments.microbatches, replicas.job.device)
        for part in zip(*(tokens.split(rows) for tokens in batch))
    ]


def run_passes(passes, worker, reduction, report):
    """The passes of one update: their gradients add up, and so do their shares of the loss."""
    losses = []
    for number, (inputs, targets) in enumerate(passes, 1):
        last = number == len(passes)
        # Replicas exchange gradients once they are whole.
        worker.around = reduction.around if last else lambda action: nullcontext()
        losses.append(worker.run_step(inputs, targets))
        if not last:
            report.record_pass()
    reduction.finish()
    return None if losses[0] is None else sum(losses)


def build_metrics(arguments, job, report):
    return Metrics(
        job,
        arguments.metrics,
        arguments.config,
        arguments.torch_dtype,
        report.has_loss,
        report.first_step,
        arguments.peak_flops,
    )


def evaluate(arguments, forward_only, metrics, step):
    """Say how well the held-out text is predicted after `step` updates."""
    rows = arguments.replicas * arguments.microbatches * arguments.microbatch_size
    windows = filled_up(arguments.text.windows(arguments.seq_len, arguments.evaluate_windows), rows)
    passes = passes_of(arguments, forward_only.replicas, windows)
    loss = forward_only.mean_loss(passes, count_real_tokens([windows[1]]))
    metrics.held_out(step, loss, arguments.text.bytes_per_token)


def show_sample(arguments, forward_only, step):
    """Let the model continue the first words of the held-out text."""
    if arguments.sample:
        prompt = arguments.text.held_out[: arguments.seq_len // 4].tolist()
        tokens = forward_only.generate(
            prompt, arguments.sample, arguments.text.num_tokens, arguments.seed
        )
        if forward_only.job.rank == 0:
            begin, continuation = map(arguments.text.decode, (prompt, tokens[len(prompt) :]))
            print(f"after {step} steps  {begin!r} -> {continuation!r}", flush=True)


def print_plan(arguments):
    """Say what each rank would hold."""
    memory = predicted_memory(arguments)
    weights = count_weights(arguments.config)[0]
    print(f"{arguments.model}: {weights:,} weights, {arguments.built_schedule.name}")
    print(memory_table({"predicted": memory}))
    most = max(range(len(memory)), key=lambda rank: memory[rank].total)
    print(f"the most on rank {most}: {memory[most].total / 2**30:.2f} GiB, and what torch needs")
    return 0


def predicted_memory(arguments):
    return predict_memory(
        arguments.config,
        arguments.built_schedule,
        arguments.stage_layers,
        arguments.microbatch_size,
        arguments.torch_dtype.itemsize,
        arguments.optimizer,
        arguments.recompute,
    )


def finish(arguments, job, training, memory, checkpoints, report, metrics, stopped, diverged):
    """The end of the run, on every rank. Returns the exit status."""
    if checkpoints:
        checkpoints.finish()
    if report.events_per_step:
        if report.has_loss:
            print(metrics.summary(), flush=True)
        report.finish()
        measured = gather(job, memory)
        if job.rank == 0:
            print(memory_table({"measured": measured, "predicted": predicted_memory(arguments)}))
    elif job.rank == 0:
        print(f"nothing is left to do: {training.step} steps of --steps {arguments.steps} are done")
    if diverged:
        return end_diverged(job, diverged, checkpoints)
    if checkpoints and checkpoints.problem:
        return 1
    if not stopped:
        return 0
    if job.rank == 0:
        mark_stopped(arguments.checkpoints, f"{stopped.name} after {training.step} steps")
        print(f"stopped by {stopped.name} after {training.step} steps, saved", flush=True)
    return STOPPED


def one_process(arguments, device):
    """The losses of one process with the same model, batches, clipping and rates."""

    def clip_and_set_rate(model, optimizer, step):
        parameters = list(model.named_parameters())
        scale_gradients(parameters, norm_of(squares_of(parameters)), arguments.clip)
        share = share_of_peak(step, arguments.warm_up_steps, arguments.decay_steps)
        optimizer.param_groups[0]["lr"] = arguments.learning_rate * share

    def build_whole(arguments, device):
        return build_model_part(arguments, 0, arguments.layers, device)

    return train_one_process(arguments, device, clip_and_set_rate, build_whole, **ADAMW)


if __name__ == "__main__":
    sys.exit(main())
