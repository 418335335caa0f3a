# SPDX-License-Identifier: Apache-2.0
"""The faults of the broken pipelines, and their cures. Stop here if you want to find them.

A case is a correct pipeline in which one function, its piece, has a fault: the one in `Broken`. The
right one is in `Cured`, under the same name.
"""

import math
import runpy
from types import SimpleNamespace

import torch

from files.inputs import InputError, read_text
from guard.ending import end_process

PIECES = {  # the function in which each case has its fault
    1: "next_to_send",
    2: "loss_to_go_back_from",
    3: "layers_of_stages",
    4: "keep_activation",
    5: "order_of_receives",
    6: "norm_to_clip_by",
    7: "before_update",
    8: "tied_gradient",
}
RANKS = 4


class Broken:
    """The pieces, each with its fault."""

    def next_to_send(outputs):
        """Rank 1 sends the activations of two micro-batches in one go: take one from the list."""
        return outputs.pop()

    def loss_to_go_back_from(mean_loss, num_microbatches):
        """What the backward of a micro-batch starts from, given the mean loss of its tokens."""
        return mean_loss

    def layers_of_stages(num_layers, num_stages):
        """How many layers each stage gets: as many as go evenly, and the last takes the rest."""
        layers = [num_layers // num_stages] * num_stages
        layers[-1] += num_layers % num_stages
        return layers

    def keep_activation(received, buffers):
        """What rank 2 hands to its stage; `buffers`, a list, is empty before the first message."""
        if not buffers:
            buffers.append(torch.empty_like(received))
        buffers[0].data.copy_(received)  # no new memory for every message
        return buffers[0].data

    def order_of_receives(actions):
        """The forwards and backwards of rank 2 in the order in which it waits for their messages."""
        forwards = [action for action in actions if action.kind == "F"]
        backwards = [action for action in actions if action.kind == "B"]
        return forwards + backwards

    def norm_to_clip_by(rank, squares_of_ranks):
        """The gradient's norm; `squares_of_ranks` has {weight: sum of squares} for each rank."""
        return math.sqrt(math.fsum(squares_of_ranks[rank].values()))

    def before_update(weights, users):
        """Called on rank 1 before the optimizer changes `weights`, a list, in place.

        `users` counts the mini-batches that have gone forward with them and not yet backward.
        """

    def tied_gradient(mine, other):
        """The gradient for the matrix that is the embedding on rank 0 and the head on rank 3.

        `mine` is what the backwards of this rank have gathered, `other` what those of the other.
        """
        return mine


class Cured:
    """The same pieces without the faults."""

    def next_to_send(outputs):
        return outputs.pop(0)  # the oldest: a receiver takes messages in the order of the schedule

    def loss_to_go_back_from(mean_loss, num_microbatches):
        return mean_loss / num_microbatches  # so that the sum over them is the batch's mean

    def layers_of_stages(num_layers, num_stages):
        base, rest = divmod(num_layers, num_stages)
        return [base + (stage < rest) for stage in range(num_stages)]

    def keep_activation(received, buffers):
        return received  # its backward comes later and needs this very memory

    def order_of_receives(actions):
        return [action for action in actions if action.kind in "FB"]

    def norm_to_clip_by(rank, squares_of_ranks):
        return math.sqrt(math.fsum(v for part in squares_of_ranks for v in part.values()))

    def before_update(weights, users):
        if users:
            for weight in weights:
                weight.data = weight.data.clone()  # the old memory stays with its users

    def tied_gradient(mine, other):
        return mine + other


def choose_pieces(arguments):
    """The pieces of this run as attributes: all of them right except that of --case.

    That piece is broken; with --cured it is right, and with --repair it is the one in FILE.
    """
    if arguments.num_ranks != RANKS:
        raise SystemExit(
            f"--case {arguments.case} is a pipeline of {RANKS} ranks, and this job has "
            f"{arguments.num_ranks}; start it with --nproc-per-node {RANKS}"
        )
    pieces = {name: getattr(Cured, name) for name in PIECES.values()}
    name = PIECES[arguments.case]
    if arguments.repair:
        pieces[name] = piece_in(arguments.repair, name)
    elif not arguments.cured:
        pieces[name] = getattr(Broken, name)
    return SimpleNamespace(**pieces)


def piece_in(file, name):
    """The function of that name that the reader's file defines, with a sentence for each mistake."""
    try:
        text = read_text(file)
        defined = runpy.run_path(file, {"math": math, "torch": torch}) if text else {}
    except InputError as error:
        raise SystemExit(f"--repair {error}; name a file of yours") from None
    except (Exception, SystemExit) as error:  # whatever the reader's code raises
        raise SystemExit(
            f"--repair {file} cannot be run ({type(error).__name__}: {error}); mend it"
        ) from None
    if not callable(defined.get(name)):
        raise SystemExit(f"--repair {file} defines no function {name}; give it that name")

    def piece(*arguments):
        try:
            result = defined[name](*arguments)
        except Exception as error:
            end_process(f"--repair {file}: {name} raised {type(error).__name__}: {error}")
        if result is None and name != "before_update":
            end_process(f"--repair {file}: {name} returned nothing; let it return what it makes")
        return result

    return piece
