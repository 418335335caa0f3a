# SPDX-License-Identifier: Apache-2.0
"""Plan a pipeline: which layers make a stage, and how many workers replicate it (lesson 04b).

    python source_code/plan_partition.py --workers 4 --bandwidth 1e9 --straight
    python source_code/plan_partition.py --workers 4 --bandwidth 1e9 \\
        --profile source_code/profiles/vgg16.json

Without --profile, the layers of the course's own model are measured on this machine; --save keeps
what was measured, for --profile or as the MODEL of plan.py.
"""

import sys

from files.outputs import not_written, to_json, write_output
from guard.flags import check_alone
from guard.one_sentence import in_one_sentence
from guard.paths import check_file
from guard.sizes import check_duration, check_memory
from pipeline.command_line import Parser, positive_integer, positive_number
from pipeline.job import choose_device
from pipeline.model import ModelConfig
from pipeline.training import DTYPES, complete_arguments
from planning.partition import (
    PartitionError,
    check_size,
    plan_stages,
    profile_as_json,
    profile_model,
    read_profile,
)

OF_MODEL = "layers", "dim", "heads", "kv_heads", "seq_len", "batch_size", "dtype", "device"
STAGE_KEYS = ("first_layer", "last_layer", "replicas", "seconds")


@in_one_sentence()
def main():
    arguments = parse_arguments()
    try:
        profile = read_profile(arguments.profile) if arguments.profile else measure(arguments)
        plan = plan_stages(
            profile,
            arguments.workers,
            arguments.bandwidth,
            overlap=not arguments.no_overlap,
            straight=arguments.straight,
            memory=arguments.memory,
        )
    except PartitionError as error:
        raise SystemExit(str(error)) from None
    if arguments.save:
        sizes = arguments.config, arguments.batch_size, arguments.torch_dtype
        text = to_json(profile_as_json(profile, *sizes), indent=1)
        write_output("--save", arguments.save, text + "\n")
    if arguments.json:
        print(to_json(figures(plan)))
    else:
        print(in_words(arguments, profile, plan))
    return int(bool(not_written))


def parse_arguments():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--profile", metavar="FILE", help="what each layer costs, as JSON")
    add("--workers", type=positive_integer, required=True, metavar="N", help="to use, all of them")
    add("--bandwidth", type=positive_number, required=True, metavar="X", help="bytes per second")
    add("--straight", action="store_true", help="one worker per stage")
    add("--no-overlap", action="store_true", help="communicate after computing, not during it")
    add("--memory", type=positive_number, metavar="BYTES", help="of a worker, for what it stashes")
    add("--json", action="store_true", help="print the plan as JSON")
    add("--save", metavar="FILE", help="keep what was measured, as JSON")
    add = parser.add_argument_group("the course's model, measured without --profile").add_argument
    count = {"type": positive_integer, "metavar": "N"}
    add("--layers", default=ModelConfig.layers, help="decoder layers", **count)
    add("--dim", default=ModelConfig.dim, help="width of the model", **count)
    add("--heads", default=ModelConfig.heads, help="query heads", **count)
    add("--kv-heads", default=ModelConfig.kv_heads, help="key and value heads", **count)
    add("--seq-len", default=ModelConfig.seq_len, help="tokens per sequence", **count)
    add("--batch-size", default=16, help="sequences per mini-batch", **count)
    add("--dtype", choices=list(DTYPES), default="float64", help="of weights and activations")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to compute")
    # Flags of a training script that are fixed here: one micro-batch, and no training.
    parser.set_defaults(microbatches=1, seed=0, learning_rate=None, optimizer="sgd")
    arguments = parser.parse_args()
    if arguments.bandwidth < 1:
        raise SystemExit(f"--bandwidth {arguments.bandwidth:g} must be at least 1 byte per second")
    if arguments.save and arguments.profile:
        raise SystemExit(
            "--save keeps what is measured, and --profile measures nothing; use one of them"
        )
    if arguments.save:
        check_file("--save", arguments.save)
    check_alone(parser, arguments, "profile", OF_MODEL)
    if arguments.profile is None:
        parser.checks += [check_plan_size, check_memory_of_a_layer, check_time_of_all]
        complete_arguments(parser, arguments, read_data=lambda _: None)
    return arguments


def check_plan_size(arguments):
    """Reject, before layers are timed, a plan that cannot exist or would take minutes to find."""
    try:
        check_size(arguments.layers, arguments.workers, arguments.straight)
    except PartitionError as error:
        raise SystemExit(str(error)) from None


def check_memory_of_a_layer(arguments):
    """Reject sizes for which the timing of a single layer would not fit into the memory."""
    arguments.num_ranks = arguments.layers
    check_memory(arguments)


def check_time_of_all(arguments):
    """Reject sizes for which the timing of all layers would take hours."""
    arguments.num_ranks = 1
    check_duration(arguments)


def measure(arguments):
    """Measure the profile of the course's model in the sizes of the flags."""
    device = choose_device(arguments.device, local_rank=0)
    return profile_model(arguments.config, arguments.batch_size, arguments.torch_dtype, device)


def figures(plan):
    """Return the plan, under the names that --json prints. Seconds are per mini-batch."""
    return {
        "stages": [{key: getattr(stage, key) for key in STAGE_KEYS} for stage in plan.stages],
        "seconds_per_minibatch": plan.seconds_per_minibatch,
        "data_parallel_seconds": plan.data_parallel_seconds,
    }


def in_words(arguments, profile, plan):
    """Return the text without --json: a row per stage, and the flags of such a training run."""
    speed_up = plan.data_parallel_seconds / plan.seconds_per_minibatch
    relation = "on top of" if arguments.no_overlap else "during"
    lines = [
        f"{profile.model}: {len(profile.layers)} layers on {arguments.workers} workers, "
        f"{arguments.bandwidth:g} bytes/s, communication {relation} computation",
        "stage  first layer  last layer  replicas  milliseconds  to the next stage",
    ]
    for index, stage in enumerate(plan.stages):
        lines.append(
            f"{index:5}  {stage.first_layer:11}  {stage.last_layer:10}  {stage.replicas:8}  "
            f"{1000 * stage.seconds:12.3f}  {1000 * stage.boundary_seconds:17.3f}"
        )
    lines += [
        f"seconds per mini-batch  {plan.seconds_per_minibatch:.6g}  (the slowest of the above)",
        f"data parallel           {plan.data_parallel_seconds:.6g}  (all layers on every worker)",
        f"speed-up                {speed_up:.2f}  (data parallel / this plan)",
    ]
    flags = f"--cut {','.join(map(str, plan.cut))}"
    if any(stage.replicas > 1 for stage in plan.stages):
        flags = f"--replicas {'-'.join(str(stage.replicas) for stage in plan.stages)} {flags}"
    return "\n".join([*lines, f"for pipedream.py        {flags}"])


if __name__ == "__main__":
    sys.exit(main())
