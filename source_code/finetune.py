"""Continues the training of a Hugging Face Llama or Qwen2: reads a folder, writes a folder.

    torchrun --standalone --nproc-per-node 4 source_code/finetune.py --model DIR --data FILE \\
        --save NEW_DIR

Each rank reads its own layers from DIR and writes them to NEW_DIR, which transformers loads; no
rank ever has the whole model, and nothing is downloaded. Any number of ranks, any synchronous
schedule. --verify compares every loss with transformers in one process. A file of --data is read
with the tokenizer of DIR, a folder that prepare_data.py has made as it is.
"""

import sys
from functools import partial

import torch

from extensions.optimization.clipping import clip_gradients
from extensions.optimization.compiling import add_compile_flag, check_compile, compile_layers
from extensions.optimization.learning_rate import WarmUpThenCosine
from extensions.optimization.mixed_precision import computing_copy, hand_over_deferred, refresh
from extensions.optimization.threads import add_thread_flag, check_threads, use_threads
from extensions.optimization.update import add_update_flags, check_rate, clip_and_set_rate
from extensions.planning.measured_cut import add_measured_cut, complete_cut, cut_model
from extensions.pretraining.batches import Batches, needed_on
from extensions.pretraining.forward_only import activations_of
from extensions.pretraining.packing import keep_documents_apart, masked_loss, packed
from extensions.pretraining.padding import ShareOfLoss
from extensions.pretraining.token_files import is_token_folder, load_tokens
from extensions.pretraining.tokens import BYTES, load_corpus, read_content
from extensions.real_models.library_model import check_library, library_model
from extensions.real_models.saved_folder import take_model, tokenizer_of
from extensions.real_models.saved_output import check_new_folder, config_in, save_model
from extensions.real_models.tied_ends import tie_ends_of
from extensions.recompute import MODES, recomputing
from lab import attach
from pipeline.command_line import reject
from pipeline.one_process import build_optimizer, train_one_process
from pipeline.schedules.from_flags import add_schedule_flags, choose_schedule
from pipeline.split_stage import stage_class_for
from pipeline.training import (
    LossLog,
    complete_arguments,
    start_job,
    training_parser,
)
from pipeline.worker import Worker


def main():
    arguments, schedule = read_flags()
    job = start_job(arguments, schedule.pairs)
    use_threads(arguments)
    share_of_loss = ShareOfLoss()
    build = partial(build_part_and_copy, arguments, job)
    cut = cut_model(arguments, job, schedule.num_stages, build, share_of_loss)
    masters, stages = build_stages(arguments, job, schedule, cut, share_of_loss)
    parameters = dict(pair for part in masters for pair in part.named_parameters())
    tied = tie_ends_of(job, arguments.config, parameters, schedule)
    optimizer = build_optimizer(arguments.optimizer, parameters.values(), arguments.learning_rate)
    rate = WarmUpThenCosine(
        optimizer, arguments.learning_rate, arguments.warm_up_steps, arguments.decay_steps
    )
    worker = Worker(job, schedule, stages)
    log = LossLog(arguments, any(stage.is_last for stage in stages.values()))
    attach.observe(arguments, job, stages.values(), schedule)
    needed = needed_on(schedule, job.rank, arguments.packed)
    batches = Batches(arguments, partial(pass_of, arguments), needed, job.device)
    for step in range(arguments.steps):
        [(inputs, targets)], share_of_loss.real_tokens = batches.take(step)
        optimizer.zero_grad()
        with activations_of(job, (*inputs[0].shape, arguments.dim)):
            loss = worker.run_step(inputs, targets)
        tied.sum_gradients()
        clip_gradients(job, tied.named_once(), arguments.clip)
        optimizer.step()
        rate.advance()
        for stage, master in zip(stages.values(), masters):
            refresh(stage.part, master)
        log.add(step, loss)
    if arguments.save:
        parts, config = [stage.part for stage in stages.values()], arguments.saved.config
        config = config_in(config, arguments.torch_dtype)
        save_model(
            job, "--save", arguments.save, config, parts, arguments.config, arguments.model_folder
        )
    job.leave()
    return log.finish(job.device, one_process)


