"""The flags that all training scripts share, and what is refused of them."""

import argparse
import os
from pathlib import Path

import torch

from pipeline.data import DataError, load_text
from pipeline.distributed import ranks_from_environment
from pipeline.model import VOCABULARY, ModelConfig, cut_as, cut_evenly
from pipeline.refusal import Parser, positive_integer, positive_number, refuse
from pipeline.schedule import ScheduleError
from pipeline.schedules import build_schedule
from pipeline.simulator import Costs

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
# Every path that a run reads or writes, and the attribute that has it; each script has some of them.
# --checkpoints is both, and stands among the first: what is there has to be kept.
READ = {
    "--data": "data",
    "--tokenizer": "tokenizer",
    "--pretrained": "pretrained",
    "--import": "import_file",
    "--repair": "repair",
    "FILE.csv": "file",
    "--checkpoints": "checkpoints",
}
WRITTEN = {
    "--timeline": "timeline",
    "--profile": "profile",
    "--losses": "losses",
    "--metrics": "metrics",
    "--record": "record",
    "--export": "export",
}
LEARNING_RATES = {"sgd": 0.2, "momentum": 0.05, "adamw": 0.003}


def seconds(text):
    value = positive_number(text)
    if not 1 <= value <= 1_000_000:
        raise argparse.ArgumentTypeError(f"must be 1 to 1000000 seconds, not '{text}'")
    return value


def layer_counts(text):
    return [positive_integer(count) for count in text.split(",")]


def replica_counts(text):
    return [positive_integer(count) for count in text.split("-")]


def training_parser(description):
    """The parser with the flags that every training script has."""
    parser = Parser(description=description)
    add = parser.add_argument
    add("--steps", type=positive_integer, default=10, metavar="N", help="updates to train")
    add("--batch-size", type=positive_integer, default=16, metavar="N", help="sequences a step")
    add("--microbatches", type=positive_integer, default=8, metavar="M", help="parts of a batch")
    add("--layers", type=positive_integer, default=8, metavar="N", help="decoder layers")
    add("--dim", type=positive_integer, default=32, metavar="N", help="width of the model")
    add("--heads", type=positive_integer, default=4, metavar="N", help="query heads")
    add("--kv-heads", type=positive_integer, default=2, metavar="N", help="key and value heads")
    add("--seq-len", type=positive_integer, default=32, metavar="N", help="bytes a sequence")
    rates = ", ".join(f"{rate} for {name}" for name, rate in LEARNING_RATES.items())
    add("--learning-rate", type=positive_number, metavar="X", help=f"step size, else {rates}")
    add("--optimizer", choices=list(LEARNING_RATES), default="sgd", help="update rule")
    add("--seed", type=int, default=0, metavar="N", help="of the weights and the batches")
    add("--dtype", choices=list(DTYPES), default="float64", help="of weights and activations")
    add("--data", metavar="FILE", help="text to learn instead of the course's own")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to compute")
    add("--cut", type=layer_counts, metavar="A,B,...", help="layers of each stage, e.g. 3,3,2")
    add("--verify", action="store_true", help="compare with one process training the whole model")
    add(
        "--pace",
        type=positive_number,
        nargs="+",
        metavar="MS",
        help="least time of a stage's forward and backward, and of the weights' part of it",
    )
    add("--timeline", metavar="FILE", help="write the performed timeline of the last step")
    add(
        "--profile", metavar="FILE", help="write torch.profiler's trace of the last step, all ranks"
    )
    add("--losses", metavar="FILE", help="write the losses, one JSON object a line")
    add("--record", metavar="FOLDER", help="write what every action of every rank used and made")
    add("--timeout", type=seconds, default=60.0, metavar="S", help="longest wait")
    parser.set_defaults(vocabulary=VOCABULARY, plan=None, metrics=None)  # few scripts have these
    return parser


def read_data(arguments):
    """The text that the flags ask for. Raises DataError."""
    return load_text(arguments.data, arguments.seq_len)


