# SPDX-License-Identifier: Apache-2.0
"""Reads the settings of a saved model for the course's layers from a config.json.

A Llama, a Mistral without a sliding window, a Qwen2 and a Qwen3 have the architecture of model.py
with other settings: the width of the gated layer, the width of a head, biases, norms of queries and
keys, the frequencies of the rotary embedding, one matrix at both ends.
"""

from pathlib import Path

from extensions.real_models.saved_part import SavedSettings
from files.inputs import MEBIBYTE, InputError, is_count, is_number, read_json, shown

CONFIG_FILE = "config.json"
SIZE_FLAGS = "layers", "dim", "heads", "kv_heads", "vocabulary"
LARGEST_CONFIG = 16 * MEBIBYTE
MOST = 2**30  # the largest size; no tensor has as many as 2**63 bytes
# What to do about a folder that is rejected.
WHOLE = "name the folder of a Llama, a Mistral, a Qwen2 or a Qwen3"
MENDED = "take config.json from the folder of the published model again"
# The values that transformers takes for settings that a family's config.json leaves out.
LEFT_OUT = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096,
    },
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
}  # fmt: skip
# The settings that a rotary embedding of each type needs.
ROTARY_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    ),
}  # fmt: skip


def check_family(path, saved):
    """Raise InputError for a kind of model that the course's layers cannot compute."""
    if not isinstance(saved, dict):
        raise InputError(f"{path} is not a JSON object; {WHOLE}")
    family = saved.get("model_type")
    if not isinstance(family, str) or family not in LEFT_OUT:
        raise InputError(
            f"{path}: the model_type is {str(family)[:40]}, which is not one of "
            f"{', '.join(LEFT_OUT)}; {WHOLE}"
        )
    saved = {**LEFT_OUT[family], **saved}
    built = saved.get("architectures") or ["ForCausalLM"]
    if not str(built[0] if isinstance(built, list) else built).endswith("ForCausalLM"):
        raise InputError(
            f"{path}: architectures is {str(built)[:60]}, which is not a language model, and its own head "
            "would be lost; name a folder that was saved as ...ForCausalLM"
        )
    if saved.get("quantization_config") is not None:
        raise InputError(
            f"{path}: the weights are quantised, and quantised weights are not trained; name the "
            "folder of the model that they were made from, or write that one with dequantize()"
        )
    if saved.get("hidden_act", "silu") != "silu":
        raise InputError(
            f"{path}: the hidden_act is {str(saved['hidden_act'])[:40]}, and not silu; change "
            "FeedForward in a copy of the script"
        )
    check_attention(path, family, saved)
    for key in ("transformers_weights", "attribute_map", "per_layer_config"):
        if saved.get(key):
            raise InputError(
                f"{path}: {key} is {shown(saved[key])}, which would make another model of these files; "
                "take it out in a copy of the folder"
            )


def check_attention(path, family, saved):
    """Raise InputError for attention other than from each position to all before it."""
    if family in ("qwen2", "qwen3") and saved.get("use_sliding_window"):
        raise InputError(
            f"{path}: use_sliding_window is set to {shown(saved['use_sliding_window'])}, and the "
            "course's attention has none; for sequences no longer than "
            "sliding_window, set it to false in a copy of the folder"
        )
    if family == "mistral" and saved["sliding_window"] is not None:
        raise InputError(
            f"{path}: the sliding_window is {shown(saved['sliding_window'])}, and the course's "
            "attention has none; for sequences no longer than that, set it to null in a copy of the "
            "folder"
        )
    other = saved.get("layer_types") or []
    if isinstance(other, list):
        other = [each for each in other if each != "full_attention"]
    if other:
        raise InputError(
            f"{path}: layer_types has {shown(other)}, and each layer of the course has "
            f"full_attention; {WHOLE}"
        )
    if saved.get("is_causal", True) is not True:
        raise InputError(
            f"{path}: is_causal is {shown(saved['is_causal'])}, and each position of the course's "
            f"attention sees those before it alone; {WHOLE}"
        )
    dropout = saved.get("attention_dropout") or 0.0
    if dropout != 0:
        raise InputError(
            f"{path}: attention_dropout is {shown(dropout)}, and the course's attention has none; "
            "set it to 0.0 in a copy of the folder"
        )


def read_settings(folder, seq_len):
    """Return (SavedSettings, JSON object) of a folder, for sequences of `seq_len` tokens.

    Raises InputError for a model that the course's layers cannot compute.
    """
    path = Path(folder) / CONFIG_FILE
    try:
        saved = read_json(path, LARGEST_CONFIG)
    except InputError as error:
        raise InputError(f"{error}; {WHOLE}") from None
    return settings_from(path, saved, seq_len), saved


