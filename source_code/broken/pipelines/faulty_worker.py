"""A worker that asks a piece which message comes next, in the cases 1, 4 and 5."""

from pipeline.message import Message
from pipeline.worker import Worker

ASKING_RANK = {1: 1, 4: 2, 5: 2}  # {case: the rank whose worker asks the piece}


class WorkerWithPieces(Worker):
    """A Worker that asks a piece in three places, each on one rank and in one case.

    Case 1 sends two activations at a time, case 4 may keep one, case 5 orders the receives.
    """

    def __init__(self, arguments, pieces, job, *rest):
        super().__init__(job, *rest)
        self.pieces = pieces
        self.asks = ASKING_RANK.get(arguments.case) == job.rank and arguments.case

    def run_step(self, inputs, targets):
        self.actions, self.outputs = [], []  # those that wait to be sent together
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

    def take(self, wanted):
        if self.asks == 5:
            return self.take_in_order(wanted)
        received = super().take(wanted)
        if self.asks == 4 and wanted.what == "activation":
            return self.pieces.keep_activation(received, self.buffers)
        return received

    def take_in_order(self, wanted):
        """Wait for one message after the other as the piece orders them, until `wanted` is here."""
        if self.order is None:
            self.order = self.pieces.order_of_receives(list(self.schedule.orders[self.job.rank]))
        while wanted not in self.arrived:
            stage, kind, microbatch = self.order.pop(0)
            forward = kind == "F"
            what, maker = ("activation", stage - 1) if forward else ("gradient", stage + 1)
            need = Message(what, maker, microbatch)
            self.arrived[need] = super().take(need)
        return self.arrived.pop(wanted)
