"""Planning before a run: cut of the model, parallelism, time and memory, shortest schedule."""
