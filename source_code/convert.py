# SPDX-License-Identifier: Apache-2.0
"""Brings a model of Hugging Face's transformers into the course, and takes one out of it.

    python source_code/convert.py --from-hf DIR --checkpoints NEW_FOLDER
    python source_code/convert.py --checkpoints FOLDER --to-hf NEW_DIR --tokenizer DIR

The first writes a checkpoint that pretrain_llama.py continues, from a folder with a Llama,
Mistral, Qwen2 or Qwen3. The second writes the newest checkpoint as a folder that
AutoModelForCausalLM loads. One process does it, with memory for the whole model; no weight changes,
unless --dtype rounds it.
"""

import json
import os
import shutil
import sys
import time
from contextlib import suppress
from shlex import quote
from types import SimpleNamespace

import torch

from extensions.checkpointing.checkpoint import Checkpoints, Training
from extensions.checkpointing.checkpoint_folder import (
    CheckpointError,
    find_checkpoint,
    name_of_step,
)
from extensions.checkpointing.whole_checkpoint import read_weights
from extensions.inference.saved_model import newest_checkpoint
from extensions.optimization.learning_rate import ConstantRate
from extensions.pretraining.tokens import digest_of_vocabulary, numbers_of, read_tokenizer
from extensions.real_models.saved_folder import read_model, tokenizer_of
from extensions.real_models.saved_output import (
    BESIDE,
    claim_output,
    config_in,
    save_model,
)
from extensions.real_models.saved_part import SavedSettings, fill_part, lay_out
from extensions.real_models.saved_settings import CONFIG_FILE, SIZE_FLAGS, settings_from
from files.claims import is_in_place
from files.inputs import InputError, parse_json
from files.outputs import not_written
from guard.around_main import guarded
from guard.paths import check_new_folder, check_paths_apart
from pipeline.command_line import Parser, ranks_from_environment
from pipeline.data import DataError
from pipeline.job import join_job
from pipeline.model import ModelConfig
from pipeline.training import DTYPES

FIRST_RUN = "run-0001"


@guarded
def main():
    arguments = read_flags()
    return take_out(arguments) if arguments.from_hf is None else bring_in(arguments)


def read_flags():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--from-hf", metavar="DIR", help="a saved Llama, Mistral, Qwen2 or Qwen3 of transformers")
    add("--checkpoints", metavar="FOLDER", required=True, help="of pretrain_llama.py")
    add("--to-hf", metavar="DIR", help="write the newest checkpoint there; a new folder")
    add("--tokenizer", metavar="DIR", help="the folder whose tokenizer goes into --to-hf")
    add(
        "--dtype", choices=list(DTYPES), help="of the weights in --to-hf; default: the checkpoint's"
    )
    arguments = parser.parse_args()
    if ranks_from_environment()[1] > 1:
        raise SystemExit("convert.py is one process; start it with python, and not with torchrun")
    if (arguments.from_hf is None) == (arguments.to_hf is None):
        raise SystemExit("--from-hf brings a model in, and --to-hf takes one out; use one of them")
    if arguments.from_hf is not None and (arguments.tokenizer or arguments.dtype):
        raise SystemExit("--tokenizer and --dtype are for --to-hf; leave them out")
    beside = arguments.tokenizer
    if beside and not any(os.path.lexists(os.path.join(beside, name)) for name in BESIDE):
        raise SystemExit(f"--tokenizer {beside} has no tokenizer; name the folder of a model")
    read = {"--checkpoints": "checkpoints", "--tokenizer": "tokenizer"}
    written = {"--to-hf": "to_hf"}
    if arguments.from_hf is not None:
        read, written = {"--from-hf": "from_hf"}, {"--checkpoints": "checkpoints"}
    check_paths_apart(arguments, written, read)
    for flag, name in written.items():
        check_new_folder(flag, getattr(arguments, name))
    return arguments


