# SPDX-License-Identifier: Apache-2.0
"""The command that starts a plan, or what to do if no script of the course can start it."""

from functools import lru_cache
from pathlib import Path
from shlex import quote

from extensions.real_models.saved_folder import find_tensors
from extensions.real_models.saved_settings import read_settings
from files.inputs import InputError
from pipeline.data import DEFAULT_TEXT
from pipeline.schedules import SCHEDULES
from planning.candidates import all_plans, divisors, search_plans
from planning.known_models import NAMED, is_of_the_course
from planning.narrow import command_lines, lines_of
from planning.plan_memory import TIGHT
from planning.plan_tables import range_of

OF_THE_COURSE = ("1m", "10m", "60m", "125m", "350m", "1b")
SAVED_BY_NAME = ("llama-", "qwen2.5-")  # models that convert.py reads, once their files are here
BYTES = 256  # a larger vocabulary needs a tokenizer
CONVERTED = "--checkpoints", "NEW_FOLDER"
STEPS, RATE, MINUTES = 100, 0.003, 30  # of pretrain_llama.py and of train.sbatch unless given
RATE_OF_SAVED = "1e-5"  # of finetune.py
LONGEST_TOKENS = 6  # bytes per token of a tokenizer that was trained on the course's text


def command_of(name, model, machine, plan):
    """The command that starts a plan, or None if no script of the course can start it."""
    flags = course_flags(name, model)
    if flags is None or not has_flags(plan):
        return None
    first, text = [], [] if own_text_is_enough(model) else ["--data", "FILE"]
    if is_saved(name):
        first, text = preparing(name, model), text_of_saved(model)
    words = [start_of(machine, plan), *flags_of(model, machine, plan, flags), *text]
    return " && ".join([*first, " ".join(words)])


def is_saved(name):
    """Whether a model's name is the folder of a saved one, whose training goes on."""
    return bool(name) and Path(name).is_dir()


def preparing(folder, model):
    """The commands that make a checkpoint of a saved model, and its tokens of a text in FILE."""
    convert = f"python source_code/convert.py --from-hf {quote(folder)} {' '.join(CONVERTED)}"
    if model.vocabulary <= BYTES:
        return [convert]
    tokenizer = quote(f"{folder}/tokenizer.json")
    tokens = f"prepare_data.py --data FILE --tokenizer {tokenizer} --out TOKENS"
    return [convert, f"python source_code/{tokens}"]


def text_of_saved(model):
    """The flags of a training that goes on with a saved model."""
    data = "FILE" if model.vocabulary <= BYTES else "TOKENS"
    return ["--data", data, "--learning-rate", RATE_OF_SAVED]


def start_of(machine, plan):
    """The command that starts pretrain_llama.py on the GPUs of a plan, without its flags."""
    most = int(machine.gpus_per_host or machine.gpus_per_node)
    if plan.gpus <= most:  # torchrun --standalone starts one computer
        return f"torchrun --standalone --nproc-per-node {plan.gpus} source_code/pretrain_llama.py"
    each = max(count for count in divisors(plan.gpus) if count <= most)
    nodes = plan.gpus // each
    return f"sbatch --nodes={nodes} --gres=gpu:{each} slurm/train.sbatch pretrain_llama.py"


def training_lines(machine, plan, saved=False):
    """Lines that say how much the command of a plan trains, and what to add for more."""
    rate = smaller = ""
    if not saved:  # whose command has a rate
        rate = f", with a learning rate of up to {RATE}"
        smaller = "; a large model also needs a smaller --learning-rate"
    limit, more = "", "add --steps (--checkpoints keeps the weights)"
    if start_of(machine, plan).startswith("sbatch"):
        limit = f", in at most {MINUTES} minutes"
        more = "use slurm/checkpointed.sbatch with --steps, and sbatch's --time"
    return lines_of(f"This trains {STEPS} steps{limit}{rate}. For more, {more}{smaller}.")


def has_flags(plan):
    """Whether pretrain_llama.py has flags for a plan, of a model that it can build."""
    if plan.tensor > 1 or plan.sharding != "none":
        return False
    if plan.recompute not in ("none", "full") or plan.precision != "bf16":
        return False
    return plan.neighbours == "stages" or plan.ranks == 1


