"""Plays the sends, receives and waits of all ranks by the strictest rule that NCCL may follow.

Each rank has one operation under way at a time, in the order in which it issues them, and a message
is transferred when it is under way at both ends. A rank that waits for a message issues nothing
until it has arrived. What the ranks issue is listed by running the worker or a loop with a
job that moves nothing, so no process is needed.
"""

from collections import deque
from types import SimpleNamespace


class ListedJob:
    """Lists what a rank issues: ("send", peer, message), ("receive", ...), ("wait", ...)
    and ("sum", ranks, what)."""

    def __init__(self, rank, num_ranks):
        self.rank, self.num_ranks, self.issued = rank, num_ranks, []

    def send(self, tensor, destination, message):
        self.issued.append(("send", destination, message))
        return SimpleNamespace(wait=lambda: None)  # the proof that it was used has arrived

    def receive(self, source, message):
        self.issued.append(("receive", source, message))
        return SimpleNamespace(wait=lambda: self.issued.append(("wait", source, message)))

    def sum(self, ranks, what, waits=True):
        if len(ranks) > 1:
            self.issued += [("sum", ranks, what), ("wait", ranks, what)][: 1 + waits]

    def release_sent(self, message):
        pass

    def complete_sends(self):
        pass


class EmptyStage:
    """A stage that computes nothing."""

    def __init__(self, index, num_stages):
        self.index, self.is_first, self.is_last = index, index == 0, index == num_stages - 1

    def nothing(self, *_):
        return 0

    forward = backward = backward_input = backward_weight = update = nothing


def issued_by(num_ranks, run_rank):
    """What each rank issues in `run_rank(job)`."""
    jobs = [ListedJob(rank, num_ranks) for rank in range(num_ranks)]
    for job in jobs:
        run_rank(job)
    return [job.issued for job in jobs]


def blocked(issued):
    """{rank: the operation in which it is stuck}; empty if all ranks reach their end."""
    issued = [deque(operations) for operations in issued]
    under_way = [deque() for _ in issued]  # in the queue of the rank's device
    arrived = [set() for _ in issued]
    progress = True
    while progress:
        progress = False
        for rank, operations in enumerate(issued):
            while operations and (operations[0][0] != "wait" or operations[0][2] in arrived[rank]):
                operation = operations.popleft()
                if operation[0] != "wait":
                    under_way[rank].append(operation)
                progress = True
        heads = [queue[0] if queue else None for queue in under_way]
        for rank, head in enumerate(heads):
            if head and head[0] == "sum":
                users = head[1]
            elif head and head[0] == "send" and heads[head[1]] == ("receive", rank, head[2]):
                users = rank, head[1]
            else:
                continue
            if head[0] == "send" or all(heads[user] == head for user in users):
                for user in users:
                    heads[user] = under_way[user].popleft() and None
                    arrived[user].add(head[2])
                progress = True
    stuck = {rank: queue[0] for rank, queue in enumerate(under_way) if queue}
    waits = {rank: rest[0] for rank, rest in enumerate(issued) if rest}
    return waits | stuck


def most_posted_ahead(operations):
    """The largest number of receives that a rank has issued and not yet waited for."""
    ahead = most = 0
    for what, _, _ in operations:
        ahead += {"receive": 1, "wait": -1, "send": 0}[what]
        most = max(most, ahead)
    return most
