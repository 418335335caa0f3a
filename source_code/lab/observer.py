# SPDX-License-Identifier: Apache-2.0
"""Attaches instruments to stages and to a job's messages, without changes to their code.

An instrument has any of five methods, all optional:

    acting(work)                              a context for the work of one action
    waiting(peer, what)                       a context for a call that blocks until `peer` acts
    moved(direction, message, peer, tensor)   a message was "sent" to, or "received" from, a rank
    running_again(stage, function, inputs)    a context for a forward inside a backward
    pass_ended()                              all messages of a step are done; gradients are whole

`what` is the Message that a rank waits for, or text. Forwards without gradients, as in an
evaluation, are not shown to the instruments; waiting always is.
"""

from contextlib import ExitStack, contextmanager

import torch

from lab.torch_stages import attach_torch_stage
from lab.work import Work
from pipeline.schedule import Action

KINDS = {
    "forward": "F",
    "backward": "B",
    "backward_input": "I",
    "backward_weight": "W",
    "apply_update": "U",
}


class Observer:
    """Shows a job, or a program that has none, and its stages to `instruments`, in their order."""

    def __init__(self, job, instruments):
        names = "acting", "waiting", "moved", "running_again", "pass_ended"
        self.methods = {name: [] for name in names}
        self.add(*instruments)
        if job is not None:
            job.waiting = self.with_waiting(job.waiting)
            job.send = self.with_sent(job.send)
            job.receive = self.with_received(job.receive)
            job.complete_sends = self.with_pass_ended(job.complete_sends)

    def add(self, *instruments):
        """Add instruments; they are called from now on."""
        for name, methods in self.methods.items():
            methods += [getattr(each, name) for each in instruments if hasattr(each, name)]

    def entered(self, name, *arguments):
        """Enter the context `name` of all instruments; returns one ExitStack that leaves them."""
        stack = ExitStack()
        for method in self.methods[name]:
            stack.enter_context(method(*arguments))
        return stack

    def attach_stage(self, stage):
        """Show the actions of `stage`, of this course or of torch's library, to the instruments."""
        if hasattr(stage, "forward_one_chunk"):
            attach_torch_stage(self, stage)
            return
        for name, kind in KINDS.items():
            if hasattr(stage, name):
                setattr(stage, name, self.with_acting(stage, kind, getattr(stage, name)))
        if hasattr(stage, "run_again"):
            stage.run_again = self.with_running_again(stage, stage.run_again)

    @contextmanager
    def around(self, work):
        """A context for one action, for programs that call modules by stage; yields `work`."""
        with self.entered("acting", work):
            yield work

    def with_acting(self, stage, kind, method):
        def observed(microbatch, *arguments):
            if not torch.is_grad_enabled():
                return method(microbatch, *arguments)
            used = arguments[0] if arguments else None
            with self.around(Work(stage, Action(stage.index, kind, microbatch), used)) as work:
                work.made = method(microbatch, *arguments)
            return work.made

        return observed

    def with_running_again(self, stage, run_again):
        def observed(function, *inputs):
            with self.entered("running_again", stage, function, inputs):
                return run_again(function, *inputs)

        return observed

    def with_waiting(self, waiting):
        @contextmanager
        def observed(peer, what):
            with waiting(peer, what), self.entered("waiting", peer, what):
                yield

        return observed

    def with_sent(self, send):
        def observed(tensor, destination, message):
            sending = send(tensor, destination, message)
            self.moved("sent", message, destination, sending.buffer)
            return sending

        return observed

    def with_received(self, receive):
        """Like `receive`; a message has moved once the rank has waited for it."""

        def observed(source, message, *layout):
            receiving = receive(source, message, *layout)

            def observed_wait():
                del receiving.wait  # a reference cycle, which would keep the buffer alive
                tensor = receiving.wait()
                self.moved("received", message, source, tensor)
                return tensor

            receiving.wait = observed_wait
            return receiving

        return observed

    def moved(self, *what):
        if torch.is_grad_enabled():
            for method in self.methods["moved"]:
                method(*what)

    def with_pass_ended(self, complete_sends):
        def observed():
            complete_sends()
            if torch.is_grad_enabled():
                self.end_pass()

        return observed

    def end_pass(self):
        """Tell the instruments that a pass through the schedule has ended."""
        for method in self.methods["pass_ended"]:
            method()
