"""The schedule explorer: choose a schedule and its costs, see at once what every rank does and why.

    explore("gpipe", compare="1f1b")

as the last line of a notebook's cell. All of it works with the keyboard alone: Tab moves from one
control to the next, the arrow keys move a slider, and the cursor tells the story of the blocks
that a pointer would show. What is drawn is worked out by the simulator anew at every change.
"""

import os
from bisect import bisect_right
from dataclasses import replace
from functools import cached_property

import ipywidgets as widgets

from pipeline.explorer_view import LOOPED, Settings, View, is_split
from pipeline.schedule import Schedule
from pipeline.schedules import GENERATORS
from pipeline.story import short

NOTHING = "nothing"
# Set to 1 where a notebook is run in order to be stored: without a kernel a page would show an
# error in the panel's place, so the picture alone is stored.
STORED = "PIPELINE_STORED_PICTURES"
STYLE = """<style>
.pipeline-explorer svg { display: block; width: 100%; height: auto; max-width: 1000px !important; }
.pipeline-explorer .blocks text { display: none; fill: currentColor; stroke: none; }
.pipeline-explorer .blocks text { font-size: 13px; }
.pipeline-explorer .blocks g:hover text { display: inline; }
.pipeline-explorer .blocks g:hover rect { stroke: currentColor; stroke-width: 2; }
.pipeline-explorer-cursor { pointer-events: none; }
.pipeline-explorer .pipeline-scroll { max-height: 28em; overflow: auto; }
.pipeline-explorer table { border-collapse: collapse; margin: 4px 24px 4px 0; line-height: 1.5; }
.pipeline-explorer caption { text-align: left; font-weight: bold; }
.pipeline-explorer th, .pipeline-explorer td { text-align: left; padding: 1px 14px 1px 0; }
.pipeline-explorer th, .pipeline-explorer td { vertical-align: top; font-size: 13px; }
.pipeline-explorer th { white-space: nowrap; }
.pipeline-explorer .jupyter-button:focus-visible { outline: 2px solid currentColor; }
</style>"""
# What ipywidgets leaves undone for those who use the keyboard or hear the page, done in it by a
# picture of one pixel whenever that is loaded. JupyterLab's own keys, of which an arrow moves to the
# next cell and two letters delete one, do not count in the panel. The handles of sliders and the
# signs on the player get the names that stand beside them, and the cursor's time is read out.
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
PLAYED = 20_000  # milliseconds that playing a whole schedule takes, about
NARROWEST = "760px"  # below that the text of the picture would be smaller than 9 pt


def explore(
    schedule="gpipe",
    ranks=4,
    microbatches=8,
    chunks=2,
    forward=10.0,
    backward=20.0,
    weight=None,
    transfer=0.0,
    compare=None,
):
    """The panel, for the last line of a cell. All arguments can be changed in it afterwards.

    `schedule` is a name such as "1f1b" or a Schedule; `compare`, of the same kind, is laid
    underneath on the same scale. `chunks` is the number of stages of a rank, for the schedules that
    can choose it. `forward` and `backward` are the milliseconds that the layers of one rank take for
    one micro-batch, however many stages they are cut into, so that the same model is compared;
    `weight` is the part of the backward that a split backward does later, half of it unless given.

    Raises ValueError for an unknown name. What a generator refuses is said in the picture's place.
    """
    for choice in (schedule, compare):
        if isinstance(choice, str) and choice not in GENERATORS:
            raise ValueError(f"no schedule is named '{choice}'; take {', '.join(GENERATORS)}")
    weight = backward / 2 if weight is None else weight
    return Explorer(
        Settings(
            schedule, ranks, microbatches, chunks, forward, backward, weight, transfer, compare
        )
    )


class Explorer:
    """What `explore` returns: shown by a notebook as the panel, and stored as its picture."""

    def __init__(self, settings):
        self.settings = settings

    @cached_property
    def panel(self):
        """The widget itself, made when it is first shown."""
        return Panel(self.settings).box

    def _repr_mimebundle_(self, include=None, exclude=None):
        view = View(self.settings)
        bundle = {"text/plain": view.alt}
        if view.predictions:
            bundle["image/svg+xml"] = view.stored_picture.svg
        if os.environ.get(STORED) != "1":
            bundle |= {
                kind: data
                for kind, data in self.panel._repr_mimebundle_().items()
                if kind != "text/plain"
            }
        return bundle


