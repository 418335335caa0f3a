# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face model of a run, its sizes and its text. Nothing is downloaded."""

import os

# transformers reads both when it is imported, which is only done inside functions.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

from contextlib import contextmanager  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402

from guard.inputs import MEBIBYTE, InputError, read_json  # noqa: E402
from guard.unpickling import UNPICKLING_ERRORS  # noqa: E402
from pipeline.data import Text, load_text  # noqa: E402

MODELS = ("gpt2", "gpt2-classifier", "llama")
PADDING = 0  # a byte that no text holds
LARGEST_CONFIGURATION = 16 * MEBIBYTE
LARGEST_SIZE = 2**31


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


def take_pretrained(arguments):
    """Read configuration, weights and, if there is one, the tokenizer from folder --pretrained.

    Every rank reads the whole checkpoint and keeps its part. A tied head is stored once; the
    loaded model has it under both names.
    """
    from transformers import AutoTokenizer

    folder = Path(arguments.pretrained)
    config = read_configuration(arguments, folder)
    with complaints_about(folder):
        loaded = model_class(arguments).from_pretrained(
            folder, config=config, local_files_only=True, weights_only=True
        )
    arguments.weights = loaded.state_dict()
    arguments.model_config = config
    config.use_cache = False
    config.tie_word_embeddings = False
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    if any(os.path.lexists(folder / name) for name in ("tokenizer.json", "vocab.json")):
        with complaints_about(folder):
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        arguments.text = tokenized(arguments, tokenizer)
    elif config.vocab_size < arguments.config.vocabulary:
        raise SystemExit(
            f"--pretrained {folder} has no tokenizer, and its vocabulary holds no bytes; name a "
            "folder with a tokenizer"
        )


def read_configuration(arguments, folder):
    """Return the configuration in a folder, if it fits the model and sizes of the flags."""
    from transformers import AutoConfig

    check_saved_configuration(arguments, folder)
    with complaints_about(folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    check_sizes(arguments, folder, config)
    return config


@contextmanager
def complaints_about(folder):
    """Reject the folder --pretrained if the library raises an error while it reads it."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    try:
        yield
    except (*UNPICKLING_ERRORS, OSError, SafetensorError, StrictDataclassError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise SystemExit(
            f"--pretrained {folder} cannot be read ({reason}); name another folder"
        ) from None


def check_saved_configuration(arguments, folder):
    """Reject a configuration of another model than --model, before any library reads it."""
    try:
        config = read_json(folder / "config.json", LARGEST_CONFIGURATION)
    except InputError as error:
        raise SystemExit(
            f"--pretrained {folder}: {error}; name a folder with a saved model"
        ) from None
    found = config.get("model_type") if isinstance(config, dict) else None
    wanted = {"gpt2-classifier": "gpt2"}.get(arguments.model, arguments.model)
    if found != wanted:
        raise SystemExit(
            f"--pretrained {folder} has model_type {str(found)[:40]}, which is not that of --model "
            f"{arguments.model}; name a folder with a {wanted}, or another --model"
        )
    sizes = [value for value in config.values() if isinstance(value, int)]
    if not all(abs(size) < LARGEST_SIZE for size in sizes):
        raise SystemExit(
            f"--pretrained {folder}: config.json has a size of {max(sizes, key=abs)}; name another "
            "folder"
        )


def check_sizes(arguments, folder, config):
    """Reject a saved model whose sizes differ from the flags."""
    sizes = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    if sizes != (arguments.layers, arguments.dim, arguments.heads):
        raise SystemExit(
            f"--pretrained {folder} has other sizes than the flags; "
            "use --layers {} --dim {} --heads {}".format(*sizes)
        )
    if arguments.seq_len > config.max_position_embeddings:
        raise SystemExit(
            f"--seq-len {arguments.seq_len} is more than the {config.max_position_embeddings} "
            f"positions of --pretrained {folder}; use fewer"
        )


def tokenized(arguments, tokenizer):
    """Return the text in the tokenizer's tokens; again the last tenth is held out."""
    text = load_text(arguments.data, arguments.seq_len)
    content = bytes(torch.cat([text.training, text.held_out]).tolist()).decode(errors="replace")
    tokens = torch.tensor(tokenizer(content)["input_ids"])
    cut = len(tokens) - len(tokens) // 10
    if len(tokens) // 10 <= arguments.seq_len:
        raise SystemExit(
            f"--data has {len(tokens)} tokens, too few for --seq-len {arguments.seq_len}; "
            "use a longer text or a smaller --seq-len"
        )
    return Text(tokens[:cut], tokens[cut:])
