"""Forecasts a training run with exactly the given flags: `--plan` of pretrain_llama.py.

plan.py compares many plans. This module makes the same forecast for the one plan that the flags
describe. The simulator is imported only with --plan, because a training run does not need it.
"""

from dataclasses import replace

from extensions.planning.machine import Machine, machine_names, read_machine
from extensions.planning.training_plan import Plan
from extensions.planning.transformer import Model
from pipeline.command_line import reject
from pipeline.inputs import InputError

AGAIN = {"none": "none", "selective": "selective", "layer": "full", "stage": "full"}


def add_flag(parser):
    """Add --machine to a parser of `training_parser`, and check it with the other flags."""
    names = ", ".join(machine_names())
    parser.add_argument(
        "--machine", metavar="NAME", help=f"of --plan's seconds: {names}, or a file; a DGX A100"
    )
    parser.checks += [check_machine]


def check_machine(arguments):
    if arguments.plan:
        machine_of(arguments)
    elif arguments.machine:
        reject(f"--machine {arguments.machine} is for --plan; add --plan RANKS, or leave it out")


def print_seconds(arguments, schedule):
    """Print how long an update takes on --machine, how idle its ranks are, and what limits it."""
    from extensions.planning.forecast import forecast
    from extensions.planning.reasons import limit_of

    machine, model, plan = machine_of(arguments), model_of(arguments), plan_of(arguments, schedule)
    found = forecast(model, machine, plan)
    work = found.update - found.reduction - found.optimizer
    seconds = arguments.accumulate * work + found.reduction + found.optimizer
    whole = replace(model, batch=arguments.batch_size)
    rate = whole.model_flops / plan.gpus / seconds
    print(
        f"{arguments.batch_size} sequences of {model.length} tokens per update, "
        f"{arguments.microbatches} micro-batches of {plan.microbatch}, {arguments.dtype}, "
        f"cut {','.join(map(str, plan.cut))}"
    )
    print(
        f"on {plan.gpus} GPUs of {arguments.machine or 'a DGX A100'}: {seconds:.3g} s per update "
        f"+-{machine.error:.0%}, {whole.batch * whole.length / seconds:,.0f} tokens per second, "
        f"MFU {rate / machine.peak:.1%}, idle {idle(found):.1%}, "
        f"limited by {limit_of(model, machine, found)}"
    )
    if machine.bytes_per_value != arguments.torch_dtype.itemsize:
        print(f"the seconds are those of {8 * machine.bytes_per_value} bits per number")
    if arguments.option:
        print("the seconds are those of the schedule without --option")


def idle(found):
    return max(0.0, found.bubble_over_ideal / (1 + found.bubble_over_ideal))


def machine_of(arguments):
    """The Machine of --machine, else a DGX A100."""
    if arguments.machine is None:
        return Machine(arguments.plan)
    try:
        machine = read_machine(arguments.machine, arguments.plan)
    except InputError as error:
        reject(f"--machine: {error}")
    if machine.measured and arguments.plan != machine.gpus_per_node:
        reject(
            f"--plan {arguments.plan}: {arguments.machine} was measured with "
            f"{machine.gpus_per_node} at once; use {machine.gpus_per_node}"
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
    ranks = arguments.plan // arguments.replicas
    return Plan(
        arguments.schedule,
        ranks,
        schedule.num_stages // ranks,
        arguments.replicas,
        microbatch=arguments.microbatch_size,
        recompute=AGAIN[arguments.recompute],
        sharding=arguments.sharding,
        cut=tuple(arguments.cut),
    )