def settings_from(path, saved, seq_len):
    """Return the SavedSettings of `saved`, the content of the config.json at `path`."""
    check_family(path, saved)
    family = saved["model_type"]
    saved = {**LEFT_OUT[family], **saved}
    sizes = sizes_in(path, saved)
    base, rotary = rotary_in(path, saved)
    biases = {name: saved.get(name, False) for name in ("attention_bias", "mlp_bias")}
    tied, epsilon = saved.get("tie_word_embeddings", False), saved.get("rms_norm_eps", 1e-6)
    for name, value in {**biases, "tie_word_embeddings": tied}.items():
        if not isinstance(value, bool):
            raise InputError(
                f"{path}: {name} is {shown(value)}, and must be true or false, without quotes; "
                f"{MENDED}"
            )
    if not is_number(epsilon, 0, 1):
        raise InputError(
            f"{path}: rms_norm_eps is {shown(epsilon)}, and not between 0 and 1; {MENDED}"
        )
    padding, vocabulary = saved.get("pad_token_id"), sizes["vocabulary"]
    if padding is not None and not (type(padding) is int and -vocabulary <= padding < vocabulary):
        raise InputError(
            f"{path}: pad_token_id is {shown(padding)}, and the model has {vocabulary} tokens; {MENDED}"
        )
    attention_bias = biases["attention_bias"] and family in ("llama", "qwen3")
    return SavedSettings(
        **sizes,
        seq_len=seq_len,
        epsilon=float(epsilon),
        rotary_base=base,
        rotary=rotary,
        query_bias=family == "qwen2" or attention_bias,
        output_bias=attention_bias,
        feed_forward_bias=biases["mlp_bias"] and family == "llama",
        head_norms=family == "qwen3",
        tied=tied,
        padding=-1 if padding is None else padding % vocabulary,
    )


def sizes_in(path, saved):
    """Return the checked sizes of SavedSettings."""

    def size(name, otherwise=None):
        value = otherwise if saved.get(name) is None else saved[name]
        if not is_count(value, MOST) or value < 1:
            raise InputError(
                f"{path}: {name} is {shown(value)}, and not a whole number from 1 to {MOST:,}; "
                f"{MENDED}"
            )
        return value

    dim, heads = size("hidden_size"), size("num_attention_heads")
    kv_heads = size("num_key_value_heads", heads)
    head_dim = size("head_dim", dim // heads or 1)
    fits = dim % heads == 0 or saved.get("head_dim") is not None
    if heads % kv_heads or not fits or head_dim % 2 or heads * head_dim > MOST:
        raise InputError(
            f"{path}: {heads} heads, {kv_heads} of them for keys, do not fit a width of {dim}; "
            f"{MENDED}"
        )
    return {
        "layers": size("num_hidden_layers"),
        "dim": dim,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_dim": size("intermediate_size"),
        "vocabulary": size("vocab_size"),
        "longest": size("max_position_embeddings"),
    }


def rotary_in(path, saved):
    """Return (base, pairs of settings) of the rotary embedding.

    Files of transformers 5 have them in `rope_parameters`, older files in `rope_theta` and
    `rope_scaling`. If a file has several, `rope_scaling` takes the place of `rope_parameters`, as
    in transformers.
    """
    newer, older = saved.get("rope_parameters") or {}, saved.get("rope_scaling") or {}
    if not isinstance(newer, dict) or not isinstance(older, dict):
        raise InputError(
            f"{path}: rope_parameters and rope_scaling have to be JSON objects; {MENDED}"
        )
    said = {"rope_theta": saved.get("rope_theta", 10000.0), **(older or newer)}
    kind = said.get("rope_type", said.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROTARY_TYPES:
        known = ", ".join(ROTARY_TYPES)
        raise InputError(
            f"{path}: the rope_type is {str(kind)[:40]}, which is not one of {known}; for "
            "sequences of up to the original_max_position_embeddings, name the folder of the model "
            "before it was extended to longer ones"
        )
    part = said.get("partial_rotary_factor", saved.get("partial_rotary_factor", 1.0))
    if part != 1.0:
        raise InputError(
            f"{path}: partial_rotary_factor is {shown(part)} and not 1, and the course rotates "
            f"whole heads; {WHOLE}"
        )
    pairs = [("type", kind)]
    for name in ("rope_theta", *ROTARY_TYPES[kind]):
        value = said.get(name)
        if name == "original_max_position_embeddings":  # in this order, as in transformers
            places = saved.get(name), value, saved.get("max_position_embeddings")
            value = next((each for each in places if each is not None), None)
        if not is_number(value, 1e-6):
            raise InputError(f"{path}: {name} of the rotary embedding is {shown(value)}; {MENDED}")
        pairs.append((name, float(value)))  # torch takes no integer beyond 64 bits
    numbers = dict(pairs)
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        raise InputError(
            f"{path}: low_freq_factor of the rotary embedding is not below high_freq_factor; {MENDED}"
        )
    return pairs[1][1], (pairs[0], *pairs[2:])
