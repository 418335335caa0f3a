"""A schedule is data: for each rank, the actions that it takes, in order."""

from collections import namedtuple

Action = namedtuple("Action", "stage kind microbatch")  # kind: F forward, B backward, U update
Schedule = namedtuple("Schedule", "name orders")  # one order for each rank
