"""Pictures of ideas for lessons 01 to 05 and 09; make_images.py saves images/idea-NAME.svg.

Every picture with a time axis is drawn from a predicted schedule.
"""

from typing import NamedTuple

from lives import draw_lives

from lab.drawing import (
    FILL,
    FONT,
    LEFT,
    NUMBER,
    OUTLINE,
    ROW,
    ROW_GAP,
    TEXT,
    WAITING,
    arrange,
    draw_legend,
    draw_place,
    shade_of,
    wrap,
)
from lab.figures import Picture
from lab.longest_path import bubbles_of
from lab.simulator import Costs, simulate
from lab.story import waits_of
from pipeline.schedules import gpipe, one_f_one_b, pipedream, zb_v

COSTS = Costs(forward=10, backward=20)
GROUND = f'fill="none" stroke="{TEXT}"'  # without a colour of its own, because words stand on it
PALE = "#bdbdbd"  # of what another rank does; its letter is black
THIN = f'stroke="{TEXT}" stroke-width="1.4" fill="none"'


def text(x, y, words, anchor="middle", color=TEXT, bold=False, size=FONT):
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{color}"{weight}>{words}</text>'
    )


def box(left, top, width, height, words="", fill=GROUND, color=TEXT, size=FONT):
    """A rectangle with words in its middle. `fill` is a colour or attributes."""
    paint = f'fill="{fill}"' if fill.startswith("#") else fill
    parts = [
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height}" rx="3" {paint}/>'
    ]
    middle = left + width / 2, top + height / 2 + 4.5 * size / FONT
    return parts + [text(*middle, words, color=color, size=size)] * bool(words)


def arrow(*corners):
    """A thin line through (x, y) corners, with a head at its end."""
    (x1, y1), (x2, y2) = corners[-2:]
    right, down = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
    line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in corners)
    side = [(x2 - 7 * right + 4 * s * down, y2 - 7 * down + 4 * s * right) for s in (1, -1)]
    head = "".join(f"L{x:.1f} {y:.1f}" for x, y in side)
    return [
        f'<path d="{line}" {THIN}/>',
        f'<path d="M{x2:.1f} {y2:.1f}{head}z" fill="{TEXT}"/>',
    ]


def cut_graph():
    """The graph of one step over two processes: the gradient returns as a message (lesson 01)."""
    forward, backward = (
        {"fill": FILL["F"], "color": NUMBER["F"]},
        {"fill": FILL["B"], "color": "#ffffff"},
    )
    dashes = f'{THIN} stroke-dasharray="2 4"'
    parts = [
        *box(8, 8, 388, 290), *box(424, 8, 388, 290),
        text(20, 30, "rank 0", "start", bold=True), text(436, 30, "rank 1", "start", bold=True),
        text(44, 87, "tokens"), *arrow((70, 82), (92, 82)),
        *box(94, 64, 116, 36, "stage 0, forward", **forward), *arrow((210, 82), (258, 82)),
        *box(260, 64, 76, 36, "output"), *arrow((336, 82), (442, 82)),
        *box(444, 64, 84, 36, "received"), *arrow((528, 82), (566, 82)),
        *box(568, 64, 124, 36, "stage 1, forward", **forward), *arrow((692, 82), (734, 82)),
        *box(736, 64, 60, 36, "loss"),
        text(388, 56, "isend(output.detach())", "end"), text(436, 56, "irecv(received)", "start"),
        text(298, 122, "the graph of"), text(298, 139, "rank 0 ends here"),
        text(444, 122, "requires_grad_(): the graph", "start"),
        text(444, 139, "of rank 1 begins here", "start"),
        f'<path d="M152 100V208M640 100V208" {dashes}/>',
        text(160, 178, "autograd remembers stage 0", "start"),
        text(632, 178, "autograd remembers stage 1", "end"),
        *arrow((766, 100), (766, 208)),
        *box(600, 210, 196, 36, "loss.backward()", **backward), *arrow((600, 228), (550, 228)),
        *box(444, 210, 104, 36, "received.grad"), *arrow((444, 228), (338, 228)),
        *box(260, 210, 76, 36, "gradient"), *arrow((260, 228), (232, 228)),
        *box(20, 210, 210, 36, "output.backward(gradient)", **backward),
        text(388, 266, "irecv(gradient)", "end"), text(436, 266, "isend(received.grad)", "start"),
        text(20, 284, "fills .grad of the weights of stage 0", "start"),
        text(796, 284, "fills .grad of the weights of stage 1", "end"),
    ]  # fmt: skip
    alt = (
        "A step over two processes. Forward: stage 0 makes its output on rank 0, where the graph "
        "ends; the numbers travel as a message; on rank 1 requires_grad_() begins a new graph with "
        "what was received. Backward: loss.backward() fills received.grad on rank 1; that gradient "
        "travels back as a message; on rank 0 output.backward(gradient) continues."
    )
    return Picture(wrap(parts, 306, alt), alt)


