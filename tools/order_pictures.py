"""Pictures of orders and of places for lessons 03, 05, 09, 10 and 10b; make_images.py saves them.

They have no time axis: what waits in a queue, the passages of a rank, and who holds what in a mesh.
"""

from idea_pictures import THIN, arrow, box, text

from lab.drawing import FILL, NUMBER, shade_of, wrap
from lab.figures import Picture
from pipeline.schedules import interleaved_1f1b, zb_h1

RANKS, MICROBATCHES, CHUNKS = 4, 8, 2
WIDE = 44  # of a passage
FORWARD, BACKWARD = (
    {"fill": FILL["F"], "color": NUMBER["F"]},
    {"fill": FILL["B"], "color": NUMBER["B"]},
)


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
    parts, left, apart, wide = [], 130, 174, 124
    for replica in range(2):
        top = 30 + 116 * replica
        parts.append(text(left - 14, top + 21, f"replica {replica}", "end", bold=True))
        parts.append(text(left - 14, top + 39, "half of the batch", "end"))
        for stage in range(RANKS):
            x = left + apart * stage
            parts += box(x, top, wide, 54, "", shade_of("F", stage % 2), NUMBER["F"])
            rank = RANKS * replica + stage
            parts.append(text(x + wide / 2, top + 24, f"rank {rank}", color=NUMBER["F"], bold=True))
            parts.append(text(x + wide / 2, top + 43, f"stage {stage}", color=NUMBER["F"]))
            if stage:
                parts += arrow((x - apart + wide, top + 18), (x, top + 18))
                parts += arrow((x, top + 38), (x - apart + wide, top + 38))
    for stage in range(RANKS):
        middle = left + apart * stage + wide / 2
        parts += arrow((middle, 115), (middle, 146)) + arrow((middle, 115), (middle, 84))
    parts.append(text(left + 1.5 * apart + wide / 2, 18, "a row: messages of each micro-batch"))
    words = "a column: one sum of gradients per step"
    parts.append(text(left + 1.5 * apart + wide / 2, 222, words))
    alt = (
        "Eight ranks as a mesh of 2 replicas and 4 stages. Ranks 0 to 3 are one pipeline, ranks 4 "
        "to 7 the other. Each micro-batch sends activations along a row and gradients back. Ranks "
        "0 and 4, 1 and 5, 2 and 6, 3 and 7 have the same stage and sum its gradients once per step."
    )
    return Picture(wrap(parts, 236, alt), alt)


def mesh():
    """Who holds what on 2 replicas of 2 stages of 2 ranks each (lesson 10b)."""
    parts = []
    for replica in range(2):
        top = 8 + 186 * replica
        parts.append(text(8, top + 70, f"replica {replica}:", "start", bold=True))
        parts.append(text(8, top + 88, f"half {replica} of the rows", "start"))
        for stage in range(2):
            left = 150 + 350 * stage
            parts += box(left, top, 310, 146)
            parts.append(text(left + 155, top + 20, f"stage {stage}", bold=True))
            for part in range(2):
                rank, fill = 4 * replica + 2 * stage + part, shade_of("F", stage)
                inner = left + 10 + 150 * part
                parts += box(inner, top + 30, 140, 84, "", fill, NUMBER["F"])
                lines = (f"rank {rank}", f"half {part} of each matrix", f"of stage {stage}")
                for line, words in enumerate(lines):
                    parts.append(
                        text(
                            inner + 70,
                            top + 54 + 20 * line,
                            words,
                            color=NUMBER["F"],
                            bold=not line,
                        )
                    )
            parts.append(text(left + 155, top + 134, "sums of each layer"))
        parts += arrow((460, top + 60), (500, top + 60)) + arrow((500, top + 90), (460, top + 90))
    for left in (220, 370, 570, 720):
        parts += arrow((left, 154), (left, 194)) + arrow((left, 194), (left, 154))
    parts.append(text(475, 179, "sums of gradients"))
    alt = (
        "Eight ranks as 2 replicas of 2 stages of 2 ranks. Ranks 0 and 1 have a half each of every "
        "matrix of stage 0, ranks 2 and 3 of stage 1; ranks 4 to 7 have the same for the other half "
        "of the rows. Ranks of a stage sum in each layer, activations go from stage 0 to stage 1 "
        "and gradients back, and ranks 0 and 4, 1 and 5, 2 and 6, 3 and 7 sum their gradients."
    )
    return Picture(wrap(parts, 348, alt), alt)


ORDERS = {
    "idea-crossing-sends": crossing_sends,
    "idea-passages": passages,
    "idea-deferred": deferred_weight_gradients,
    "idea-replicas": replicas,
    "idea-mesh": mesh,
}
