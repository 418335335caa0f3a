# SPDX-License-Identifier: Apache-2.0
"""The number of threads of a rank: one by default, more with --threads.

Several threads divide a sum into as many parts, which changes its last digits.
"""

import torch

from pipeline.command_line import positive_integer


def add_thread_flag(parser):
    """Add --threads."""
    what = "of each rank on a CPU, with --dtype float32 or bfloat16"
    parser.add_argument("--threads", type=positive_integer, default=1, metavar="N", help=what)


def check_threads(arguments):
    """Reject several threads for float64, where the course promises the same digits."""
    if arguments.threads > 1 and arguments.dtype == "float64":
        raise SystemExit(
            f"--threads {arguments.threads} with --dtype float64, whose digits are promised for one "
            "thread; use --dtype float32 or bfloat16, or leave --threads out"
        )


def use_threads(arguments):
    """Compute with --threads threads; call it after `start_job`, which sets one."""
    torch.set_num_threads(arguments.threads)
