"""What a long training adds to the steps: texts, held-out loss, useful work, a log."""
