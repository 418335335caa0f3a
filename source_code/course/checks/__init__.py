"""The instant answers to the exercises: one file a lesson, what they share, the puzzles as data."""
