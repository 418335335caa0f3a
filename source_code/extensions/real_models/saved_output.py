# SPDX-License-Identifier: Apache-2.0
"""Writes a model on many ranks as a folder in which every rank writes one file.

No rank has the whole model, so each rank writes its own layers, and rank 0 the index of all files.
config.json is written last: without it no reader takes the folder for a model.
"""

import atexit
import os
import sys
from contextlib import suppress
from pathlib import Path

from extensions.real_models.saved_folder import (
    INDEX,
    ONE_FILE,
    TOKENIZER_OF_MODEL,
    is_tied_copy,
    tokenizer_of,
)
from extensions.real_models.saved_part import name_in_file
from extensions.real_models.saved_settings import CONFIG_FILE
from extensions.real_models.tensor_files import write_tensors
from files.claims import LOCK, ClaimError, NewFolder
from files.inputs import InputError, read_bytes
from files.outputs import not_written, replace_file, to_json, write_whole
from pipeline.collectives import gather, share

# Files beside the weights, copied unchanged from the folder of the starting weights.
BESIDE = (
    "generation_config.json", TOKENIZER_OF_MODEL, "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja",
)  # fmt: skip
MAKE_ROOM = "nothing else was changed: make room, remove the folder, and start again"


def claim_output(arguments, job, flag, folder):
    """Claim the new folder of a model before its training begins; all ranks call it.

    Otherwise two runs could both find it empty, and mix their files hours later.
    """
    arguments.claimed = problem = None
    if folder is None:
        return
    try:
        if job.rank == 0:
            arguments.claimed = NewFolder(flag, folder)
            atexit.register(arguments.claimed.give_up)  # if nothing is saved
    except ClaimError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{flag} {folder} cannot be written ({error.strerror}); name a folder of yours"
    problem = share(job, problem)
    sees = gather(job, problem or job.rank == 0 or sees_claim(folder))
    if job.rank == 0 and not all(sees):
        who = f"rank {sees.index(False)} does not see the folder that rank 0 has made"
        problem = f"{flag} {folder}: {who}; name one that all nodes share"
    problem = share(job, problem)
    if problem:
        if arguments.claimed:
            arguments.claimed.give_up()  # now: the launcher may kill this rank once another has ended
        job.leave()
        raise SystemExit(problem)


def sees_claim(folder):
    """Return whether the folder that rank 0 has claimed is the one that this rank sees.

    A look is not enough: a network file system may remember for a minute that nothing was there.
    Its server decides what can be made, and it refuses what rank 0 has made.
    """
    folder = Path(folder)
    try:
        with suppress(FileExistsError):
            folder.mkdir()
            folder.rmdir()
            return False
        open(folder / LOCK, "xb").close()
        (folder / LOCK).unlink()
    except FileExistsError:
        return True
    except OSError:
        pass
    return False


def save_trained(arguments, job, stages, flag, folder, beside):
    """Write the model of `stages`, which began as a saved one; all ranks call it.

    `arguments` are those of a training run, with `saved`. The others are those of `save_model`.
    """
    claimed = arguments.claimed  # None on other ranks
    saved, parts = arguments.saved, [stage.part for stage in stages.values()]
    config = config_in(saved.config, arguments.torch_dtype)
    if claimed and beside and not arguments.text.is_made_with(tokenizer_of(beside)):
        reason = f"the tokenizer in {beside} is not the one with which the training began"
        print(f"{flag} {folder} gets the model alone: {reason}", file=sys.stderr, flush=True)
        not_written.append(flag)
        beside = None
    written = save_model(job, flag, folder, config, parts, saved.settings, beside, claimed)
    if claimed:
        (claimed.release if written else claimed.give_up)()