def read_flags():
    """The flags, with the sizes and settings of the saved model, and the schedule."""
    parser = training_parser(__doc__)
    add = parser.add_argument
    saved = {"dest": "model_folder", "required": True, "metavar": "DIR"}
    add("--model", help="folder with a saved Llama or Qwen2", **saved)
    add("--save", metavar="DIR", help="write the trained model there, in --dtype; a new folder")
    add("--documents", action="store_true", help="a row is one document, between blank lines")
    add(
        "--packed", action="store_true", help="the same with several to a row, kept apart by a mask"
    )
    add_schedule_flags(parser, default="1f1b")
    add_measured_cut(parser)
    add_compile_flag(parser)
    add_thread_flag(parser)
    add("--recompute", choices=list(MODES), default="none", help="what runs forward a second time")
    add_update_flags(parser, warm_up_steps=1)
    sizes = dict.fromkeys(["layers", "dim", "heads", "kv_heads", "dtype"])
    parser.set_defaults(optimizer="adamw", learning_rate=1e-5, seq_len=128, clip=1.0, **sizes)
    attach.add_flags(parser)
    a = parser.parse_args()
    check_library(a)
    take_model(a, "--model", a.model_folder)
    if a.save:
        check_new_folder("--save", a.save)
    if a.dtype is None:
        on_gpu = a.device != "cpu" and torch.cuda.is_available()
        a.dtype = "bfloat16" if on_gpu else "float32"
    complete_arguments(parser, a, read_corpus)
    a.config = a.saved.settings
    a.warm_up_steps = a.warm_up_steps or 1
    a.decay_steps = a.decay_steps or max(a.steps, a.warm_up_steps + 1)
    check_rate(a)
    schedule = choose_schedule(a)
    check_compile(a, schedule)
    check_threads(a)
    complete_cut(a, schedule.num_stages)
    return a, schedule


def read_corpus(arguments):
    """What is learnt, in the tokens of the saved model."""
    a, tokenizer = arguments, tokenizer_of(arguments.model_folder)
    if is_token_folder(a.data):
        if a.documents:
            reject(f"--data {a.data} is one text of all documents; use --packed for --documents")
        return load_tokens(a.data, a.vocabulary, a.seq_len, a.packed)
    if tokenizer is None and a.vocabulary != BYTES:
        reject(
            f"--model {a.model_folder} has no tokenizer.json; make tokens for --data with prepare_data.py"
        )
    content = read_content(a.data, a.seq_len)
    corpus = load_corpus(content, a.vocabulary, tokenizer, a.documents or a.packed, a.seq_len)
    return packed(corpus, a.seq_len) if a.packed else corpus


def pass_of(arguments, batch):
    """The micro-batches of `batch`, by number: all of an update are one pass."""
    return [tuple(dict(enumerate(tokens.chunk(arguments.microbatches))) for tokens in batch)]


def build_part_and_copy(arguments, job, first, last):
    """Layers `first` to `last` - 1 as they are updated, and as they compute: the same, or a copy."""
    a = arguments
    master_dtype = torch.float32 if a.dtype == "bfloat16" else a.torch_dtype
    master = a.saved.build_part(first, last, master_dtype, job.device)
    part = computing_copy(master, a.torch_dtype)
    compile_layers(part, a.compile)
    return master, part


def build_stages(arguments, job, schedule, cut, share_of_loss):
    """The parts that are updated, and by index the stages that compute with them or with a copy."""
    a, masters, stages = arguments, [], {}
    stage_class = stage_class_for(schedule)
    for index in schedule.stages_of(job.rank):
        master, part = build_part_and_copy(a, job, *cut[index])
        masters.append(master)
        stage = stage_class(part, index, schedule.num_stages, share_of_loss)
        stages[index] = recomputing(stage, a.recompute)
        hand_over_deferred(stages[index], masters[-1])
        if a.packed:
            keep_documents_apart(stages[index])
    return masters, stages


def one_process(arguments, device):
    """The losses of transformers in one process, with the same batches, clipping and rates."""

    def build_whole(arguments, device):
        return library_model(arguments.model_folder, arguments.torch_dtype, device)

    before_update, loss_of = clip_and_set_rate(arguments), masked_loss if arguments.packed else None
    return train_one_process(arguments, device, before_update, build_whole, loss_of)


if __name__ == "__main__":
    sys.exit(main())
