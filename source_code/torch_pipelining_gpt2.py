# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models through torch.distributed.pipelining.

    torchrun --standalone --nproc-per-node 4 torch_pipelining_gpt2.py --verify

GPT-2 is cut by torch's tracer. A classifier and a Llama, which the tracer cannot train, are cut by
hand. Weights are random, drawn from the seed and their names. Nothing is ever downloaded; to
continue a saved model, see finetune.py.
"""

import sys

from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from extensions.torch_pipelining.hugging_face.classification import sequences_to_classify
from extensions.torch_pipelining.hugging_face.configuration import MODELS, model_config
from extensions.torch_pipelining.hugging_face.stages import build_own_stage, describe_stages
from extensions.torch_pipelining.hugging_face.tied_matrix import tie_ends
from extensions.torch_pipelining.hugging_face.weights import build_whole
from extensions.torch_pipelining.library import (
    complaint_about,
    join_library_job,
    mean_of,
    schedule_as_data,
)
from guard.around_main import guarded
from lab import attach
from pipeline.model import token_loss
from pipeline.one_process import build_optimizer
from pipeline.training import LossLog, cut_layers, parse_arguments, training_parser

SCHEDULE_CLASSES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


@guarded
def main():
    arguments = read_flags()
    cut = cut_layers(arguments, arguments.num_ranks)
    job = join_library_job(arguments)
    stage = build_own_stage(arguments, job, cut)
    schedule = SCHEDULE_CLASSES[arguments.schedule](
        stage,
        arguments.microbatches,
        loss_fn=token_loss,  # a classifier's loss is per sequence
    )
    optimizer = build_optimizer(
        arguments.optimizer, stage.submod.parameters(), arguments.learning_rate
    )
    tied = tie_ends(job, stage) if arguments.tied else None
    expected = schedule_as_data(arguments.schedule, job.num_ranks, arguments.microbatches, 1)
    attach.observe(arguments, job, [stage], expected)
    describe_stages(job, stage)
    log = LossLog(arguments, has_loss=job.rank == expected.num_stages - 1)

    for step in range(arguments.steps):
        inputs, targets, keywords = batch_of(arguments, job.device, step)
        optimizer.zero_grad()
        loss = run_step(arguments, job, schedule, stage, inputs, targets, keywords)
        if tied:
            tied.sum_gradients()
        optimizer.step()
        log.add(step, loss)

    job.leave()
    return log.finish(job.device, train_in_one_process)


def run_step(arguments, job, schedule, stage, inputs, targets, keywords):
    """Forward and backward of a batch. Returns the loss on the last rank, else None."""
    losses = [] if stage.is_last else None
    with job.waiting_for_all(f"a step of {arguments.schedule}"):
        schedule.step(
            *([inputs] if stage.is_first else []),
            target=targets if stage.is_last else None,
            losses=losses,
            return_outputs=False,
            **keywords,
        )
    job.complete_sends()
    return mean_of(losses)


def batch_of(arguments, device, step):
    """Inputs, targets and keyword arguments of a step, for the whole batch, on every rank."""
    batch = arguments.text.batch(step, arguments.batch_size, arguments.seq_len, arguments.seed)
    inputs, targets = (tokens.to(device) for tokens in batch)
    if arguments.model == "gpt2-classifier":
        return sequences_to_classify(inputs)
    return inputs, targets, {}


def read_flags():
    parser = training_parser(__doc__)
    add = parser.add_argument
    add("--model", choices=MODELS, default="gpt2", help="gpt2 is traced, the others cut by hand")
    add(
        "--schedule",
        choices=list(SCHEDULE_CLASSES),
        default="1F1B",
        help="the library's name of it",
    )
    add("--tied", action="store_true", help="one matrix for embedding and head, as in GPT-2")
    # GPT-2 itself has 12 layers and width 768.
    parser.set_defaults(layers=12, dim=64, kv_heads=4, optimizer="adamw", learning_rate=0.001)
    attach.add_flags(parser)
    arguments = parse_arguments(parser)
    complaint = complaint_about(
        arguments.schedule, arguments.num_ranks, arguments.microbatches, chunks=1
    )
    if complaint:
        raise SystemExit(complaint)
    if arguments.tied and arguments.model != "gpt2":
        raise SystemExit(
            f"--tied with --model {arguments.model}: only --model gpt2 ties its matrices"
        )
    arguments.model_config = model_config(arguments)
    return arguments


def train_in_one_process(arguments, device="cpu"):
    """Return the loss of every step of the unchanged model, with which --verify compares."""
    model = build_whole(arguments, device)
    optimizer = build_optimizer(arguments.optimizer, model.parameters(), arguments.learning_rate)
    losses = []
    for step in range(arguments.steps):
        inputs, targets, _ = batch_of(arguments, device, step)
        loss = token_loss(model(inputs).logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    sys.exit(main())
