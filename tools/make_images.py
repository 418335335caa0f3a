"""Draw every figure of images/: predicted by the simulator, performed by real processes.

make images
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "source_code"))

from pipeline.notebook.launch import run  # noqa: E402
from pipeline.schedules import build_schedule  # noqa: E402
from pipeline.simulator import Costs, simulate  # noqa: E402
from pipeline.views.figures import draw_timelines  # noqa: E402

RUNS = 3  # of which the shortest is drawn: whatever else the machine does only adds time

# What performs each schedule, with the flags that ask for it.
TRAINED_BY = {
    "naive": "naive_model_parallelism.py --microbatches 1",
    "gpipe": "gpipe.py --microbatches 8",
    "1f1b": "one_f_one_b.py --microbatches 8",
    "pipedream": "pipedream.py --steps 8",
    "interleaved-1f1b": "interleaved_1f1b.py --microbatches 8 --schedule interleaved-1f1b",
    "looped-bfs": "interleaved_1f1b.py --microbatches 8 --schedule looped-bfs",
    "zb-h1": "zero_bubble.py --microbatches 8 --schedule zb-h1",
    "zb-h2": "zero_bubble.py --microbatches 8 --schedule zb-h2",
    "zb-v": "zero_bubble.py --microbatches 8 --schedule zb-v",
    "dualpipe-v": "zero_bubble.py --microbatches 8 --schedule dualpipe-v",
}


def main():
    for name, script in TRAINED_BY.items():
        microbatches = 1 if name == "naive" else 8
        draw(name, build_schedule(name, 4, microbatches), script, Costs(10, 20, 10))
    return 0


def draw(name, schedule, script, costs):
    """One schedule above, what four ranks did with it below, as images/NAME.svg."""
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
