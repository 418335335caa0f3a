"""PipeDream with a stash that asks the piece of case 7 before every update."""

from broken.pipelines.faults import RANKS
from broken.pipelines.faulty_stages import draw_microbatches
from extensions.asynchronous.asynchronous_reference import train_by_rule
from extensions.asynchronous.weight_stash import StashingStage, WeightStash
from lab.report import Report
from pipeline.collectives import gather
from pipeline.job import join_job, leave_job
from pipeline.model import build_part, token_loss
from pipeline.schedules import pipedream
from pipeline.training import build_optimizer
from pipeline.worker import Worker


class StashWithPiece(WeightStash):
    """A stash whose copy before an update is left to `piece`."""

    def __init__(self, parameters, piece):
        super().__init__(parameters, keep=False)
        self.piece = piece

    def update(self, optimizer, gradients, oldest_needed):
        self.piece(list(self.parameters.values()), self.users[self.current])
        super().update(optimizer, gradients, oldest_needed)


def train_without_flush(arguments, pieces):
    """Train with PipeDream and a stash on every rank; that of rank 1 asks the piece.

    Returns the exit status, as main() does.
    """
    arguments.weights, arguments.replicas = "stashed", [1] * RANKS
    schedule = pipedream(RANKS, arguments.steps)
    job = join_job(arguments.device, arguments.timeout, schedule.pairs)
    recorder = Recorder(job, arguments.paced)
    first, last = arguments.stage_layers[job.rank]
    part = build_part(
        arguments.config, first, last, arguments.seed, arguments.torch_dtype, job.device
    )
    optimizer = build_optimizer(arguments.optimizer, part.parameters(), arguments.learning_rate)
    stage = StashingStage(
        part, job.rank, [1] * RANKS, recorder, token_loss, optimizer, "stashed", 1, (job.rank,)
    )
    if job.rank == 1:
        stage.stash = StashWithPiece(part.named_parameters(), pieces.before_update)
    shape = (arguments.batch_size, arguments.seq_len, arguments.dim)
    worker = Worker(job, schedule, {stage.index: stage}, shape, arguments.torch_dtype)
    report = Report(arguments, job, schedule, recorder, what="whole run", loss_rank=0)

    batches = [draw_microbatches(arguments, job, step) for step in range(arguments.steps)]
    worker.run_step(*([piece for [piece] in each] for each in zip(*batches)))
    report.events_per_step.append(recorder.take_events())
    losses = gather(job, {minibatch: loss.cpu() for minibatch, loss in worker.losses.items()})
    for step in range(arguments.steps) if job.rank == 0 else []:
        report.record_loss(step, losses[-1][step])

    report.finish()
    leave_job(job)
    return 0 if report.verify(train_by_rule) else 1
