"""What a notebook calls: to start ranks, to show a script's code, to reach a cluster."""
