"""What pretrain_llama.py and finetune.py do so that devices do not wait, each shown by a count.

The stub of a device is torch's meta device: tensors with shapes and no numbers. Whatever lets a host
wait for a number of the device, item() or a copy to the host, is an error there.
"""

import os
import sys
from functools import partial
from types import SimpleNamespace
from unittest import mock

import finetune
import pretrain_llama
import pytest
import torch
import torch.distributed as dist
from saved_models import write_model
from token_folders import prepare
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from extensions.checkpointing.checkpoint import Training
from extensions.data_parallel import replicas as replicas_module
from extensions.data_parallel.replicas import AllReduce, Replicas, SumInBuckets
from extensions.data_parallel.sharded_optimizer import ShardedOptimizer, own_rows
from extensions.optimization.learning_rate import ConstantRate
from extensions.optimization.mixed_precision import NormOf16Bits, frugal_norm
from extensions.pretraining import cut_by_time as timed
from extensions.pretraining.batches import Batches, needed_on
from extensions.pretraining.cut_by_work import best_cut, head_in_layers, slowest
from extensions.pretraining.padding import ShareOfLoss
from extensions.pretraining.trained_stages import build_stages
from pipeline.data import Text, load_text
from pipeline.job import Job
from pipeline.model import ModelConfig, ModelPart, RMSNorm, build_part, materialise
from pipeline.one_process import build_optimizer
from pipeline.schedules import build_schedule

SMALL = "--dim 16 --heads 2 --seq-len 16 --batch-size 16 --microbatches 4 --device cpu"
CONFIG = ModelConfig(layers=4, dim=16, heads=2, kv_heads=2, seq_len=8)


def flags_of(script, flags, rank=0, ranks=4):
    """(arguments, schedule) of `script` as rank `rank` reads them."""
    names = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    environment = {name: str(value) for name, value in names.items()}
    command = [f"{script.__name__}.py", *flags.split()]
    with mock.patch.dict(os.environ, environment), mock.patch.object(sys, "argv", command):
        return script.read_flags()


# No host waits for its device between the first action of a step and the last.


