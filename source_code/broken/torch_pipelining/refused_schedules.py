"""Traps of lesson 08: the library rejects the schedule (section "It refuses the schedule")."""

from torch.distributed.pipelining import PipelineStage

from broken.torch_pipelining import small_pipeline as small


def few_microbatches(job, cured):
    """1F1B needs at least as many micro-batches as stages.

    Broken: one micro-batch for two stages. Cured: two.
    """
    small.run_and_compare(job, "1F1B", microbatches=2 if cured else 1)


def uneven_rounds(job, cured):
    """Interleaved 1F1B needs rounds of equal length.

    Broken: five micro-batches in two rounds. Cured: four.
    """
    small.run_and_compare(job, "Interleaved1F1B", microbatches=4 if cured else 5)


def one_stage_in_a_v(job, cured):
    """ZB-V needs exactly two stages per rank.

    Broken: one stage per rank. Cured: two, placed as a V.
    """
    parts = None if cured else {job.rank: small.build_layer(job.rank)}
    small.run_and_compare(job, "ZBVZeroBubble", parts=parts)


def few_microbatches_in_dualpipev(job, cured):
    """DualPipeV needs at least as many micro-batches as stages.

    Broken: three micro-batches for four stages. Cured: four.
    """
    small.run_and_compare(job, "DualPipeV", microbatches=4 if cured else 3)


def too_many_stages(job, cured):
    """A process group cannot have more ranks than the pipeline has stages.

    Broken: one stage on two ranks. Cured: two stages.
    """
    if cured:
        return small.run_and_compare(job)
    PipelineStage(small.build_layer(0), 0, 1, job.device)


def listed_order_of_1f1b(job, cured):
    """The library's list of 1F1B's actions leaves a forward out.

    Broken: its own check rejects the list of 1F1B. Cured: the list of GPipe is complete.
    """
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
    from torch.distributed.pipelining.schedules import _validate_schedule

    rows = get_schedule_ops("GPipe" if cured else "1F1B", 2, 4)
    _validate_schedule(dict(enumerate(rows)), 2, 2, 4)
    small.say(job, "the list is complete")
