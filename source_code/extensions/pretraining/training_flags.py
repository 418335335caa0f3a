# SPDX-License-Identifier: Apache-2.0
"""The flags that pretrain_llama.py and finetune.py share, and which values are rejected."""

import torch

from extensions.optimization.update import add_update_flags
from extensions.pretraining.cut_by_time import add_cut_flag, complete_cut
from extensions.pretraining.epochs import take_epochs
from extensions.recompute import MODES
from pipeline.command_line import ranks_from_environment
from pipeline.schedules.from_flags import add_schedule_flags


def add_training_flags(parser, warm_up_steps):
    """Add the flags of rows, schedule, cut, computation and update.

    The parser is one made by `training_parser`.
    """
    add = parser.add_argument
    [data] = [action for action in parser._actions if action.dest == "data"]
    data.help += "; or a folder from prepare_data.py"
    add("--packed", action="store_true", help="documents share rows, and a mask keeps them apart")
    add("--shuffle", action="store_true", help="each row once per epoch, not drawn with repeats")
    add_schedule_flags(parser, default="1f1b")
    add_cut_flag(parser)
    add("--recompute", choices=list(MODES), default="none", help="what runs forward a second time")
    add_update_flags(parser, warm_up_steps)


def reject_packed(arguments):
    """Reject --packed for a text that does not say where its documents end."""
    if arguments.packed:
        raise SystemExit(
            "--packed needs to know where documents end; make a folder of tokens with prepare_data.py, "
            "and name it with --data"
        )


def choose_dtype(arguments):
    """Without --dtype choose bfloat16 on a GPU that computes in it, else float32."""
    if arguments.dtype is None:
        arguments.dtype = default_dtype(arguments.device)


def default_dtype(device):
    """The dtype of a training run by default; rank 0 says so if its GPU has no bfloat16.

    A GPU of compute capability below 8.0, such as a T4, emulates bfloat16 and is slower with it.
    """
    if device == "cpu" or not torch.cuda.is_available():
        return "float32"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bfloat16"
    if ranks_from_environment()[0] == 0:
        name = torch.cuda.get_device_name()
        print(
            f"{name} only emulates bfloat16, so the default of --dtype is float32 here", flush=True
        )
    return "float32"


def check_training_flags(arguments, schedule):
    """Reject what cannot be computed or cut; choose a cut by counted work, and epochs."""
    take_epochs(arguments)
    complete_cut(arguments, schedule.num_stages)
