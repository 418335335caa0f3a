"""What messages and collectives cost: within a node, between nodes, and over both.

A ring that passes through several nodes enters and leaves each node once, however many of its
members the node holds. A library with several cards runs as many rings side by side. So a group
with k members in a node, each with its share of the cards, has k shares between the nodes, and never
more than the links within the node carry.

Sources: nccl-tests, PERFORMANCE.md (bytes of ring collectives); NVIDIA/nccl#687 (a ring enters and
leaves a node once) and #569 (measured with 1, 2 and 4 cards per node). Bytes and seconds.
"""


def bus_bandwidth(machine, members, inside):
    """Bytes per second of a ring over `members` GPUs with `inside` of them in each node."""
    if inside >= members:
        return machine.inside.bandwidth
    return min(machine.inside.bandwidth, inside * machine.card_share)


def gather_time(machine, size, members, inside):
    """An all-gather, or a reduce-scatter, of `size` bytes in all: each member misses (n - 1)/n."""
    if members == 1:
        return 0.0
    nodes = -(-members // inside)
    far = nodes if nodes > 1 else 0  # of the ring's hops, those that leave a node
    latency = (members - 1) / members
    latency *= far * machine.between.latency + (members - far) * machine.inside.latency
    moved = (members - 1) / members * size
    return latency + moved / bus_bandwidth(machine, members, inside)


def all_reduce_time(machine, size, members, inside):
    """A ring all-reduce of `size` bytes: a reduce-scatter and an all-gather."""
    return 2 * gather_time(machine, size, members, inside)


def message_costs(machine, size, far, tensor=1, senders=None):
    """(latency, occupancy of its link) of one activation of `size` bytes to the next stage.

    `tensor` GPUs that share the activation send a part each, over a card each, and gather the
    parts again inside the other node (Megatron-LM 2021, section 4.1). `far`: it leaves the node.
    `senders` GPUs of a node send at the same time, by default those `tensor`.
    """
    if not far:
        return machine.inside.latency, size / tensor / machine.inside.bandwidth
    cards = machine.between.number / max(senders or tensor, tensor)
    speed = machine.between.bandwidth * min(1.0, cards)
    gathered = gather_time(machine, size, tensor, tensor)
    return machine.between.latency + gathered, size / tensor / speed
