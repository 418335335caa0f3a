"""What a reader sees of a timeline: its story in words, its picture, the explorer."""
