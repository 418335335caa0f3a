# SPDX-License-Identifier: Apache-2.0
"""The planner's models: by name, by sizes, or from a config.json of Hugging Face.

Sizes are those of the papers and of the published config files. The course's own sizes are those of
pretrain_llama.py, with a gated part of 8/3 of the width, rounded up to a multiple of 16.
"""

import math
import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from files.inputs import InputError, is_count, read_json, shown
from planning.families import SIZE_KEYS, read_family, weights_outside_matrices
from planning.partition import LARGEST_FILE
from planning.profiled import check_layers, profiled_model
from planning.transformer import Model


def llama(layers, hidden, heads, kv_heads, inner, vocabulary, tied=False):
    """A Model that is built as Llama is."""
    return Model(
        layers,
        hidden,
        vocabulary=vocabulary,
        heads=heads,
        kv_heads=kv_heads,
        inner=inner,
        gated=True,
        tied=tied,
    )


def qwen2(*sizes, tied=False):
    """A Model that is built as Llama is, with biases for queries, keys and values."""
    model = llama(*sizes, tied)
    biases = model.query_width + 2 * model.kv_width
    return replace(model, layer_rest=2 * model.hidden + biases)


def inner_of_the_course(hidden):
    return 16 * math.ceil(8 * hidden / 3 / 16)


def of_the_course(layers, hidden, heads, kv_heads, vocabulary):
    return llama(layers, hidden, heads, kv_heads, inner_of_the_course(hidden), vocabulary)


@lru_cache(maxsize=100)
def is_of_the_course(model):
    """Whether pretrain_llama.py can build this model from its sizes."""
    if not (type(model) is Model and model.gated and model.hidden % model.head_count == 0):
        return False
    heads = model.head_count
    ours = of_the_course(
        model.layers, model.hidden, heads, model.kv_heads or heads, model.vocabulary
    )
    free = {name: getattr(model, name) for name in ("length", "batch", "norms_in_float32")}
    return replace(ours, **free) == model


NAMED = {
    "1m": of_the_course(8, 104, 4, 2, 256),
    "10m": of_the_course(8, 288, 6, 2, 4096),
    "60m": of_the_course(8, 512, 8, 4, 32_000),
    "125m": of_the_course(12, 768, 12, 4, 32_000),
    "350m": of_the_course(24, 1024, 16, 8, 32_000),
    "1b": of_the_course(20, 2048, 32, 4, 32_000),
    "gpt-3": Model(96, 12288, vocabulary=51_200, heads=96),
    "llama-2-7b": llama(32, 4096, 32, 32, 11_008, 32_000),
    "llama-3-8b": llama(32, 4096, 32, 8, 14_336, 128_256),
    "llama-3-70b": llama(80, 8192, 64, 8, 28_672, 128_256),
    "llama-3.1-405b": llama(126, 16_384, 128, 8, 53_248, 128_256),
    "qwen2.5-0.5b": qwen2(24, 896, 14, 2, 4864, 151_936, tied=True),
    "qwen2.5-7b": qwen2(28, 3584, 28, 4, 18_944, 152_064),
    "mistral-7b-v0.1": llama(32, 4096, 32, 8, 14_336, 32_000),
}
SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "inner", "vocabulary")
SIZES_TEXT = (
    "sizes such as layers=32,hidden=4096,vocabulary=32000 (also heads, kv_heads, head_dim, inner; "
    "a Llama has gated=1,tied=0)"
)
NEEDED = {"layers", "hidden", "vocabulary"}
LARGEST_SIZE = 10_000_000
MOST_LETTERS = 80  # of a model's name in a sentence


def find_model(text, length, batch):
    """The Model of a name, of sizes such as layers=32,hidden=4096,vocabulary=32000, or of a file.

    A file is a config.json or a profile of layers; a profile has its own length. An update has
    `batch` sequences of `length` tokens. Raises InputError with one sentence.
    """
    try:
        return model_of(text, length, batch)
    except InputError as error:
        if "; " in str(error):  # it says already what to do
            raise
        raise InputError(f"{error}; mend that, or give {SIZES_TEXT}") from None


