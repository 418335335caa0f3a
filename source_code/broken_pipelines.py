# SPDX-License-Identifier: Apache-2.0
"""Eight pipelines with one fault each, to be found in their recordings (lesson 12b).

    mkdir -p build
    torchrun --standalone --nproc-per-node 4 source_code/broken_pipelines.py --case 1 \\
        --record build/case_1

Each case is a correct pipeline in which one function, its piece, is wrong. With --cured the case
uses the right function, and with --repair FILE yours: FILE defines a function of the piece's name.
If you want to find the faults, read no further than this file: they are in broken/pipelines/.
"""

import os
import sys

import pipedream

from broken.pipelines.faults import PIECES, RANKS, choose_pieces
from broken.pipelines.faulty_stages import build_faulty_stage, cut_by_piece
from broken.pipelines.faulty_stash import train_without_flush
from broken.pipelines.faulty_worker import WorkerWithPieces, choose_reference
from guard.around_main import guarded
from lab import attach
from pipeline.command_line import positive_integer
from pipeline.one_process import build_optimizer
from pipeline.schedules import one_f_one_b
from pipeline.training import (
    LossLog,
    microbatches_of,
    parse_arguments,
    start_job,
    training_parser,
)


@guarded
def main():
    arguments = parse_case()
    pieces = choose_pieces(arguments)
    cut = cut_by_piece(arguments, pieces)
    if arguments.case == 7:
        return train_without_flush(pipedream, arguments, pieces, cut)
    schedule = one_f_one_b(RANKS, arguments.microbatches)
    tied_pairs = [(0, RANKS - 1), (RANKS - 1, 0)] if arguments.case == 8 else []
    job = start_job(arguments, schedule.pairs + tied_pairs)
    stage = build_faulty_stage(arguments, job, cut, pieces)
    attach.observe(arguments, job, [stage], schedule)
    worker = WorkerWithPieces(arguments, pieces, job, schedule, stage)
    optimizer = build_optimizer(
        arguments.optimizer, stage.part.parameters(), arguments.learning_rate
    )
    log = LossLog(arguments, stage.is_last)
    for step in range(arguments.steps):
        inputs, targets = microbatches_of(arguments, job.device, step)
        optimizer.zero_grad()
        loss = worker.run_step(inputs, targets)
        optimizer.step()
        log.add(step, loss)
    job.leave()
    return log.finish(job.device, choose_reference(arguments))


def parse_case():
    parser = training_parser(__doc__)
    add = parser.add_argument
    add("--case", type=positive_integer, choices=list(PIECES), default=1, help="which pipeline")
    add("--cured", action="store_true", help="with the right piece")
    add("--repair", metavar="FILE", help="with the piece that FILE defines")
    parser.reads.append("--repair")
    attach.add_flags(parser)
    parser.set_defaults(dim=16, heads=2, kv_heads=2, steps=3, pace=[4.0, 8.0])
    case = parser.parse_args().case
    if case == 3:
        parser.set_defaults(layers=11)
    if case == 7:
        parser.set_defaults(microbatches=1, steps=10)
    arguments = parse_arguments(parser)
    if case == 7 and arguments.microbatches > 1:
        raise SystemExit(
            "--case 7 updates after each batch and cuts none; leave out --microbatches"
        )
    if arguments.cured and arguments.repair:
        raise SystemExit(
            "--cured and --repair each replace the broken piece; leave one of the two out"
        )
    if arguments.repair is not None and not os.path.isfile(arguments.repair):
        raise SystemExit(
            f"--repair {arguments.repair}: there is no such file; name one that defines a piece"
        )
    return arguments


if __name__ == "__main__":
    sys.exit(main())
