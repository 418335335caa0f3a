"""Attaches instruments to the stages of a test, as the lab does to those of a script."""

from contextlib import contextmanager
from unittest import mock

from lab.activation_memory import ActivationMemory
from lab.observer import Observer


class ListedActions:
    """The actions that a rank takes, in order: a tuple for each step that has ended."""

    def __init__(self):
        self.steps, self.under_way = [], []

    @contextmanager
    def acting(self, work):
        self.under_way.append(work.action)
        yield

    def pass_ended(self):
        self.steps.append(tuple(self.under_way))
        self.under_way = []


def attach_instruments(job, stages, *instruments):
    """Show `stages`, and what `job` sends and waits for, to `instruments`."""
    observer = Observer(job, instruments)
    for stage in stages:
        observer.attach_stage(stage)


def count_memory(*stages):
    """An ActivationMemory of stages whose job, if they have one, is not observed."""
    memory = ActivationMemory(every_pass=True)
    attach_instruments(mock.Mock(), stages, memory)
    return memory
