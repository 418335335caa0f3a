# SPDX-License-Identifier: Apache-2.0
"""A folder with a saved model: which file has which tensor, and whether all are present.

Every rank reads the headers of all files, so all ranks find the same errors before the first
message. After that a rank reads the tensors of its own layers only.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from extensions.real_models.saved_part import SavedSettings, fill_part, lay_out, name_in_file
from extensions.real_models.saved_settings import CONFIG_FILE, SIZE_FLAGS, read_settings
from extensions.real_models.tensor_files import stored_tensors
from files.inputs import MEBIBYTE, InputError, is_file_name, read_json

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST_INDEX = 64 * MEBIBYTE
TOKENIZER_OF_MODEL = "tokenizer.json"
COMPUTED = "rotary_emb.inv_freq"  # of older files; the course computes it from config.json
AGAIN = "copy or download it again"  # what to do about an incomplete folder


@dataclass(frozen=True)
class SavedModel:
    """A saved model: `config` is the object of config.json, `tensors` has StoredTensors by name."""

    folder: Path
    settings: SavedSettings
    config: dict
    tensors: dict

    def weight(self, name):
        """Read the parameter with the course's name `name` from its file.

        Raises InputError if a number in it is not finite.
        """
        stored = self.stored_name(name)
        weight = self.tensors[stored].read()
        least, largest = weight.aminmax()  # both are nan if one number is
        if not (least.isfinite() and largest.isfinite()):
            raise InputError(
                f"{self.tensors[stored].path}: {stored} was saved with a number that is not finite; "
                f"{AGAIN}, or name another model"
            )
        return weight

    def stored_name(self, name):
        """Return its name in the files; a tied head is stored as the embedding."""
        return name_in_file("embedding.weight" if is_tied_copy(self.settings, name) else name)

    def build_part(self, first, last, dtype, device):
        """Build layers `first` to `last` - 1 with their weights; no other tensor is read."""
        return fill_part(lay_out(self.settings, first, last), self.weight, dtype, device)


def is_tied_copy(settings, name):
    """Return whether a parameter is the last stage's head as a copy of the embedding."""
    return settings.tied and name == "head.weight"


def read_model(folder, seq_len):
    """Return the SavedModel in `folder`. Raises InputError if anything is missing or wrong."""
    folder = Path(folder)
    settings, config = read_settings(folder, seq_len)
    model = SavedModel(folder, settings, config, find_tensors(folder))
    if settings.layers > len(model.tensors):  # before any is built
        raise InputError(
            f"{folder} has {len(model.tensors):,} tensors, too few for the {settings.layers:,} layers "
            f"of {CONFIG_FILE}; use the {CONFIG_FILE} of these weights"
        )
    layouts = dict(lay_out(settings).named_parameters())
    for name, layout in layouts.items():
        stored = model.tensors.get(model.stored_name(name))
        if stored is None:
            raise InputError(
                f"{folder} has no tensor {model.stored_name(name)}, which {CONFIG_FILE} wants; use the "
                f"{CONFIG_FILE} of these weights, or, if a file is missing, {AGAIN}"
            )
        if stored.shape != tuple(layout.shape):
            raise InputError(
                f"{stored.path}: {model.stored_name(name)} has the shape {stored.shape}, and "
                f"{CONFIG_FILE} wants {tuple(layout.shape)}; use the {CONFIG_FILE} of these weights"
            )
    check_tied(model)
    check_surplus(model, set(map(name_in_file, layouts)))
    return model


def check_surplus(model, known):
    """Raise InputError if the files have a tensor, such as a bias, that would be lost in silence."""
    more = sorted(n for n in model.tensors if n not in known and not n.endswith(COMPUTED))
    if more:
        raise InputError(
            f"{model.folder} has the tensor {more[0][:80]}, and the {model.settings.layers} layers of "
            f"{CONFIG_FILE} have none of this name; use the {CONFIG_FILE} of these weights"
        )


