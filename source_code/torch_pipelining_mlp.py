# SPDX-License-Identifier: Apache-2.0
"""A three-stage network that is not a transformer, cut by torch's tracer.

    torchrun --standalone --nproc-per-node 3 torch_pipelining_mlp.py --verify

The simplest case of torch.distributed.pipelining: write the model as for one device, name the
submodules after which to cut, and train.
"""

import sys
import warnings

import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

from extensions.torch_pipelining.library import mean_of
from guard.around_main import guarded
from pipeline.command_line import Parser, positive_integer, ranks_from_environment
from pipeline.job import join_job
from pipeline.training import seconds

SPLIT = {"encoder": SplitPoint.END, "middle": SplitPoint.END}  # three stages: two cuts
MOST_ROWS = 1_000_000  # a gigabyte, with what each row's forward keeps


@guarded
def main():
    arguments = read_flags()
    job = join_job("cpu", arguments.timeout, pairs=[])
    pipe = cut(arguments.batch_size // arguments.microbatches)
    stage = pipe.build_stage(job.rank, job.device)
    schedule = Schedule1F1B(stage, arguments.microbatches, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)

    losses = []
    for step in range(arguments.steps):
        inputs, targets = batch_of(step, arguments.batch_size)
        optimizer.zero_grad()
        of_microbatches = [] if stage.is_last else None
        with job.waiting_for_all(f"step {step}"):
            schedule.step(
                *([inputs] if stage.is_first else []),
                target=targets if stage.is_last else None,
                losses=of_microbatches,
                return_outputs=False,
            )
        optimizer.step()
        if stage.is_last:
            losses.append(mean_of(of_microbatches).item())
            print(f"step {step}  loss {losses[-1]:.6f}", flush=True)

    job.leave()
    return 0 if not (arguments.verify and stage.is_last) or verify(arguments, losses) else 1


def read_flags():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--steps", type=positive_integer, default=5, metavar="N", help="updates to train")
    add("--batch-size", type=positive_integer, default=24, metavar="N", help="rows per step")
    add("--microbatches", type=positive_integer, default=6, metavar="M", help="parts of a batch")
    add("--verify", action="store_true", help="compare with one process training the whole model")
    add("--timeout", type=seconds, default=60.0, metavar="S", help="longest wait")
    arguments = parser.parse_args()
    if arguments.batch_size % arguments.microbatches:
        raise SystemExit(
            f"--microbatches {arguments.microbatches} does not divide --batch-size "
            f"{arguments.batch_size}; use a divisor"
        )
    if arguments.batch_size > MOST_ROWS:
        raise SystemExit(f"--batch-size {arguments.batch_size}: {MOST_ROWS:,} rows are the most")
    if arguments.microbatches < 3:
        raise SystemExit(
            f"--microbatches {arguments.microbatches} is less than the 3 stages; use 3 or more"
        )
    if ranks_from_environment()[1] != 3:
        raise SystemExit("the model is cut in three: use --nproc-per-node 3")
    return arguments


class Network(nn.Module):
    """A network written without pipelines in mind: branches, a sum and unequal widths."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 16))
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)
        self.middle = nn.Linear(16, 12)
        self.head = nn.Sequential(nn.Tanh(), nn.Linear(12, 1))

    def forward(self, x):
        x = self.encoder(x)
        x = torch.relu(self.left(x)) + torch.sigmoid(self.right(x))
        x = self.middle(x)
        return self.head(x)


def build_network():
    torch.manual_seed(0)
    return Network().double()


def cut(microbatch_size):
    """Return the traced network as a Pipe of three stages; every rank traces all of it."""
    warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)  # torch's own
    example = torch.zeros(microbatch_size, 8, dtype=torch.float64)
    return pipeline(build_network(), mb_args=(example,), split_spec=SPLIT)


def batch_of(step, batch_size):
    """Inputs (batch_size, 8) and targets (batch_size, 1): the sine of the inputs' sum."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(batch_size, 8, generator=generator, dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True).sin()


def verify(arguments, losses):
    """Train the uncut network here, print the largest difference, return whether it is small."""
    network = build_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    differences = []
    for step, ours in enumerate(losses):
        inputs, targets = batch_of(step, arguments.batch_size)
        loss = nn.functional.mse_loss(network(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        differences.append(abs(loss.item() - ours))
    kept = all(difference <= 1e-12 for difference in differences)  # false for NaN
    verdict = "as promised" if kept else "MORE THAN PROMISED"
    print(f"largest difference from one process: {max(differences):.1e}, {verdict}", flush=True)
    return kept


if __name__ == "__main__":
    sys.exit(main())
