"""Before anything runs: where to cut, which parallelism, how long it takes, the best order."""