def bubble():
    """What the ranks of GPipe wait for: p - 1 forwards and p - 1 backwards each (lesson 02)."""
    timeline = simulate(gpipe(4, 8), COSTS)
    places, height = arrange({"": timeline})
    (place,) = places
    title = "GPipe, 4 ranks, 8 micro-batches: what each rank waits for"
    parts = draw_place(place, "ms", title, stories=False)
    for rank in range(timeline.num_ranks):
        for event, start, end in waited_for(timeline, rank):
            left, width = place.x(start), (end - start) * place.scale
            parts.append(
                f'<rect x="{left + 1:.1f}" y="{place.y(rank) + 1}" width="{width - 2:.1f}" '
                f'height="{ROW - 2}" fill="{PALE}" stroke="{TEXT}" stroke-dasharray="3 2.4"/>'
            )
            middle, kind = left + width / 2, event.action.kind
            parts.append(text(middle, place.y(rank) + ROW / 2 + 4.5, kind, color="#000000"))
    parts += draw_legend([timeline], place.bottom + 30)
    parts += box(
        LEFT,
        height - 4,
        ROW,
        18,
        "F",
        f'fill="{PALE}" stroke="{TEXT}" stroke-dasharray="3 2.4"',
        "#000000",
    )
    parts.append(
        text(
            LEFT + ROW + 6,
            height + 9.5,
            "an action of another rank that this one waits for",
            "start",
        )
    )
    alt = (
        "GPipe on four ranks with eight micro-batches. Every idle time is filled with the actions of "
        "other ranks that the rank waits for: rank 3 waits for three forwards at the start and three "
        "backwards at the end, rank 0 for three forwards and three backwards in the middle, and the "
        "ranks between them for three of each in all."
    )
    return Picture(wrap(parts, height + 22, alt), alt)


def waited_for(timeline, rank):
    """[(event, start, end)]: the actions of other ranks that fill the idle times of `rank`.

    Each event's end is what the next event waits for, back to the start of the idle time.
    """
    found = []
    for idle in bubbles_of(timeline):
        if idle.rank != rank:
            continue
        event = idle.wait.source if idle.wait else _last(timeline)
        while event is not None and event.end > idle.start + 1e-9:
            found.append((event, max(event.start, idle.start), event.end))
            event = _before(timeline, event)
    return sorted(found, key=lambda each: each[1])


def _last(timeline):
    return max(timeline.events, key=lambda event: event.end)


def _before(timeline, event):
    """The event at whose end `event` began: that which sent its message, or its rank's own."""
    wait = next(each for each in waits_of(timeline) if each.event == event)
    if wait.source is not None and abs(wait.source.end - event.start) < 1e-9:
        return wait.source
    own = [each for each in timeline.by_rank[event.rank] if each.end <= event.start]
    return own[-1] if own else None


