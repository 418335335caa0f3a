# SPDX-License-Identifier: Apache-2.0
"""Seconds of messages and collectives: within a node, between nodes, and over both.

A ring that passes through several nodes enters and leaves each node once, however many of its
members the node holds. If a node has several cards, a library runs several rings side by side. A
group with k members in a node, each with its share of the cards, therefore has k shares between the
nodes, but never more than the bandwidth within the node.

Sources: nccl-tests, PERFORMANCE.md (bytes of ring collectives); NVIDIA/nccl#687 (a ring enters and
leaves a node once) and #569 (measured with 1, 2 and 4 cards per node). Bytes and seconds.
"""


def bus_bandwidth(machine, members, inside):
    """Bytes per second of a ring over `members` GPUs with `inside` of them in each node."""
    if inside >= members:
        return machine.inside.bandwidth
    return min(machine.inside.bandwidth, inside * machine.card_share)


def gather_time(machine, size, members, inside):
    """Seconds of an all-gather, or a reduce-scatter, of `size` bytes in total on a ring.

    Each of n members receives the (n - 1)/n that it does not have.
    """
    if members == 1:
        return 0.0
    nodes = -(-members // inside)
    far = nodes if nodes > 1 else 0  # of the ring's hops, those that leave a node
    latency = (members - 1) / members
    latency *= far * machine.between.latency + (members - far) * machine.inside.latency
    moved = (members - 1) / members * size
    return latency + moved / bus_bandwidth(machine, members, inside)


def all_reduce_time(machine, size, members, inside):
    """Seconds of a ring all-reduce of `size` bytes: a reduce-scatter and an all-gather."""
    return 2 * gather_time(machine, size, members, inside)


def message_costs(machine, size, far, tensor=1, senders=None):
    """(latency, occupancy of its link) of one activation of `size` bytes to the next stage.

    If `tensor` GPUs share the activation, each sends one part over its own card, and the parts are
    gathered inside the other node (Megatron-LM 2021, section 4.1). `far` is true if the message
    leaves the node. `senders` is the number of GPUs of a node that send at the same time, by
    default `tensor`.
    """
    if not far:
        return machine.inside.latency, size / tensor / machine.inside.bandwidth
    cards = machine.between.number / max(senders or tensor, tensor)
    speed = machine.between.bandwidth * min(1.0, cards)
    gathered = gather_time(machine, size, tensor, tensor)
    return machine.between.latency + gathered, size / tensor / speed