def find_tensors(folder):
    """Return {name: StoredTensor} of model.safetensors, or of the files that its index names."""
    if os.path.lexists(folder / ONE_FILE):
        return tensors_of(folder / ONE_FILE)
    if not os.path.lexists(folder / INDEX):
        raise InputError(
            f"{folder} has neither {ONE_FILE} nor {INDEX}; {without_safetensors(folder)}"
        )
    try:
        index = read_json(folder / INDEX, LARGEST_INDEX)
    except InputError as error:
        raise InputError(f"{error}; {AGAIN}") from None
    file_of = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(file_of, dict) or not all(map(is_file_name, file_of.values())):
        raise InputError(
            f"{folder / INDEX} has no weight_map with names of files in the folder; {AGAIN}"
        )
    files = {name: tensors_of(folder / name) for name in sorted(set(file_of.values()))}
    missing = next((name for name, file in file_of.items() if name not in files[file]), None)
    if missing is not None:
        raise InputError(
            f"{folder / file_of[missing]} has no {missing}, which {INDEX} says it has; {AGAIN}"
        )
    stored = {name for file in files.values() for name in file if not name.endswith(COMPUTED)}
    if unlisted := sorted(stored - file_of.keys()):
        raise InputError(
            f"{folder / INDEX} has no tensor {unlisted[0][:80]}, which its files have; {AGAIN}"
        )
    return {name: files[file][name] for name, file in file_of.items()}


def tensors_of(path):
    """Return `stored_tensors(path)`; an error also says what to do about the file."""
    try:
        return stored_tensors(path)
    except InputError as error:
        raise InputError(f"{error}; {AGAIN}") from None


def without_safetensors(folder):
    """What to do about a folder whose weights are elsewhere, or in files of another kind."""
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        return (
            "its weights are pickled, which could run anything: load them with from_pretrained, "
            "and write them with save_pretrained(..., safe_serialization=True)"
        )
    if (folder / "adapter_config.json").exists():
        return "it is an adapter: merge it into its model (merge_and_unload), and save that"
    return "download the weights, too"


def check_tied(model):
    """Raise InputError if a tied head is also stored, with values unlike the embedding's."""
    embedding, head = name_in_file("embedding.weight"), name_in_file("head.weight")
    if not model.settings.tied or head not in model.tensors:
        return
    if not torch.equal(model.weight("embedding.weight"), model.tensors[head].read()):
        raise InputError(
            f"{model.folder}: tie_word_embeddings is true, and {head} is not {embedding}; "
            "set it to false in config.json, or save the model again with tied weights"
        )


def take_model(arguments):
    """Set the sizes to those of the model in the folder --model.

    Keeps the model as `arguments.saved`. Rejects a size flag with another value, and a folder
    without a complete model.
    """
    folder = arguments.model_folder
    try:
        arguments.saved = read_model(folder, arguments.seq_len)
    except InputError as error:
        raise SystemExit(f"--model: {error}") from None
    settings = arguments.saved.settings
    sizes = {name: getattr(settings, name) for name in SIZE_FLAGS}
    given = {name: getattr(arguments, name, None) for name in sizes}
    other = next((name for name in sizes if given[name] not in (None, sizes[name])), None)
    if other:
        raise SystemExit(
            f"--{other.replace('_', '-')} {given[other]} contradicts --model {folder}, which has "
            f"{sizes[other]}; leave out --layers, --dim, --heads and --kv-heads"
        )
    vars(arguments).update(sizes)
    if arguments.seq_len > settings.longest:
        raise SystemExit(
            f"--seq-len {arguments.seq_len} is more than the {settings.longest} positions of --model "
            f"{folder}; use fewer"
        )


def tokenizer_of(folder):
    """Return the path of the folder's tokenizer.json, or None if it or the folder is missing."""
    if folder is None:
        return None
    path = Path(folder) / TOKENIZER_OF_MODEL
    return str(path) if os.path.lexists(path) else None
