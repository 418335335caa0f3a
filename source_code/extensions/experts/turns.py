# SPDX-License-Identifier: Apache-2.0
"""Two threads of a rank that compute in turns: each works while the other waits for an all-to-all.

Only one of them runs at any time, and it hands over at fixed points: right after it has started an
all-to-all. So all ranks that run the same two actions start their all-to-alls in one order, as
NCCL demands, whichever of them arrives first.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

SPIN = 0.0003  # seconds: a sleep ends late, so the last part of it spins


class Turns:
    """Hands the turn from one of two threads to the other. Without a pair, `change` does nothing."""

    def __init__(self):
        # One thread for all pairs: torch prepares a new thread for its first computation.
        self.pool = ThreadPoolExecutor(1, "pair", partial(torch.set_num_threads, 1))
        self.own = threading.local()  # .number is 0 in the pool's thread and 1 in the rank's own
        self.gates = [threading.Semaphore(0) for _ in range(2)]
        self.running = [False, False]

    def run_both(self, first, second):
        """Call two functions in turns, the first one first; return when both have ended."""
        self.running = [True, True]
        ended = self.pool.submit(self.run_one, 0, first)
        self.gates[0].release()
        self.run_one(1, second)
        ended.result()

    def run_one(self, number, function):
        self.own.number = number
        self.gates[number].acquire()
        try:
            function()
        finally:
            self.running[number] = False
            if self.running[1 - number]:
                self.gates[1 - number].release()

    def change(self):
        """Let the other thread run until it calls this method or ends."""
        number = getattr(self.own, "number", None)
        if number is not None and self.running[1 - number]:
            self.gates[1 - number].release()
            self.gates[number].acquire()


class Pace:
    """Lets the parts of an action, and its all-to-alls, last as long as `costs` say, in ms.

    An action with n all-to-alls, two for each layer, is cut into n + 1 equal parts. Each thread of
    a pair has an action of its own. Within a pair every part begins at its planned moment or as
    soon after it as the thread can run, so the times for changing threads do not add up.
    """

    def __init__(self, costs):
        self.costs = costs
        self.own = threading.local()
        self.free = 0.0  # the planned end of the last part, after which another one can begin

    def restart(self):
        """Begin to plan an action or a pair: its first part begins now."""
        self.free = time.perf_counter()

    def begin(self, action):
        exchanges = self.costs.exchanges_of(action)
        self.own.part = self.costs.computing(action) / (exchanges + 1) / 1000
        self.own.exchange = self.costs.exchange_of(action) / exchanges / 1000
        self.own.since = self.free

    def end_part(self):
        """Wait until the part that computes has lasted long enough; the all-to-all begins."""
        self.free = self.own.sent_at = self.own.since + self.own.part
        sleep_until(self.free)

    def arrive(self):
        """Wait until the all-to-all has lasted long enough; the next part begins."""
        self.own.since = max(self.own.sent_at + self.own.exchange, self.free)
        sleep_until(self.own.since)


def sleep_until(moment):
    time.sleep(max(0.0, moment - time.perf_counter() - SPIN))
    while time.perf_counter() < moment:
        pass
