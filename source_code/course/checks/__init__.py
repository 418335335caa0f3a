"""Answers to the exercises, at once: one file per lesson, what they share, the puzzles as data."""
