"""Pictures of orders and of places for lessons 00, 03, 05, 09, 10 and 10b; make_images.py saves them.

They show no schedule: what waits in a queue, the passages of a rank, who holds what in a mesh. Those
with LARGE letters can be read on a slide.
"""

from functools import partial

from idea_pictures import THIN, arrow, box, text

from lab.drawing import FILL, NUMBER, TEXT, WAITING, shade_of, wrap
from lab.figures import Picture
from pipeline.schedules import interleaved_1f1b, zb_h1

RANKS, MICROBATCHES, CHUNKS = 4, 8, 2
WIDE = 44  # of a passage
LARGE = 18  # of letters that can be read on a slide
X = [[1, 2, 3, 4], [5, 6, 7, 8]]  # the product of lesson 10b
W = [[1, 0, 2, 0], [0, 1, 0, 2], [3, 0, 1, 0], [0, 3, 0, 1]]
CELL = 38  # of a number of a matrix
FORWARD, BACKWARD = (
    {"fill": FILL["F"], "color": NUMBER["F"]},
    {"fill": FILL["B"], "color": NUMBER["B"]},
)
label = partial(text, size=LARGE)


def blue(shade):
    """The paint of a box with large letters, in a shade of the forward."""
    return {"fill": shade_of("F", shade), "color": NUMBER["F"], "size": LARGE}


def crossing_sends():
    """Two sends with one queue per rank, each on its own and then as one batch (lesson 03)."""
    parts = []
    for top, how in ((8, "each message on its own"), (196, "send and receive as one batch")):
        parts.append(text(410, top + 18, how, bold=True))
        for left, rank in ((8, 2), (540, 3)):
            parts += box(left, top, 272, 160)
            parts.append(text(left + 14, top + 22, f"rank {rank}, its queue", "start", bold=True))
        parts += box(22, top + 36, 244, 40, "send activation 1 to rank 3", **FORWARD)
        parts += box(22, top + 92, 244, 40, "receive gradient 0 from rank 3")
        parts += box(554, top + 36, 244, 40, "send gradient 0 to rank 2", **BACKWARD)
        parts += box(554, top + 92, 244, 40, "receive activation 1 from rank 2")
    parts += arrow((266, 64), (370, 64), (370, 128), (554, 128))
    parts += arrow((554, 64), (450, 64), (450, 112), (266, 112))
    for left in (22, 554):
        parts.append(text(left + 122, 158, "begins only after the send"))
        parts.append(
            f'<rect x="{left - 6}" y="226" width="256" height="112" rx="5" {THIN} '
            'stroke-dasharray="5 4"/>'
        )
    parts.append(text(410, 158, "both sends wait: a hang"))
    parts += arrow((266, 252), (370, 252), (370, 316), (554, 316))
    parts += arrow((554, 252), (450, 252), (450, 300), (266, 300))
    parts.append(text(410, 346, "both messages arrive"))
    alt = (
        "Two neighbouring ranks with one queue each. If each message is issued on its own, each "
        "rank's send is under way and its receive stands behind it in the queue; the send of each "
        "rank waits for the receive of the other, so both hang. If a rank issues its send and its "
        "receive as one batch, both begin together, and both messages arrive."
    )
    return Picture(wrap(parts, 364, alt), alt)


def warm_ups():
    """The number of forward passages in the warm-up of each rank, read off the schedule."""
    firsts = []
    for order in interleaved_1f1b(RANKS, MICROBATCHES, CHUNKS).orders:
        first_backward = next(i for i, action in enumerate(order) if action.kind == "B")
        firsts.append(first_backward - 1)  # the forward before it belongs to the steady phase
    return firsts


