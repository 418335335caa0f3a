# SPDX-License-Identifier: Apache-2.0
"""Steps through a timeline in a notebook: picture or table, a cursor, and the state at its time.

The explorer steps through predictions, the time machine through recordings; this file has what they
share. The keyboard alone is enough: Tab moves from one control to the next, the arrow keys move the
cursor, and the text below it has the stories of the blocks that a pointer would show.
"""

import os
from bisect import bisect_right
from functools import cached_property

import ipywidgets as widgets

from lab.story import short

# 1 when a notebook is run in order to be stored: a page without a kernel would show an error in
# place of the panel, so only the picture is stored.
STORED = "PIPELINE_STORED_PICTURES"
STYLE = """<style>
.pipeline-explorer svg { display: block; width: 100%; height: auto; max-width: 1000px !important; }
.pipeline-explorer .blocks text { display: none; fill: currentColor; stroke: none; }
.pipeline-explorer .blocks text { font-size: 13px; }
.pipeline-explorer .blocks g:hover text { display: inline; }
.pipeline-explorer .blocks g:hover rect { stroke: currentColor; stroke-width: 2; }
.pipeline-explorer svg text[fill="#767676"] { fill: currentColor; }
.pipeline-explorer-cursor { pointer-events: none; }
.pipeline-explorer .pipeline-scroll { max-height: 28em; overflow: auto; }
.pipeline-explorer table { border-collapse: collapse; margin: 4px 24px 4px 0; line-height: 1.5; }
.pipeline-explorer caption { text-align: left; font-weight: bold; }
.pipeline-explorer th, .pipeline-explorer td { text-align: left; padding: 1px 14px 1px 0; }
.pipeline-explorer th, .pipeline-explorer td { vertical-align: top; font-size: 13px; }
.pipeline-explorer th { white-space: nowrap; }
.pipeline-explorer .jupyter-button:focus-visible { outline: 2px solid currentColor; }
</style>"""
# Makes the widgets accessible by keyboard and screen reader, which ipywidgets alone does not. The
# script runs when a picture of one pixel is loaded. It keeps JupyterLab's own keys out of the panel
# (an arrow moves to the next cell, two letters delete a cell). It labels the sliders' handles and
# the player's buttons with the names beside them, and has the cursor's time read out.
KEYS_AND_NAMES = (
    '<img alt="" style="display:none" src="data:image/gif;base64,'
    'R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw==" onload="'
    "const panel = this.closest('.pipeline-explorer'); if (panel) {"
    "panel.querySelectorAll('select, button, [tabindex]').forEach(control => "
    "control.setAttribute('data-lm-suppress-shortcuts', 'true'));"
    "panel.querySelectorAll('.widget-slider').forEach(slider => slider.querySelector("
    "'[role=slider]')?.setAttribute('aria-label', slider.querySelector('label').textContent));"
    "panel.querySelectorAll('.widget-play button').forEach((button, i) => "
    "button.setAttribute('aria-label', ['play', 'stop', 'repeat'][i]));"
    "panel.querySelector('.pipeline-explorer-now')?.setAttribute('aria-live', 'polite'); }"
    '">'
)
PLAYED = 20_000  # approximate milliseconds for playing a whole schedule
NARROWEST = "760px"  # below this width the picture's text is smaller than 9 pt


class Shown:
    """An object that a notebook shows as a panel and stores as a picture; a cell's last line.

    A subclass has `view`, see `Stepper.show`, which also has `alt` and `stored_picture`, and
    `make_panel()`, which returns the Stepper.
    """

    @cached_property
    def panel(self):
        """The widget; it is made when it is first shown."""
        return self.make_panel().box

    def _repr_mimebundle_(self, include=None, exclude=None):
        view = self.view
        bundle = {"text/plain": view.alt}
        if not view.refusal:
            bundle["image/svg+xml"] = view.stored_picture.svg
        if os.environ.get(STORED) != "1":
            bundle |= {
                kind: data
                for kind, data in self.panel._repr_mimebundle_().items()
                if kind != "text/plain"
            }
        return bundle


