"""What a training adds to the core: other stages, other updates, checkpoints, planning."""
