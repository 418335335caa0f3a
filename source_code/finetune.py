# SPDX-License-Identifier: Apache-2.0
"""Continues the training of a saved Llama, Mistral, Qwen2 or Qwen3 of Hugging Face.

    torchrun --standalone --nproc-per-node 4 finetune.py --model DIR --data FILE \\
        --save NEW_DIR

Each rank reads its own layers from the folder DIR and writes them to the folder NEW_DIR, which
transformers loads; no rank ever has the whole model, and nothing is downloaded. Any number of
ranks, any synchronous schedule. --verify compares every loss with transformers in one process. A
file of --data is encoded with the tokenizer of DIR; a folder from prepare_data.py is read as it is.
Of JSON lines with "prompt" and "completion" only the completions are learnt.
"""

import sys
from functools import partial

import torch

from extensions.optimization.clipping import clip_gradients
from extensions.optimization.learning_rate import WarmUpThenCosine
from extensions.optimization.update import check_rate, clip_and_set_rate
from extensions.pretraining.batches import Batches, needed_on
from extensions.pretraining.packing import masked_loss
from extensions.pretraining.padding import ShareOfLoss
from extensions.pretraining.prompts import has_prompts, load_prompts
from extensions.pretraining.token_files import is_token_folder, load_tokens
from extensions.pretraining.tokens import BYTES, load_corpus
from extensions.pretraining.trained_stages import build_stages, update_copies
from extensions.pretraining.training_flags import (
    add_training_flags,
    check_training_flags,
    choose_dtype,
    reject_packed,
)
from extensions.real_models.library_model import check_library, library_model
from extensions.real_models.saved_folder import take_model, tokenizer_of
from extensions.real_models.saved_output import claim_output, save_trained
from extensions.real_models.tied_ends import tie_ends_of
from guard.around_main import guarded
from guard.paths import check_new_folder
from lab import attach
from pipeline.data import load_text
from pipeline.one_process import build_optimizer, train_one_process
from pipeline.schedules.from_flags import choose_schedule
from pipeline.training import LossLog, complete_arguments, start_job, training_parser
from pipeline.worker import Worker


@guarded
def main():
    arguments, schedule = read_flags()
    job = start_job(arguments, schedule.pairs)
    share_of_loss = ShareOfLoss()
    masters, stages = build_stages(arguments, job, schedule, build_model_part, share_of_loss)
    claim_output(arguments, job, "--save", arguments.save)
    parameters = dict(pair for part in masters.values() for pair in part.named_parameters())
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
        job.shape = (*inputs[0].shape, arguments.dim)  # of activations; batches differ in length
        loss = worker.run_step(inputs, targets)
        tied.sum_gradients()
        clip_gradients(job, tied.named_once(), arguments.clip)
        optimizer.step()
        rate.advance()
        update_copies(stages, masters)
        log.add(step, loss)
    if arguments.save:
        save_trained(arguments, job, stages, "--save", arguments.save, arguments.model_folder)
    job.leave()
    return log.finish(job.device, one_process)


def read_flags():
    """The flags, with the sizes and settings of the saved model, and the schedule."""
    parser = training_parser(__doc__)
    add = parser.add_argument
    saved = {"dest": "model_folder", "required": True, "metavar": "DIR"}
    add("--model", help="folder with a saved Llama, Mistral, Qwen2 or Qwen3", **saved)
    add("--save", metavar="DIR", help="write the trained model there, in --dtype; a new folder")
    add_training_flags(parser, warm_up_steps=1)
    parser.reads.append("--model")
    parser.writes.append("--save")
    sizes = dict.fromkeys(["layers", "dim", "heads", "kv_heads", "dtype"])
    parser.set_defaults(optimizer="adamw", learning_rate=1e-5, seq_len=128, clip=1.0, **sizes)
    attach.add_flags(parser)
    a = parser.parse_args()
    take_model(a)
    check_library(a)
    check_new_folder("--save", a.save)
    choose_dtype(a)
    complete_arguments(parser, a, read_corpus)
    a.config = a.saved.settings
    a.warm_up_steps = a.warm_up_steps or 1
    a.decay_steps = a.decay_steps or max(a.steps, a.warm_up_steps + 1)
    check_rate(a)
    schedule = choose_schedule(a)
    check_training_flags(a, schedule)
    return a, schedule


def read_corpus(arguments):
    """Return the text to learn, in the saved model's tokens; Corpus says how to use your own data."""
    a, tokenizer = arguments, tokenizer_of(arguments.model_folder)
    if is_token_folder(a.data):
        return load_tokens(a.data, a.vocabulary, a.seq_len, a.packed, tokenizer)
    reject_packed(a)
    if tokenizer is None and a.vocabulary != BYTES:
        raise SystemExit(
            f"--model {a.model_folder} has no tokenizer.json; put the model's own there, or make tokens "
            "for --data with the course's prepare_data.py and its --tokenizer"
        )
    if has_prompts(a.data):
        return load_prompts(a.data, a.vocabulary, tokenizer, a.seq_len)
    return load_corpus(load_text(a.data, a.seq_len), a.vocabulary, tokenizer, a.seq_len)


def pass_of(arguments, batch):
    """The micro-batches of `batch`, by number: all of an update are one pass."""
    return [tuple(dict(enumerate(tokens.chunk(arguments.microbatches))) for tokens in batch)]


def build_model_part(arguments, first, last, device):
    """Layers `first` to `last` - 1 as they are updated; for --verify, see `build_whole` as well."""
    dtype = torch.float32 if arguments.dtype == "bfloat16" else arguments.torch_dtype
    return arguments.saved.build_part(first, last, dtype, device)


def one_process(arguments, device):
    """The losses of transformers in one process, with the same batches, clipping and rates."""

    def build_whole(arguments, device):
        return library_model(arguments.model_folder, arguments.torch_dtype, device)

    loss_of = masked_loss if arguments.packed else None
    return train_one_process(arguments, device, clip_and_set_rate, build_whole, loss_of)


if __name__ == "__main__":
    sys.exit(main())
