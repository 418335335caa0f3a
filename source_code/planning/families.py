# SPDX-License-Identifier: Apache-2.0
"""Families of language models: what a config.json of transformers says of their weights.

A file leaves out what equals the default of its family, so the defaults are here, too. They are
those of transformers 5. A test compares the number of weights of every family with the library's.
"""

from dataclasses import dataclass, replace

from files.inputs import InputError, shown

Setting = bool | tuple[str, bool]  # a fact of the family, or a key of the file and its default


@dataclass(frozen=True)
class Family:
    """How a layer is built. `norms` per layer have one weight per number of the width, or with
    `norm_bias` two. `head_norms` are norms of queries and keys: of a head, or of all heads.
    """

    gated: bool = True
    norms: int = 2
    norm_bias: bool = False
    last_norm: bool = True
    further_norms: int = 0  # outside the layers, besides the last
    head_norms: str = ""  # "head" or "heads"
    qkv_bias: Setting = False
    output_bias: Setting = False  # of attention
    up_bias: Setting = False  # of the feed-forward part's first matrices
    down_bias: Setting = False
    head_bias: bool = False
    positions: int | None = None  # rows of a table of positions beyond the longest sequence
    per_layer: int = 0  # further weights of a layer
    head_dim: int = 0  # if the file has none; 0 means the width over the heads
    kv_heads: int = 0  # if the file has none; 0 means as many as heads
    grouped: bool = True  # whether the file's kv_heads and head_dim are used
    tied: bool = False
    always: tuple = ()  # (key, value): with another value the layer is built differently


ATTENTION, MLP = ("attention_bias", False), ("mlp_bias", False)
GEMMA = {"qkv_bias": ATTENTION, "output_bias": ATTENTION, "head_dim": 256, "tied": True}
GPT = {
    "gated": False,
    "norm_bias": True,
    "output_bias": True,
    "up_bias": True,
    "down_bias": True,
    "grouped": False,
    "tied": True,
}
GPT_J = {**GPT, "norms": 1, "output_bias": False, "head_bias": True, "tied": False}
LLAMA = {"qkv_bias": ATTENTION, "output_bias": ATTENTION}
LLAMA_MLP = {**LLAMA, "up_bias": MLP, "down_bias": MLP}
GLM = {"qkv_bias": ("attention_bias", True), "head_dim": 128, "kv_heads": 2}

FAMILIES = {
    "llama": Family(**LLAMA_MLP),
    "mistral": Family(kv_heads=8),
    "ministral": Family(kv_heads=8),
    "qwen2": Family(qkv_bias=True, kv_heads=32),
    "qwen3": Family(**LLAMA, head_norms="head", head_dim=128, kv_heads=32),
    "gemma": Family(**GEMMA, kv_heads=16),
    "gemma2": Family(**GEMMA, norms=4, kv_heads=4),
    "gemma3_text": Family(**GEMMA, norms=4, head_norms="head", kv_heads=4),
    "phi": Family(
        **{**GPT_J, "qkv_bias": True, "output_bias": True, "grouped": True},
        always=(("qk_layernorm", False),),
    ),
    "phi3": Family(),
    "gpt2": Family(**GPT, qkv_bias=True, positions=0),
    "gpt_neo": Family(**GPT, positions=0),
    "gpt_neox": Family(
        **{**GPT, "tied": False, "output_bias": ("attention_bias", True)},
        qkv_bias=("attention_bias", True),
    ),
    "gptj": Family(**GPT_J),
    "codegen": Family(**GPT_J),
    "opt": Family(
        **GPT,
        qkv_bias=True,
        positions=2,
        always=(
            ("do_layer_norm_before", True),
            ("_remove_final_layer_norm", False),
            ("enable_bias", True),
            ("layer_norm_elementwise_affine", True),
        ),
    ),
    "bloom": Family(**GPT, qkv_bias=True, further_norms=1),
    "mpt": Family(gated=False, grouped=False, tied=True, always=(("no_bias", True),)),
    "gpt_bigcode": Family(**GPT, qkv_bias=True, positions=0),
    "falcon": Family(
        gated=False,
        norm_bias=True,
        grouped=False,
        qkv_bias=("bias", False),
        output_bias=("bias", False),
        up_bias=("bias", False),
        down_bias=("bias", False),
        tied=True,
    ),
    "stablelm": Family(
        norm_bias=True,
        qkv_bias=("use_qkv_bias", False),
        kv_heads=32,
        always=(("qk_layernorm", False), ("use_parallel_residual", False), ("head_dim", None)),
    ),
    "starcoder2": Family(
        gated=False,
        norm_bias=True,
        qkv_bias=("use_bias", True),
        output_bias=("use_bias", True),
        up_bias=("use_bias", True),
        down_bias=("use_bias", True),
        kv_heads=2,
        tied=True,
    ),
    "olmo": Family(**LLAMA, norms=0, last_norm=False),
    "olmo2": Family(**LLAMA, head_norms="heads"),
    "olmo3": Family(**LLAMA, head_norms="heads"),
    "granite": Family(**LLAMA_MLP),
    "cohere": Family(**LLAMA, norms=1, tied=True, always=(("use_qk_norm", False),)),
    "cohere2": Family(**LLAMA, norms=1, tied=True),
    "glm": Family(**GLM),
    "glm4": Family(**GLM, norms=4),
    "smollm3": Family(**LLAMA_MLP, kv_heads=4, tied=True),
    "nemotron": Family(**LLAMA_MLP, gated=False, norm_bias=True),
    "seed_oss": Family(
        qkv_bias=("attention_bias", True),
        output_bias=("attention_out_bias", False),
        up_bias=MLP,
        down_bias=MLP,
        head_dim=128,
        kv_heads=8,
    ),
    "exaone4": Family(head_norms="head", kv_heads=32),
    "ernie4_5": Family(
        qkv_bias=("use_bias", False),
        output_bias=("use_bias", False),
        up_bias=("use_bias", False),
        down_bias=("use_bias", False),
        head_dim=128,
        kv_heads=2,
        tied=True,
    ),
    "arcee": Family(**LLAMA_MLP, gated=False),
    "hunyuan_v1_dense": Family(**LLAMA, head_norms="head"),
    "apertus": Family(**LLAMA, gated=False, head_norms="head", per_layer=2),
}
SIZE_KEYS = {  # our name: the keys in a config.json; the first one with a value is used
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "inner": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocabulary": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions"),
}
EXPERTS = (  # keys of files of models with experts
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_experts_per_tok",
)
LANGUAGE_MODEL = ("ForCausalLM", "LMHeadModel", "Model")


