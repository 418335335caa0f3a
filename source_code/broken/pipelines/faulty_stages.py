"""Cutting the model and the batch, with the pieces of the cases 2 and 3."""

from broken.pipelines.faults import RANKS
from broken.pipelines.faulty_tying import start_tied
from lab.simulator import Costs
from pipeline.command_line import reject
from pipeline.model import build_part, cut_as, token_loss
from pipeline.stage import Stage


def cut_layers(arguments, pieces):
    """Cut the model as the piece says, and pace every stage in proportion to its layers."""
    layers = pieces.layers_of_stages(arguments.layers, RANKS)
    if len(layers) != RANKS or sum(layers) != arguments.layers or min(layers) < 1:
        reject(
            f"--repair: layers_of_stages({arguments.layers}, {RANKS}) returned {layers}; give each "
            "stage at least one layer, and all of them together"
        )
    arguments.stage_layers = cut_as(layers)
    share = [count * RANKS / arguments.layers for count in layers]
    forward, backward = arguments.pace[:2]
    arguments.paced = Costs([forward * part for part in share], [backward * part for part in share])


def build_stage(arguments, job, recorder, pieces, losses):
    """This rank's stage; the last one puts the mean loss of each micro-batch into `losses`."""
    first, last = arguments.stage_layers[job.rank]
    part = build_part(
        arguments.config, first, last, arguments.seed, arguments.torch_dtype, job.device
    )
    if arguments.case == 8:
        start_tied(part, arguments)

    def share_of_loss(scores, targets):
        loss = token_loss(scores, targets)
        losses.append(loss.detach())
        return pieces.loss_to_go_back_from(loss, arguments.microbatches)

    return Stage(part, job.rank, job.num_ranks, recorder, share_of_loss)


def draw_microbatches(arguments, job, step):
    """Inputs and targets of one step, each a list of (micro-batch size, length) tokens."""
    batch = arguments.text.batch(step, arguments.batch_size, arguments.seq_len, arguments.seed)
    return tuple(tokens.to(job.device).chunk(arguments.microbatches) for tokens in batch)
