"""torch.distributed.pipelining beside the course's own worker, or in its place."""