class Operators(TorchDispatchMode):
    """The names of all operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.names.add(function.name().partition(".")[0])
        return function(*arguments, **(keywords or {}))


def step_on_a_stub(rank, flags):
    """The names of all operators that rank `rank` calls in the actions of a step, on a stub."""
    arguments, schedule = flags_of(pretrain_llama, f"{SMALL} {flags}", rank)
    stub = torch.device("meta")
    job = Job(rank, 4, stub, "nccl", 20, shape=(0, 0, arguments.dim), dtype=arguments.torch_dtype)
    job.shape = arguments.microbatch_size, arguments.seq_len, arguments.dim
    job.channels = mock.MagicMock()
    count = arguments.replicas
    peers = tuple(range(rank % (4 // count), 4, 4 // count))
    job.groups = {peers: None}
    replicas = Replicas(job, None, count, rank // (4 // count), peers)
    loss = ShareOfLoss()
    masters, stages = build_stages(arguments, job, schedule, pretrain_llama.build_model_part, loss)
    worker = pretrain_llama.build_worker(replicas, schedule, masters, stages)
    batches = pretrain_llama.build_batches(arguments, replicas, schedule)
    passes, loss.real_tokens = batches.take(0)
    transport = {name: mock.Mock() for name in ("isend", "irecv", "all_reduce")}
    with (
        mock.patch.multiple(dist, **transport),
        mock.patch("torch.cuda.synchronize", side_effect=AssertionError("waits")),
        Operators() as called,
    ):
        result = pretrain_llama.run_passes(passes, worker)
    if result is not None:  # the stub has no number, so that waiting for one cannot go unseen
        with pytest.raises(RuntimeError, match="meta"):
            result.item()
    return called.names


@pytest.mark.further
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--schedule zb-h1 --dtype bfloat16 --recompute layer",
        "--schedule interleaved-1f1b --chunks 2 --recompute stage --accumulate 2",
        "--schedule gpipe --data {tokens} --packed --recompute selective --dtype bfloat16",
        "--schedule gpipe --replicas 2 --shuffle",
    ],
)
def test_no_rank_waits_for_its_device_between_the_first_and_the_last_action(flags, tmp_path):
    flags = flags.format(tokens=prepare(tmp_path / "tokens"))
    for rank in range(4):
        names = step_on_a_stub(rank, flags)
        assert "aten::mm" in names
        assert not names & {"aten::_local_scalar_dense", "aten::nonzero"}


def test_a_loss_that_looks_at_its_own_number_would_be_found():
    def looks(loss, scores, targets):
        return scores.sum() * float(scores.sum() > 0)

    with mock.patch.object(ShareOfLoss, "__call__", looks):
        with pytest.raises(RuntimeError, match="meta"):
            step_on_a_stub(3, "")


# Batches: made by the ranks that need them, while the step before is computed.


def batches_of(text, needed, steps=3, device="cpu"):
    arguments = SimpleNamespace(text=text, batch_size=4, seq_len=8, seed=0, steps=steps)
    cut = partial(finetune.pass_of, SimpleNamespace(microbatches=2))
    return Batches(arguments, cut, needed, torch.device(device))


def test_ranks_without_an_end_of_the_pipeline_draw_no_batch_and_the_others_one_per_step():
    text, schedule = load_text(), build_schedule("1f1b", 4, 8)
    plain = Text.batch
    for rank, calls in enumerate([3, 0, 0, 3]):
        drawn = []

        def batch(self, step, *sizes, drawn=drawn):
            if self is text:  # a thread of another test may still draw from its own
                drawn.append(step)
            return plain(self, step, *sizes)

        with mock.patch.object(Text, "batch", batch):
            batches = batches_of(text, needed_on(schedule, rank))
            for number in range(3):
                [(inputs, targets)], tokens = batches.take(number)
                assert tokens == 4 * 8
                assert inputs[1].shape == targets[1].shape == (2, 8)
        assert sorted(drawn) == list(range(calls))
        if calls:
            assert torch.equal(torch.cat([*inputs.values()]), text.batch(2, 4, 8)[0])


def test_masks_of_documents_and_rows_of_another_length_are_made_from_every_rank_s_own_batch():
    schedule = build_schedule("1f1b", 4, 8)
    assert needed_on(schedule, 1) == (False, False)
    assert needed_on(schedule, 1, packed=True) == (False, True)

    class Varying(Text):
        def batch(self, step, batch_size, seq_len, seed=0):
            return tuple(part[:, :5] for part in super().batch(step, batch_size, seq_len, seed))

    text = load_text()
    batches = batches_of(Varying(text.training, text.held_out), needed_on(schedule, 1))
    [(inputs, _)], tokens = batches.take(0)
    assert inputs[0].shape == (2, 5) and tokens == 20


def test_the_next_batch_is_under_way_when_a_step_has_its_own_and_none_after_the_last():
    batches = batches_of(load_text(), (True, True))
    batches.take(0)
    assert list(batches.coming) == [1]
    batches.take(1)
    batches.take(2)
    assert not batches.coming


def test_what_a_gpu_needs_is_pinned_and_copied_without_a_wait_and_nothing_else():
    with (
        mock.patch.object(torch.Tensor, "pin_memory", lambda self: self.clone()) as _,
        mock.patch.object(torch.Tensor, "to", autospec=True) as to,
    ):
        batches_of(load_text(), (True, False), device="cuda").take(0)
    assert [call.kwargs for call in to.call_args_list] == [{"non_blocking": True}] * 2


# Sums of replicas: in buckets, within a stage's last backward.


def started_in_backwards(part, schedule, size):
    """For each action of rank 0 of two replicas, how many sums had started when it was over,
    before `start` sends the rest; and the names of what each sum had, in the order of starting."""
    job, sent = mock.Mock(spec=Job, rank=0), []
    names = {id(weight): name for name, weight in part.named_parameters()}

    def summing(job, gradients, ranks, what):
        of = {id(weight.grad): name for name, weight in part.named_parameters()}
        sent.append([of[id(gradient)] for gradient in gradients])
        return mock.Mock()

    with (
        mock.patch.object(replicas_module, "Summing", summing),
        mock.patch.object(replicas_module, "BUCKET", size),
    ):
        reduction = AllReduce(Replicas(job, None, 2, 0, (0, 1)), schedule)
        part = reduction.wrap(part, 0)
        counts = []
        for action in schedule.orders[0]:
            with reduction.around(action):
                if action.kind == "B":
                    part(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
                counts.append(len(sent))
        reduction.finish()
    assert sorted(sum(sent, [])) == sorted(names.values())
    return counts, sent


def test_sums_start_in_buckets_within_the_last_backward_and_in_no_other():
    part = build_part(CONFIG, 0, 4, dtype=torch.float32)
    schedule = replicas_module.replicate(build_schedule("gpipe", 1, 3), 2)
    counts, sent = started_in_backwards(part, schedule, 4096)
    assert counts[:-1] == [0] * 5
    assert counts[-1] == len(sent) > 10
    assert sent[0][0] == "head.weight" and sent[-1][-1] == "embedding.weight"


def test_one_bucket_holds_a_small_stage_and_a_shared_weight_waits_for_the_end():
    schedule = replicas_module.replicate(build_schedule("gpipe", 1, 2), 2)
    counts, sent = started_in_backwards(build_part(CONFIG, 0, 4), schedule, replicas_module.BUCKET)
    assert counts[-1] == len(sent) == 1
    shared = build_part(CONFIG, 0, 4)
    shared.layers["1"].attention_norm.weight = shared.layers["0"].attention_norm.weight
    counts, sent = started_in_backwards(shared, schedule, 4096)
    assert counts[-1] == 0 and len(sent) > 1


def test_buckets_start_in_one_order_also_where_gradients_are_complete_in_another():
    weights = [nn.Parameter(torch.zeros(8)) for _ in range(3)]
    with (
        mock.patch.object(replicas_module, "Summing") as summing,
        mock.patch.object(replicas_module, "BUCKET", 32),
    ):
        total = SumInBuckets(mock.Mock(), weights, (0, 1), "")
        total.complete(weights[0])
        total.complete(weights[1])
        assert summing.call_count == 0
        total.complete(weights[2])
        assert summing.call_count == 3
    assert [call.args[1][0] is w.grad for call, w in zip(summing.call_args_list, weights[::-1])]


# An optimizer in shards.


@pytest.mark.parametrize("count", [2, 3])
def test_each_replica_keeps_the_states_of_its_rows_and_together_they_are_one_optimizer_s(count):
    torch.manual_seed(0)
    whole = {"matrix": nn.Parameter(torch.randn(8, 5)), "row": nn.Parameter(torch.randn(1, 4))}
    whole["scalar"] = nn.Parameter(torch.tensor(2.0))
    gradients = {name: torch.randn_like(weight) for name, weight in whole.items()}
    parts = []
    for replica in range(count):
        own = {name: nn.Parameter(weight.detach().clone()) for name, weight in whole.items()}
        place = SimpleNamespace(count=count, replica=replica, peers=tuple(range(count)))
        sharded = ShardedOptimizer(place, "adamw", own, 0.1)
        with mock.patch.object(ShardedOptimizer, "exchange"):
            for _ in range(2):
                for name, weight in own.items():
                    weight.grad = gradients[name].clone()
                sharded.step()
        parts.append((own, sharded, place))
    optimizer = build_optimizer("adamw", whole.values(), 0.1)
    for _ in range(2):
        for name, weight in whole.items():
            weight.grad = gradients[name].clone()
        optimizer.step()
    for name in ("matrix", "row"):
        rows = [own_rows(own[name], place) for own, _, place in parts]
        assert torch.equal(torch.cat(list(rows)), whole[name])
        kept = sum(s.state[s.shards[name]]["exp_avg"].nbytes for _, s, _ in parts)
        assert kept == whole[name].nbytes
    assert all(torch.equal(own["scalar"], whole["scalar"]) for own, _, _ in parts)


# The update, norms, buffers.


def test_adamw_is_one_kernel_on_a_gpu_and_as_it_was_on_a_cpu():
    weights = [nn.Parameter(torch.zeros(2))]
    assert build_optimizer("adamw", weights, 0.1).defaults["fused"] is None
    with (
        mock.patch.object(torch.Tensor, "is_cuda", True),
        mock.patch("torch.optim.AdamW") as made,
    ):
        build_optimizer("adamw", weights, 0.1, weight_decay=0.2)
    assert made.call_args.kwargs == {"lr": 0.1, "fused": True, "weight_decay": 0.2}


def test_a_continued_fused_optimizer_counts_its_steps_on_the_device_of_its_weights():
    weight = nn.Parameter(torch.zeros(2, device="meta"))
    fused = SimpleNamespace(state={}, defaults={"fused": True})
    training = Training({"w": weight}, fused, ConstantRate(), {})
    state = {"optimizer": {"w": {"step": torch.tensor(3.0)}}, "rate": {"updates": 3}}
    state |= {"progress": {"step": 3, "batches": 3}, "random": {}}
    training.take(SimpleNamespace(rank=0, num_ranks=1), state)
    assert fused.state[weight]["step"].device.type == "meta"


def test_a_norm_of_16_bits_is_worked_out_in_32_and_keeps_its_input_and_one_number_per_row():
    torch.manual_seed(0)
    norm, exact = RMSNorm(64), RMSNorm(64)
    weight, x = torch.randn(64), torch.randn(6, 5, 64)
    gradient = torch.randn(6, 5, 64).bfloat16()
    norm.weight = nn.Parameter(weight.bfloat16())
    exact.weight = nn.Parameter(norm.weight.detach().double())
    narrow = x.bfloat16().requires_grad_()
    wide = narrow.detach().double().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        result = frugal_norm(norm, narrow)
    rows = [t for t in kept if t is not norm.weight]
    assert sum(t.nbytes for t in rows) == narrow.nbytes + 6 * 5 * 4
    result.backward(gradient)
    expected = exact(wide)
    expected.backward(gradient.double())
    for found, right in (
        (result, expected),
        (narrow.grad, wide.grad),
        (norm.weight.grad, exact.weight.grad),
    ):
        # One rounding to 8 bits, of each number itself.
        assert found.dtype == torch.bfloat16
        assert torch.allclose(found.double(), right, rtol=2**-8, atol=2**-12)
    assert torch.allclose(norm(narrow).double(), expected, rtol=2**-8, atol=2**-12)
    in_16_bits = norm.weight * narrow * torch.rsqrt(narrow.pow(2).mean(-1, keepdim=True) + 1e-6)
    assert not torch.allclose(in_16_bits.double(), expected, rtol=2**-8, atol=2**-12)


def test_the_gradients_of_such_a_norm_are_those_of_autograd():
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    with mock.patch.object(torch.Tensor, "float", lambda self: self):  # at full precision
        assert torch.autograd.gradcheck(NormOf16Bits.apply, (x, weight, 1e-6))


def test_a_part_that_is_built_in_16_bits_leaves_the_type_of_other_buffers():
    class WithFrequencies(ModelPart):
        def __init__(self, config):
            super().__init__(config, 0, config.layers)
            with torch.device("cpu"):
                self.register_buffer("frequency", torch.ones(4), persistent=False)

    with torch.device("meta"):
        part = WithFrequencies(CONFIG)
    part = materialise(part, CONFIG, dtype=torch.bfloat16)
    assert part.frequency.dtype == torch.float32
    assert part.cosine.dtype == part.embedding.weight.dtype == torch.bfloat16


# Cuts.


def test_an_embedding_that_takes_time_has_fewer_layers_behind_it():
    assert best_cut(12, 4, embedding=1.5, head=1.5) == [2, 4, 4, 2]
    assert best_cut(12, 3, embedding=3) == [2, 5, 5]
    assert best_cut(8, 2, head=2) == [5, 3]
    for embedding, head in ((0.3, 2.2), (2.5, 0.1), (1, 1)):
        found = best_cut(7, 3, embedding, head)
        every = [[a, b, 7 - a - b] for a in range(1, 6) for b in range(1, 7 - a)]
        assert slowest(found, embedding, head) == min(slowest(c, embedding, head) for c in every)


def test_all_ranks_find_the_cut_of_their_times_together():
    times = iter([3.0, 1.0, 2.0])

    def of_another_rank(tensor):
        tensor += torch.tensor([5.0, 3.0, 6.0])  # together 8, 4, 8: an end is worth a layer

    job = mock.Mock(spec=Job, rank=1, num_ranks=2)
    job.waiting_for_all.return_value = mock.MagicMock()
    with (
        mock.patch.object(timed, "seconds_of", lambda *words: next(times)),
        mock.patch.object(dist, "all_reduce", of_another_rank),
    ):
        cut = timed.cut_by_time(job, lambda *ends: None, 10, 4, torch.zeros(2, 8), None)
    assert cut == best_cut(10, 4, 1, 1) == [2, 3, 3, 2]


def test_a_measurement_runs_the_parts_that_it_names_with_both_ends():
    job = Job(0, 1, torch.device("cpu"), "gloo", 20, shape=(2, 8, 16), dtype=torch.float64)
    built, loss = [], ShareOfLoss()
    loss.real_tokens = 16

    def build(first, last):
        built.append((first, last))
        return build_part(CONFIG, first, last)

    tokens = torch.zeros(2, 8, dtype=torch.int64)
    cut = timed.cut_by_time(job, build, 4, 2, tokens, loss)
    assert built == [(0, 1), (1, 2), (3, 4)] and sum(cut) == 4
    assert timed.cut_by_time(job, build, 4, 4, tokens, loss) == [1, 1, 1, 1]
    assert len(built) == 3  # there is nothing to choose


def test_finetune_cuts_by_counted_work(tmp_path):
    folder = write_model(tmp_path / "model")
    arguments, schedule = flags_of(finetune, f"--model {folder} --seq-len 16 --device cpu", ranks=2)
    assert arguments.cut == best_cut(arguments.layers, 2, head=head_in_layers(arguments.config))
    assert schedule.num_stages == 2


# What does not fit is rejected in one sentence.


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--cut even", "--cut"),
    ],
)
def test_a_bad_combination_is_rejected_in_one_sentence_that_names_the_flag(flags, words):
    with pytest.raises(SystemExit) as ended:
        flags_of(pretrain_llama, f"{SMALL} {flags}", ranks=4)
    assert words in ended.value.code and "\n" not in ended.value.code
