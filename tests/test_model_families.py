"""plan.py counts the weights of a config.json as transformers does, or rejects the file."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.inputs import InputError
from planning.families import FAMILIES
from planning.known_models import NAMED, from_config

pytestmark = [pytest.mark.further, pytest.mark.processes]  # imports the code of 38 families

# Sizes unlike every default, in the keys that a family reads.
SIZES = {
    "vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 80,
    "max_position_embeddings": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT_SIZES = {
    "vocab_size": 96, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 40, "n_inner": 80,
    "rotary_dim": 4, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OWN_SIZES = {
    "gpt2": GPT_SIZES, "gptj": GPT_SIZES, "gpt_bigcode": GPT_SIZES,
    "codegen": {**GPT_SIZES, "n_head": 4},
    "gpt_neo": {**SIZES, "num_layers": 4, "num_heads": 6, "attention_types": [[["global"], 4]]},
    "opt": {**SIZES, "ffn_dim": 80, "word_embed_proj_dim": 48},
    "bloom": {"vocab_size": 96, "hidden_size": 48, "n_layer": 3, "n_head": 6},
    "mpt": {"vocab_size": 96, "d_model": 48, "n_layers": 3, "n_heads": 6, "expansion_ratio": 3},
    "falcon": {**SIZES, "ffn_hidden_size": 80},
}  # fmt: skip
NO_HEAD_DIM = ("gpt_neo", "gpt_neox", "opt", "falcon", "phi", "phi3", "stablelm", "starcoder2",
               "qwen2", "olmo", "olmo2", "olmo3", "granite", "cohere", "cohere2", "smollm3",
               "apertus")  # fmt: skip
VARIANTS = {
    "wide heads": {"head_dim": 16},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "biases": {"attention_bias": True, "mlp_bias": True, "use_bias": True, "use_qkv_bias": True},
    "no biases": {"attention_bias": False, "use_bias": False},
}
FALCONS = {
    "40B": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "one norm": {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
    "all heads": {"multi_query": False, "bias": True},
    "in a row": {"parallel_attn": False},
}


def counted_by_the_library(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def compare(kind, given):
    config = AutoConfig.for_model(kind, **given)
    file = json.loads(config.to_json_string(use_diff=False))
    assert from_config(file, "config.json").parameters == counted_by_the_library(config)


def sizes_for(kind):
    sizes = OWN_SIZES.get(kind, SIZES)
    if kind in NO_HEAD_DIM:  # its heads divide the width
        sizes = {key: value for key, value in sizes.items() if key != "head_dim"}
    return sizes


@pytest.mark.parametrize("kind", FAMILIES)
def test_each_family_has_the_library_s_number_of_weights(kind):
    compare(kind, sizes_for(kind))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_settings_change_the_number_as_in_the_library(kind, variant):
    if variant == "wide heads" and (kind in NO_HEAD_DIM or kind in OWN_SIZES):
        return
    compare(kind, {**sizes_for(kind), **VARIANTS[variant]})


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_a_file_leaves_out_is_the_family_s_default(kind):
    """The file has sizes and model_type only; the library reads the same file."""
    sizes = {**sizes_for(kind), "hidden_size": 512, "num_attention_heads": 64}
    if kind in OWN_SIZES:
        sizes = sizes_for(kind)
    file = {key: value for key, value in sizes.items()
            if key not in ("num_key_value_heads", "head_dim")}  # fmt: skip
    if FAMILIES[kind].kv_heads in (20,):
        file["num_attention_heads"], file["hidden_size"] = 20, 640
    if kind in ("ministral", "nemotron", "hunyuan_v1_dense"):  # the library needs head_dim
        file["head_dim"] = 8
    config = AutoConfig.for_model(kind, **file)
    counted = from_config({"model_type": kind, **file}, "config.json").parameters
    assert counted == counted_by_the_library(config)


@pytest.mark.parametrize("variant", FALCONS)
def test_the_kinds_of_falcon_are_told_apart(variant):
    compare("falcon", {**sizes_for("falcon"), **FALCONS[variant]})


def test_at_least_30_families_are_counted():
    assert len(FAMILIES) >= 30
