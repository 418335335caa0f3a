# SPDX-License-Identifier: Apache-2.0
"""The schedule explorer: the reader chooses a schedule and costs and sees what every rank does.

    explore("gpipe", compare="1f1b")

as the last line of a notebook's cell. The keyboard alone is enough: Tab moves from one control to
the next, the arrow keys move a slider, and the cursor shows the stories of the blocks that a
pointer would show. At every change the simulator predicts the timelines again.
"""

from dataclasses import replace
from functools import partial

import ipywidgets as widgets

from course.views.explorer_view import SLIDERS, WORK, Settings, View, without_effect
from course.views.memory_and_time import AXES, SIZE_SLIDERS, MemoryAndTime, Sizes
from course.views.stepping import STYLE, Shown, Stepper
from files.inputs import is_number
from lab.simulator import LONGEST
from pipeline.schedule import Schedule
from pipeline.schedules import SCHEDULES

NOTHING = "nothing"
WHOLE = "ranks", "microbatches", "chunks"  # sliders of whole numbers


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
    occupancy=0.0,
    longest_path=False,
    kept=None,
    states=Sizes.states,
    limit=Sizes.limit,
    work="equal",
):
    """The panel, for the last line of a cell. All arguments can be changed in it afterwards.

    `schedule` is a name such as "1f1b" or a Schedule; `compare`, a name or a Schedule, is drawn
    below it on the same scale. `chunks` is the number of stages per rank, for schedules that leave
    it open. `forward` and `backward` are the milliseconds that all layers of a rank take for one
    micro-batch, whatever the number of stages, so that the same model is compared. `weight` is the
    part of the backward that a split backward does later, by default half of it. `transfer` is the
    latency of a message in milliseconds. `occupancy` is the milliseconds for which a message
    occupies its link; the next message waits until the link is free. `work` says which micro-batches
    have more work than others: a name of WORK (explorer_view.py), such as "one long, first".
    `longest_path` draws a longest path and adds the cause of each bubble.

    With `kept` the panel also shows whether each rank has enough memory, and plots memory and time
    over the slider that was moved last. `kept` is the GiB that the layers of one rank keep per
    micro-batch, `states` the GiB of their weights, gradients and optimizer state, and `limit` the
    GiB that a rank has.

    Raises CannotExplore for an unknown name and for what is not a number. If a generator rejects the
    settings, its message is shown in place of the picture.
    """
    check_numbers(locals())
    for choice in [schedule] if compare is None else [schedule, compare]:
        if not isinstance(choice, Schedule) and choice not in list(SCHEDULES):
            raise CannotExplore(f"no schedule is named '{choice}'; take {', '.join(SCHEDULES)}")
    if work not in list(WORK):
        raise CannotExplore(f"work is one of: {'; '.join(WORK)}; not '{work}'")
    weight = backward / 2 if weight is None else weight
    times = forward, backward, weight, transfer
    settings = Settings(schedule, ranks, microbatches, chunks, *times, compare, occupancy, work)
    sizes = None if kept is None else Sizes(kept, states, limit)
    return Explorer(settings, longest_path, sizes)


class CannotExplore(ValueError):
    """An argument of `explore` is of no use; the text says which one, and what to take."""

    def _render_traceback_(self):
        """The line that a notebook shows, without a traceback."""
        return [str(self)]


def check_numbers(given):
    """Reject a value that no slider can have; `given` are the arguments of `explore`, by name."""
    for name in SLIDERS | SIZE_SLIDERS:
        value, is_whole = given[name], name in WHOLE
        if value is None and name in ("weight", "kept"):
            continue
        if not is_number(value, 0, LONGEST) or (is_whole and not isinstance(value, int)):
            kind = "a whole number" if is_whole else "a number"
            raise CannotExplore(f"{name} is {kind} from 0 to {LONGEST:g}, not {value!r}")


class Explorer(Shown):
    """The result of `explore`. `sizes` is None if memory and time are not shown."""

    def __init__(self, settings, longest_path, sizes=None):
        self.settings, self.longest_path, self.sizes = settings, longest_path, sizes

    @property
    def view(self):
        """The view that is stored: memory and time if there are `sizes`, otherwise the timelines."""
        view = View(self.settings, self.longest_path)
        if self.sizes is None or view.refusal:
            return view
        return MemoryAndTime(view, self.sizes)

    def make_panel(self):
        return Panel(self.settings, self.longest_path, self.sizes)


