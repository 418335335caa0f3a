"""plan.py counts the weights of a config.json as transformers does, or rejects the file."""

import json
import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from files.inputs import InputError
from planning.families import FAMILIES
from planning.known_models import NAMED, from_config

pytestmark = [pytest.mark.further, pytest.mark.processes]  # imports the code of every family

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
    "gpt_neo": {"vocab_size": 96, "hidden_size": 48, "num_layers": 4, "num_heads": 6,
                "intermediate_size": 80, "max_position_embeddings": 40,
                "attention_types": [[["global"], 4]], "bos_token_id": 1, "eos_token_id": 2},
    "opt": {**SIZES, "ffn_dim": 80, "word_embed_proj_dim": 48},
    "bloom": {"vocab_size": 96, "hidden_size": 48, "n_layer": 3, "n_head": 6},
    "mpt": {"vocab_size": 96, "d_model": 48, "n_layers": 3, "n_heads": 6},
    "falcon": {**SIZES, "ffn_hidden_size": 80},
}  # fmt: skip
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
    sizes = dict(OWN_SIZES.get(kind, SIZES))
    if kind in ("falcon", "stablelm"):  # their heads divide the width
        sizes.pop("head_dim", None)
    return sizes


@pytest.mark.parametrize("kind", FAMILIES)
def test_each_family_has_the_library_s_number_of_weights(kind):
    compare(kind, sizes_for(kind))


WIDE = [(kind, name) for kind in FAMILIES for name in VARIANTS
        if not (name == "wide heads" and kind in ("falcon", "stablelm"))]  # fmt: skip


@pytest.mark.parametrize(("kind", "variant"), WIDE)
def test_settings_change_the_number_as_in_the_library(kind, variant):
    compare(kind, {**sizes_for(kind), **VARIANTS[variant]})


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_a_file_leaves_out_is_the_family_s_default(kind):
    """The file has sizes and model_type only; the library reads the same file."""
    sizes = {**sizes_for(kind), "hidden_size": 512, "num_attention_heads": 64}
    if kind in OWN_SIZES:
        sizes = sizes_for(kind)
    file = {key: value for key, value in sizes.items()
            if key not in ("num_key_value_heads", "head_dim")}  # fmt: skip
    if kind in ("ministral", "nemotron", "hunyuan_v1_dense"):  # the library needs these two
        file |= {"head_dim": 8, "num_key_value_heads": 4}
    config = AutoConfig.for_model(kind, **file)
    counted = from_config({"model_type": kind, **file}, "config.json").parameters
    assert counted == counted_by_the_library(config)


@pytest.mark.parametrize("variant", FALCONS)
def test_the_kinds_of_falcon_are_told_apart(variant):
    compare("falcon", {**sizes_for("falcon"), **FALCONS[variant]})


def test_at_least_30_families_are_counted():
    assert len(FAMILIES) >= 30


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "num_local_experts is 8, and no plan"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256}, "n_routed_experts is 256"),
        ({"model_type": "llama", "num_experts": 4}, "num_experts is 4, and no plan covers"),
        ({"model_type": "bert"}, "model_type bert are not counted; use a file of llama"),
        ({}, "model_type None are not counted"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
         "is for a language model"),
        ({"model_type": "phi", "qk_layernorm": True}, "qk_layernorm is true are not counted"),
        ({"model_type": "qwen3", "attention_bias": "yes"}, 'is "yes" in quotes'),
        ({"model_type": "llama", "max_position_embeddings": -1}, "max_position_embeddings is -1"),
        ({"model_type": "opt", "max_position_embeddings": None}, "max_position_embeddings is missing"),
    ],
)  # fmt: skip
def test_what_is_not_counted_is_rejected_in_one_sentence(file, sentence):
    with pytest.raises(InputError, match=sentence) as error:
        from_config({**SIZES, **file}, "config.json")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3-8b", "llama-3.1-405b", "qwen2.5-7b",
                                  "qwen2.5-0.5b", "mistral-7b-v0.1"])  # fmt: skip
def test_named_models_have_the_library_s_number_of_weights(name):
    model = NAMED[name]
    config = AutoConfig.for_model(
        re.match("[a-z]+2?", name)[0],
        num_hidden_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.hidden // model.heads,
        intermediate_size=model.inner,
        vocab_size=model.vocabulary,
        tie_word_embeddings=model.tied,
    )
    assert model.parameters == counted_by_the_library(config)
