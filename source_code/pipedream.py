"""PipeDream: 1F1B without a flush, with real weight stashing (lesson 04).

    torchrun --standalone --nproc-per-node 4 source_code/pipedream.py --verify
    torchrun --standalone --nproc-per-node 4 source_code/pipedream.py --replicas 2-1-1 --verify

--steps counts mini-batches, each of --batch-size and with an update of its own; a stage of several
--replicas updates once for as many mini-batches. The weights that a mini-batch meets are those of
--weights; --verify works that rule out in one process.
"""

import sys

from pipeline.arguments import (
    parse_training_arguments,
    refuse,
    replica_counts,
    training_parser,
)
from pipeline.asynchronous.asynchronous_reference import train_by_rule
from pipeline.asynchronous.weight_stash import MODES, StashingStage
from pipeline.distributed import gather, join_job, leave_job
from pipeline.model import build_part, token_loss
from pipeline.optimizer import build_optimizer
from pipeline.recorder import Recorder
from pipeline.report import Report
from pipeline.schedules import pipedream, pipedream_round_robin
from pipeline.worker import Worker


def main():
    arguments = parse_arguments()
    schedule = build_schedule(arguments)
    replicated = [ranks for ranks in schedule.ranks_of_stage.values() if len(ranks) > 1]
    job = join_job(arguments.device, arguments.timeout, schedule.pairs, replicated)
    recorder = Recorder(job, arguments.paced)
    stage = build_stage(arguments, job, schedule, recorder)
    shape = (arguments.microbatch_size, arguments.seq_len, arguments.dim)
    worker = Worker(job, schedule, {stage.index: stage}, shape, arguments.torch_dtype)
    report = Report(arguments, job, schedule, recorder, what="whole run", loss_rank=0)

    # One pass through the schedule is the whole training: the pipeline never drains in between.
    inputs, targets = microbatches_of(arguments, job)
    worker.run_step(inputs, targets)
    report.events_per_step.append(recorder.take_events())
    shares = gather(job, {microbatch: loss.cpu() for microbatch, loss in worker.losses.items()})
    for step, loss in enumerate(losses_of_steps(arguments, shares)):
        report.record_loss(step, loss)

    report.finish()
    print_versions(arguments, job, stage)
    leave_job(job)
    return 0 if report.verify(train_by_rule) else 1


def parse_arguments():
    parser = training_parser(__doc__.splitlines()[0])
    parser.add_argument(
        "--weights", choices=list(MODES), default="stashed", help="which versions are used"
    )
    parser.add_argument(
        "--replicas", type=replica_counts, metavar="A-B-...", help="ranks of each stage, e.g. 2-1-1"
    )
    parser.set_defaults(microbatches=1, steps=12)
    arguments = parse_training_arguments(parser, num_stages_of)
    if arguments.weights != "double-buffered" and arguments.microbatches > 1:
        refuse(
            f"--weights {arguments.weights} has no use for --microbatches; leave it out, or use "
            "--weights double-buffered"
        )
    if arguments.weights == "double-buffered" and arguments.microbatches < arguments.num_ranks:
        refuse(
            f"--weights double-buffered needs --microbatches of at least the {arguments.num_ranks} "
            f"ranks, not {arguments.microbatches}; use more micro-batches or fewer ranks"
        )
    if arguments.weights != "stashed" and max(arguments.replicas) > 1:
        refuse(
            f"--weights {arguments.weights} has no rule for stages with several --replicas; leave "
            "one of the two out"
        )
    if arguments.steps * arguments.microbatches < arguments.num_ranks:
        refuse(
            f"--steps {arguments.steps} is less than the warm-up of {arguments.num_ranks} ranks; "
            "train at least one mini-batch a rank"
        )
    return arguments


def num_stages_of(arguments):
    """The stages that --replicas asks for, by default one a rank."""
    if arguments.replicas is None:
        arguments.replicas = [1] * arguments.num_ranks
    if sum(arguments.replicas) != arguments.num_ranks:
        refuse(
            f"--replicas {'-'.join(map(str, arguments.replicas))} adds up to "
            f"{sum(arguments.replicas)} ranks, and this job has {arguments.num_ranks}; name as "
            "many as there are"
        )
    return len(arguments.replicas)


def build_schedule(arguments):
    """The whole training as one schedule."""
    if arguments.weights == "double-buffered":
        num_microbatches = arguments.steps * arguments.microbatches
        return pipedream(arguments.num_ranks, num_microbatches, arguments.microbatches)
    return pipedream_round_robin(arguments.replicas, arguments.steps)


def build_stage(arguments, job, schedule, recorder):
    """This rank's stage with its optimizer, since it updates whenever a gradient is complete."""
    [index] = schedule.stages_of(job.rank)
    first, last = arguments.stage_layers[index]
    part = build_part(
        arguments.config, first, last, arguments.seed, arguments.torch_dtype, job.device
    )

    def share_of_loss(scores, targets):
        # The mean over the batch is the mean of the micro-batches' means: they are equally large.
        return token_loss(scores, targets) / arguments.microbatches

    optimizer = build_optimizer(arguments.optimizer, part.parameters(), arguments.learning_rate)
    return StashingStage(
        part,
        index,
        arguments.replicas,
        recorder,
        share_of_loss,
        optimizer,
        arguments.weights,
        arguments.microbatches,
        schedule.ranks_of_stage[index],
    )


def microbatches_of(arguments, job):
    """Inputs and targets of the whole training, each a list of (micro-batch size, length)."""
    inputs, targets = [], []
    for step in range(arguments.steps):
        batch = arguments.text.batch(step, arguments.batch_size, arguments.seq_len, arguments.seed)
        for microbatches, tokens in zip((inputs, targets), batch):
            microbatches += tokens.to(job.device).chunk(arguments.microbatches)
    return inputs, targets


def losses_of_steps(arguments, losses_of_ranks):
    """The loss of each mini-batch from the shares of its micro-batches, wherever they were made.

    `losses_of_ranks` has a dictionary from micro-batch to loss for each rank, or is None.
    """
    shares = {}
    for losses in losses_of_ranks or []:
        shares.update(losses)
    per_step = arguments.microbatches
    return [sum(shares[i + j] for j in range(per_step)) for i in range(0, len(shares), per_step)]


def print_versions(arguments, job, stage):
    """Per stage: live versions and their bytes, and which version each mini-batch met."""
    everything = gather(job, (stage.used, stage.stash.peak, stage.stash.bytes_of_one()))
    if job.rank != 0:
        return
    names = [
        f"stage {index}" + (f", replica {replica}" if count > 1 else "")
        for index, count in enumerate(arguments.replicas)
        for replica in range(count)
    ]
    for name, (used, peak, one) in zip(names, everything):
        print(f"{name}: at most {peak} live versions of {one} bytes each")
        shown = ", ".join(f"{use.minibatch}:{use.forward}/{use.backward}" for use in used[:16])
        print(f"  mini-batch:forward/backward version  {shown}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
