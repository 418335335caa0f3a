"""Small models with random weights, as transformers saves them, and without transformers."""

import json
from pathlib import Path

import torch
from convert import config_of

from extensions.real_models.saved_part import SavedSettings, lay_out, name_in_file
from extensions.real_models.saved_settings import CONFIG_FILE
from extensions.real_models.tensor_files import write_tensors

SIZES = {
    "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def library_config(family, **changes):
    """A configuration of transformers; embedding and head of a `qwen2` are one matrix."""
    import transformers

    if family == "llama":
        return transformers.LlamaConfig(**{**SIZES, "rms_norm_eps": 1e-5, **changes})
    if family == "mistral":
        return transformers.MistralConfig(**{**SIZES, "sliding_window": None, **changes})
    if family == "qwen3":
        return transformers.Qwen3Config(**{**SIZES, "head_dim": 12, **changes})
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    options = {"tie_word_embeddings": True, "rope_parameters": rope}
    return transformers.Qwen2Config(**{**SIZES, **options, **changes})


def library_model_with(config, seed=0, dtype=torch.float64):
    """A model of transformers with random weights, biases included, that give clear differences."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            size = 0.2 if parameter.dim() > 1 else 0.1
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.mul_(float(parameter.dim() == 1)).add_(size * drawn)
    return model


def save_library_model(folder, family, shards=1, **changes):
    """Save a model of transformers in `shards` files in a folder; return the folder."""
    model = library_model_with(library_config(family, **changes))
    total = sum(weight.numel() * 8 for weight in model.parameters())
    most = f"{int(total / shards * 1.1) // 1000 + 1}KB" if shards > 1 else "5GB"
    model.save_pretrained(folder, max_shard_size=most)
    assert len(list(Path(folder).glob("*.safetensors"))) == shards
    return Path(folder)


def write_model(folder, dtype=torch.float64, tied=False, **sizes):
    """Write a Llama in one file without transformers; returns the folder."""
    folder = Path(folder)
    folder.mkdir()
    sizes = {"layers": 4, "dim": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, **sizes}
    settings = SavedSettings(**{"hidden_dim": 48, "longest": 64, **sizes}, tied=tied)
    config = {**config_of(settings, dtype), "tie_word_embeddings": tied}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, layout in lay_out(settings).named_parameters():
        if not (tied and name == "head.weight"):
            drawn = torch.randn(layout.shape, generator=generator, dtype=torch.float64)
            tensors[name_in_file(name)] = (0.25 * drawn + (layout.dim() == 1)).to(dtype)
    write_tensors(folder / "model.safetensors", tensors)
    return folder