def passages():
    """The passages of a rank as two numbered strips, and where its warm-up ends (lesson 05)."""
    order = interleaved_1f1b(RANKS, MICROBATCHES, CHUNKS).orders[0]
    parts, left = [], 104
    for top, kind, words in ((34, "F", "forwards"), (186, "B", "backwards")):
        parts.append(text(left - 10, top + 22, words, "end"))
        for number, action in enumerate(action for action in order if action.kind == kind):
            chunk, x = action.stage // RANKS, left + number * WIDE
            fill, color = shade_of(kind, chunk), NUMBER[kind]
            parts.append(text(x + WIDE / 2, top - 8, str(number)))
            parts += box(x + 1, top, WIDE - 2, 34, str(action.microbatch), fill, color)
    for rank, passes in enumerate(warm_ups()):
        y = 84 + 18 * rank
        parts.append(text(left - 10, y + 4.5, f"rank {rank}", "end"))
        parts.append(
            f'<path d="M{left} {y - 5}V{y + 5}M{left} {y}H{left + passes * WIDE}" {THIN}/>'
        )
        parts.append(f'<path d="M{left + passes * WIDE} {y - 5}V{y + 5}" {THIN}/>')
        parts.append(text(left + passes * WIDE + 8, y + 4.5, f"warm-up: {passes}", "start"))
    parts.append(
        text(left, 250, "in a box: the micro-batch; shades: the two chunks of a rank", "start")
    )
    alt = (
        "The sixteen forward passages of a rank with two chunks and eight micro-batches, numbered "
        "from 0: micro-batches 0 to 3 through the first chunk, 0 to 3 through the second, then 4 "
        "to 7 in the same way. The backward passages have the same micro-batches, but the second "
        "chunk comes first. "
        f"The warm-ups of ranks 0 to 3 have {', '.join(map(str, warm_ups()))} forward passages."
    )
    return Picture(wrap(parts, 262, alt), alt)


def deferred_after(order):
    """[(action, micro-batches whose W is still to run)]: what each action of a rank leaves behind."""
    found, deferred = [], []
    for action in order:
        if action.kind == "I":
            deferred = [*deferred, action.microbatch]
        if action.kind == "W":
            deferred = [each for each in deferred if each != action.microbatch]
        found.append((action, deferred))
    return found


def deferred_weight_gradients():
    """The actions of the last rank in ZB-H1, and under each one what is deferred (lesson 09)."""
    parts, left, wide, top = [], 104, 29, 8
    found = deferred_after(zb_h1(RANKS, MICROBATCHES).orders[-1])
    bottom = top + 52 + 26 * max(len(deferred) for _, deferred in found)
    parts.append(text(left - 10, top + 21, f"rank {RANKS - 1}", "end"))
    parts.append(text(left - 10, bottom - 9, "its deferred W", "end"))
    for number, (action, deferred) in enumerate(found):
        x, kind = left + number * wide, action.kind
        label = f"{kind}{action.microbatch}"
        parts += box(x, top, wide - 1, 32, label, FILL[kind], NUMBER[kind])
        for place, microbatch in enumerate(deferred):
            y = bottom - 26 * (place + 1)
            parts += box(x, y, wide - 1, 24, str(microbatch), FILL["W"], NUMBER["W"])
    parts.append(f'<path d="M{left} {bottom}H{left + wide * len(found)}" {THIN}/>')
    alt = (
        f"The actions of rank {RANKS - 1} in ZB-H1, and under each action the micro-batches whose W "
        "is deferred. Each I adds its micro-batch at the end of the list, and each W takes the "
        f"oldest one. The list grows to {max(len(deferred) for _, deferred in found)}, stays there "
        "or one shorter while W follows each I, and empties at the end of the step."
    )
    return Picture(wrap(parts, bottom + 8, alt), alt)


def replicas():
    """Two replicas of a pipeline: who sends along a row, who sums along a column (lesson 10)."""
    parts, left, apart, wide = [], 122, 190, 122
    for replica in range(2):
        top = 32 + 116 * replica
        parts.append(label(4, top + 24, f"replica {replica}", "start", bold=True))
        parts.append(label(4, top + 47, f"batch half {replica}", "start"))
        for stage in range(RANKS):
            x, color = left + apart * stage, NUMBER["F"]
            parts += box(x, top, wide, 58, **blue(stage % 2))
            rank = RANKS * replica + stage
            parts.append(label(x + wide / 2, top + 24, f"rank {rank}", color=color, bold=True))
            parts.append(label(x + wide / 2, top + 47, f"stage {stage}", color=color))
            if stage:
                parts += arrow((x - apart + wide, top + 19), (x, top + 19))
                parts += arrow((x, top + 40), (x - apart + wide, top + 40))
    for stage in range(RANKS):
        middle = left + apart * stage + wide / 2
        parts += arrow((middle, 119), (middle, 148)) + arrow((middle, 119), (middle, 90))
    middle = left + 1.5 * apart + wide / 2
    parts.append(label(middle, 18, "a row: messages of each micro-batch"))
    parts.append(label(middle, 230, "a column: one sum of gradients per step"))
    alt = (
        "Eight ranks as a mesh of 2 replicas and 4 stages. Ranks 0 to 3 are one pipeline, ranks 4 "
        "to 7 the other. Each micro-batch sends activations along a row and gradients back. Ranks "
        "0 and 4, 1 and 5, 2 and 6, 3 and 7 have the same stage and sum its gradients once per step."
    )
    return Picture(wrap(parts, 240, alt), alt)


