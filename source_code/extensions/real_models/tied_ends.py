# SPDX-License-Identifier: Apache-2.0
"""One matrix at both ends of a pipeline: the embedding of the first stage, the head of the last.

Each end has a copy. Copies that start equal stay equal if both are updated by the sum of the two
gradients (Press and Wolf 2017, 1608.05859, ties the two; Megatron-LM sums the gradients of its
copies, too). The two copies are one parameter of the model, so the gradient's norm counts them
once. A checkpoint has both.
"""

from pipeline.collectives import Summing, open_groups

ENDS = "embedding.weight", "head.weight"


class TiedEnds:
    """The copies of the matrix on this rank: none, one, or both. `parameters` are this rank's.

    `ranks` are those of the first and the last stage, one of the job's groups, or None if the
    model's ends are two matrices. `ends` has the names of the two copies.
    """

    def __init__(self, job, parameters, ranks, ends=ENDS):
        self.job, self.parameters, self.ranks, self.ends = job, parameters, ranks, ends
        copies = [parameters[n] for n in ends if n in parameters] if ranks else []
        self.copies = [weight for weight in copies if weight.requires_grad]  # both or none

    def sum_gradients(self):
        """Set both copies' gradients to their sum; call it between last backward and update."""
        if len(self.copies) == 2:  # one rank has both
            total = self.copies[0].grad + self.copies[1].grad
            for copy in self.copies:
                copy.grad = total.clone()
        elif self.copies:
            what = "its gradient of the tied embedding"
            Summing(self.job, [self.copies[0].grad], self.ranks, what).wait()

    def named_once(self):
        """Return (name, parameter) pairs of this rank; both copies have the embedding's name.

        A sum of squares by name counts them once, and a scaling of gradients scales both.
        """
        return [
            (self.ends[0] if self.copies and name == self.ends[1] else name, parameter)
            for name, parameter in self.parameters.items()
        ]


def tie_ends_of(job, settings, parameters, schedule, pipelines=1):
    """Return the TiedEnds of this rank. Every rank calls it.

    `schedule` is that of all ranks, which form `pipelines` equal pipelines, one after the other.
    """
    if not getattr(settings, "tied", False):
        return TiedEnds(job, parameters, None)
    size, own = job.num_ranks // pipelines, None
    last_stage, microbatches = schedule.num_stages - 1, schedule.num_microbatches
    for number in range(pipelines):
        first = number * microbatches // pipelines
        ends = {schedule.rank_of(stage, first) for stage in (0, last_stage)}
        group = tuple(sorted(ends))
        if len(group) > 1:
            open_groups(job, [group])
        if job.rank // size == number:
            own = group
    return TiedEnds(job, parameters, own)