def read_family(config, path):
    """(sizes of a Model, {rest of its arguments}) of `config`, the parsed config.json `path`.

    The sizes are not checked yet. Raises InputError for a model whose weights are not counted here.
    """
    if not isinstance(config, dict):
        raise InputError(f"{path} is not a JSON object")
    family = family_of(config, path)
    sizes = {}
    for size, keys in SIZE_KEYS.items():
        if size in ("kv_heads", "head_dim") and not family.grouped:
            continue
        given = [config[key] for key in keys if key in config]
        value = next((each for each in given if each is not None), None)
        if value is None and not given and size != "positions":  # null does not mean the default
            value = getattr(family, size, 0) or None
        if value is not None:
            sizes[size] = value
    if family.gated and "inner" not in sizes:
        raise InputError(f"{path} does not say intermediate_size")
    if setting(config, ("multi_query", config["model_type"] in ("gpt_bigcode", "falcon")), path):
        sizes["kv_heads"] = 1
    if config["model_type"] == "falcon":
        family, sizes["kv_heads"] = falcon(family, config, sizes, path)
    tied = setting(config, ("tie_word_embeddings", family.tied), path)
    return family, sizes, tied


def family_of(config, path):
    """The Family of a parsed config.json. Raises InputError if there is none."""
    experts = next((key for key in EXPERTS if config.get(key) not in (None, 0, 1)), None)
    if experts:
        raise InputError(
            f"{path}: {experts} is {shown(config[experts])}, and no plan covers experts; "
            "give the sizes of a model without them"
        )
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise InputError(
            f"{path}: the weights of model_type {str(kind)[:40]} are not counted; use a file of "
            f"{', '.join(FAMILIES)}, or sizes such as layers=32,hidden=4096,vocabulary=32000"
        )
    built = config.get("architectures") or ["ForCausalLM"]
    if not (isinstance(built, list) and str(built[0]).endswith(LANGUAGE_MODEL)):
        raise InputError(
            f"{path}: architectures is {str(built)[:60]}, and a plan is for a language model; "
            "use the file of one"
        )
    for key, value in FAMILIES[kind].always:
        if config.get(key, value) != value:
            raise InputError(
                f"{path}: the weights of a {kind} whose {key} is {shown(config[key])} are not "
                f"counted; use a file where it is {str(value).lower()}"
            )
    return FAMILIES[kind]


def setting(config, fact, path):
    """Whether a Setting holds for a file. Raises InputError if it is not true or false there."""
    if isinstance(fact, bool):
        return fact
    key, default = fact
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise InputError(
            f"{path}: {key} is {shown(value)}, and must be true or false, without quotes"
        )
    return value


def falcon(family, config, sizes, path):
    """The Family of this Falcon, and its heads for keys: Falcon 40B and 7B differ in both."""
    if setting(config, ("new_decoder_architecture", False), path):
        norms = config.get("num_ln_in_parallel_attn") or 2
        if norms not in (1, 2):
            raise InputError(f"{path}: num_ln_in_parallel_attn is {shown(norms)}, and not 1 or 2")
        return replace(family, norms=norms), config.get("num_kv_heads") or sizes.get("heads")
    norms = 1 if setting(config, ("parallel_attn", True), path) else 2
    shared = setting(config, ("multi_query", True), path)
    return replace(family, norms=norms), 1 if shared else sizes.get("heads")


def weights_outside_matrices(family, config, model, path):
    """(weights of a layer, weights of the ends) of a Model that are not in a matrix.

    Of a layer these are its biases and norms; of the ends, norms and the head's bias. The table of
    positions is not among them.
    """
    width, norm = model.hidden, model.hidden * (2 if family.norm_bias else 1)
    layer = family.norms * norm + family.per_layer
    if family.head_norms == "head":
        layer += 2 * model.head_size
    elif family.head_norms == "heads":
        layer += model.query_width + model.kv_width
    biases = {
        "qkv_bias": model.query_width + 2 * model.kv_width,
        "output_bias": width,
        "up_bias": model.inner_width * (2 if model.gated else 1),
        "down_bias": width,
    }
    layer += sum(n for key, n in biases.items() if setting(config, getattr(family, key), path))
    ends = norm * (family.last_norm + family.further_norms)
    ends += model.vocabulary if family.head_bias else 0
    return layer, ends