class Stepper:
    """The widgets that step through a view. A subclass puts them and its own into one box.

    The box is what its `arrange()` returns.
    """

    def __init__(self):
        self.time = 0.0  # the cursor's time
        self.moving = False  # True while this class moves the cursor
        self.make_player()
        self.make_outputs()
        self.box = self.arrange()
        self.box.add_class("pipeline-explorer")

    def make_player(self):
        """Make the widgets that move through time: play, back, on, cursor, picture or table."""
        self.shown = widgets.ToggleButtons(
            options=["picture", "table"],
            description="show as",
            tooltips=["the timeline drawn", "the same as a table, block by block"],
            style={"description_width": "initial", "button_width": "90px"},
        )
        self.play = widgets.Play(value=0, min=0, max=1, interval=400, show_repeat=False)
        self.play.description = "play"
        step = {"layout": widgets.Layout(width="90px")}
        self.back = widgets.Button(description="step back", tooltip="to the moment before", **step)
        self.on = widgets.Button(description="step on", tooltip="to the next moment", **step)
        self.cursor = widgets.IntSlider(
            value=0,
            min=0,
            max=1,
            readout=False,
            description="cursor",
            tooltip="the moment of the cursor",
            layout=widgets.Layout(flex="1 1 auto"),
        )
        self.now = widgets.HTML(layout=widgets.Layout(width="90px"))
        self.now.add_class("pipeline-explorer-now")

    def make_outputs(self):
        """Make the widgets that show the view: the drawing, its cursor, the table, the moment."""
        self.moment = widgets.HTML()
        over = widgets.Layout(grid_area="1 / 1 / 2 / 2", min_width=NARROWEST, margin="0")
        self.picture, self.line = widgets.HTML(layout=over), widgets.HTML(layout=over)
        self.line.add_class("pipeline-explorer-cursor")
        self.table = widgets.HTML(layout=widgets.Layout(display="none"))
        self.drawing = widgets.GridBox(
            [self.picture, self.line],
            layout=widgets.Layout(grid_template_columns="minmax(0, 1fr)", overflow="auto"),
        )

    def stepping_rows(self):
        """The part of a panel that steps: picture or table, cursor, moment."""
        return [
            self.shown,
            self.drawing,
            self.table,
            widgets.HBox([self.play, self.back, self.on, self.cursor, self.now]),
            self.moment,
        ]

    def listen(self):
        """Connect the controls to their actions."""
        self.shown.observe(self.on_shown, names="value")
        self.cursor.observe(self.on_cursor, names="value")
        self.back.on_click(lambda _: self.step(-1))
        self.on.on_click(lambda _: self.step(1))
        widgets.jslink((self.play, "value"), (self.cursor, "value"))

    def show(self, view):
        """Show a view. The cursor moves to the last moment that is not after its present time.

        A view has `picture`, `table`, `cursor(time)` and `moment(time)` as text for the page,
        `times`, at which something starts or ends, and `refusal`, a sentence if there is nothing to
        draw.
        """
        self.view = view
        self.picture.value = view.picture
        self.show_table()
        times = view.times
        place = max(0, bisect_right(times, self.time) - 1)
        self.moving = True
        for control in (self.play, self.cursor):
            control.max = max(1, len(times) - 1)
            control.value = place
            control.disabled = bool(view.refusal)
        self.moving = False
        self.play.interval = int(min(600, max(80, PLAYED / len(times))))
        self.show_moment()

    def on_shown(self, change):
        as_table = change["new"] == "table"
        self.drawing.layout.display = "none" if as_table else None
        self.table.layout.display = None if as_table else "none"
        self.show_table()

    def show_table(self):
        # The table has one row per block and is large, so it is filled only when it is shown.
        self.table.value = self.view.table if self.shown.value == "table" else ""

    def on_cursor(self, change):
        if not self.moving:
            self.show_moment()

    def show_moment(self):
        if not self.view.refusal:  # otherwise the time stays until there is a drawing again
            self.time = self.view.times[min(self.cursor.value, len(self.view.times) - 1)]
        self.line.value = self.view.cursor(self.time)
        self.moment.value = self.view.moment(self.time) + KEYS_AND_NAMES
        self.now.value = f"at {short(self.time)} ms" if not self.view.refusal else ""

    def step(self, by):
        self.cursor.value = min(max(self.cursor.value + by, 0), len(self.view.times) - 1)

    def go_to(self, time):
        """Move the cursor to the moment at `time`."""
        self.cursor.value = max(0, bisect_right(self.view.times, time) - 1)
