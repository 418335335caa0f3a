# SPDX-License-Identifier: Apache-2.0
"""Runs a reader's step on this rank; build_steps.py reads what it reports (lessons 01 to 05, 09)."""

import weakref
from numbers import Real

import torch
import torch.distributed as dist

from course.building import messages, zb_h1
from course.building.messages import tell
from course.checks.answer import number_in
from small import pipeline as my_pipeline
from small import split_backward

CLOSE = 1e-9


def run_there_and_back(_, function):
    """Run the reader's function of lesson 01, which itself joins the group and sends messages."""
    returned = function()
    kind = None if isinstance(returned, torch.Tensor) else type(returned).__name__
    value = repr(returned) if kind else returned.tolist()
    came = [tensor.tolist() for tensor in messages.received if tensor.numel() == 3]
    left = not dist.is_initialized()
    tell("report", value={"value": value, "kind": kind, "came": came, "left": left})


def run_steps(request, function):
    """Run the reader's step once for each number of micro-batches, on fresh gradients."""
    dist.init_process_group("gloo")
    rank, p, chunks = dist.get_rank(), dist.get_world_size(), request["chunks"]
    between = dist.new_group()  # the reader's barriers cannot meet this group's
    for number, m in enumerate(request["microbatches"]):
        # A batch has any number of sequences.
        size = number + (p if request.get("whole_batch") else 2)
        tokens, targets = my_pipeline.batch(number, size * m)
        parts = tokens.chunk(m), targets.chunk(m)
        reference = Reference(p * chunks, *parts)
        stages = [my_pipeline.build_stage(rank + c * p, p * chunks) for c in range(chunks)]
        for c, stage in enumerate(stages):
            Observer(stage, rank + c * p, reference, request.get("halves"))
        given = stages if chunks > 1 else stages[0]
        first = [[weight.detach().clone() for weight in stage.parameters()] for stage in stages]
        tell("begins step", m=m)
        returned = function(given, *((tokens, targets) if request.get("whole_batch") else parts))
        result = result_of(returned, stages, rank, p, reference)
        pairs = [zip(stage.parameters(), was) for stage, was in zip(stages, first)]
        result["updated"] = not all(torch.equal(w, was) for each in pairs for w, was in each)
        tell("report", value=result)
        tell("ends step")
        dist.barrier(between)


def backward_input(stage, k, held, sends, begin=zb_h1.backward_input):
    """Replaces that of zb_h1.py: it also reports when the half for the weights runs."""
    later = begin(stage, k, held, sends)

    def run():
        tell("weights", kind="W", stage=stage.index, k=k)
        later()

    return run


zb_h1.backward_input = backward_input  # before the reader's function imports it


class Reference:
    """The results of one process with its own copy of the model, by stage s and micro-batch k.

    `inputs[s][k]` is the input of stage s, `gradients[s][k]` is the gradient of its output, and
    `weights[s]` has one column per micro-batch: the gradient of all weights of the stage.
    """

    def __init__(self, num_stages, inputs, targets):
        stages = [my_pipeline.build_stage(index, num_stages) for index in range(num_stages)]
        self.inputs, self.gradients = [[] for _ in stages], [[] for _ in stages]
        columns, self.loss = [[] for _ in stages], 0.0
        for tokens, wanted in zip(inputs, targets):
            made = []
            for number, stage in enumerate(stages):
                stage.zero_grad()
                self.inputs[number].append(tokens.detach())
                tokens = stage(tokens)
                tokens.retain_grad()
                made.append(tokens)
            loss = my_pipeline.loss_of(tokens, wanted) / len(inputs)
            loss.backward()
            self.loss += loss.item()
            for number, stage in enumerate(stages):
                self.gradients[number].append(made[number].grad)
                columns[number].append(flat_gradient(stage))
        self.weights = [torch.stack(column, 1) for column in columns]


def flat_gradient(stage):
    """The gradients of all weights as one vector; zeros for a weight without a gradient."""
    weights = stage.parameters()
    return torch.cat(
        [(w.grad if w.grad is not None else 0 * w.detach()).flatten() for w in weights]
    )


