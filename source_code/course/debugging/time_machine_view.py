# SPDX-License-Identifier: Apache-2.0
"""The content of the time machine for one recorded step: the drawing as SVG, the tables as HTML."""

from functools import cached_property
from html import escape

from course.views.explorer_view import table_of, tell_held, tell_wait
from lab.drawing import draw_cursor
from lab.figures import draw_timelines
from lab.flight_log_reader import message_in, recorded_as
from lab.story import moments_at, short, tell, times_of, waits_of
from pipeline.schedule import KINDS


class RecordedView:
    """One step of one recording, or of two recordings, one below the other.

    `recordings` is {label: Recording}; a recording that ended before the step is left out.
    `difference` is the first Difference of the two, or None.
    """

    refusal = ""

    def __init__(self, recordings, step, difference=None):
        self.step = step
        self.recordings = {
            label: each for label, each in recordings.items() if step < len(each.steps)
        }
        self.timelines = {label: each.timeline(step) for label, each in self.recordings.items()}
        self.difference = difference
        self.times = times_of(self.timelines.values())

    @property
    def alt(self):
        """The picture in words."""
        return f"step {self.step}; {self.stored_picture.alt}"

    @cached_property
    def stored_picture(self):
        return draw_timelines(self.timelines)

    @property
    def picture(self):
        stories = {label: self.stories(label) for label in self.timelines}
        return draw_timelines(self.timelines, reading=True, stories=stories).svg

    @cached_property
    def waits(self):
        """{label: {event: its Wait}} of each timeline."""
        return {
            label: {wait.event: wait for wait in waits_of(timeline)}
            for label, timeline in self.timelines.items()
        }

    def stories(self, label):
        """Two lines per block: the action and its times; its wait and its version of weights."""
        timeline = self.timelines[label]
        told = (tell(self.waits[label][event], timeline) for event in timeline.events)
        return [
            (what, f"{why}; {self.weights(label, event)}")
            for event, (what, why) in zip(timeline.events, told)
        ]

    def entry(self, label, event):
        return self.recordings[label].steps[self.step].by_action[event.action]

    def weights(self, label, event):
        """The version of the weights that an action used or an update made, in words."""
        verb = "makes" if event.action.kind == "U" else "uses"
        return f"{verb} version {self.entry(label, event).version}"

    def cursor(self, time):
        marked = ()
        if self.difference and self.difference.step == self.step and self.difference.event:
            marked = (self.difference.event.action,)
        return draw_cursor(self.timelines, time, reading=True, marked=marked)

    def moment(self, time):
        """What every rank does, used, made and holds at `time`: a table for each recording."""
        return "".join(self.moment_table(label, time) for label in self.timelines)

    def moment_table(self, label, time):
        """The table of one recording; for an idle rank, it has what the rank waits for."""
        timeline, unanswered = self.timelines[label], self.recordings[label].unanswered
        last = self.step == len(self.recordings[label].steps) - 1
        rows = []
        for moment in moments_at(timeline, time):
            holds = tell_held(moment.held)
            if moment.doing:
                event = moment.doing[-1]
                why = "; ".join(tell(self.waits[label][event], timeline))
                does = f"{why}; {self.weights(label, event)}"
                used, made, held, gradient = self.cells(label, event)
                rows.append([f"rank {moment.rank}", does, used, made, f"{holds}, {held}", gradient])
                continue
            if moment.next:
                event = moment.next
                does = tell_wait(self.waits[label][event], timeline)
                does += f"; then {event.action} {self.weights(label, event)}"
            elif last and moment.rank in unanswered:
                wait = unanswered[moment.rank]
                what = message_in(wait.producer) or wait.producer
                does = f"waits for {what}, from rank {wait.source}; here its recording ends"
            else:
                does = "has done everything"
            rows.append([f"rank {moment.rank}", does, "", "", holds, ""])
        caption = f"{label}: {timeline.name}, step {self.step}, at {short(time)} ms"
        heads = ["", "does", "took in", "gave", "holds micro-batches", "gradient so far"]
        return table_of(caption, heads, rows)

    def cells(self, label, event):
        """The cells of one action: what it used and made, the held bytes, the gradient's norm."""
        entry = self.entry(label, event)
        recording = self.recordings[label]
        gradient = "" if entry.gradient is None else f"norm {entry.gradient:.6g}"
        held = f"{entry.held / 2**20:.2f} MiB"
        return [tell_used(recording, self.step, entry), tell_made(recording, entry), held, gradient]

    @property
    def updates(self):
        """A table of the gradient norm of each stage after its backwards and after the step."""
        rows = []
        for label, recording in self.recordings.items():
            for stage, (gathered, taken) in recording.updates(self.step).items():
                ratio = f"{taken / gathered:.4f}" if taken and gathered else ""
                norms = [f"{norm:.6g}" if norm else "" for norm in (gathered, taken)]
                rows.append([label, f"stage {stage}", *norms, ratio])
        heads = ["", "", "gathered, norm", "at the end of the step, norm", "end over gathered"]
        return table_of(f"The gradients of step {self.step}", heads, rows) if rows else ""

    @property
    def table(self):
        """The text equivalent of the drawing: one row per block, in the order of time."""
        return "".join(self.action_table(label) for label in self.timelines)

    def action_table(self, label):
        """The rows of one recording, as a table with its own scroll bar."""
        timeline = self.timelines[label]
        stories = dict(zip(timeline.events, self.stories(label)))
        rows = []
        for event in sorted(timeline.events, key=lambda event: (event.end, event.rank)):
            kind = KINDS[event.action.kind]
            times = f"{short(event.start)} to {short(event.end)}"
            cells = self.cells(label, event)
            rows.append(
                [f"rank {event.rank}", str(event.action), kind, times, stories[event][1], *cells]
            )
        heads = ["", "action", "is", "ms", "why then", "took in", "gave", "holds", "gradient"]
        name = escape(f"{label}: step {self.step} of {timeline.name}, block by block")
        return (
            f'<div class="pipeline-scroll" tabindex="0" role="region" aria-label="{name}" '
            f'data-lm-suppress-shortcuts="true">{table_of(name, heads, rows)}</div>'
        )


