# SPDX-License-Identifier: Apache-2.0
"""The time machine: steps through a recording forwards and backwards, with all ranks together.

    time_machine("build/monday")
    time_machine("build/monday", compare="build/sunday")

as the last line of a notebook's cell. Each block shows what it waited for and which version of the
weights it used. At each moment, a table shows what every rank used and made. With two recordings,
the first action at which they differ is named and marked.
"""

from html import escape
from pathlib import Path

import ipywidgets as widgets

from course.debugging.time_machine_view import RecordedView
from course.views.stepping import STYLE, Shown, Stepper
from lab.flight_log_comparing import compare as compare_recordings
from lab.flight_log_reader import (
    Recording,
    RecordingError,
    describe_unanswered_waits,
    read_recording,
)

SAME = "No message, no weight and no gradient differs."


def time_machine(recording, compare=None, step=None, tolerance=0.0):
    """The panel, for the last line of a cell.

    `recording` and `compare` are folders that --record wrote, or results of `read_recording`.
    `step` is shown first; its default is the step of the first difference, or else the last step.
    `tolerance` is that of `compare` in flight_log_comparing.py. Raises RecordingError if a folder
    has no recording.
    """
    recordings = {"recorded": _read(recording)}
    difference, words = None, ""
    if compare is not None:
        recordings["compared with"] = _read(compare)
        try:
            difference = compare_recordings(*recordings.values(), tolerance)
            words = f"First difference: {difference.sentence}" if difference else SAME
        except RecordingError as error:
            words = f"Not to be compared: {error}"
    last = max(len(each.steps) for each in recordings.values()) - 1
    if last < 0:
        waits = ". ".join(describe_unanswered_waits(recordings["recorded"])) or "the run ended"
        raise RecordingError(f"no rank has recorded an action: {waits}")
    if step is None:
        step = min(difference.step, last) if difference else last
    if step not in range(last + 1):
        raise RecordingError(f"step is a whole number from 0 to {last}, not {step!r}")
    return TimeMachine(recordings, step, difference, words)


def _read(recording):
    if not isinstance(recording, (str, Path, Recording)):
        raise RecordingError(f"{recording!r} is not a folder; name one that --record has written")
    return recording if isinstance(recording, Recording) else read_recording(recording)


class TimeMachine(Shown):
    """The result of `time_machine`. `difference` is the first Difference of the two, or None.

    `words` describes the difference, or says why the recordings cannot be compared.
    """

    def __init__(self, recordings, step, difference, words):
        self.recordings, self.step, self.difference = recordings, step, difference
        self.words = words

    @property
    def view(self):
        return RecordedView(self.recordings, self.step, self.difference)

    def make_panel(self):
        return TimePanel(self.recordings, self.step, self.difference, self.words)


class TimePanel(Stepper):
    """The widgets of one time machine. `box` holds all of them."""

    def __init__(self, recordings, step, difference, words):
        self.recordings, self.difference = recordings, difference
        steps = range(max(len(each.steps) for each in recordings.values()))
        self.chosen = widgets.Dropdown(options=list(steps), value=step, description="step")
        self.jump = widgets.Button(
            description="to the first difference",
            tooltip="to the first action at which the two recordings differ",
            disabled=difference is None or difference.event is None,
            layout=widgets.Layout(width="190px"),
        )
        self.verdict = widgets.HTML(verdict(recordings, words))
        self.updates = widgets.HTML()
        super().__init__()
        self.show(RecordedView(recordings, step, difference))
        self.listen()
        self.chosen.observe(self.on_step, names="value")
        self.jump.on_click(lambda _: self.go_to_difference())

    def arrange(self):
        controls = [self.chosen] + ([self.jump] if len(self.recordings) > 1 else [])
        return widgets.VBox(
            [
                widgets.HTML(STYLE, layout=widgets.Layout(display="none")),
                widgets.HBox(controls),
                self.verdict,
                *self.stepping_rows(),
                self.updates,
            ]
        )

    def show(self, view):
        super().show(view)
        self.updates.value = view.updates

    def on_step(self, change):
        self.show(RecordedView(self.recordings, change["new"], self.difference))

    def go_to_difference(self):
        """Show the step of the first difference, with the cursor at the start of its action."""
        self.chosen.value = self.difference.step
        [event] = [
            event
            for event in self.view.timelines["recorded"].events
            if event.action == self.difference.event.action
        ]
        self.go_to(event.start)


def verdict(recordings, words):
    """HTML about the whole recordings: the first difference, and the waits at the end."""
    sentences = [words] if words else []
    for label, recording in recordings.items():
        sentences += [f"{label}: {sentence}" for sentence in describe_unanswered_waits(recording)]
    return "".join(f'<p role="status">{escape(sentence)}</p>' for sentence in sentences)
