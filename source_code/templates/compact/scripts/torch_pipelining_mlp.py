import argparse

from pipeline.arguments import positive_integer, refuse
from pipeline.distributed import ranks_from_environment


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--steps", type=positive_integer, default=5, metavar="N", help="updates to train")
    add("--batch-size", type=positive_integer, default=24, metavar="N", help="rows a step")
    add("--microbatches", type=positive_integer, default=6, metavar="M", help="parts of a batch")
    add("--timeout", type=float, default=60.0, metavar="S", help="longest wait")
    arguments = parser.parse_args()
    if arguments.batch_size % arguments.microbatches or arguments.microbatches < 3:
        refuse("--microbatches must divide --batch-size, and be at least the 3 stages")
    if ranks_from_environment()[1] != 3:
        refuse("the model is cut in three: use --nproc-per-node 3")
    return arguments
