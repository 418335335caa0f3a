# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models in stages of torch.distributed.pipelining, without any download."""

# What a rank imports only when it builds or traces a model: with these in the server that ranks
# are forked from, each rank starts a second earlier. The first keeps the library offline, which
# has to be said before it is imported.
LATE_IMPORTS = (
    "extensions.torch_pipelining.hugging_face.configuration",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "torch.export._trace",
    "networkx",
)
