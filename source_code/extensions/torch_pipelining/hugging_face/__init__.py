"""Hugging Face models in stages of torch.distributed.pipelining, without any download."""
