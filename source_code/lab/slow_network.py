# SPDX-License-Identifier: Apache-2.0
"""The nodes of ranks, and a pretended slow network between nodes."""

import os
import socket
import time
from argparse import ArgumentTypeError
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch.distributed as dist

from guard.ending import end_process
from lab.variables import DELAY_VARIABLE, OCCUPANCY_VARIABLE, PRETENDED_VARIABLE
from pipeline.command_line import number_from_zero, positive_integer


class NodesError(ValueError):
    """The environment does not fit; the text says what to set."""


def node_name(rank):
    """The node of this rank: the pretended one, SLURM's name for it, or the machine's own name."""
    pretended = os.environ.get(PRETENDED_VARIABLE)
    if pretended is not None:
        try:
            return f"node{rank // positive_integer(pretended)}"
        except ArgumentTypeError as error:
            raise NodesError(f"{PRETENDED_VARIABLE} {error}") from None
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def seconds_in(variable):
    """The seconds of an environment variable, which has milliseconds."""
    text = os.environ.get(variable, "0")
    try:
        milliseconds = number_from_zero(text)
    except ArgumentTypeError:
        milliseconds = -1.0
    if not 0 <= milliseconds <= 60_000:
        raise NodesError(f"{variable} must be 0 to 60000 milliseconds, not '{text}'")
    return milliseconds / 1000


def check_transport(backend, slow):
    """Reject slow links with NCCL: they send from a second thread, which NCCL calls unsafe."""
    rehearsed = getattr(dist.group.WORLD, "mode", None)
    if slow and (rehearsed or backend == "nccl"):
        raise NodesError(
            f"{DELAY_VARIABLE} and {OCCUPANCY_VARIABLE} send from a second thread, which NCCL does "
            "not allow; use --device cpu, and no --rehearse"
        )


def attach_network(job):
    """Exchange the ranks' nodes; slow messages between nodes if requested. All ranks call it."""
    try:
        mine = node_name(job.rank)
        delay, occupancy = seconds_in(DELAY_VARIABLE), seconds_in(OCCUPANCY_VARIABLE)
        check_transport(job.backend, delay or occupancy)
    except NodesError as error:
        end_process(str(error))
    store = dist.PrefixStore("node", job.store)
    store.set(str(job.rank), mine)
    with job.waiting_for_all("the name of its node"):
        names = store.multi_get([str(rank) for rank in range(job.num_ranks)])
    return SlowNetwork(job, [name.decode() for name in names], delay, occupancy)


class SlowNetwork:
    """Slows the messages that a job sends to other nodes; `nodes` has the name of each rank's node.

    `delay` and `occupancy` are in seconds. They are the simulator's `transfer` and `occupancy`,
    with a link for each ordered pair of ranks; simulator.py says what this model leaves out. A sum
    over ranks on several nodes counts as one message to one of them.
    """

    def __init__(self, job, nodes, delay, occupancy=0.0):
        self.num_ranks, self.nodes = job.num_ranks, nodes
        self.delay, self.occupancy = delay, occupancy
        others = [rank for rank, name in enumerate(nodes) if name != nodes[job.rank]]
        slow = delay or occupancy
        self.links = {rank: SlowLink(delay, occupancy) for rank in others} if slow else {}
        self.start_at_once = job.start
        job.start = self.start

    def start(self, peers, begin):
        links = [self.links[peer] for peer in peers if peer in self.links]
        return links[0].send(begin) if links else self.start_at_once(peers, begin)

    def slow_down(self, costs):
        """`costs` in milliseconds, with the pretend network between ranks on different nodes."""
        ranks = range(self.num_ranks)
        pairs = [(a, b) for a in ranks for b in ranks if self.nodes[a] != self.nodes[b]]
        return replace(
            costs,
            transfer={pair: 1000 * self.delay for pair in pairs} if self.delay else 0.0,
            occupancy={pair: 1000 * self.occupancy for pair in pairs} if self.occupancy else 0.0,
        )


class SlowLink:
    """Starts sends to one rank late and in order, and does not delay the sender.

    A send waits until the link has served the earlier ones, occupies the link for `occupancy`
    seconds, and travels for `delay` seconds. Several sends can travel at the same time.
    """

    def __init__(self, delay, occupancy):
        self.delay, self.occupancy = delay, occupancy
        self.served = 0.0  # when the link has served all its sends
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slow link")

    def send(self, start):
        """Call `start()`, which returns a Work, later; returns an object with wait()."""
        self.served = max(time.monotonic(), self.served) + self.occupancy
        return LateTransfer(self.thread.submit(_start_at, self.served + self.delay, start))


def _start_at(moment, start):
    time.sleep(max(0.0, moment - time.monotonic()))
    return start()


class LateTransfer:
    """A send that a SlowLink starts later."""

    def __init__(self, started):
        self.started = started

    def wait(self):
        self.started.result().wait()
