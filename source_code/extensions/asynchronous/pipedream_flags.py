# SPDX-License-Identifier: Apache-2.0
"""The flags of pipedream.py, the values that it rejects, and the versions that it prints."""

from extensions.asynchronous.weight_stash import MODES
from pipeline.collectives import gather
from pipeline.command_line import positive_integer


def add_pipedream_flags(parser):
    """Add --weights and --replicas; --steps counts mini-batches."""
    add = parser.add_argument
    add("--weights", choices=list(MODES), default="stashed", help="which versions are used")
    helped = "ranks of each stage, e.g. 2-1-1"
    add("--replicas", type=replica_counts, metavar="A-B-...", help=helped)
    parser.set_defaults(microbatches=1, steps=12)
    parser.checks.append(check_pipedream)


def replica_counts(text):
    return [positive_integer(count) for count in text.split("-")]


def check_pipedream(arguments):
    """Set the default of --replicas, one rank per stage, and reject values without a rule."""
    ranks, weights, microbatches = arguments.num_ranks, arguments.weights, arguments.microbatches
    replicas = arguments.replicas = arguments.replicas or [1] * ranks
    if sum(replicas) != ranks:
        raise SystemExit(
            f"--replicas {'-'.join(map(str, replicas))} adds up to {sum(replicas)} ranks, and this "
            f"job has {ranks}; name as many as there are"
        )
    if weights != "double-buffered" and microbatches > 1:
        raise SystemExit(
            f"--weights {weights} has no use for --microbatches; leave it out, or use --weights "
            "double-buffered"
        )
    if weights == "double-buffered" and microbatches < ranks:
        raise SystemExit(
            f"--weights double-buffered needs --microbatches of at least the {ranks} ranks, not "
            f"{microbatches}; use more micro-batches or fewer ranks"
        )
    if weights != "stashed" and max(replicas) > 1:
        raise SystemExit(
            f"--weights {weights} has no rule for stages with several --replicas; leave one of the "
            "two out"
        )
    if arguments.steps * microbatches < ranks:
        raise SystemExit(
            f"--steps {arguments.steps} is less than the warm-up of {ranks} ranks; train at least "
            "one mini-batch per rank"
        )


def losses_of_steps(job, microbatches, losses):
    """Return on rank 0 the loss of each mini-batch, on other ranks an empty list."""
    shares = {}
    for losses_of_rank in gather(job, {k: loss.cpu() for k, loss in losses.items()}) or []:
        shares.update(losses_of_rank)
    starts = range(0, len(shares), microbatches)
    return [sum(shares[start + k] for k in range(microbatches)) for start in starts]


def print_versions(job, replicas, stage):
    """Print for each stage its live versions, their bytes, and the versions per mini-batch."""
    used = [tuple(use) for use in stage.used]  # ranks exchange plain data only
    everything = gather(job, (used, stage.stash.peak, stage.stash.bytes_of_one()))
    if job.rank != 0:
        return
    names = [
        f"stage {index}" + (f", replica {replica}" if count > 1 else "")
        for index, count in enumerate(replicas)
        for replica in range(count)
    ]
    for name, (used, peak, one) in zip(names, everything):
        print(f"{name}: at most {peak} live versions of {one} bytes each")
        shown = ", ".join(f"{k}:{forward}/{backward}" for k, forward, backward in used[:16])
        print(f"  mini-batch:forward/backward version  {shown}", flush=True)
