"""What a GPU would pay for is counted on the CPU: synchronisations of the host, and pickles.

And what 16 bits would spoil there is compared.
"""

import math
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from ranks import run_on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from extensions.optimization.clipping import clip_gradients, squares_of
from extensions.optimization.mixed_precision import computing_copy
from lab.clock import Clock
from lab.work import Work
from pipeline.job import join_job
from pipeline.model import ModelConfig, build_part
from pipeline.schedule import Action

NAMES = [f"layers.{index}.weight" for index in range(12)]


class CountedReads(TorchDispatchMode):
    """Counts what lets the host wait for a number of the device: item() and its like."""

    reads = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.reads += function is torch.ops.aten._local_scalar_dense.default
        return function(*arguments, **(keywords or {}))


def parameters_with_gradients(names, dtype=torch.float32):
    parameters = {}
    for number, name in enumerate(names):
        parameters[name] = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
        parameters[name].grad = torch.full((3,), float(number + 1), dtype=dtype)
    return parameters


def test_the_norm_reads_no_number_per_parameter():
    parameters = parameters_with_gradients(NAMES)
    with CountedReads() as counted:
        squares = squares_of(parameters.items())
    assert counted.reads == 0
    assert squares == {name: 3.0 * (k + 1) ** 2 for k, name in enumerate(NAMES)}
    with CountedReads() as counted:
        [parameter.grad.pow(2).sum().item() for parameter in parameters.values()]
    assert counted.reads == len(NAMES)  # what it replaces


def clip_on_ranks(rank):
    """Ranks have one parameter in common, different numbers of others, and rank 2 has none."""
    job = join_job("cpu", 20)
    own = {0: NAMES[:5], 1: NAMES[4:], 2: []}[rank]
    everything = parameters_with_gradients(NAMES, torch.float64)
    parameters = {name: everything[name] for name in own}
    with mock.patch.object(dist, "all_gather_object", side_effect=AssertionError("pickled")):
        norm = clip_gradients(job, parameters.items(), 1.0)
    job.leave()
    return norm, [parameter.grad[0].item() for parameter in parameters.values()]


def test_ranks_exchange_the_squares_of_their_gradients_as_tensors():
    expected = math.sqrt(sum(3 * (k + 1) ** 2 for k in range(len(NAMES))))
    for rank, (norm, gradients) in enumerate(run_on_ranks(clip_on_ranks, 3)):
        assert norm == expected
        first = {0: 1, 1: 5, 2: None}[rank]
        assert gradients == [(first + k) * (1 / (norm + 1e-6)) for k in range(len(gradients))]


class Rotary(torch.nn.Module):
    """As Hugging Face's: frequencies in a buffer, multiplied by positions in float32."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("frequency", 10000.0 ** (-torch.arange(16) / 16), persistent=False)

    def forward(self, positions):
        return self.scale * (positions[:, None].float() * self.frequency.float()).cos()


def test_floating_point_buffers_keep_their_type_in_the_copy_that_computes():
    master, positions = Rotary(), torch.arange(2048)
    part = computing_copy(master, torch.bfloat16)
    assert (part.scale.dtype, part.frequency.dtype) == (torch.bfloat16, torch.float32)
    assert (part(positions) - master(positions)).abs().max() < 2**-8  # the rounding of a result
    cast = Rotary().to(torch.bfloat16)
    assert (cast(positions) - master(positions)).abs().max() > 0.3  # what a cast buffer would do


def test_the_tables_of_the_course_s_model_have_the_type_of_its_activations():
    config = ModelConfig(layers=2, dim=16, heads=2, kv_heads=1, seq_len=8)
    master = build_part(config, 0, 2, dtype=torch.float32)
    part, cast = (
        computing_copy(master, torch.bfloat16),
        build_part(config, 0, 2, dtype=torch.float32),
    )
    tokens = torch.arange(8)[None]
    assert torch.equal(part(tokens), cast.to(torch.bfloat16)(tokens))
    assert master.cosine.dtype == torch.float32


class StubbedEvent:
    """A CUDA event: a moment of the device, of which the host knows nothing before it asks."""

    def __init__(self, enable_timing=False):
        pass

    def record(self):
        pass

    def elapsed_time(self, later):
        return 1.0


def test_a_clock_waits_for_the_device_when_its_times_are_read_and_not_in_a_step():
    device = SimpleNamespace(type="cuda")
    with (
        mock.patch("torch.cuda.synchronize") as synchronize,
        mock.patch("torch.cuda.Event", StubbedEvent),
    ):
        clock = Clock(0, device, origin=0.0)
        synchronize.reset_mock()  # the one that sets the origin
        for _ in range(3):
            for microbatch in range(8):
                with clock.acting(Work(None, Action(0, "F", microbatch), None)):
                    pass
            clock.pass_ended()
        assert synchronize.call_count == 0
        assert [len(events) for events in clock.passes] == [8, 8, 8]
        assert synchronize.call_count == 1
        assert len(clock.passes) == 3  # and reading them again needs no device
        assert synchronize.call_count == 1