def tell_used(recording, step, entry):
    """What an action used, and whether that equals the tensor that was sent to it."""
    if entry.used is None:
        return "nothing from outside"
    text = str(entry.used)
    if entry.received is None:
        return text
    if entry.received.what.digest != entry.used.digest:
        return f"{text}, though {entry.received.what} came from rank {entry.received.peer}"
    sender = sender_of(recording, step, entry)
    if sender is None or sender.sent is None:
        return f"{text}, from rank {entry.received.peer}"
    if sender.sent.what.digest != entry.received.what.digest:
        return f"{text}, though rank {entry.received.peer} sent {sender.sent.what}"
    return f"{text}, as rank {entry.received.peer} sent it"


def tell_made(recording, entry):
    """What an action made, and whether that equals the tensor that was sent."""
    action = entry.event.action
    if entry.made is None:
        return "no message"
    last = action.stage == recording.schedule.num_stages - 1
    if action.kind == "F" and last and not recording.seen:
        return f"{entry.made.norm:.6f} of the loss"
    text = str(entry.made)
    if entry.sent is None:
        return text
    if entry.sent.what.digest != entry.made.digest:
        return f"{text}, though to rank {entry.sent.peer} went {entry.sent.what}"
    return f"{text}, to rank {entry.sent.peer}"


def sender_of(recording, step, entry):
    """The Entry whose message an action needed, if it was recorded."""
    own = recorded_as(entry.event.action)
    source = own._replace(stage=own.stage - 1 if own.kind == "F" else own.stage + 1)
    return recording.steps[step].by_result.get(source)
