# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face model of a run and its sizes. Nothing is downloaded."""

import os

# transformers reads both when it is imported, which is only done inside functions.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

MODELS = ("gpt2", "gpt2-classifier", "llama")
PADDING = 0  # a byte that no text holds


def model_config(arguments):
    """Return the configuration from the flags: as small as the course's model, with byte tokens."""
    from transformers import GPT2Config, LlamaConfig

    common = {
        "vocab_size": arguments.config.vocabulary,
        "use_cache": False,  # a stage cannot send a cache of keys and values
        "tie_word_embeddings": False,  # two stages cannot share a matrix; see tied_matrix.py
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": PADDING,
    }
    if arguments.model == "llama":
        return LlamaConfig(
            hidden_size=arguments.dim,
            intermediate_size=arguments.config.hidden_dim,
            num_hidden_layers=arguments.layers,
            num_attention_heads=arguments.heads,
            num_key_value_heads=arguments.kv_heads,
            max_position_embeddings=arguments.seq_len,
            **common,
        )
    return GPT2Config(
        n_positions=arguments.seq_len,
        n_embd=arguments.dim,
        n_layer=arguments.layers,
        n_head=arguments.heads,
        num_labels=2,
        resid_pdrop=0.0,  # with dropout each cut would draw other numbers
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **common,
    )


def model_class(arguments):
    """Return the class of --model in transformers."""
    import transformers

    return {
        "gpt2": transformers.GPT2LMHeadModel,
        "gpt2-classifier": transformers.GPT2ForSequenceClassification,
        "llama": transformers.LlamaForCausalLM,
    }[arguments.model]