def bring_in(arguments):
    """Write the saved model as the first checkpoint of a new folder. Returns the exit status."""
    try:
        saved = read_model(arguments.from_hf, seq_len=1)
    except InputError as error:
        raise SystemExit(f"--from-hf: {error}") from None
    settings = saved.settings
    if settings.dim % (2 * settings.heads) or settings.vocabulary < ModelConfig.vocabulary:
        raise SystemExit(
            f"--from-hf {arguments.from_hf} has {settings.vocabulary} tokens and {settings.heads} "
            f"heads for a width of {settings.dim}, which pretrain_llama.py does not have; continue "
            "it with finetune.py"
        )
    sizes = {f"--{name.replace('_', '-')}": getattr(settings, name) for name in SIZE_FLAGS}
    weights = {name: saved.weight(name) for name, _ in lay_out(settings).named_parameters()}
    kept = {**settings.further(), "config": json.dumps(saved.config)}
    configuration = {**sizes, "--settings": kept}
    file = tokenizer_of(arguments.from_hf)
    try:
        if file:  # pretrain_llama.py rejects tokens that the model does not know
            configuration["--tokenizer"] = digest_of_vocabulary(read_tokenizer(file))
    except DataError as error:
        raise SystemExit(f"--from-hf: {error}") from None
    no_state = SimpleNamespace(state={})
    training = Training(weights, no_state, ConstantRate(), configuration)
    checkpoints = Checkpoints(join_job("cpu"), arguments.checkpoints, FIRST_RUN)
    problem = checkpoints.prepare()
    if problem is None:
        problem = checkpoints.write(training.state(checkpoints.job), 0, time.perf_counter())
        if problem and is_in_place(checkpoints.claim, checkpoints.folder):
            remove_first(os.path.join(checkpoints.folder, checkpoints.run))
    checkpoints.finish()
    checkpoints.job.leave()
    if problem:
        fix = "" if "; " in problem else "; mend that (make room, for example) and start again"
        raise SystemExit(f"--from-hf {arguments.from_hf} was not brought in: {problem}{fix}")
    if file:
        print(
            f"make tokens with prepare_data.py --data TEXT --tokenizer {quote(file)} --out TOKENS"
        )
    words = " ".join(f"{flag} {size}" for flag, size in sizes.items())
    words += f" --learning-rate 1e-5 --data {'TOKENS' if file else 'TEXT'}"
    print(f"continue with pretrain_llama.py --checkpoints {quote(arguments.checkpoints)} {words}")
    return 0


def remove_first(run_folder):
    """Remove what a failed save has made, so that the same command works once there is room.

    Only this: somebody may have put other files there.
    """
    shutil.rmtree(os.path.join(run_folder, name_of_step(0)), ignore_errors=True)
    with suppress(OSError):
        os.rmdir(run_folder)


def read_newest(folder):
    """Return the newest Checkpoint, and its read_model_of().

    A training may save and remove checkpoints there meanwhile. Raises CheckpointError.
    """

    def read_checked(folder):
        checkpoint = find_checkpoint(folder)
        if checkpoint is None:
            raise SystemExit(f"--checkpoints: there is no checkpoint in {folder}; train first")
        return checkpoint, read_model_of(checkpoint)

    return newest_checkpoint(folder, read_checked)


def take_out(arguments):
    """Write the newest checkpoint as a folder of transformers. Returns the exit status."""
    try:
        checkpoint, (settings, config, part, weights) = read_newest(arguments.checkpoints)
    except CheckpointError as error:
        raise SystemExit(str(error)) from None
    for name, layout in part.named_parameters():
        if weights[name].shape != layout.shape:
            raise SystemExit(
                f"{checkpoint.path}: {name} has the shape {tuple(weights[name].shape)}, and a Llama of "
                f"these sizes has {tuple(layout.shape)}; only a Llama or a relative can be taken out"
            )
    trained_with = checkpoint.description["configuration"].get("--tokenizer")
    check_tokenizer(arguments.tokenizer, settings.vocabulary, trained_with)
    dtype = DTYPES[arguments.dtype] if arguments.dtype else weights["embedding.weight"].dtype
    part = fill_part(part, weights.__getitem__, dtype, torch.device("cpu"))
    config = config_in(config, dtype) if config else config_of(settings, dtype)
    write(arguments, join_job("cpu"), config, part, settings)
    return int(bool(not_written))