def parse_training_arguments(
    parser,
    num_stages=lambda arguments: arguments.num_ranks,
    complete=lambda arguments: None,
    read_data=read_data,
):
    """Parse and check. `num_stages` says how many stages the flags ask for, by default one a rank.

    `complete(arguments)` may give values to flags before any is looked at; `read_data(arguments)`
    returns what is learnt, a Text.

    Adds what follows from the flags: `num_ranks`, `config` (a ModelConfig), `text` (a
    Text), `torch_dtype`, `stage_layers` (first and last layer of each stage), `microbatch_size`
    and `paced` (a Costs in milliseconds, or None).
    """
    arguments = parser.parse_args()
    arguments.num_ranks = ranks_from_environment()[1]
    complete(arguments)
    if arguments.learning_rate is None:
        arguments.learning_rate = LEARNING_RATES[arguments.optimizer]
    check_sizes(arguments)
    check_outputs(arguments)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        refuse("--device cuda: this machine has no usable GPU; use --device cpu or auto")
    sizes = "layers", "dim", "heads", "kv_heads", "seq_len", "vocabulary"
    arguments.config = ModelConfig(**{name: getattr(arguments, name) for name in sizes})
    try:
        arguments.text = read_data(arguments)
    except DataError as error:
        refuse(str(error))
    arguments.torch_dtype = DTYPES[arguments.dtype]
    arguments.microbatch_size = arguments.batch_size // arguments.microbatches
    arguments.stage_layers = stage_layers(arguments, num_stages(arguments))
    if not arguments.plan:
        check_memory(arguments)
    arguments.paced = pace_costs(arguments.pace, arguments.timeout)
    return arguments


def choose_schedule(arguments, num_ranks=None):
    """The schedule that --schedule names, for --microbatches and --chunks.

    `num_ranks` are those of one pipeline, by default all of the job.
    """
    chunks = getattr(arguments, "chunks", None)
    num_ranks = num_ranks or arguments.num_ranks
    try:
        return build_schedule(arguments.schedule, num_ranks, arguments.microbatches, chunks)
    except ScheduleError as error:
        refuse(f"--schedule {arguments.schedule} --microbatches {arguments.microbatches}: {error}")


def check_sizes(arguments):
    """Refuse numbers that are fine alone and do not fit each other."""
    batch, microbatches = arguments.batch_size, arguments.microbatches
    if batch % microbatches:
        refuse(
            f"--microbatches {microbatches} does not divide --batch-size {batch}; "
            f"use a --batch-size that is a multiple of {microbatches}"
        )
    if arguments.dim % arguments.heads or arguments.dim // arguments.heads % 2:
        refuse(
            f"--heads {arguments.heads} does not cut --dim {arguments.dim} into parts of even "
            f"width; use a --dim that is a multiple of {2 * arguments.heads}"
        )
    if arguments.heads % arguments.kv_heads:
        refuse(
            f"--kv-heads {arguments.kv_heads} does not divide --heads {arguments.heads}; "
            "use a divisor of --heads"
        )
    if not 0 <= arguments.seed < 2**31:
        refuse(f"--seed {arguments.seed} is out of range; use a number from 0 to {2**31 - 1}")


def check_rate(arguments):
    """Refuse a learning rate whose cosine would end before it begins."""
    if arguments.decay_steps <= arguments.warm_up_steps:
        refuse(
            f"--decay-steps {arguments.decay_steps} must be more than --warm-up-steps "
            f"{arguments.warm_up_steps}, where the cosine begins; lower the one or raise the other"
        )


def check_outputs(arguments):
    """Refuse an output that could not be written when the training is over, or would destroy."""
    check_paths_apart(arguments)
    for flag in ("--timeline", "--profile", "--losses", "--metrics"):
        path = getattr(arguments, flag.removeprefix("--"))
        if path is None:
            continue
        folder = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(folder):
            refuse(f"{flag} {path}: the folder {folder} does not exist; make it first")
        if not can_be_written(path, folder):
            refuse(f"{flag} {path} cannot be written; name a file in a folder of yours")
    check_recording(arguments.record)


def check_paths_apart(arguments):
    """Refuse an output on or in another path of the run, or around it; links are resolved."""
    taken = {}  # flag -> path, of those that may be followed by an output
    for flag, name in {**READ, **WRITTEN}.items():
        path = getattr(arguments, name, None)
        if not path:  # not given, or '', which is refused elsewhere
            continue
        for other in taken if flag in WRITTEN else []:
            check_apart(flag, path, other, taken[other])
        taken[flag] = path


