"""Eight pipelines with one fault each, to be found in their recordings (lesson 12b).

    torchrun --standalone --nproc-per-node 4 source_code/broken_pipelines.py --case 1 --record build/case_1

Each is a correct pipeline in which one function, its piece, is wrong: the one in `Broken` below. With
--cured it takes the right one, from `Cured`, and with --repair FILE one of yours: FILE defines a
function of the piece's name. Whoever wants to find the faults stops reading at the end of `main`.
"""

import math
import os
import runpy
import sys
from types import SimpleNamespace

import torch

from pipeline.arguments import parse_training_arguments, refuse, training_parser
from pipeline.asynchronous.asynchronous_reference import train_by_rule
from pipeline.asynchronous.weight_stash import StashingStage, WeightStash
from pipeline.distributed import Receiving, Sending, gather, join_job, leave_job, waiting_for_all
from pipeline.model import build_model, build_part, cut_as, starting_weight, token_loss
from pipeline.optimization.clipping import norm_of, scale_gradients, squares_of
from pipeline.optimizer import build_optimizer
from pipeline.recorder import Recorder
from pipeline.reference import train_one_process
from pipeline.report import Report
from pipeline.schedule import Action
from pipeline.schedules import one_f_one_b, pipedream
from pipeline.simulator import Costs
from pipeline.stage import Stage
from pipeline.worker import Worker

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
LARGEST_NORM = 0.4  # of the gradient, in the case that clips
RANKS = 4


def main():
    arguments = parse_arguments()
    pieces = pieces_of(arguments)
    if arguments.case == 7:
        return train_without_flush(arguments, pieces)
    cut_layers(arguments, pieces)
    schedule = one_f_one_b(RANKS, arguments.microbatches)
    tied_pairs = [(0, RANKS - 1), (RANKS - 1, 0)] if arguments.case == 8 else []
    job = join_job(arguments.device, arguments.timeout, schedule.pairs + tied_pairs)
    recorder = Recorder(job, arguments.paced)
    losses = []
    stage = build_stage(arguments, job, recorder, pieces, losses)
    optimizer = build_optimizer(
        arguments.optimizer, stage.part.parameters(), arguments.learning_rate
    )
    shape = (arguments.microbatch_size, arguments.seq_len, arguments.dim)
    worker = WorkerWithPieces(
        arguments, pieces, job, schedule, {stage.index: stage}, shape, arguments.torch_dtype
    )
    report = Report(arguments, job, schedule, recorder)

    for step in report.steps():
        inputs, targets = microbatches_of(arguments, job, step)
        optimizer.zero_grad()
        losses.clear()
        worker.run_step(inputs, targets)
        if arguments.case == 6:
            clip(job, stage, pieces)
        if arguments.case == 8:
            exchange_tied_gradient(arguments, job, stage, pieces)
        optimizer.step()
        report.record_step(step, sum(losses) / len(losses) if losses else None)

    report.finish()
    leave_job(job)
    return 0 if report.verify(reference_of(arguments)) else 1


# Below are the pieces: the broken ones, the right ones. Stop here if you want to find them.


class Broken:
    """One fault each."""

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
    """The same, right."""

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


def parse_arguments():
    parser = training_parser(__doc__.splitlines()[0])
    add = parser.add_argument
    add("--case", type=int, choices=list(PIECES), default=1, help="which pipeline")
    add("--cured", action="store_true", help="with the right piece")
    add("--repair", metavar="FILE", help="with the piece that FILE defines")
    small = {"dim": 16, "heads": 2, "kv_heads": 2, "steps": 3, "pace": [4.0, 8.0]}
    parser.set_defaults(**small)
    case = parser.parse_args().case
    if case == 3:
        parser.set_defaults(layers=11)
    if case == 7:
        parser.set_defaults(microbatches=1, steps=10)
    arguments = parse_training_arguments(parser)
    if case == 7 and arguments.microbatches > 1:
        refuse("--case 7 updates after each batch and cuts none; leave out --microbatches")
    if arguments.cured and arguments.repair:
        refuse("--cured and --repair each replace the broken piece; leave one of the two out")
    if arguments.repair is not None and not os.path.isfile(arguments.repair):
        refuse(f"--repair {arguments.repair}: there is no such file; name one that defines a piece")
    return arguments


