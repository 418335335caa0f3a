"""The order of 1F1B, for one rank."""


def one_f_one_b(rank, num_ranks, num_microbatches):
    """One forward, one backward: the actions of one rank as (stage, kind, micro-batch)."""
    forwards, backwards = ([(rank, kind, k) for k in range(num_microbatches)] for kind in "FB")
    warm_up = min(num_microbatches, num_ranks - 1 - rank)
    # Warm-up: fill the stages behind this one; steady: each forward is followed by a backward.
    order = forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards):
        order += [forward, backward]
    # Cool-down: the backwards that are left.
    return order + backwards[num_microbatches - warm_up :]
