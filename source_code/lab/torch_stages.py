# SPDX-License-Identifier: Apache-2.0
"""Shows the stages of torch.distributed.pipelining to the instruments.

The library calls each of three methods of a stage as soon as the message for it has arrived, as the
course's worker does. The library's messages are not seen, but each stage's inputs and outputs are.
"""

from dataclasses import dataclass

import torch

from lab.work import Work, first_tensor
from pipeline.schedule import Action


@dataclass
class StageView:
    """A stage of the library as the instruments see it: its index and its module."""

    index: int
    part: torch.nn.Module


def attach_torch_stage(observer, stage, view=None):
    """Show a PipelineStage, cut by hand or traced, as `view` or as a StageView.

    The library counts micro-batches from 0 in every replica; the stage's attribute
    `first_microbatch` is the number of its replica's first one. A backward's `used` is the gradient
    of the stage's output; on the last stage, whose output is scores, only with a `view`.
    """
    forward, backward = stage.forward_one_chunk, stage.backward_one_chunk
    backward_weight = stage.backward_weight_one_chunk
    shows_scores = view is not None
    view = view or StageView(stage.stage_index, stage.submod)
    first = getattr(stage, "first_microbatch", 0)

    under_way = []  # the Work of the present backward
    taken = []  # the module's last input, during a forward

    def note_input(module, inputs):
        taken[:] = [first_tensor(inputs)]

    stage.submod.register_forward_pre_hook(note_input)

    def work_of(kind, microbatch):
        action = Action(stage.stage_index, kind, first + microbatch)
        return observer.around(Work(view, action, starts_now=kind != "W"))

    def observed_forward(microbatch, *arguments, **keywords):
        if not stage.has_backward:
            return forward(microbatch, *arguments, **keywords)
        with work_of("F", microbatch) as work:
            output = forward(microbatch, *arguments, **keywords)
            work.used = taken.pop()
            if shows_scores or not stage.is_last:
                work.made = first_tensor(output)
                watch_gradient(work.made)
        return output

    def watch_gradient(made):
        """Note the gradient with which the backward of an output begins."""

        def arrived(gradient):
            for work in under_way:
                work.used = gradient

        if made is not None and made.requires_grad:
            made.register_hook(arrived)

    def observed_backward(microbatch, *arguments, full_backward=True, **keywords):
        keywords["full_backward"] = full_backward
        if not stage.has_backward:
            return backward(microbatch, *arguments, **keywords)
        with work_of("B" if full_backward else "I", microbatch) as work:
            under_way.append(work)
            backward(microbatch, *arguments, **keywords)
            under_way.clear()  # otherwise its tensors would stay alive
            work.made = first_tensor(stage.bwd_cache.get(microbatch))

    def observed_backward_weight(microbatch, *arguments, **keywords):
        if not stage.has_backward:
            return backward_weight(microbatch, *arguments, **keywords)
        with work_of("W", microbatch):
            return backward_weight(microbatch, *arguments, **keywords)

    stage.forward_one_chunk = observed_forward
    stage.backward_one_chunk = observed_backward
    stage.backward_weight_one_chunk = observed_backward_weight
