"""Shows the stages of torch.distributed.pipelining to the instruments.

The library calls each of three methods of a stage as soon as the message that it needs has arrived,
as the course's worker does. Its own messages stay unseen.
"""

from dataclasses import dataclass

import torch

from lab.work import Work
from pipeline.schedule import Action


@dataclass
class StageView:
    """What the instruments see of a stage of the library: its index and its module."""

    index: int
    part: torch.nn.Module


def attach_torch_stage(observer, stage):
    """Show a PipelineStage, cut by hand or traced.

    The library counts micro-batches from 0 in every replica; an attribute `first_microbatch` of the
    stage says where its replica starts.
    """
    forward, backward = stage.forward_one_chunk, stage.backward_one_chunk
    backward_weight = stage.backward_weight_one_chunk
    view = StageView(stage.stage_index, stage.submod)
    first = getattr(stage, "first_microbatch", 0)

    def work_of(kind, microbatch):
        action = Action(stage.stage_index, kind, first + microbatch)
        return observer.around(Work(view, action, starts_now=kind != "W"))

    def observed_forward(microbatch, *arguments, **keywords):
        if not stage.has_backward:
            return forward(microbatch, *arguments, **keywords)
        with work_of("F", microbatch) as work:
            output = forward(microbatch, *arguments, **keywords)
            if torch.is_tensor(output) and not stage.is_last:  # the last one's are scores
                work.made = output
        return output

    def observed_backward(microbatch, *arguments, full_backward=True, **keywords):
        keywords["full_backward"] = full_backward
        if not stage.has_backward:
            return backward(microbatch, *arguments, **keywords)
        with work_of("B" if full_backward else "I", microbatch):
            return backward(microbatch, *arguments, **keywords)

    def observed_backward_weight(microbatch, *arguments, **keywords):
        if not stage.has_backward:
            return backward_weight(microbatch, *arguments, **keywords)
        with work_of("W", microbatch):
            return backward_weight(microbatch, *arguments, **keywords)

    stage.forward_one_chunk = observed_forward
    stage.backward_one_chunk = observed_backward
    stage.backward_weight_one_chunk = observed_backward_weight
