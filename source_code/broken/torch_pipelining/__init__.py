"""The traps of torch.distributed.pipelining, one file per section of the page of errors."""
