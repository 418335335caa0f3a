# SPDX-License-Identifier: Apache-2.0
"""Cutting the model, and the loss of a micro-batch, with the pieces of the cases 3 and 2."""

from broken.pipelines.faults import RANKS
from broken.pipelines.faulty_tying import start_tied
from lab.simulator import Costs
from pipeline.model import token_loss
from pipeline.training import build_stage, cut_layers


def cut_by_piece(arguments, pieces):
    """Cut the model as the piece says, and pace every stage in proportion to its layers."""
    layers = [int(count) for count in pieces.layers_of_stages(arguments.layers, RANKS)]
    if len(layers) != RANKS or sum(layers) != arguments.layers or min(layers) < 1:
        raise SystemExit(
            f"--repair: layers_of_stages({arguments.layers}, {RANKS}) returned {layers}; give each "
            "stage at least one layer, and all of them together"
        )
    arguments.cut = layers
    if not arguments.pace_per_layer:
        forward, backward = (time * RANKS / arguments.layers for time in arguments.pace[:2])
        arguments.pace_costs, arguments.pace_per_layer = Costs(forward, backward), True
    return cut_layers(arguments, RANKS)


def build_faulty_stage(arguments, job, cut, pieces):
    """This rank's stage. The last one puts each micro-batch's mean loss into `mean_losses`."""
    stage = build_stage(arguments, job.rank, cut, job.device)
    stage.mean_losses = []
    if arguments.case == 8:
        start_tied(stage.part, arguments)

    def loss_to_go_back_from(scores, targets):
        loss = token_loss(scores, targets)
        stage.mean_losses.append(loss.detach())
        return pieces.loss_to_go_back_from(loss, arguments.microbatches)

    stage.loss_function = loss_to_go_back_from
    return stage