def save_model(job, flag, folder, config, parts, settings, beside=None, claimed=None):
    """Write the model whose layers on this rank are `parts`; all ranks call it.

    `config` is the JSON object of config.json. `beside` is the folder that the tokenizer comes
    from, and `claimed` on rank 0 the NewFolder. Returns False if no file is written: the model has
    NaN or infinity, or the folder has files of another program. Returns True even if a file could
    not be written, since others may have been.
    """
    folder = Path(folder)
    own, problem = {}, None
    for part in parts:
        named = part.named_parameters()
        own |= {name_in_file(n): w.detach() for n, w in named if not is_tied_copy(settings, n)}
    files = files_of(job.num_ranks)
    file = files[job.rank]
    total = sum(weight.numel() * weight.element_size() for weight in own.values())
    if wrong := not_finite(job, own):
        reason = f"{wrong} is not finite: the training diverged, or needs a wider --dtype"
        wrong = f"{flag} {folder}: nothing is saved, since {reason}"
    else:
        wrong = share(job, check_claim(claimed, flag, files) if claimed else None)
    if wrong:
        not_written.append(flag)
        if job.rank == 0:
            print(wrong, file=sys.stderr, flush=True)
        return False
    try:
        folder.mkdir(exist_ok=True)
        if own:
            write_tensors(folder / file, own)
    except OSError as error:
        problem = f"{flag} {folder}: {file} was not written ({error.strerror}); {MAKE_ROOM}"
    written = gather(job, (file, list(own), total, problem))
    if job.rank == 0 and not any(each[3] for each in written):
        problem = finish_folder(flag, folder, config, beside, written, claimed)
        if problem is None:
            print(f"the model is in {folder}", flush=True)
    if problem:
        not_written.append(flag)
        print(problem, file=sys.stderr, flush=True)
    return True


def files_of(num_ranks):
    """Return the names of the files in which the ranks write their weights."""
    if num_ranks == 1:
        return [ONE_FILE]
    return [f"model-{rank:05}-of-{num_ranks:05}.safetensors" for rank in range(1, num_ranks + 1)]


def check_claim(claimed, flag, files):
    """Return None if a model can be written into the claimed folder, else a sentence.

    A folder that somebody has removed is made and claimed again: the trained model is not lost.
    """
    try:
        claimed.renew(flag)
        claimed.check(flag, *files, ONE_FILE, INDEX, CONFIG_FILE)
    except ClaimError as error:
        return str(error)
    except OSError as error:
        return f"{flag} {claimed.folder} cannot be read ({error.strerror}); nothing is saved"
    return None


def not_finite(job, weights):
    """Return the name of a weight on any rank with NaN or infinity, else None; all ranks call it."""
    own = next((name for name, weight in weights.items() if not weight.isfinite().all()), None)
    found = gather(job, own)
    return share(job, next(filter(None, found), None) if job.rank == 0 else None)


def finish_folder(flag, folder, config, beside, written, claimed=None):
    """Write the files without tensors. Returns a sentence about a failure, or None."""
    left_out, texts = [], {}
    try:
        for file, *_ in written:
            if not (folder / file).is_file():
                return f"{flag} {folder}: {file} of another node is not there; use a shared folder"
        for name in BESIDE if beside else ():
            if claimed:
                claimed.check(flag)
            if os.path.lexists(folder / name):
                left_out.append(f"{name} is a file of another program")
            elif os.path.lexists(Path(beside) / name):
                left_out += copy_beside(Path(beside) / name, folder / name)
        if len(written) > 1:
            file_of = {name: file for file, names, *_ in written for name in names}
            index = {
                "metadata": {"total_size": sum(each[2] for each in written)},
                "weight_map": dict(sorted(file_of.items())),
            }
            texts[INDEX] = to_json(index, indent=2)
        texts[CONFIG_FILE] = to_json(config, indent=2)
        for name, text in texts.items():
            if claimed:
                claimed.check(flag, name)
            write_whole(folder / name, text + "\n")
    except ClaimError as error:
        return str(error)
    except OSError as error:
        return f"{flag} {folder} is not whole ({error.strerror}); {MAKE_ROOM}"
    return f"{flag} {folder} has the model alone: {'; '.join(left_out)}" if left_out else None


def copy_beside(path, copy):
    """Copy a file that the weights do not need. Returns [a sentence] if it cannot be read, else []."""
    try:
        content = read_bytes(path)
        replace_file(copy, lambda partial: partial.write_bytes(content))
    except InputError as error:
        return [str(error)]
    return []


def config_in(config, dtype):
    """Return `config`, the object of a config.json, changed for weights of `dtype`."""
    name = str(dtype).removeprefix("torch.")
    older = {"torch_dtype": name} if "torch_dtype" in config else {}
    return {**config, **older, "dtype": name}
