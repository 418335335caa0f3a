"""What a reader sees of a timeline: the explorer, and steps through time."""