class Panel(Stepper):
    """The widgets of one explorer. `box` holds all of them."""

    def __init__(self, settings, longest_path=False, sizes=None):
        self.settings = settings
        self.sizes = {} if sizes is None else vars(sizes)  # name -> value
        self.moved = "microbatches"  # the setting on the x axis of the curves
        self.path = widgets.Checkbox(
            value=bool(longest_path), description="longest path and bubbles", indent=False
        )
        self.reasons = widgets.HTML()
        self.own = _by_name(settings.schedule, settings.compare)
        self.make_controls()
        super().__init__()
        self.redraw()
        for name, control in self.controls.items():
            control.observe(partial(self.on_change, name), names="value")
        for control in self.size_controls.values():
            control.observe(lambda _: self.show_memory_and_time(), names="value")
        self.path.observe(lambda _: self.redraw(), names="value")
        self.listen()

    def make_controls(self):
        """Make one control for each of the Settings, under the same name."""
        chosen = self.settings
        names = [*self.own, *(name for name in SCHEDULES if name not in self.own)]
        first, second = (
            next((name for name, own in self.own.items() if own is choice), choice)
            for choice in (chosen.schedule, chosen.compare)
        )
        self.controls = {
            "schedule": _dropdown("schedule", names, first),
            "compare": _dropdown("compare with", [NOTHING, *names], second or NOTHING),
            **{name: _slider(name, getattr(chosen, name)) for name in SLIDERS},
            "work": _dropdown("work of micro-batches", list(WORK), chosen.work),
        }
        self.size_controls = {name: _slider(name, value) for name, value in self.sizes.items()}
        self.figures, self.verdict, self.curves, self.held = (widgets.HTML() for _ in range(4))

    def arrange(self):
        """All widgets in one box: choices, picture or table, cursor, folded costs, figures."""
        first = ["schedule", "ranks", "compare", "microbatches"]
        wrapped = widgets.Layout(flex_flow="row wrap")
        others = [control for name, control in self.controls.items() if name not in first]
        sized = [*self.size_controls.values()]
        folded = widgets.VBox(
            [
                widgets.HBox([*others, *sized], layout=wrapped),
                *([self.verdict, self.curves] * bool(self.sizes)),
            ]
        )
        self.folded = widgets.Accordion(
            [folded], titles=["costs and memory" if self.sizes else "costs"]
        )
        self.folded.selected_index = 0 if self.sizes else None
        stepping = self.stepping_rows()
        return widgets.VBox(
            [
                widgets.HTML(STYLE, layout=widgets.Layout(display="none")),
                widgets.HBox([self.controls[name] for name in first], layout=wrapped),
                *stepping[:2],
                self.held,
                *stepping[2:-1],
                self.folded,
                self.path,
                self.figures,
                stepping[-1],
                self.reasons,
            ]
        )

    def on_change(self, name, change):
        """Predict and draw again after setting `name` has changed."""
        self.moved = name if name in AXES else self.moved
        values = {name: control.value for name, control in self.controls.items()}
        values["schedule"] = self.own.get(values["schedule"], values["schedule"])
        compare = self.own.get(values["compare"], values["compare"])
        values["compare"] = None if compare == NOTHING else compare
        self.settings = replace(self.settings, **values)
        self.redraw()

    def redraw(self):
        """Predict and draw again with the present settings."""
        view = View(self.settings, self.path.value)
        self.figures.value, self.reasons.value = view.figures, view.reasons
        self.held.value = view.held
        self.show(view)
        self.disable_what_does_not_count()
        self.show_memory_and_time()  # last: the picture is on its way to the page already

    def show_memory_and_time(self):
        """Show the sentences on memory and the curves, if there are sizes."""
        if not self.sizes:
            return
        shown = not self.view.refusal
        values = {name: control.value for name, control in self.size_controls.items()}
        slider = self.controls[self.moved]
        limits = slider.min, slider.max
        both = MemoryAndTime(self.view, Sizes(**values), self.moved, limits) if shown else None
        self.verdict.value = both.verdict if shown else ""
        self.curves.value = both.picture.svg + both.table if shown else ""

    def disable_what_does_not_count(self):
        names = without_effect(self.view)
        for name in ("ranks", "microbatches", "chunks", "weight"):
            self.controls[name].disabled = name in names


def _by_name(*choices):
    """{name: Schedule} of the Schedules among the choices, each with a name of its own."""
    own = {}
    for choice in choices:
        if isinstance(choice, Schedule):
            taken = own.get(choice.name, choice) is not choice
            own[f"{choice.name} (the other)" if taken else choice.name] = choice
    return own


def _dropdown(description, options, value):
    return widgets.Dropdown(options=options, value=value, **_named(description))


def _slider(name, value):
    """A slider of SLIDERS or SIZE_SLIDERS, which extends to `value` if that is beyond its ends."""
    description, least, most, step = (SLIDERS | SIZE_SLIDERS)[name]
    limits = {"min": min(least, value), "max": max(most, value), "step": step}
    if name in WHOLE:
        return widgets.IntSlider(value=value, **limits, **_named(description))
    return widgets.FloatSlider(value=value, readout_format="", **limits, **_named(description))


def _named(description):
    return {
        "description": description,
        "tooltip": description,
        "style": {"description_width": "175px"},  # fits the longest description in a wide font
        "layout": widgets.Layout(width="405px"),
    }
