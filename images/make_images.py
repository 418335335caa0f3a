"""Draw every figure in this folder: predicted by the simulator, performed by real processes.

make images
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "source_code"))

from pipeline.figures import draw_timelines  # noqa: E402
from pipeline.launch import run  # noqa: E402
from pipeline.schedules import gpipe, naive  # noqa: E402
from pipeline.simulator import Costs, simulate  # noqa: E402


def main():
    draw("naive", naive(4), "naive_model_parallelism.py", Costs(10, 20))
    draw("gpipe", gpipe(4, 8), "gpipe.py", Costs(10, 20))
    return 0


def draw(name, schedule, script, costs):
    """One schedule above, what four ranks did with it below, as images/NAME.svg."""
    predicted = simulate(schedule, costs)
    performed = run(
        f"{script} --microbatches {schedule.num_microbatches} --steps 4 "
        f"--pace {costs.forward} {costs.backward} --timeline build/images_{name}.json",
        ranks=schedule.num_ranks,
        warm=True,
        show=False,
    ).timeline
    picture = draw_timelines({"predicted": predicted, "performed": performed})
    picture.save(ROOT / "images" / f"{name}.svg")
    print(f"images/{name}.svg: {picture.alt}")


if __name__ == "__main__":
    sys.exit(main())
