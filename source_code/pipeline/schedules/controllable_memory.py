# SPDX-License-Identifier: Apache-2.0
"""V-Half and V-Min: the V of ZB-V with about half and a third of 1F1B's activation memory.

Controllable Memory: Qi et al. 2024, arXiv 2405.15362.

A building block says in which time slots a micro-batch passes each rank. It is repeated every six
slots, since a rank has six actions per micro-batch: F, I and W of two stages. A rank holds a
micro-batch from its F to its W, so the shorter the block, the fewer are held at once. Rank i has
stage i from the start, `down`, and stage i from the end, `up`.
"""

from collections import deque

from pipeline.schedule import Action, Schedule, message_of, needs_of
from pipeline.schedules.order import require_positive

INTERVAL = 6  # slots from one micro-batch to the next
HELD = {"F": 1, "I": 0, "W": -1}  # change in a rank's held activations per action


def v_half(num_ranks, num_microbatches):
    """Every rank holds floor((p + 2) / 2) micro-batches at most, about half of 1F1B's p.

    Forward and gradient take two slots per rank towards the last rank and one on the way back. So
    the slots from F to I, summed over both stages, are equally many on every rank: 6p - 1, or
    6p + 5 if p is even.
    """
    require_positive(num_ranks, num_microbatches)
    p, shift = num_ranks, 0 if num_ranks % 2 else 3  # 0 would put I down and F up in one slot

    def slots(rank):
        turn = 3 * p - 1
        return 2 * rank, turn - 1 - rank, turn + shift + 2 * rank, 2 * turn + shift - rank

    return _repeated("v-half", num_ranks, num_microbatches, slots)


def v_min(num_ranks, num_microbatches):
    """Every rank holds floor((p + 4) / 3) micro-batches at most, about a third of 1F1B's p.

    Forward and gradient take one slot per rank, so that no block is shorter: 4p slots from F to I,
    or 4p + 4 if 3 divides p, summed over both stages, on every rank. The schedule suits equal times
    of F, I and W: if F or I takes more than a third of the three, the ranks wait in every
    micro-batch.
    """
    require_positive(num_ranks, num_microbatches)
    p, shift = num_ranks, 0 if num_ranks % 3 else 2  # 0 would put I up and F down in one slot

    def slots(rank):
        return rank, 2 * p - 1 - rank, 2 * p + shift + rank, 4 * p - 1 + shift - rank

    return _repeated("v-min", num_ranks, num_microbatches, slots)


def _repeated(name, num_ranks, num_microbatches, slots):
    """Repeat the block for each micro-batch, `INTERVAL` slots apart, and remove empty slots.

    `slots(rank)` gives the slots of micro-batch 0: F down, F up, I up and I down.
    """
    orders = []
    for rank in range(num_ranks):
        down, up = rank, 2 * num_ranks - 1 - rank
        block = zip(((down, "F"), (up, "F"), (up, "I"), (down, "I")), slots(rank))
        taken = {
            slot + INTERVAL * microbatch: Action(stage, kind, microbatch)
            for (stage, kind), slot in block
            for microbatch in range(num_microbatches)
        }
        orders.append(_with_weights_in_free_slots(taken))
    limit = max(_most_held(order) for order in orders)
    return Schedule(name, _pulled_forward(orders, limit))


def _with_weights_in_free_slots(taken):
    """Return the order of a rank, with the W of the oldest open I in each free slot."""
    order, delayed = [], deque()
    for slot in range(max(taken) + 1):
        if slot in taken:
            order.append(taken[slot])
            if taken[slot].kind == "I":
                delayed.append(taken[slot]._replace(kind="W"))
        elif delayed:
            order.append(delayed.popleft())
    return order + list(delayed)


def _most_held(order):
    held = most = 0
    for action in order:
        held += HELD[action.kind]
        most = max(most, held)
    return most


def _pulled_forward(orders, limit):
    """Move a later action forward if a rank would wait and the action's inputs exist.

    The blocks leave slots empty before the first gradient arrives and after the last forward. All
    ranks advance slot by slot together. Each stage keeps the order of the micro-batches, and no
    forward moves if its rank would then hold more than `limit` activations of a stage.
    """
    orders, places = [list(order) for order in orders], [_places_in(order) for order in orders]
    performed, held, made = [[] for _ in orders], [0] * len(orders), set()
    while any(places):
        messages = []
        for rank, order in enumerate(orders):
            possible = _possible(order, places[rank], made, limit - held[rank], 2 * len(orders))
            if any(kind == "F" for _, kind in places[rank]):
                place = next(possible, None)
            else:  # cool-down: W can wait, because no rank needs it
                place = min(possible, key=lambda place: order[place].kind != "I", default=None)
            if place is None:
                continue
            action = order[place]
            _take(order, places[rank], place)
            performed[rank].append(action)
            held[rank] += HELD[action.kind]
            messages.append(message_of(action))
        made.update(messages)
    return tuple(map(tuple, performed))


def _places_in(order):
    """{(stage, kind): the indices of its actions in `order`}."""
    places = {}
    for place, action in enumerate(order):
        places.setdefault(action[:2], deque()).append(place)
    return places


def _take(order, places, place):
    """Replace an action in `order` by None, and remove its index from `places`."""
    kind = order[place][:2]
    places[kind].popleft()
    if not places[kind]:
        del places[kind]
    order[place] = None


def _possible(order, places, made, room, num_stages):
    """Yield the index in `order` of each stage and kind's next action, if it can run now."""
    following = sorted(queue[0] for queue in places.values())
    for place in following:
        if made.issuperset(needs_of(order[place], num_stages)):
            before = filter(None, order[following[0] : place])
            if order[place].kind != "F" or _most_held(before) < room:
                yield place
