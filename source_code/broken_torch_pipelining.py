"""Broken on purpose: the traps of torch.distributed.pipelining, one a run (lesson 08).

    torchrun --standalone --nproc-per-node 2 source_code/broken_torch_pipelining.py --trap LIST
    torchrun --standalone --nproc-per-node 2 source_code/broken_torch_pipelining.py \\
        --trap tied-embeddings
    torchrun --standalone --nproc-per-node 2 source_code/broken_torch_pipelining.py \\
        --trap tied-embeddings --cured

Each trap is a function, in its broken and its cured form, in one of the files of
broken/torch_pipelining/. A trap that raises ends with its traceback; one that is silently wrong
prints how far it is from one process.
"""

import sys
from importlib import import_module

import torch.distributed as dist

from broken.torch_pipelining.small_pipeline import RANKS, TRAPS
from lab import attach
from pipeline.command_line import Parser, ranks_from_environment, reject
from pipeline.job import join_job
from pipeline.training import seconds

for section in (  # in the order of the page of errors; each registers its traps
    "refused_schedules",
    "hangs",
    "shapes_and_batches",
    "steps_and_losses",
    "traced_models",
    "meta_device_and_checkpoints",
    "distributed_data_parallel",
):
    import_module(f"broken.torch_pipelining.{section}")


def main():
    arguments = parse_arguments()
    job = join_job("cpu", arguments.timeout, pairs=[])
    job.watch = attach.watch(job)
    dist.barrier()  # a rank that fails at once would take the others down while they still join
    with job.waiting_for_all(f"the trap {arguments.trap}"):
        TRAPS[arguments.trap](job, arguments.cured)
    job.leave()
    return 0


def parse_arguments():
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--trap", required=True, metavar="NAME", help="LIST prints all names")
    parser.add_argument("--cured", action="store_true", help="run the form that works")
    parser.add_argument("--timeout", type=seconds, default=2.0, metavar="S", help="longest wait")
    arguments = parser.parse_args()
    if arguments.trap not in TRAPS:
        reject(f"--trap takes one of: {', '.join(TRAPS)}")
    ranks = RANKS[arguments.trap]
    if ranks_from_environment()[1] != ranks:
        reject(f"--trap {arguments.trap} is set for {ranks} ranks: use --nproc-per-node {ranks}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