def laundry():
    """What is known before the reader's guess: the washer's row, and the dryer's first load (lesson 00)."""
    left, minute = 96, 3.5
    parts = [label(left - 12, 34, "washer", "end"), label(left - 12, 86, "dryer", "end")]
    parts += box(left, 60, 30 * minute - 2, 40, fill=WAITING)
    for load in range(4):
        parts += box(left + 30 * minute * load, 8, 30 * minute - 2, 40, f"load {load}", **blue(0))
    parts += box(left + 30 * minute, 60, 40 * minute - 2, 40, "load 0", **blue(0))
    open_end = f'{THIN} stroke-dasharray="5 4"'
    parts += box(left + 70 * minute, 60, 130 * minute, 40, fill=open_end)
    parts.append(label(left + 135 * minute, 86, "loads 1, 2 and 3: until when?"))
    for at in (0, 30, 60, 90, 120):
        parts.append(label(left + minute * at, 124, f"{at} min" if at == 0 else str(at)))
    alt = (
        "The washer works on load 0 from minute 0 to 30, on load 1 to 60, on load 2 to 90 and on "
        "load 3 to 120. The dryer waits for load 0 until minute 30 and dries it until minute 70. "
        "The picture leaves open when it dries the other three loads."
    )
    return Picture(wrap(parts, 132, alt), alt)


def two_cuts():
    """The product of lesson 10b, cut in two ways: which numbers each of two ranks has."""
    parts = [label(204, 20, "cut by columns", bold=True), label(594, 20, "cut by rows", bold=True)]
    top, cell = 56, CELL
    for left, by_rows in ((24, False), (414, True)):
        right = left + 4 * cell + 40
        middle = top + 2 * cell
        parts.append(label(left + 4 * cell + 20, middle + 6, "×"))
        parts += cells(left, top + cell, X, "columns" if by_rows else "not at all")
        parts += cells(right, top, W, "rows" if by_rows else "columns")
        if not by_rows:
            parts.append(label(left + 2 * cell, top + cell - 9, "on both ranks"))
        for rank in range(2):
            along = cell * (1 + 2 * rank)
            if by_rows:
                parts.append(label(left + along, top + cell - 9, f"rank {rank}"))
                parts.append(label(right + 4 * cell + 8, top + along + 6, f"rank {rank}", "start"))
            else:
                parts.append(label(right + along, top - 9, f"rank {rank}"))
    alt = (
        "A product of x, which has 2 rows, and a 4 × 4 matrix, cut for two ranks in two ways. Cut "
        "by columns, rank 0 has the left two columns of the matrix and rank 1 the right two, and "
        "both have all of x. Cut by rows, rank 0 has the upper two rows of the matrix and the left "
        "two columns of x, and rank 1 has the lower two rows and the right two columns."
    )
    return Picture(wrap(parts, top + 4 * cell + 8, alt), alt)


