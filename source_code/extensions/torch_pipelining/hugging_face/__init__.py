# SPDX-License-Identifier: Apache-2.0
"""Hugging Face models in stages of torch.distributed.pipelining, without any download."""

# A rank imports these only when it builds or traces a model. If the server that forks the ranks has
# imported them, each rank starts a second earlier. The first one sets the library offline, which
# has to happen before the library's own import.
LATE_IMPORTS = (
    "extensions.torch_pipelining.hugging_face.configuration",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "torch.export._trace",
    "networkx",
)