def round_trip(microbatch=4):
    """Why rank r of 1F1B holds p - r: the way of a micro-batch there and back (lesson 03)."""
    timeline = simulate(one_f_one_b(4, 8), COSTS)
    (place,), _ = arrange({"": timeline})
    title = f"1F1B, 4 ranks, 8 micro-batches: the way of micro-batch {microbatch}"
    parts = draw_place(place, "ms", title, stories=False)
    for event in timeline.events:
        if event.action.microbatch == microbatch:
            parts += _outline(place, event)
    top = place.bottom + 48
    parts.append(
        text(LEFT, top - 8, "from the start of its forward to the end of its backward:", "start")
    )
    pair = COSTS.forward + COSTS.backward
    for rank, (start, end) in enumerate(trips(timeline, microbatch)):
        y = top + rank * (ROW + ROW_GAP)
        count = round((end - start) / pair)
        for piece in range(count):
            left = place.x(start + piece * pair)
            parts += box(left, y, pair * place.scale - 2, ROW, "F + B")
        parts.append(text(LEFT - 8, y + 17.5, f"rank {rank}", "end"))
        words = f"{count} × (F + B) = {end - start:.0f} ms"
        parts.append(text(place.x(start) - 10, y + 17.5, words, "end"))
        parts.append(text(place.x(end) + 8, y + 17.5, f"{count} under way", "start"))
    height = top + 4 * (ROW + ROW_GAP) + 4
    parts += draw_legend([timeline], height + 4)
    alt = (
        "1F1B on four ranks. Micro-batch 4 takes 120 ms on rank 0, 90 on rank 1, 60 on rank 2 and 30 "
        "on rank 3, from the start of its forward to the end of its backward: p - r times the 30 ms "
        "of a forward and a backward. A rank takes in a micro-batch every 30 ms, so p - r are under way."
    )
    return Picture(wrap(parts, height + 30, alt), alt)


def trips(timeline, microbatch):
    """(start of the forward, end of the backward) of a micro-batch on each rank."""
    found = []
    for events in timeline.by_rank:
        own = [event for event in events if event.action.microbatch == microbatch]
        found.append((own[0].start, own[-1].end))
    return found


def _outline(place, event):
    left, width = place.x(event.start), (event.end - event.start) * place.scale
    around = (
        f'x="{left:.1f}" y="{place.y(event.rank)}" width="{width:.1f}" height="{ROW}" fill="none"'
    )
    return [
        f'<rect {around} stroke="#ffffff" stroke-width="5"/>',
        f'<rect {around} stroke="#000000" stroke-width="2.6"/>',
    ]


class Storage(NamedTuple):
    """A storage of a rank's weights: [(version, since when)] and the time at which it is freed."""

    versions: list
    end: float


def storages_of(timeline, rank):
    """The Storages of a rank of PipeDream, by the rule of weight_stash.py, in the order of time."""
    used, current, storages = {}, 0, [[(0, timeline.start)]]
    ends = {}
    for event in timeline.by_rank[rank]:
        action = event.action
        if action.kind == "F":
            used[action.microbatch] = current, len(storages) - 1
        elif action.kind == "B":
            _, storage = used.pop(action.microbatch)
            ends[storage] = event.end
        elif any(version == current for version, _ in used.values()):
            current += 1
            storages.append([(current, event.start)])
        else:
            current += 1
            storages[-1].append((current, event.start))
    ends[len(storages) - 1] = timeline.start + timeline.makespan
    return [Storage(versions, ends[index]) for index, versions in enumerate(storages)]


def versions():
    """Which versions of the weights are stored when on the first and the last rank (lesson 04)."""
    timeline = simulate(pipedream(4, 8), COSTS)
    (place,), _ = arrange({"": timeline})
    parts, top = [], 8
    for rank, title in (
        (
            0,
            "rank 0: an update is made in a clone if a mini-batch still needs the version before it",
        ),
        (3, "rank 3: no mini-batch is under way at an update, so one storage has all versions"),
    ):
        parts.append(text(LEFT, top + FONT, title, "start"))
        top += FONT + 9
        parts += _row_of(place, timeline, rank, top)
        storages = storages_of(timeline, rank)
        for lane, storage in enumerate(storages):
            parts += _draw_storage(place, storage, top + ROW + 10 + lane * 28)
        top += ROW + 10 + len(storages) * 28 + 20
    parts += draw_legend([timeline], top)
    parts += box(LEFT, top + 24, ROW, 18)
    parts.append(
        text(
            LEFT + ROW + 6,
            top + 37.5,
            "a storage of the weights, with its version; it ends when nobody needs it",
            "start",
        )
    )
    alt = (
        "Two ranks of PipeDream on four. On rank 0 an update goes into a clone while a mini-batch "
        "needs the version before it, and up to four storages exist at one time, each until the "
        "last mini-batch that used it is back. On rank 3 there is one storage, in which each update "
        "replaces the version before it."
    )
    return Picture(wrap(parts, top + 50, alt), alt)


