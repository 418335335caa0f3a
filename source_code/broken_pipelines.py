"""Eight pipelines with one fault each, to be found in their recordings (lesson 12b).

    mkdir -p build
    torchrun --standalone --nproc-per-node 4 source_code/broken_pipelines.py --case 1 \\
        --record build/case_1

Each is a correct pipeline in which one function, its piece, is wrong. With --cured it takes the
right one, and with --repair FILE one of yours: FILE defines a function of the piece's name. Whoever
wants to find the faults reads no further than this file: they are in broken/pipelines/.
"""

import os
import sys

from broken.pipelines.faults import PIECES, RANKS, choose_pieces
from broken.pipelines.faulty_clipping import clip_gradients, clip_gradients_in_one_process
from broken.pipelines.faulty_stages import build_stage, cut_layers, draw_microbatches
from broken.pipelines.faulty_stash import train_without_flush
from broken.pipelines.faulty_tying import exchange_tied_gradient, train_tied_in_one_process
from broken.pipelines.faulty_worker import WorkerWithPieces
from lab.report import Report
from pipeline.command_line import reject
from pipeline.job import join_job, leave_job
from pipeline.schedules import one_f_one_b
from pipeline.training import (
    build_optimizer,
    parse_training_arguments,
    train_one_process,
    training_parser,
)


def main():
    arguments = parse_arguments()
    pieces = choose_pieces(arguments)
    if arguments.case == 7:
        return train_without_flush(arguments, pieces)
    cut_layers(arguments, pieces)
    schedule = one_f_one_b(RANKS, arguments.microbatches)
    tied_pairs = [(0, RANKS - 1), (RANKS - 1, 0)] if arguments.case == 8 else []
    job = join_job(arguments.device, arguments.timeout, schedule.pairs + tied_pairs)
    recorder = Recorder(job, arguments.paced)
    losses = []
    stage = build_stage(arguments, job, recorder, pieces, losses)
    optimizer = build_optimizer(
        arguments.optimizer, stage.part.parameters(), arguments.learning_rate
    )
    shape = (arguments.microbatch_size, arguments.seq_len, arguments.dim)
    worker = WorkerWithPieces(
        arguments, pieces, job, schedule, {stage.index: stage}, shape, arguments.torch_dtype
    )
    report = Report(arguments, job, schedule, recorder)

    for step in report.steps():
        inputs, targets = draw_microbatches(arguments, job, step)
        optimizer.zero_grad()
        losses.clear()
        worker.run_step(inputs, targets)
        if arguments.case == 6:
            clip_gradients(job, stage, pieces)
        if arguments.case == 8:
            exchange_tied_gradient(arguments, job, stage, pieces)
        optimizer.step()
        report.record_step(step, sum(losses) / len(losses) if losses else None)

    report.finish()
    leave_job(job)
    return 0 if report.verify(choose_reference(arguments)) else 1


def parse_arguments():
    parser = training_parser(__doc__.splitlines()[0])
    add = parser.add_argument
    add("--case", type=int, choices=list(PIECES), default=1, help="which pipeline")
    add("--cured", action="store_true", help="with the right piece")
    add("--repair", metavar="FILE", help="with the piece that FILE defines")
    small = {"dim": 16, "heads": 2, "kv_heads": 2, "steps": 3, "pace": [4.0, 8.0]}
    parser.set_defaults(**small)
    case = parser.parse_args().case
    if case == 3:
        parser.set_defaults(layers=11)
    if case == 7:
        parser.set_defaults(microbatches=1, steps=10)
    arguments = parse_training_arguments(parser)
    if case == 7 and arguments.microbatches > 1:
        reject("--case 7 updates after each batch and cuts none; leave out --microbatches")
    if arguments.cured and arguments.repair:
        reject("--cured and --repair each replace the broken piece; leave one of the two out")
    if arguments.repair is not None and not os.path.isfile(arguments.repair):
        reject(f"--repair {arguments.repair}: there is no such file; name one that defines a piece")
    return arguments


def choose_reference(arguments):
    """What one process does in this case: the whole model, no pipeline."""
    if arguments.case == 6:
        return lambda arguments, device: train_one_process(
            arguments, device, clip_gradients_in_one_process
        )
    return train_tied_in_one_process if arguments.case == 8 else train_one_process


if __name__ == "__main__":
    sys.exit(main())
