"""The model of pretrain_llama.py in a plain loop of one process: what its machinery is compared with.

    python tools/plain_loop.py --model 1m --steps 12

The flags are those of pretrain_llama.py. Weights are float32; with --dtype bfloat16 torch's
autocast computes in it. The loop has no stages, no schedule and no hooks.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "source_code"))

import pretrain_llama  # noqa: E402

from extensions.pretraining.metrics import Metrics  # noqa: E402
from extensions.pretraining.throughput import known_peak, measured_peak  # noqa: E402
from guard.around_main import guarded  # noqa: E402
from pipeline.model import token_loss  # noqa: E402
from pipeline.one_process import build_optimizer  # noqa: E402


@guarded
def main():
    arguments, _ = pretrain_llama.read_flags()
    a, on_gpu = arguments, arguments.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    if not on_gpu:
        torch.set_num_threads(1)  # as a rank of the course
    model = pretrain_llama.build_model_part(a, 0, a.layers, device)
    optimizer = build_optimizer(
        a.optimizer, model.parameters(), a.learning_rate, **pretrain_llama.ADAMW
    )
    narrow = a.torch_dtype == torch.bfloat16
    computing = torch.autocast(device.type, torch.bfloat16) if narrow else nullcontext()
    peak = known_peak(device, a.torch_dtype) or measured_peak(device, a.torch_dtype)
    metrics = Metrics(None, None, a.config, a.torch_dtype, True, False, peak)
    for step in range(a.steps):
        metrics.start_step()
        loss = update(a, model, optimizer, computing, step, device)
        print(f"step {step}  loss {loss:.6f}", flush=True)  # the device has to have computed it
        metrics.end_step(step, torch.tensor(loss), optimizer, 0.0, a.batch_size * a.seq_len)
    print(metrics.summary())


def update(arguments, model, optimizer, computing, step, device):
    """Train on one batch, micro-batch by micro-batch; its loss."""
    a = arguments
    batch = a.text.batch(step, a.batch_size, a.seq_len, a.seed)
    inputs, targets = (tokens.to(device) for tokens in batch)
    optimizer.zero_grad()
    total = 0.0
    for some, theirs in zip(inputs.chunk(a.microbatches), targets.chunk(a.microbatches)):
        with computing:
            loss = token_loss(model(some).float(), theirs) / a.microbatches
        loss.backward()
        total = total + loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), a.clip or float("inf"))
    optimizer.step()
    return total.item()


if __name__ == "__main__":
    sys.exit(main())