class Observer:
    """Reports every forward and backward of `stage` with its micro-batch.

    It observes the input of the stage's first part and the output of its last part, so the reader
    may call the stage, its method `forward`, or its parts.
    """

    def __init__(self, stage, index, reference, halves):
        self.index, self.reference = index, reference
        self.half = "I" if halves else "B"
        self.inputs, self.graphs, self.outputs = {}, {}, {}  # micro-batch -> a weak reference
        self.done = []  # the micro-batches whose backward has ended
        self.current = None  # the micro-batch whose forward has begun
        stage.index = index
        if halves:
            split_backward.split(stage)
        layer = next(part for part in stage if isinstance(part, my_pipeline.Layer))
        layer.down.register_forward_pre_hook(self.inside)
        self.first, self.last = stage[0].forward, None
        stage[0].forward = self.before
        self.last, stage[-1].forward = stage[-1].forward, self.after

    def before(self, tensor):
        """Replaces the forward of the stage's first part."""
        k, factor = which(tensor.detach(), self.reference.inputs[self.index])
        asks = self.index == 0 or tensor.requires_grad
        used = [j for j in self.inputs if j not in self.done and alive(self.inputs[j])]
        over = [j for j in used if self.inputs[j]().data_ptr() == tensor.data_ptr()]
        self.current, self.inputs[k] = k, weakref.ref(tensor)
        found = {"k": k if factor == 1 else None, "asks": asks, "over": over}
        if k is None:
            found["rounded"] = is_rounded(tensor, self.reference.inputs[self.index])
        self.tell("forward", kind="F", **found)
        return self.first(tensor)

    def inside(self, _, arguments):
        """A hook on a layer whose input is in memory as long as the graph can run a backward."""
        self.graphs[self.current] = weakref.ref(arguments[0])

    def after(self, tensor):
        """Replaces the forward of the stage's last part."""
        output = self.last(tensor)  # calls `before` if the stage has one part
        k = self.current

        def on_gradient(gradient):
            j, factor = which(gradient, self.reference.gradients[self.index])
            empty = bool(gradient.isnan().any())
            self.tell("backward", kind=self.half, k=k, of=j, factor=factor, empty=empty)
            end = torch.autograd.Variable._execution_engine.queue_callback  # of this backward
            end(lambda: self.done.append(k))

        if output.requires_grad:  # a forward under no_grad has no backward
            output.register_hook(on_gradient)
        self.outputs[k] = weakref.ref(output)
        return output

    def tell(self, event, **more):
        """Report an action, and the micro-batches that are still in memory after their backward."""
        graphs, outputs = (
            [k for k in self.done if k in held and alive(held[k])]
            for held in (self.graphs, self.outputs)
        )
        more |= {"graphs": graphs, "outputs": outputs, "sent": len(messages.sent)}
        tell(event, stage=self.index, **more)


def alive(reference):
    return reference() is not None


def which(tensor, candidates):
    """(k, factor) with `tensor` = factor x `candidates[k]`, or (None, None)."""
    for k, candidate in enumerate(candidates):
        if tensor.shape != candidate.shape:
            continue
        if torch.equal(tensor, candidate):
            return k, 1
        if not candidate.is_floating_point():
            continue
        factor = ((tensor * candidate).sum() / (candidate * candidate).sum()).item()
        if not abs(factor) > CLOSE:
            continue  # zeros fit every micro-batch, so they tell nothing
        if (tensor - factor * candidate).abs().max() <= CLOSE * candidate.abs().max():
            return k, rounded(factor)
    return None, None


def is_rounded(tensor, candidates):
    """Whether `tensor` is one of `candidates` with fewer digits."""
    return any(tensor.shape == each.shape and torch.allclose(tensor, each) for each in candidates)


def rounded(number):
    return round(number, 9) + 0.0 if number == number else None


def result_of(returned, stages, rank, p, reference):
    """The loss and the gradients of each stage, as compared with one process."""
    gradients = []
    for c, stage in enumerate(stages):
        wanted = reference.weights[rank + c * p]
        found = flat_gradient(stage)
        known = found.nan_to_num(1e30, 1e30, -1e30)  # nan: no message was received
        parts = torch.linalg.lstsq(wanted, known[:, None]).solution
        rest = (wanted @ parts - found[:, None]).abs().max() / wanted.abs().max()
        gradients.append(
            {
                "stage": rank + c * p,
                "difference": (found - wanted.sum(1)).abs().max().item(),
                "parts": [rounded(part) for part in parts[:, 0].tolist()],
                "rest": rest.item(),
                "none": all(weight.grad is None for weight in stage.parameters()),
            }
        )
    loss, kind = returned, type(returned).__name__
    if isinstance(returned, torch.Tensor) and returned.numel() == 1:
        loss, kind = returned.item(), "graph" if returned.requires_grad else "float"
    else:
        loss = number_in(returned)
        is_number = isinstance(loss, Real) and not isinstance(loss, bool)
        loss = float(loss) if is_number else None
    return {"loss": loss, "kind": kind, "wanted": reference.loss, "gradients": gradients}
