# SPDX-License-Identifier: Apache-2.0
"""A worker that asks a piece in the cases 1, 4, 5, 6 and 8, and its training in one process."""

from functools import partial

from broken.pipelines.faulty_clipping import clip_gradients, clip_gradients_in_one_process
from broken.pipelines.faulty_tying import build_tied_model, exchange_tied_gradient
from pipeline.one_process import train_one_process
from pipeline.worker import Worker

ASKING_RANK = {1: 1, 4: 2, 5: 2}  # {case: the rank whose worker asks the piece}


class WorkerWithPieces(Worker):
    """A Worker that asks a piece about the messages of one rank, or about the gradients of all.

    Case 1 sends two activations at a time, case 4 may keep one, case 5 orders the receives. Cases 6
    and 8 change the gradients at the end of a step.
    """

    def __init__(self, arguments, pieces, job, schedule, stage):
        super().__init__(job, schedule, {stage.index: stage})
        self.stage, self.pieces, self.case = stage, pieces, arguments.case
        self.asks = ASKING_RANK.get(arguments.case) == job.rank and arguments.case

    def run_step(self, inputs, targets):
        """Run a step as Worker does; the loss is the mean of the stage's mean_losses."""
        self.actions, self.outputs = [], []  # those that wait to be sent together
        self.buffers = []
        self.order, self.arrived = None, {}
        self.stage.mean_losses.clear()
        super().run_step(inputs, targets)
        losses = self.stage.mean_losses
        return sum(losses) / len(losses) if losses else None

    def end_step(self):
        if self.case == 6:
            clip_gradients(self.job, self.stage, self.pieces)
        if self.case == 8:
            exchange_tied_gradient(self.job, self.stage, self.pieces)
        super().end_step()  # from here on a recording has the gradients that the update takes

    def give(self, action, tensor):
        if self.asks != 1 or action.kind != "F":
            return super().give(action, tensor)
        self.actions.append(action)
        self.outputs.append(tensor)
        if len(self.outputs) == 2 or action.microbatch == self.schedule.num_microbatches - 1:
            for waiting in self.actions:
                super().give(waiting, self.pieces.next_to_send(self.outputs))
            self.actions = []

    def take(self, *wanted):
        if self.asks == 5:
            return self.take_in_order(wanted)
        received = super().take(*wanted)
        if self.asks == 4 and wanted[0] == "activation":
            return self.pieces.keep_activation(received, self.buffers)
        return received

    def take_in_order(self, wanted):
        """Wait for one message after the other as the piece orders them, until `wanted` is here."""
        if self.order is None:
            actions = list(self.schedule.orders[self.job.rank])
            self.order = list(self.pieces.order_of_receives(actions))
        while wanted not in self.arrived:
            stage, kind, microbatch = self.order.pop(0)
            what, maker = ("activation", stage - 1) if kind == "F" else ("gradient", stage + 1)
            self.arrived[what, maker, microbatch] = super().take(what, maker, microbatch)
        return self.arrived.pop(wanted)


def choose_reference(arguments):
    """The function that trains the whole model of this case in one process, without a pipeline."""
    if arguments.case == 6:
        return partial(train_one_process, before_update=clip_gradients_in_one_process)
    return partial(train_one_process, build=build_tied_model if arguments.case == 8 else None)
