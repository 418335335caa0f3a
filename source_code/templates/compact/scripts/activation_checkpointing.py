from pipeline.arguments import parse_training_arguments, training_parser
from pipeline.memory.recompute import recompute
from pipeline.model import build_part, token_loss
from pipeline.schedules import gpipe
from pipeline.stage import Stage


def parse_arguments():
    parser = training_parser(__doc__.splitlines()[0])
    parser.add_argument(
        "--recompute",
        choices=["none", "stage", "layer", "selective"],
        default="stage",
        help="whose input is kept, and the rest run again: selective is attention's",
    )
    arguments = parse_training_arguments(parser)
    return arguments, gpipe(arguments.num_ranks, arguments.microbatches)


def build_stage(arguments, job):
    """This rank's stage: its layers and, on the last rank, the loss."""

    def share_of_loss(scores, targets):
        # The mean over the batch is the mean of the micro-batches' means: they are equally large.
        return token_loss(scores, targets) / arguments.microbatches

    first, last = arguments.stage_layers[job.rank]
    part = build_part(arguments, first, last, job.device)
    recompute(part, arguments.recompute)
    return Stage(part, job.rank, job.num_ranks, share_of_loss)