def _row_of(place, timeline, rank, top):
    """The blocks of one rank, and the bars of its updates, at the height `top`."""
    parts = [text(LEFT - 8, top + 17.5, f"rank {rank}", "end")]
    parts += box(LEFT, top, timeline.makespan * place.scale, ROW, fill=WAITING)
    # Updates last: they are narrow, and the next action would cover them.
    for event in sorted(timeline.by_rank[rank], key=lambda event: event.action.kind == "U"):
        kind, number = event.action.kind, str(event.action.microbatch)
        width = max((event.end - event.start) * place.scale, 3)
        parts.append(
            f'<rect x="{place.x(event.start):.1f}" y="{top}" width="{width:.1f}" height="{ROW}" '
            f'fill="{FILL[kind]}" stroke="{OUTLINE}" stroke-width="0.7"/>'
        )
        if kind != "U":
            middle = place.x(event.start) + width / 2
            parts.append(text(middle, top + 17.5, number, color=NUMBER[kind], bold=True))
    return parts


def _draw_storage(place, storage, top):
    parts = box(
        place.x(storage.versions[0][1]),
        top,
        (storage.end - storage.versions[0][1]) * place.scale - 2,
        22,
    )
    for number, (version, since) in enumerate(storage.versions):
        until = (
            storage.versions[number + 1][1] if version != storage.versions[-1][0] else storage.end
        )
        x = place.x(since)
        if since > place.timeline.start:
            parts.append(f'<path d="M{x:.1f} {top}v22" stroke="{FILL["U"]}" stroke-width="2.4"/>')
        room = (until - since) * place.scale
        words = f"version {version}" if room > 70 else str(version)
        parts += [text(x + 7, top + 15.5, words, "start")] * (room > 14)
        if number == 0 and since > place.timeline.start and room > 120:
            parts.append(text(x + 72, top + 15.5, "(a clone)", "start"))
    return parts


def chunk_loop():
    """Eight stages on four ranks: a micro-batch goes round twice (lesson 05)."""
    parts = []
    for rank in range(4):
        left = 40 + rank * 192
        parts += box(left, 8, 164, 226)
        parts.append(text(left + 82, 28, f"rank {rank}", bold=True))
        for chunk in range(2):
            top = 42 + chunk * 108
            for half, (kind, words) in enumerate((("F", "forward"), ("B", "backward"))):
                fill, color = shade_of(kind, chunk), NUMBER[kind]
                stage = f"stage {rank + 4 * chunk}, {words}"
                parts += box(left + 10, top + 36 * half, 144, 34, stage, fill, color)
            if rank < 3:
                parts += arrow((left + 154, top + 17), (left + 202, top + 17))
                parts += arrow((left + 202, top + 53), (left + 154, top + 53))
    parts += arrow((770, 59), (800, 59), (800, 131), (20, 131), (20, 167), (50, 167))
    parts += arrow((50, 203), (28, 203), (28, 139), (792, 139), (792, 95), (770, 95))
    parts += arrow((4, 59), (50, 59)) + arrow((770, 167), (784, 167), (784, 203), (770, 203))
    parts.append(text(40, 256, "shades: the first stage of a rank", "start"))
    for at, (x, chunk) in enumerate(((262, 0), (458, 1))):
        for half, kind in enumerate("FB"):
            parts += box(x + 30 * half, 242, 26, 18, fill=shade_of(kind, chunk))
        if at == 0:
            parts.append(text(338, 256, "its second stage", "start"))
    alt = (
        "Eight stages on four ranks. A micro-batch goes through stages 0 to 3 on ranks 0 to 3, "
        "returns to rank 0 and goes through stages 4 to 7 on the same ranks; its gradient follows "
        "the same route in reverse. "
        "A rank's second stage is the lighter blue in its forward and the darker green in its backward."
    )
    return Picture(wrap(parts, 272, alt), alt)


def long_and_short():
    """How long each rank holds a micro-batch, with one stage and with a V (lesson 09)."""
    one, both = Costs(20, 40), Costs(10, 20)  # two stages per rank, each half as long
    timelines = {
        "1F1B": simulate(one_f_one_b(4, 16), one),
        "ZB-V": simulate(zb_v(4, 16), both),
    }
    return draw_lives(timelines, microbatch=8)


IDEAS = {
    "idea-cut-graph": cut_graph,
    "idea-bubble": bubble,
    "idea-round-trip": round_trip,
    "idea-versions": versions,
    "idea-chunk-loop": chunk_loop,
    "idea-long-and-short": long_and_short,
}