def cells(left, top, numbers, cut):
    """The numbers of a matrix that is cut by "rows", "columns" or not at all: a shade per rank."""
    parts = []
    for row, line in enumerate(numbers):
        for column, number in enumerate(line):
            rank = {"rows": row // 2, "columns": column // 2}.get(cut)
            paint = {"size": LARGE} if rank is None else blue(rank)
            x, y = left + CELL * column, top + CELL * row
            parts += box(x, y, CELL - 2, CELL - 2, str(number), **paint)
    return parts


def columns_then_rows():
    """Two products with nothing sent between them, and the collectives at both ends (lesson 10b)."""
    parts, enter, leave = [], 204, 660
    heads = ((enter, "enter"), (324, "W1: columns"), (514, "W2: rows"), (leave, "leave"))
    parts += [label(x, 20, name, bold=True) for x, name in heads]
    for rank in range(2):
        top = 34 + 70 * rank
        middle = top + 29
        parts.append(label(10, middle + 6, f"rank {rank}", "start", bold=True))
        parts += box(100, top + 9, 44, 40, "x", size=LARGE)
        parts += arrow((144, middle), (enter - 9, middle)) + arrow(
            (enter + 9, middle), (280, middle)
        )
        parts += box(282, top, 84, 58) + box(282 + 42 * rank, top, 42, 58, "W1", **blue(rank))
        parts += arrow((366, middle), (396, middle))
        parts += box(398, top + 9, 44, 40) + box(398 + 22 * rank, top + 9, 22, 40, **blue(rank))
        parts += arrow((442, middle), (470, middle))
        parts += box(472, top, 84, 58) + box(472, top + 29 * rank, 84, 29, "W2", **blue(rank))
        parts += arrow((556, middle), (leave - 9, middle)) + arrow(
            (leave + 9, middle), (736, middle)
        )
        parts.append(label((556 + leave - 9) / 2, middle - 8, "a term"))
        parts += box(738, top + 9, 44, 40, "y", size=LARGE)
    for x in (enter, leave):  # where the ranks talk
        parts += box(x - 9, 32, 18, 134, fill=f'fill="{TEXT}" stroke="{TEXT}"')
    rows = (
        ("forward", "nothing", "all-reduce"),
        ("backward", "all-reduce", "nothing"),
        ("forward", "all-gather", "reduce-scatter"),
        ("backward", "reduce-scatter", "all-gather"),
    )
    for row, (direction, first, last) in enumerate(rows):
        y = 192 + 22 * row + 8 * (row > 1)
        parts.append(label(10, y, direction, "start"))
        parts += [label(enter, y, first), label(leave, y, last)]
        if row % 2 == 0:
            how = ("whole", "split")[row // 2]
            parts.append(label((enter + leave) / 2, y + 11, f"sequence {how}"))
    alt = (
        "A feed-forward network on two ranks. Both ranks have x. Rank 0 has the left half of the "
        "columns of W1 and the upper half of the rows of W2, rank 1 the other halves. Nothing is "
        "sent between W1 and W2. After W2 each rank has a term of y, and `leave` sums the terms with "
        "an all-reduce; in the backward, `enter` sums the gradients of x with an all-reduce. If the "
        "sequence is split, `enter` is an all-gather and `leave` a reduce-scatter in the forward, "
        "and the other way round in the backward."
    )
    return Picture(wrap(parts, 274, alt), alt)


def mesh():
    """Who holds what on 2 replicas of 2 stages of 2 ranks each (lesson 10b)."""
    parts = []
    for replica in range(2):
        top = 4 + 176 * replica
        parts.append(label(4, top + 56, f"replica {replica}", "start", bold=True))
        parts.append(label(4, top + 80, f"batch half {replica}", "start"))
        for stage in range(2):
            left = 122 + 366 * stage
            parts += box(left, top, 326, 122)
            parts.append(label(left + 163, top + 21, f"stage {stage}", bold=True))
            for part in range(2):
                rank, inner = 4 * replica + 2 * stage + part, left + 8 + 160 * part
                parts += box(inner, top + 30, 150, 60, **blue(stage))
                name, held = f"rank {rank}", f"matrix half {part}"
                parts.append(label(inner + 75, top + 55, name, color=NUMBER["F"], bold=True))
                parts.append(label(inner + 75, top + 79, held, color=NUMBER["F"]))
            parts.append(label(left + 163, top + 112, "sums in each layer"))
        parts += arrow((448, top + 48), (488, top + 48)) + arrow((488, top + 74), (448, top + 74))
    for x in (205, 365, 571, 731):
        parts += arrow((x, 153), (x, 178)) + arrow((x, 153), (x, 128))
    parts.append(label(468, 159, "sums of gradients"))
    alt = (
        "Eight ranks as 2 replicas of 2 stages of 2 ranks. Ranks 0 and 1 have a half each of every "
        "matrix of stage 0, ranks 2 and 3 of stage 1; ranks 4 to 7 have the same for the other half "
        "of the batch. Ranks of a stage sum in each layer, activations go from stage 0 to stage 1 "
        "and gradients back, and ranks 0 and 4, 1 and 5, 2 and 6, 3 and 7 sum their gradients."
    )
    return Picture(wrap(parts, 305, alt), alt)


ORDERS = {
    "idea-laundry": laundry,
    "idea-crossing-sends": crossing_sends,
    "idea-passages": passages,
    "idea-deferred": deferred_weight_gradients,
    "idea-replicas": replicas,
    "idea-two-cuts": two_cuts,
    "idea-columns-then-rows": columns_then_rows,
    "idea-mesh": mesh,
}
