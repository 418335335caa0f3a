"""Pipelines without a flush: an update after each backward, with several versions of weights."""
