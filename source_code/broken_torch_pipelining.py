# SPDX-License-Identifier: Apache-2.0
"""Broken on purpose: the traps of torch.distributed.pipelining, one per run (lessons 08 and 08b).

    torchrun --standalone --nproc-per-node 2 source_code/broken_torch_pipelining.py --trap LIST
    torchrun --standalone --nproc-per-node 2 source_code/broken_torch_pipelining.py \\
        --trap tied-embeddings --cured

Each trap is a function, in its broken and its cured form, in one of the files of
broken/torch_pipelining/. A trap that raises ends with its traceback; one that is silently wrong
prints how far it is from one process.
"""

import sys
from inspect import isfunction, signature

import torch.distributed as dist

from broken.torch_pipelining import (
    distributed_data_parallel,
    frozen_stages,
    hangs,
    meta_device_and_checkpoints,
    refused_schedules,
    shapes_and_batches,
    steps_and_losses,
    traced_models,
)
from guard.around_main import guarded
from pipeline.command_line import Parser, ranks_from_environment
from pipeline.job import join_job
from pipeline.training import seconds

SECTIONS = (  # in the order of the page on errors
    refused_schedules,
    hangs,
    shapes_and_batches,
    frozen_stages,
    steps_and_losses,
    traced_models,
    meta_device_and_checkpoints,
    distributed_data_parallel,
)
TRAPS = {
    name.replace("_", "-"): function
    for section in SECTIONS
    for name, function in vars(section).items()
    if isfunction(function) and list(signature(function).parameters) == ["job", "cured"]
}
RANKS = {  # the number of ranks of traps that do not need two
    "wrong-placement": 4,
    "skip-connection": 3,
    "ddp-without-shapes": 4,
    "ddp-with-split-backward": 4,
}


@guarded
def main():
    arguments = parse_arguments()
    job = join_job("cpu", arguments.timeout, pairs=[])
    dist.barrier()  # otherwise a rank that fails at once would end others while they join
    with job.waiting_for_all(f"the trap {arguments.trap}"):
        TRAPS[arguments.trap](job, arguments.cured)
    job.leave()
    return 0


def parse_arguments():
    parser = Parser(__doc__)
    parser.add_argument("--trap", required=True, metavar="NAME", help="LIST prints all names")
    parser.add_argument("--cured", action="store_true", help="run the form that works")
    parser.add_argument("--timeout", type=seconds, default=2.0, metavar="S", help="longest wait")
    arguments = parser.parse_args()
    if arguments.trap not in TRAPS:
        raise SystemExit(f"--trap takes one of: {', '.join(TRAPS)}")
    ranks = RANKS.get(arguments.trap, 2)
    if ranks_from_environment()[1] != ranks:
        raise SystemExit(
            f"--trap {arguments.trap} is set for {ranks} ranks: use --nproc-per-node {ranks}"
        )
    return arguments


if __name__ == "__main__":
    sys.exit(main())
