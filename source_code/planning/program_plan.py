# SPDX-License-Identifier: Apache-2.0
"""Forecasts the training run that one command of pretrain_llama.py describes.

plan.py compares many plans. This module forecasts exactly one, and starts no rank.
"""

from dataclasses import replace

from extensions.pretraining.weight_count import count_weights
from files.inputs import InputError
from lab.held_bytes import memory_table
from pipeline.training import cut_layers
from planning.counted_memory import predict_memory
from planning.expected_error import expected_error
from planning.forecast import forecast
from planning.machine import Machine, read_machine
from planning.narrow import how_many, lines_of
from planning.plan_memory import usable
from planning.plan_tables import nodes_of, short_words
from planning.reasons import limit_in_words
from planning.training_plan import Plan
from planning.transformer import Model

AGAIN = {"none": "none", "selective": "selective", "layer": "full", "stage": "full"}


def print_program_plan(arguments, schedule, machine=None):
    """Print what each rank would hold and how long an update would take. Returns whether it fits.

    `arguments` are the completed flags, with `num_ranks`; `schedule` is that of all replicas, and
    `machine` a name or a JSON file of a machine, by default a DGX A100.
    """
    if arguments.cut == "auto":
        raise SystemExit(
            "--cut auto is measured by the ranks, and a plan starts none; leave it out"
        )
    read = machine_of(arguments.num_ranks, machine)
    memory = predicted_memory(arguments, schedule)
    sizes = f"{how_many(arguments.layers, 'layer')} of width {arguments.dim}"
    print(f"{sizes}, {count_weights(arguments.config)[0]:,} weights, {schedule.name}")
    print(memory_table({"predicted": memory[: arguments.num_ranks // arguments.replicas]}))
    if arguments.replicas > 1:
        print(f"each of the {arguments.replicas} replicas holds the same")
    most = max(range(len(memory)), key=lambda rank: memory[rank].total)
    needed, name, room = memory[most].total, machine or "a DGX A100", usable(read)
    gigabytes = f"{needed / 1e9:.1f} GB"
    print(f"the most on rank {most}: {needed / 2**30:.2f} GiB ({gigabytes}), and what torch needs")
    print_seconds(arguments, schedule, read, name)
    if needed > room:
        said = f"does not fit: {gigabytes}, and a GPU of {name} has {room / 1e9:.1f}"
        print("\n".join(lines_of(said)))
    return needed <= room


def predicted_memory(arguments, schedule):
    """The predicted RankMemory of each rank."""
    a = arguments
    return predict_memory(
        a.config,
        schedule,
        cut_layers(a, schedule.num_stages),
        a.microbatch_size,
        a.torch_dtype.itemsize,
        a.optimizer,
        a.recompute,
    )


def print_seconds(arguments, schedule, machine, name):
    """Print how long an update takes, how idle its ranks are, and what limits it."""
    model, plan = model_of(arguments), plan_of(arguments, schedule)
    found = forecast(model, machine, plan)
    work = found.update - found.reduction - found.optimizer
    seconds = arguments.accumulate * work + found.reduction + found.optimizer
    whole = replace(model, batch=arguments.batch_size)
    rate = whole.model_flops / plan.gpus / seconds
    said = (
        f"{how_many(arguments.batch_size, 'sequence')} of {how_many(model.length, 'token')} per "
        f"update, {how_many(arguments.microbatches, 'micro-batch')} of {plan.microbatch}, "
        f"{arguments.dtype}, cut {','.join(map(str, plan.cut))}",
        f"on {how_many(plan.gpus, 'GPU')} of {name}{nodes_of(machine)}: {seconds:.3g} s per update "
        f"({expected_error(machine, plan).text}),",
        f"{whole.batch * whole.length / seconds:,.0f} tokens per second, "
        f"MFU {rate / machine.peak:.1%}, idle {found.idle:.1%}, "
        f"limited by {limit_in_words(model, machine, found)}",
        *short_words(machine, seconds),
    )
    print("\n".join(line for text in said for line in lines_of(text)))
    if machine.bytes_per_value != arguments.torch_dtype.itemsize:
        print(f"the seconds are those of {8 * machine.bytes_per_value} bits per number")
    if arguments.option:
        print("the seconds are those of the schedule without --option")


def machine_of(gpus, name):
    """The Machine of that name or file; a DGX A100 if the name is None."""
    if name is None:
        return Machine(gpus)
    try:
        machine = read_machine(name, gpus)
    except InputError as error:
        raise SystemExit(f"--machine: {error}") from None
    if machine.measured and gpus != machine.gpus_per_node:
        raise SystemExit(
            f"--gpus {gpus}: {name} was measured with {machine.gpus_per_node} at once; "
            f"use {machine.gpus_per_node}"
        )
    return machine


def model_of(arguments):
    """The planner's Model of one pass, from the flags or from a saved model's settings."""
    config = arguments.config
    return Model(
        config.layers,
        config.dim,
        length=arguments.seq_len,
        vocabulary=config.vocabulary,
        batch=arguments.batch_size // arguments.accumulate,
        heads=config.heads,
        kv_heads=config.kv_heads,
        inner=config.hidden_dim,
        gated=True,
        tied=getattr(config, "tied", False),
    )


def plan_of(arguments, schedule):
    """The Plan of the flags. `schedule` is that of all replicas."""
    ranks = arguments.num_ranks // arguments.replicas
    return Plan(
        arguments.schedule,
        ranks,
        schedule.num_stages // ranks,
        arguments.replicas,
        microbatch=arguments.microbatch_size,
        recompute=AGAIN[arguments.recompute],
        cut=tuple(arguments.cut),
    )
