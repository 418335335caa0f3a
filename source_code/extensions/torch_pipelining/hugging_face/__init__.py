"""Hugging Face models in stages of torch.distributed.pipelining, with the weights of this machine."""
