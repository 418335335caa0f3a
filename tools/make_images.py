"""Draw every figure of images/: ideas, comparisons, and schedules predicted and performed.

make images
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "source_code"))

from idea_pictures import IDEAS  # noqa: E402
from order_pictures import ORDERS  # noqa: E402
from preview_picture import preview  # noqa: E402
from schedule_pictures import COMPARISONS  # noqa: E402

from course.launch import run  # noqa: E402
from guard.one_sentence import in_one_sentence, naming_files  # noqa: E402
from lab.figures import draw_timelines  # noqa: E402
from lab.simulator import Costs, simulate  # noqa: E402
from pipeline.command_line import Parser  # noqa: E402
from pipeline.schedules import SCHEDULES, build_schedule  # noqa: E402

RUNS = 3  # the shortest run is drawn, because other load only adds time

MICROBATCHES = {"naive": 1}  # 8 for the others


@in_one_sentence()
def main():
    Parser(__doc__).parse_args()
    with naming_files():
        for name, draw_picture in (IDEAS | ORDERS | COMPARISONS).items():
            draw_picture().save(ROOT / "images" / f"{name}.svg")
        preview().save(ROOT / "images" / "preview.png", optimize=True)
        for name in SCHEDULES:
            draw(name, schedule_of(name), script_of(name), Costs(10, 20, 10))
    return 0


def schedule_of(name):
    """The Schedule to draw: four ranks, with two stages per rank if the schedule has chunks."""
    return build_schedule(name, 4, MICROBATCHES.get(name, 8))


def script_of(name):
    """The command that runs the schedule. Each asynchronous schedule has its own script."""
    if not SCHEDULES[name].synchronous:
        return f"{name}.py --steps 8"
    return f"train.py --schedule {name} --microbatches {MICROBATCHES.get(name, 8)}"


def draw(name, schedule, script, costs):
    """Draw the predicted schedule above the measured timeline of four ranks, as images/NAME.svg."""
    predicted = simulate(schedule, costs)
    runs = [perform(name, schedule, script, costs) for _ in range(RUNS)]
    performed = min(runs, key=lambda timeline: timeline.makespan)
    picture = draw_timelines({"predicted": predicted, "performed": performed})
    picture.save(ROOT / "images" / f"{name}.svg")
    print(f"images/{name}.svg: {picture.alt}")


def perform(name, schedule, script, costs):
    """The timeline of the last step of one run."""
    steps = "" if "--steps" in script else "--steps 4"
    return run(
        f"{script} {steps} --pace {costs.forward} {costs.backward} {costs.backward_weight} "
        f"--timeline build/images_{name}.json",
        ranks=schedule.num_ranks,
        warm=True,
        show=False,
    ).timeline


if __name__ == "__main__":
    sys.exit(main())