class Panel:
    """The widgets of one explorer. `box` holds all of them."""

    def __init__(self, settings):
        self.settings = settings
        self.own = _by_name(settings.schedule, settings.compare)
        self.time = 0.0  # of the cursor
        self.moving = False  # while the cursor is set from here
        self.make_controls()
        self.make_outputs()
        self.box = self.arrange()
        self.box.add_class("pipeline-explorer")
        self.redraw()
        for control in self.controls.values():
            control.observe(self.on_change, names="value")
        self.shown.observe(self.on_shown, names="value")
        self.cursor.observe(self.on_cursor, names="value")
        self.back.on_click(lambda _: self.step(-1))
        self.on.on_click(lambda _: self.step(1))
        widgets.jslink((self.play, "value"), (self.cursor, "value"))

    def make_controls(self):
        """One control for each of the Settings, under the same name."""
        chosen = self.settings
        names = [*self.own, *(name for name in GENERATORS if name not in self.own)]
        first, second = (
            next((name for name, own in self.own.items() if own is choice), choice)
            for choice in (chosen.schedule, chosen.compare)
        )
        self.controls = {
            "schedule": _dropdown("schedule", names, first),
            "compare": _dropdown("compare with", [NOTHING, *names], second or NOTHING),
            "ranks": _whole("ranks", chosen.ranks, 1, 8),
            "microbatches": _whole("micro-batches", chosen.microbatches, 1, 64),
            "chunks": _whole("stages a rank", chosen.chunks, 2, 4),
            "forward": _time("forward of a rank, ms", chosen.forward, 0.5, 50),
            "backward": _time("backward of a rank, ms", chosen.backward, 1, 100),
            "weight": _time("of it for weights, ms", chosen.weight, 0.5, 99),
            "transfer": _time("transfer, ms", chosen.transfer, 0, 20),
        }
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
        self.figures, self.moment = widgets.HTML(), widgets.HTML()
        over = widgets.Layout(grid_area="1 / 1 / 2 / 2", min_width=NARROWEST, margin="0")
        self.picture, self.line = widgets.HTML(layout=over), widgets.HTML(layout=over)
        self.line.add_class("pipeline-explorer-cursor")
        self.table = widgets.HTML(layout=widgets.Layout(display="none"))

    def arrange(self):
        """All widgets in one box: choices and figures, picture or table, cursor, moment."""
        left = ["schedule", "compare", "ranks", "microbatches", "chunks"]
        right = ["forward", "backward", "weight", "transfer"]
        columns = [widgets.VBox([self.controls[name] for name in names]) for names in (left, right)]
        wrapped = widgets.Layout(flex_flow="row wrap")
        self.drawing = widgets.GridBox(
            [self.picture, self.line],
            layout=widgets.Layout(grid_template_columns="minmax(0, 1fr)", overflow="auto"),
        )
        return widgets.VBox(
            [
                widgets.HTML(STYLE, layout=widgets.Layout(display="none")),
                widgets.HBox([*columns, self.figures], layout=wrapped),
                self.shown,
                self.drawing,
                self.table,
                widgets.HBox([self.play, self.back, self.on, self.cursor, self.now]),
                self.moment,
            ]
        )

    def on_change(self, change):
        """A setting was moved: predict and draw again."""
        values = {name: control.value for name, control in self.controls.items()}
        values["schedule"] = self.own.get(values["schedule"], values["schedule"])
        compare = self.own.get(values["compare"], values["compare"])
        values["compare"] = None if compare == NOTHING else compare
        self.settings = replace(self.settings, **values)
        self.redraw()

    def redraw(self):
        """Everything anew. The cursor stays at its time, as nearly as there is a moment."""
        self.view = View(self.settings)
        self.picture.value = self.view.picture
        self.figures.value = self.view.figures
        self.show_table()
        self.disable_what_does_not_count()
        times = self.view.times
        place = max(0, bisect_right(times, self.time) - 1)
        self.moving = True
        for control in (self.play, self.cursor):
            control.max = max(1, len(times) - 1)
            control.value = place
            control.disabled = bool(self.view.refusal)
        self.moving = False
        self.play.interval = int(min(600, max(80, PLAYED / len(times))))
        self.show_moment()

    def disable_what_does_not_count(self):
        chosen = (self.settings.schedule, self.settings.compare)
        made = any(isinstance(choice, str) for choice in chosen)
        self.controls["ranks"].disabled = self.controls["microbatches"].disabled = not made
        self.controls["chunks"].disabled = not set(map(str, chosen)) & set(LOOPED)
        split = any(is_split(each.schedule) for each in self.view.predictions)
        # Where a refusal may be about the weights' part, it must be possible to move it.
        self.controls["weight"].disabled = not split and not self.view.refusal

    def on_shown(self, change):
        as_table = change["new"] == "table"
        self.drawing.layout.display = "none" if as_table else None
        self.table.layout.display = None if as_table else "none"
        self.show_table()

    def show_table(self):
        # A row a block is much text, so it is written only where it is looked at.
        self.table.value = self.view.table if self.shown.value == "table" else ""

    def on_cursor(self, change):
        if not self.moving:
            self.show_moment()

    def show_moment(self):
        if self.view.predictions:  # else the time stays, until there is something to draw again
            self.time = self.view.times[min(self.cursor.value, len(self.view.times) - 1)]
        self.line.value = self.view.cursor(self.time)
        self.moment.value = self.view.moment(self.time) + KEYS_AND_NAMES
        self.now.value = f"at {short(self.time)} ms" if self.view.predictions else ""

    def step(self, by):
        self.cursor.value = min(max(self.cursor.value + by, 0), len(self.view.times) - 1)


def _by_name(*choices):
    """The Schedules among them, each under a name of its own."""
    own = {}
    for choice in choices:
        if isinstance(choice, Schedule):
            taken = own.get(choice.name, choice) is not choice
            own[f"{choice.name} (the other)" if taken else choice.name] = choice
    return own


def _dropdown(description, options, value):
    return widgets.Dropdown(options=options, value=value, **_named(description))


def _whole(description, value, least, most):
    limits = {"min": min(least, value), "max": max(most, value)}
    return widgets.IntSlider(value=value, **limits, **_named(description))


def _time(description, value, least, most):
    limits = {"min": min(least, value), "max": max(most, value), "step": 0.5}
    return widgets.FloatSlider(value=value, readout_format="", **limits, **_named(description))


def _named(description):
    return {
        "description": description,
        "tooltip": description,
        "style": {"description_width": "150px"},
        "layout": widgets.Layout(width="380px"),
    }