def model_of(text, length, batch):
    """The Model of `find_model`. The InputError may not say what to do."""
    called = text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}..."
    if text in NAMED:
        model = NAMED[text]
    elif "=" in text and not os.path.lexists(text):
        model = from_sizes(text)
    elif Path(text).suffix == ".json" or os.path.isdir(text):
        path = Path(text) / "config.json" if os.path.isdir(text) else Path(text)
        content = read_json(path, LARGEST_FILE)
        if isinstance(content, dict) and isinstance(content.get("layers"), list):
            return profiled_model(content, path, batch)
        model = from_config(content, path)
    else:
        raise InputError(
            f"{called} is not a model's name, a .json file or a folder; use one of {names()}, or {SIZES_TEXT}"
        )
    return replace(model, length=length, batch=batch)


def names():
    return ", ".join(NAMED)


def from_sizes(text):
    """The Model of sizes such as layers=32,hidden=4096,vocabulary=32000. Raises InputError.

    A gated part without `inner` is as wide as that of pretrain_llama.py.
    """
    sizes = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        flag = key in ("gated", "tied") and value in ("0", "1")
        digits = value.isascii() and value.isdecimal()
        is_size = key in SIZES and digits and len(value) <= len(str(LARGEST_SIZE))
        if not flag and not (is_size and int(value)):
            part = part[:MOST_LETTERS]
            raise InputError(
                f"'{part}' is not a size up to {LARGEST_SIZE:,}; use {'=N, '.join(SIZES)}=N, gated=1, tied=0"
            )
        if key in sizes:
            raise InputError(f"{text[:MOST_LETTERS]} gives {key} twice; give it once")
        sizes[key] = int(value)
    model = checked(sizes, text)
    if model.gated and not model.inner:
        return replace(model, inner=inner_of_the_course(model.hidden))
    return model


def from_config(config, path):
    """The Model of a config.json of transformers. Raises InputError."""
    family, sizes, tied = read_family(config, path)
    longest = sizes.pop("positions", None)
    if longest is None and family.positions is None:
        longest = 1  # no weights belong to positions
    if not is_count(longest, LARGEST_SIZE) or longest == 0:
        said = "is missing" if longest is None else f"is {shown(longest)}"
        raise InputError(
            f"{path}: max_position_embeddings {said}; give a number from 1 to {LARGEST_SIZE:,}"
        )
    built = {"gated": family.gated, "tied": tied, "norms_in_float32": family.gated}
    keys = {
        size: next((key for key in SIZE_KEYS[size] if key in config), SIZE_KEYS[size][0])
        for size in SIZES
    }
    model = checked({**sizes, **built}, path, keys)
    if model.head_dim * model.head_count == model.hidden:  # the same as without head_dim
        model = replace(model, head_dim=0)
    layer, ends = weights_outside_matrices(family, config, model, path)
    if model.gated and (layer, ends) == (2 * model.hidden, model.hidden):
        return model
    rows = 0 if family.positions is None else longest + family.positions
    return replace(model, layer_rest=layer, positions=rows, ends_rest=ends)


def checked(sizes, name, keys=None):
    """The Model of these sizes, named `keys` in a file. Raises InputError if it cannot be built."""
    keys = keys or {size: size for size in SIZES}
    missing = NEEDED - set(sizes)
    if missing:
        raise InputError(f"{name} does not say {', '.join(keys[size] for size in sorted(missing))}")
    for size in SIZES:
        value = sizes.get(size, 1)
        if not is_count(value, LARGEST_SIZE) or value == 0:
            value, most = shown(value), f"{LARGEST_SIZE:,}"
            raise InputError(f"{keys[size]} of {name} is {value}; give a number from 1 to {most}")
    check_layers(sizes["layers"], name)
    model = Model(
        **{**sizes, "gated": bool(sizes.get("gated")), "tied": bool(sizes.get("tied", 1))}
    )
    if not model.head_dim and model.hidden % model.head_count:
        raise InputError(
            f"{name}: {model.head_count} heads do not divide a width of {model.hidden}"
        )
    if model.head_count % (model.kv_heads or model.head_count):
        raise InputError(
            f"{name}: {model.kv_heads} heads for keys do not divide {model.head_count} heads"
        )
    return model
