# SPDX-License-Identifier: Apache-2.0
"""The steps between backward and update in a long training run: clipping and the learning rate."""

from extensions.optimization.clipping import norm_of, scale_gradients, squares_of
from extensions.optimization.learning_rate import share_of_peak
from pipeline.command_line import positive_integer, positive_number


def add_update_flags(parser, warm_up_steps):
    """Add --warm-up-steps, --decay-steps and --clip."""
    add, count = parser.add_argument, {"type": positive_integer, "metavar": "N"}
    add("--warm-up-steps", help=f"updates to the peak, by default {warm_up_steps}", **count)
    add(
        "--decay-steps",
        help="update from which the rate stays at its floor, by default --steps of the first run, or "
        "one more than the warm-up",
        **count,
    )
    add("--clip", type=positive_number, metavar="X", help="largest norm of the whole gradient")


def check_rate(arguments):
    """Reject a cosine that would end before the warm-up ends."""
    if arguments.decay_steps <= arguments.warm_up_steps:
        raise SystemExit(
            f"--decay-steps {arguments.decay_steps} must be more than --warm-up-steps "
            f"{arguments.warm_up_steps}, where the cosine begins; lower the one or raise the other"
        )


def clip_and_set_rate(arguments, model, optimizer, step):
    """Clip, and set the rate, in one process, between backward and update."""
    clip_whole_model(arguments, model)
    share = share_of_peak(step, arguments.warm_up_steps, arguments.decay_steps)
    optimizer.param_groups[0]["lr"] = arguments.learning_rate * share


def clip_whole_model(arguments, model, *_):
    """Clip by the norm of all gradients, in one process, between backward and update."""
    if arguments.clip:
        parameters = list(model.named_parameters())
        scale_gradients(parameters, norm_of(squares_of(parameters)), arguments.clip)