def pieces_of(arguments):
    """The functions that this run takes, by name."""
    if arguments.num_ranks != RANKS:
        refuse(
            f"--case {arguments.case} is a pipeline of {RANKS} ranks, and this job has "
            f"{arguments.num_ranks}; start it with --nproc-per-node {RANKS}"
        )
    pieces = {name: getattr(Cured, name) for name in PIECES.values()}
    name = PIECES[arguments.case]
    if arguments.repair:
        defined = runpy.run_path(arguments.repair, {"math": math, "torch": torch})
        if name not in defined:
            refuse(f"--repair {arguments.repair} defines no function {name}; give it that name")
        pieces[name] = defined[name]
    elif not arguments.cured:
        pieces[name] = getattr(Broken, name)
    return SimpleNamespace(**pieces)


def cut_layers(arguments, pieces):
    """Cut the model as the piece says, and let a stage take as long as it has layers."""
    layers = pieces.layers_of_stages(arguments.layers, RANKS)
    if len(layers) != RANKS or sum(layers) != arguments.layers or min(layers) < 1:
        refuse(
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
        tie(part, arguments)

    def share_of_loss(scores, targets):
        loss = token_loss(scores, targets)
        losses.append(loss.detach())
        return pieces.loss_to_go_back_from(loss, arguments.microbatches)

    return Stage(part, job.rank, job.num_ranks, recorder, share_of_loss)


def microbatches_of(arguments, job, step):
    """Inputs and targets of one step, each a list of (micro-batch size, length) tokens."""
    batch = arguments.text.batch(step, arguments.batch_size, arguments.seq_len, arguments.seed)
    return tuple(tokens.to(job.device).chunk(arguments.microbatches) for tokens in batch)


class WorkerWithPieces(Worker):
    """A Worker that asks a piece in three places, each on one rank and in one case."""

    def __init__(self, arguments, pieces, job, *rest):
        super().__init__(job, *rest)
        self.pieces = pieces
        self.asks = {1: 1, 4: 2, 5: 2}.get(arguments.case) == job.rank and arguments.case

    def run_step(self, inputs, targets):
        self.actions, self.outputs = [], []  # that wait to be sent together
        self.buffers = []
        self.order, self.arrived = None, {}
        return super().run_step(inputs, targets)

    def give(self, action, tensor):
        if self.asks != 1 or action.kind != "F":
            return super().give(action, tensor)
        self.actions.append(action)
        self.outputs.append(tensor)
        if len(self.outputs) == 2 or action.microbatch == self.schedule.num_microbatches - 1:
            for waiting in self.actions:
                super().give(waiting, self.pieces.next_to_send(self.outputs))
            self.actions = []

    def take(self, result):
        if self.asks == 5:
            return self.take_in_order(result)
        received = super().take(result)
        if self.asks == 4 and result.kind == "F":
            return self.pieces.keep_activation(received, self.buffers)
        return received

    def take_in_order(self, result):
        """Wait for one message after the other as the piece orders them, until `result` is here."""
        if self.order is None:
            self.order = self.pieces.order_of_receives(list(self.schedule.orders[self.job.rank]))
        while result not in self.arrived:
            stage, kind, microbatch = self.order.pop(0)
            need = Action(stage - 1, "F", microbatch) if kind == "F" else None
            need = need or Action(stage + 1, "I", microbatch)
            self.arrived[need] = super().take(need)
        return self.arrived.pop(result)


def clip(job, stage, pieces):
    """Shorten the gradients to LARGEST_NORM by the norm that the piece works out."""
    squares = [None] * job.num_ranks
    named = list(stage.part.named_parameters())
    with waiting_for_all(job, "its share of the gradient's norm"):
        torch.distributed.all_gather_object(squares, squares_of(named))
    scale_gradients(named, pieces.norm_to_clip_by(job.rank, squares), LARGEST_NORM)


def clip_in_one_process(model, optimizer, step):
    named = list(model.named_parameters())
    scale_gradients(named, norm_of(squares_of(named)), LARGEST_NORM)


def tie(part, arguments):
    """Start the embedding and the head, whichever the part has, as the same matrix."""
    for module in (getattr(part, "embedding", None), getattr(part, "head", None)):
        if module is not None:
            matrix = starting_weight("head.weight", module.weight.shape, arguments.seed)
            module.weight.data.copy_(matrix)


def exchange_tied_gradient(arguments, job, stage, pieces):
    """First and last rank tell each other the gradient of the matrix that both have."""
    if job.rank not in (0, RANKS - 1):
        return
    other, name = RANKS - 1 - job.rank, "the gradient of the tied matrix"
    weight = stage.part.embedding.weight if job.rank == 0 else stage.part.head.weight
    receiving = Receiving(job, weight.shape, arguments.torch_dtype, other, name)
    sending = Sending(job, weight.grad, other, name)
    weight.grad = pieces.tied_gradient(weight.grad, receiving.wait())
    sending.wait()


def reference_of(arguments):
    """What one process does in this case: the whole model, no pipeline."""
    if arguments.case == 6:
        return lambda arguments, device: train_one_process(arguments, device, clip_in_one_process)
    return train_tied if arguments.case == 8 else train_one_process


def train_tied(arguments, device):
    """The losses of one process in which embedding and head are one matrix."""
    model = build_model(arguments.config, arguments.seed, arguments.torch_dtype, device)
    tie(model, arguments)
    model.head.weight = model.embedding.weight
    optimizer = build_optimizer(arguments.optimizer, model.parameters(), arguments.learning_rate)
    losses = []
    for step in range(arguments.steps):
        inputs, targets = arguments.text.batch(
            step, arguments.batch_size, arguments.seq_len, arguments.seed
        )
        loss = token_loss(model(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# The case without a flush: pipedream.py, with a stash that asks the piece.


class StashWithPiece(WeightStash):
    """A stash whose copy before an update is left to `piece`."""

    def __init__(self, parameters, piece):
        super().__init__(parameters, keep=False)
        self.piece = piece

    def update(self, optimizer, gradients, oldest_needed):
        self.piece(list(self.parameters.values()), self.users[self.current])
        super().update(optimizer, gradients, oldest_needed)


def train_without_flush(arguments, pieces):
    """As main: PipeDream with a stash on every rank, that of rank 1 with the piece."""
    arguments.weights, arguments.replicas = "stashed", [1] * RANKS
    schedule = pipedream(RANKS, arguments.steps)
    job = join_job(arguments.device, arguments.timeout, schedule.pairs)
    recorder = Recorder(job, arguments.paced)
    first, last = arguments.stage_layers[job.rank]
    part = build_part(
        arguments.config, first, last, arguments.seed, arguments.torch_dtype, job.device
    )
    optimizer = build_optimizer(arguments.optimizer, part.parameters(), arguments.learning_rate)
    stage = StashingStage(
        part, job.rank, [1] * RANKS, recorder, token_loss, optimizer, "stashed", 1, (job.rank,)
    )
    if job.rank == 1:
        stage.stash = StashWithPiece(part.named_parameters(), pieces.before_update)
    shape = (arguments.batch_size, arguments.seq_len, arguments.dim)
    worker = Worker(job, schedule, {stage.index: stage}, shape, arguments.torch_dtype)
    report = Report(arguments, job, schedule, recorder, what="whole run", loss_rank=0)

    batches = [microbatches_of(arguments, job, step) for step in range(arguments.steps)]
    worker.run_step(*([piece for [piece] in each] for each in zip(*batches)))
    report.events_per_step.append(recorder.take_events())
    losses = gather(job, {minibatch: loss.cpu() for minibatch, loss in worker.losses.items()})
    for step in range(arguments.steps) if job.rank == 0 else []:
        report.record_loss(step, losses[-1][step])

    report.finish()
    leave_job(job)
    return 0 if report.verify(train_by_rule) else 1


if __name__ == "__main__":
    sys.exit(main())