def check_apart(flag, path, other, other_path):
    """Refuse two paths of which one is the other or lies in it."""
    real, other_real = Path(os.path.realpath(path)), Path(os.path.realpath(other_path))
    if real == other_real:
        refuse(f"{flag} and {other} name the same file {path}; give each its own")
    if real.is_relative_to(other_real):
        refuse(f"{flag} {path} lies in {other} {other_path}; name a place outside of it")
    if other_real.is_relative_to(real):
        refuse(f"{other} {other_path} lies in {flag} {path}; name a place outside of it")


def check_recording(folder):
    """Refuse a --record that could not be written, or that would mix two recordings."""
    if folder is None:
        return
    parent, whole = os.path.dirname(os.path.abspath(folder)), os.path.abspath(folder)
    if not folder or not os.path.isdir(parent):
        refuse(f"--record {folder}: the folder {parent} does not exist; make it first")
    if not os.path.isdir(whole):
        possible = not os.path.lexists(whole) and can_be_written(whole, parent)
    elif os.listdir(whole):
        refuse(f"--record {folder}: there is something in it; name a new folder, or empty this one")
    else:
        possible = can_be_written(os.path.join(whole, "recording"), whole)
    if not possible:
        refuse(f"--record {folder} cannot be written; name a folder of yours")


def can_be_written(path, folder):
    """Whether a file can be made in `folder` and take the place of `path`."""
    if not os.path.basename(path):
        return False
    if os.path.exists(path) and not (os.path.isfile(path) and os.access(path, os.W_OK)):
        return False
    # Permissions do not tell the whole truth (root, read-only mounts, /proc): try it.
    attempt = os.path.join(folder, f".{os.path.basename(path)}.{os.getpid()}")
    try:
        os.close(os.open(attempt, os.O_CREAT | os.O_WRONLY))
        os.remove(attempt)
    except OSError:
        return False
    return True


def check_memory(arguments):
    """Refuse sizes that cannot start: this is far less than training takes.

    Counted are the weights of the largest stage, the tokens of a batch and the activations of one
    layer, 8 bytes each.
    """
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not every system tells
        return
    config = arguments.config
    layers = max(last - first for first, last in arguments.stage_layers)
    kv_dim = config.kv_heads * config.head_dim
    weights = layers * config.dim * (2 * config.dim + 2 * kv_dim + 3 * config.hidden_dim)
    weights += config.vocabulary * config.dim
    tokens = arguments.batch_size * config.seq_len
    activations = arguments.microbatch_size * config.seq_len * config.dim
    needed = 8 * (weights + tokens + activations)
    if needed > memory:
        refuse(
            f"--dim, --layers and --batch-size need more than {needed / 2**30:.0f} GiB a rank, and "
            f"this machine has {memory / 2**30:.0f} GiB; use smaller ones, or more ranks"
        )


def stage_layers(arguments, num_stages):
    """(first, last) layer of each stage, from --cut or as even as it goes."""
    if arguments.cut is None:
        if arguments.layers < num_stages:
            refuse(
                f"--layers {arguments.layers} is too few for {num_stages} stages; use at least one "
                "layer a stage, or fewer stages"
            )
        return cut_evenly(arguments.layers, num_stages)
    if len(arguments.cut) != num_stages or sum(arguments.cut) != arguments.layers:
        refuse(
            f"--cut {','.join(map(str, arguments.cut))} must name {num_stages} stages "
            f"with {arguments.layers} layers in all"
        )
    return cut_as(arguments.cut)


def pace_costs(pace, timeout):
    """--pace as Costs in milliseconds, or None. `timeout` in seconds."""
    if pace is None:
        return None
    if len(pace) not in (2, 3):
        refuse("--pace takes two or three times in milliseconds: forward, backward, and the "
               "weights' part of the backward")  # fmt: skip
    if len(pace) == 3 and pace[2] >= pace[1]:
        refuse(
            "--pace: the weights' part must be less than the full backward; lower the third time"
        )
    if max(pace) >= 1000 * timeout:
        refuse(
            f"--pace: an action of {max(pace):g} ms outlasts --timeout {timeout:g} s; use a "
            "shorter time or a longer --timeout"
        )
    return Costs(*pace)
