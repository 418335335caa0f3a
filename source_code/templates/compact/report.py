"""What a training prints and writes."""

import json
import sys
from pathlib import Path

from tqdm import tqdm


class Report:
    """Prints the losses and collects them, on the rank that has them; shows how far it is."""

    def __init__(self, arguments, job, first_step=0):
        self.arguments, self.job, self.first_step, self.losses = arguments, job, first_step, []

    def steps(self):
        """The numbers of the steps, behind a progress bar where a terminal watches."""
        hidden = self.job.rank > 0 or not sys.stderr.isatty()
        return tqdm(range(self.first_step, self.arguments.steps), unit="step", disable=hidden)

    def record_step(self, step, loss):
        """Note the end of one step; `loss` is None on ranks without the last stage."""
        if loss is not None:
            self.losses.append({"step": step, "loss": loss.item()})
            print(f"step {step}  loss {loss.item():.6f}", flush=True)

    def finish(self):
        """With --losses FILE: write one JSON object a line, in full precision."""
        if self.arguments.losses and self.losses:
            Path(self.arguments.losses).write_text("\n".join(map(json.dumps, self.losses)) + "\n")
