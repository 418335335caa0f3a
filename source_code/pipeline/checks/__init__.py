"""The instant answers to the exercises: one file a lesson, `answer.py` for what they share."""