def check_tokenizer(folder, vocabulary, trained_with=None):
    """Reject a tokenizer.json that cannot be read, or has tokens that the model does not have.

    `trained_with` is the `digest_of_vocabulary` of the model's own tokenizer, or None.
    """
    path = tokenizer_of(folder)
    try:
        tokenizer = read_tokenizer(path) if path else None
        num_tokens = numbers_of(tokenizer) if path else 0
    except DataError as error:
        raise SystemExit(f"--tokenizer: {error}") from None
    if path and trained_with not in (None, digest_of_vocabulary(tokenizer)):
        raise SystemExit(
            f"--tokenizer {folder} has other tokens than the model was trained with ({trained_with}); "
            "name the folder of that tokenizer"
        )
    if num_tokens > vocabulary:
        raise SystemExit(
            f"--tokenizer {folder} has {num_tokens} tokens, and the model {vocabulary}; name the folder "
            "of the tokenizer that it was trained with"
        )


def read_model_of(checkpoint):
    """Return settings, config, ModelPart without weights, and weights. Raises CheckpointError."""
    settings, config = checked_settings(checkpoint)
    part = lay_out(settings)
    weights = read_weights(checkpoint, [name for name, _ in part.named_parameters()])
    return settings, config, part, weights


def write(arguments, job, config, part, settings):
    claim_output(arguments, job, "--to-hf", arguments.to_hf)
    rest = settings, arguments.tokenizer, arguments.claimed
    if save_model(job, "--to-hf", arguments.to_hf, config, [part], *rest):
        arguments.claimed.release()
    job.leave()


def checked_settings(checkpoint):
    """Return settings_in() of a Checkpoint whose sizes fit its files. Raises CheckpointError."""
    configuration = checkpoint.description["configuration"]
    try:
        settings, config = settings_in(configuration)
    except InputError as error:
        raise CheckpointError(f"{checkpoint.path}: its flags are damaged ({error})") from None
    written = sum(size for size, _ in checkpoint.description["files"].values())
    if settings.dim * max(settings.layers * settings.dim, settings.vocabulary) > written:
        raise CheckpointError(
            f"{checkpoint.path} has {written:,} bytes, and {settings.layers:,} layers of a width of "
            f"{settings.dim:,} with {settings.vocabulary:,} tokens need more"
        )
    return settings, config


def settings_in(configuration):
    """Return (SavedSettings, JSON object of its config.json or None) of a checkpoint's flags."""
    names = [*SIZE_FLAGS, "seq_len"]
    flags = {name: configuration.get(f"--{name.replace('_', '-')}") for name in names}
    config = ModelConfig(**{name: value for name, value in flags.items() if value is not None})
    if configuration.get("--settings"):
        return settings_in_checkpoint(config, configuration["--settings"])
    sizes = {name: getattr(config, name) for name in (*names, "head_dim", "hidden_dim")}
    return SavedSettings(**sizes, longest=config.seq_len), None


def settings_in_checkpoint(config, kept):
    """Return (SavedSettings, JSON object) of the config.json that convert.py keeps in a checkpoint.

    `config` is the ModelConfig of the checkpoint's flags, and `kept` its "--settings". Raises
    InputError if they are damaged.
    """
    text = kept.get("config") if isinstance(kept, dict) else None
    path = f"{CONFIG_FILE} in the checkpoint"
    saved = parse_json(text if isinstance(text, str) else "", path)
    settings = settings_from(path, saved, config.seq_len)
    if any(getattr(settings, name) != getattr(config, name) for name in SIZE_FLAGS):
        raise InputError(f"{path} has other sizes than its flags; bring the model in again")
    return settings, saved


def config_of(settings, dtype):
    """Return the object of a config.json for SavedSettings of the course's own model."""
    name = str(dtype).removeprefix("torch.")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": None,
        "dtype": name,
        "eos_token_id": None,
        "head_dim": settings.head_dim,
        "hidden_act": "silu",
        "hidden_size": settings.dim,
        "intermediate_size": settings.hidden_dim,
        "max_position_embeddings": settings.longest,
        "mlp_bias": False,
        "num_attention_heads": settings.heads,
        "num_hidden_layers": settings.layers,
        "num_key_value_heads": settings.kv_heads,
        "rms_norm_eps": settings.epsilon,
        "rope_parameters": {"rope_theta": settings.rotary_base, "rope_type": "default"},
        "rope_theta": settings.rotary_base,
        "tie_word_embeddings": False,
        "torch_dtype": name,
        "vocab_size": settings.vocabulary,
    }


if __name__ == "__main__":
    sys.exit(main())