def own_text_is_enough(model):
    """Whether the held-out tenth of the course's text is long enough for a sequence of tokens."""
    bytes_per_token = 1 if model.vocabulary <= BYTES else LONGEST_TOKENS
    return DEFAULT_TEXT.stat().st_size >= 10 * (model.length + 1) * bytes_per_token


def further_lines(name, model, machine):
    """Lines about a model that no command of the course builds from its name alone."""
    if course_flags(name, model) is not None:
        return []
    if name and name in NAMED and name.startswith(SAVED_BY_NAME):
        return ["", *lines_with_files(name, model, machine)]
    if is_saved(name):
        why = f"No command, as convert.py cannot read this folder: {why_not_saved(name, model)}."
        return ["", *lines_of(why)]
    return [
        "",
        *lines_of(
            "No script of the course builds this model. For a saved Llama, Mistral, Qwen2 or "
            "Qwen3, name its folder as MODEL; for any other, docs/your-own-model.md shows how to "
            "change a copy."
        ),
    ]


def lines_with_files(name, model, machine):
    """Lines with the commands of the fastest plan that pretrain_llama.py can start."""
    plans = [plan for plan in all_plans(model, machine) if has_flags(plan)]
    best = search_plans(model, machine, plans, 1).best
    if not best:
        return lines_of(f"Nothing that pretrain_llama.py can start with a saved {name} fits.")
    flags = flags_of(model, machine, best[0].plan, [*CONVERTED, *sizes_of(model)])
    start = " ".join([start_of(machine, best[0].plan), *flags, *text_of_saved(model)])
    least, most = range_of(machine, best[0])
    tight = " Its memory is tight." if best[0].memory > TIGHT * machine.memory else ""
    return [
        *lines_of(
            f"With a saved {name} in FOLDER and a text in FILE, the fastest plan for a script of "
            f"the course takes {best[0].update:.3g} s per update (expect {least:.3g} to {most:.3g}"
            f" s) and {best[0].memory / 1e9:.1f} GB.{tight} Convert the model and the text once, "
            "then train:"
        ),
        *(line for command in preparing("FOLDER", model) for line in command_lines(command)),
        *command_lines(start),
        *training_lines(machine, best[0].plan, saved=True),
    ]


def why_not_saved(folder, model):
    """Return why convert.py does not take a folder, or "" if it does."""
    try:
        read_settings(folder, model.length)
        find_tensors(Path(folder))
    except InputError as error:
        return str(error)
    return ""


@lru_cache(maxsize=100)
def course_flags(name, model):
    """The flags of pretrain_llama.py for a model; None if the script cannot build the model."""
    if name in OF_THE_COURSE:
        return ["--model", name]
    if is_saved(name):
        return None if why_not_saved(name, model) else [*CONVERTED, *sizes_of(model)]
    return sizes_of(model) if is_of_the_course(model) else None


def sizes_of(model):
    """The flags of a model's sizes."""
    sizes = model.layers, model.hidden, model.head_count, model.kv_heads or model.head_count
    words = zip(("--layers", "--dim", "--heads", "--kv-heads"), map(str, sizes))
    return [*(word for pair in words for word in pair), "--vocabulary", str(model.vocabulary)]


def flags_of(model, machine, plan, sizes=None):
    """The flags with which pretrain_llama.py trains according to a plan."""
    chunks = SCHEDULES[plan.schedule].chunks and not SCHEDULES[plan.schedule].fixed_chunks
    flags = {
        "--replicas": plan.replicas,
        "--schedule": plan.schedule,
        **({"--chunks": plan.chunks} if chunks else {}),
        "--batch-size": model.batch,
        "--microbatches": plan.microbatches(model),
        "--seq-len": model.length,
        "--recompute": "layer" if plan.recompute == "full" else "none",
        "--dtype": {2: "bfloat16", 4: "float32", 8: "float64"}[machine.bytes_per_value],
        "--cut": ",".join(map(str, plan.layers_of(model))),
    }
    words = [str(word) for pair in flags.items() for word in pair]
    return [*(sizes or course_flags(None, model)), *words]
