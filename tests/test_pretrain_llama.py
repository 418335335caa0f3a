"""The pretraining program trains exactly, whatever it combines, and learns, continues, refuses."""

import json
import re
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pretrain_llama
import pytest
import torch
from further import first_of
from ranks import run_on_ranks
from token_folders import prepare

from course.failed_run import RunFailed
from course.launch import PRELOAD, run
from extensions.optimization.mixed_precision import computing_copy, refresh
from extensions.pretraining.forward_only import ForwardOnly, show_sample
from extensions.pretraining.metrics import Metrics
from extensions.pretraining.padding import PADDING, count_real_tokens
from extensions.pretraining.throughput import PEAKS, flops_per_token, known_peak, peak_flops
from extensions.pretraining.token_files import load_tokens
from extensions.pretraining.tokens import filled_up, load_corpus
from extensions.pretraining.training_flags import default_dtype
from extensions.pretraining.weight_count import count_weights
from extensions.real_models.saved_part import SavedPart, SavedSettings
from pipeline.data import DataError, load_text
from pipeline.model import ModelConfig, ModelPart, build_part, token_loss
from pipeline.schedules import gpipe

PRELOAD.extend(["torch._dynamo", "torch.distributed.checkpoint", "tokenizers"])

SMALL = "--dim 16 --heads 2 --seq-len 16 --batch-size 16 --microbatches 4 --device cpu"
EXACT = f"{SMALL} --dtype float64 --warm-up-steps 2 --decay-steps 8 --evaluate-windows 8"


def train(flags, ranks=4, limit=60):
    """The losses in full precision, {step: loss}, and what was printed."""
    with TemporaryDirectory() as folder:
        losses = Path(folder) / "losses"
        command = f"pretrain_llama.py {flags} --losses {losses}"
        output = run(command, ranks, warm=True, show=False, limit=limit).output
        rows = map(json.loads, losses.read_text().splitlines()) if losses.exists() else []
        return {row["step"]: row["loss"] for row in rows}, output


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Flags for 300 tokens, which are byte pairs."""
    folder = prepare(tmp_path_factory.mktemp("made") / "tokens", "--vocabulary", 300)
    return f"--data {folder} --vocabulary 300"


def difference_of(output):
    return float(re.search(r"largest difference from one process: (\S+), as promised", output)[1])


def pretrain_bare(rank, flags):
    """The status of the program without its guard."""
    with mock.patch.object(sys, "argv", ["pretrain_llama.py", *flags.split()]):
        return pretrain_llama.main.__wrapped__()


def test_without_the_guard_a_log_that_could_not_be_written_is_no_success(tmp_path):
    flags = f"{EXACT} --steps 1 --metrics"
    assert run_on_ranks(pretrain_bare, 1, f"{flags} {tmp_path}/log") == [0]
    assert run_on_ranks(pretrain_bare, 1, f"{flags} /dev/full") == [1]


# The same losses as one process on the whole batch.


@pytest.mark.parametrize(
    ("ranks", "flags"),
    first_of(
        [
            (4, "--schedule 1f1b"),
            (4, "--schedule gpipe --replicas 2 --accumulate 2 --recompute layer --cut auto"),
            (
                4,
                "--schedule interleaved-1f1b --chunks 2 --replicas 2 {tokens} --packed --microbatches 2 "
                "--clip 0.3",
            ),
            (2, "--schedule zb-v --recompute stage {tokens} --packed --accumulate 4"),
            (4, "--schedule zb-h1 --replicas 4 --recompute selective {tokens}"),
            (
                3,
                "--schedule dualpipe-v --layers 7 --batch-size 24 --microbatches 6 --accumulate 2 {tokens} --packed",
            ),
            (
                1,
                "--schedule looped-bfs --chunks 2 --layers 4 --accumulate 2 --optimizer sgd",
            ),
        ],
        4,
    ),
)
def test_losses_are_those_of_one_process_to_1e_12(ranks, flags, tokens):
    losses, output = train(f"{EXACT} --steps 3 --verify {flags.format(tokens=tokens)}", ranks)
    assert sorted(losses) == [0, 1, 2]
    assert difference_of(output) <= 1e-12


def test_accumulation_and_replicas_change_no_loss_by_more_than_1e_12_and_packing_does(tokens):
    plain, _ = train(f"{EXACT} --steps 3", ranks=1)
    other, _ = train(f"{EXACT} --steps 3 --accumulate 2 --replicas 2")
    assert max(abs(plain[step] - other[step]) for step in plain) <= 1e-12
    whole, _ = train(f"{EXACT} --steps 1 {tokens}", ranks=1)
    documents, _ = train(f"{EXACT} --steps 1 {tokens} --packed", ranks=1)
    assert abs(documents[0] - whole[0]) > 1e-3


def test_micro_batches_of_documents_have_unequally_many_tokens_that_count(tmp_path):
    corpus = load_tokens(prepare(tmp_path / "tokens"), 256, 200, packed=True)
    _, targets = corpus.batch(0, 16, 200)
    counts = [count_real_tokens([rows]) for rows in targets.chunk(4)]
    assert len(set(counts)) > 1 and sum(counts) == (targets != PADDING).sum()


@pytest.mark.further
@pytest.mark.parametrize("schedule", first_of(["zb-h1", "1f1b"], 1))
def test_bfloat16_stays_near_one_process_in_float32(schedule):
    _, output = train(f"{SMALL} --dtype bfloat16 --steps 4 --verify --schedule {schedule}", 2)
    assert 0 < difference_of(output) <= 5e-2


# Held-out text, samples, log.


@pytest.mark.further
def test_the_held_out_perplexity_falls_and_the_log_has_every_step(tmp_path):
    flags = f"{SMALL} --steps 30 --evaluate-every 10 --learning-rate 0.01 --sample 5"
    _, output = train(f"{flags} --metrics {tmp_path / 'log'}", ranks=2)
    perplexities = [float(x) for x in re.findall(r"perplexity (\S+)", output)]
    assert len(perplexities) == 4
    assert perplexities[0] > 200 and perplexities[-1] < 60
    rows = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [row["step"] for row in rows if "step" in row] == list(range(30))
    assert [row["steps"] for row in rows if "steps" in row] == [0, 10, 20, 30]
    assert all(row["tokens"] == 256 and row["mfu"] > 0 for row in rows if "step" in row)
    assert len(re.findall(r"^after (?:0|30) steps  '", output, re.M)) == 2
    assert re.search(r"tokens/s .* MFU \d+\.\d%$", output, re.M)


def test_the_held_out_loss_is_that_of_one_process():
    _, output = train(f"{EXACT} --steps 1 --replicas 2")
    config = ModelConfig(8, 16, 2, 2, 16)
    inputs, targets = load_corpus(load_text()).windows(16, 8)
    expected = token_loss(build_part(config, 0, config.layers)(inputs), targets)
    assert f"after 0 steps  held-out loss {expected:.6f}" in output


def test_looking_at_the_held_out_text_changes_no_training():
    plain, _ = train(f"{EXACT} --steps 4", ranks=2)
    looked, _ = train(f"{EXACT} --steps 4 --evaluate-every 1 --sample 3", ranks=2)
    assert looked == plain


@pytest.mark.further
def test_the_sample_is_the_same_from_any_number_of_ranks_and_replicas():
    samples = [
        re.findall(r"^after \d steps  '.*$", train(f"{EXACT} --steps 2 --sample 8 {f}", n)[1], re.M)
        for n, f in ((1, ""), (3, ""), (4, "--replicas 2 --schedule zb-v --recompute layer"))
    ]
    assert len(samples[0]) == 2
    assert samples[0] == samples[1] == samples[2]


def test_a_sample_of_short_rows_begins_with_a_token_of_the_text(capsys):
    text = mock.Mock(held_out=torch.tensor([7, 8, 9]), decode=str)
    arguments = types.SimpleNamespace(sample=2, seq_len=3, text=text, seed=0)
    forward_only = mock.Mock(generate=lambda prompt, *_: [*prompt, 1, 2])
    forward_only.job.rank = 0
    show_sample(arguments, forward_only, 0)
    assert "'[7]' -> '[1, 2]'" in capsys.readouterr().out


def test_the_seed_of_a_sample_decides_its_tokens():
    job = mock.MagicMock(rank=0, device="cpu", shape=(1, 8, 4))
    training = mock.Mock(job=job, schedule=gpipe(1, 1), stages={})
    indifferent = mock.Mock(losses={0: torch.zeros(1, 8, 256)})
    with (
        mock.patch.object(ForwardOnly, "worker", lambda *_: indifferent),
        mock.patch("torch.distributed.broadcast"),
    ):
        one, again, other = (
            ForwardOnly(training, None, None).generate([1, 2], 6, 256, seed) for seed in (0, 0, 1)
        )
    assert one == again != other and len(one) == 8


# Continue.


@pytest.mark.further
@pytest.mark.parametrize("more", first_of(["--dtype bfloat16", ""], 1))
def test_continued_on_the_same_cut_the_losses_are_the_same_bits(tmp_path, more):
    flags = f"{EXACT} --replicas 2 --accumulate 2 {more}"
    whole, _ = train(f"{flags} --steps 4")
    folder = f"--checkpoints {tmp_path / 'saved'} --save-every 2"
    before, _ = train(f"{flags} --steps 2 {folder}")
    after, output = train(f"{flags} --steps 4 {folder}")
    assert "continues after 2 steps" in output
    assert {**before, **after} == whole


def test_continued_with_other_ranks_replicas_and_schedule_the_losses_stay_within_1e_12(tmp_path):
    whole, _ = train(f"{EXACT} --steps 5", ranks=1)
    folder = f"--checkpoints {tmp_path / 'saved'} --save-every 1"
    losses = {}
    for ranks, steps, flags in [
        (4, 2, "--replicas 2"),
        (4, 3, "--replicas 4"),
        (2, 4, "--schedule zb-v --accumulate 2"),
        (3, 5, "--schedule gpipe --recompute layer"),
    ]:
        losses |= train(f"{EXACT} --steps {steps} {folder} {flags}", ranks)[0]
    assert max(abs(losses[step] - whole[step]) for step in whole) <= 1e-12


def test_a_training_that_is_done_prints_its_sample_once(tmp_path):
    flags = f"{EXACT} --steps 1 --sample 3 --checkpoints {tmp_path / 'saved'}"
    samples = [re.findall(r"^after \d steps  '.*$", train(flags, 2)[1], re.M) for _ in range(2)]
    assert len(samples[0]) == 2 and samples[1] == samples[0][1:]


def test_a_checkpoint_of_another_text_or_tokenizer_is_refused(tmp_path, tokens):
    folder = f"--checkpoints {tmp_path / 'saved'}"
    train(f"{EXACT} --steps 1 {folder}", ranks=2)
    with pytest.raises(RunFailed, match="--vocabulary"):
        train(f"{EXACT} --steps 2 {tokens} {folder}", ranks=2)
    with pytest.raises(RunFailed, match="--data"):
        train(f"{EXACT} --steps 2 --data {prepare(tmp_path / 'bytes')} {folder}", ranks=2)


# Refusals: one sentence, before the first message.


@pytest.mark.parametrize(
    ("ranks", "flags", "sentence"),
    first_of(
        [
            (2, "--accumulate 3", "--accumulate 3"),
            (4, "--replicas 3", "--replicas 3"),
            (1, "--vocabulary 100", "--vocabulary 100"),
            (1, "--packed", "--packed needs to know where documents end"),
            (1, "--warm-up-steps 8", "--decay-steps 8"),
            (1, "--metrics nowhere/log", "--metrics"),
            (1, "--seq-len 30000", "--seq-len 30000"),
        ],
        4,
    ),
)
def test_what_does_not_fit_is_refused_in_one_sentence(ranks, flags, sentence):
    with pytest.raises(RunFailed) as refusal:
        run(f"pretrain_llama.py {EXACT} {flags}", ranks, warm=True, show=False, limit=60)
    said = str(refusal.value)
    assert sentence in said and "Traceback" not in said
    assert "exit status 2" in said


# Texts.


def test_byte_pairs_come_back_as_the_same_text_and_are_the_same_each_time(tmp_path):
    folders = [prepare(tmp_path / name, "--vocabulary", 500) for name in ("a", "b")]
    first, second = (load_tokens(folder, 500, 16) for folder in folders)
    bytes_of_text = load_tokens(prepare(tmp_path / "bytes"), 256, 16).training
    assert torch.equal(first.training[:], second.training[:])
    assert len(first.training) < 0.6 * len(bytes_of_text)
    decoded = first.decode(first.training[:].tolist()).encode()
    assert decoded == bytes(bytes_of_text[:].tolist())
    assert first.decode(first.encode("a line of stations")) == "a line of stations"
    assert first.num_tokens == 500 and first.training[:].max() < 500


def test_a_tokenizer_is_read_from_a_file(tmp_path):
    file = prepare(tmp_path / "tokens", "--vocabulary", 400) / "tokenizer.json"
    corpus = load_corpus(load_text(), 1000, file)
    assert corpus.decode(corpus.training[:50].tolist()) == load_text_of(corpus, 50)
    with pytest.raises(DataError, match="use at least 400"):
        load_corpus(load_text(), 300, file)


def load_text_of(corpus, count):
    """The beginning of the course's text, as long as the first `count` tokens."""
    length = len(corpus.decode(corpus.training[:count].tolist()).encode())
    return bytes(load_text().training[:length].tolist()).decode()


def test_a_held_out_part_is_filled_up_with_rows_that_do_not_count():
    rows = torch.arange(12).view(3, 4)
    inputs, targets = filled_up((rows, rows), 2)
    assert inputs.shape == targets.shape == (4, 4)
    assert targets[3].tolist() == [PADDING] * 4 and torch.equal(targets[:3], rows)


# Speed and precision.


@pytest.mark.parametrize("name", pretrain_llama.MODELS)
def test_a_model_has_about_as_many_weights_as_its_name_says(name):
    layers, dim, heads, kv_heads, vocabulary = pretrain_llama.MODELS[name]
    weights = count_weights(ModelConfig(layers, dim, heads, kv_heads, 128, vocabulary))[0]
    said = int(name[:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]
    assert abs(weights - said) <= 0.08 * said
    assert dim // heads % 2 == 0 and heads % kv_heads == 0


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (ModelConfig(2, 32, 4, 4, 16), ModelPart),
        (SavedSettings(2, 32, 4, 4, 16, head_dim=16), SavedPart),  # heads wider than dim / heads
    ],
)
def test_model_flops_are_those_that_torch_counts_in_a_forward_and_a_backward(config, part):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model = part(config, 0, config.layers)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        token_loss(model(tokens), tokens).backward()
    norms = 6 * (2 * 2 + 1) * 32  # weights of the norms, which multiply no matrix
    assert counter.get_total_flops() == 16 * (flops_per_token(config) - norms)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181e12),  # not the L4's, nor the SXM part's for the next two
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),  # a seventh of the card
        ("Some other GPU", None),
    ],
)
def test_the_peak_of_a_gpu_is_found_by_its_name(name, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    device = torch.device("cuda", 0)
    assert known_peak(device, torch.bfloat16) == peak
    assert known_peak(device, torch.float32) is None
    assert known_peak(torch.device("cpu"), torch.bfloat16) is None
    assert min(PEAKS.values()) > 1e13


def test_a_gpu_counts_once_in_the_peak_whatever_number_its_ranks_see_it_by(monkeypatch):
    def gather(everyone, own):
        owns.append(own)
        everyone[:] = (2 * owns)[:2]

    owns = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    job = types.SimpleNamespace(device=torch.device("cuda", 0), num_ranks=2, rank=0)
    job.waiting_for_all = lambda what: nullcontext()
    for gpu, peak in (("first", 989e12), ("second", 2 * 989e12)):
        properties = mock.Mock(return_value=types.SimpleNamespace(uuid=gpu))
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        assert peak_flops(job, torch.bfloat16) == (peak, "its data sheet")


@pytest.mark.parametrize(
    ("major", "rank", "dtype", "said"),
    [
        (8, "0", "bfloat16", ""),
        (
            7,
            "0",
            "float32",
            "Tesla T4 only emulates bfloat16, so the default of --dtype is float32",
        ),
        (7, "1", "float32", ""),
    ],
)
def test_the_default_dtype_is_one_that_the_gpu_computes_in(
    major, rank, dtype, said, monkeypatch, capsys
):
    assert default_dtype("auto") == "float32"  # no GPU here
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    gpu = types.SimpleNamespace(major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    assert default_dtype("cuda") == dtype and default_dtype("cpu") == "float32"
    printed = capsys.readouterr().out
    assert printed.startswith(said) and printed.count("\n") == bool(said)


def test_a_thousand_small_updates_reach_the_master_and_would_be_lost_in_16_bits():
    master = build_part(ModelConfig(1, 8, 2, 2, 4), 0, 1, dtype=torch.float32)
    part = computing_copy(master, torch.bfloat16)
    name = "layers.0.feed_forward.gate.weight"
    updated, weight = master.get_parameter(name), part.get_parameter(name)
    lost = torch.ones_like(weight)
    with torch.no_grad():
        updated.fill_(1.0)
        for _ in range(1000):
            updated -= 1e-4
            lost -= 1e-4
    refresh(part, master)
    assert abs(updated.mean().item() - 0.9) < 1e-3
    assert abs(weight.float().mean().item() - 0.9) < 2e-3
    assert lost.eq(1).all()


def test_gradients_of_many_micro_batches_add_up_in_float32():
    master = build_part(ModelConfig(1, 8, 2, 2, 4), 0, 1, dtype=torch.float32)
    part = computing_copy(master, torch.bfloat16)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    for _ in range(512):
        part(tokens)[..., 0].sum().backward()
    assert all(weight.grad is None for weight in part.parameters())
    (once,) = [p.grad.clone() / 512 for n, p in master.named_parameters() if n == "head.weight"]
    master.zero_grad()
    part(tokens)[..., 0].sum().backward()
    assert torch.allclose(dict(master.named_parameters())["head.weight"].grad, once, rtol=1e-5)


class Alone:
    device = torch.device("cpu")


def test_mfu_is_useful_work_over_possible_work():
    metrics = Metrics(Alone(), None, ModelConfig(), torch.float64, True, False, peak=1e9)
    assert metrics.utilisation(1e9 / flops_per_token(ModelConfig())) == pytest.approx(1.0)


# What ends a training run early.


def test_a_continued_log_begins_a_new_line_after_a_torn_one(tmp_path):
    log = tmp_path / "log"
    for content, wanted in (("{}\n{", "{}\n{\n{"), ("{}\n", "{}\n{"), ("", "{")):
        log.write_text(content)
        metrics = Metrics(Alone(), log, ModelConfig(), torch.float64, True, True, peak=1e9)
        metrics.write(step=1)
        metrics.claim.close()
        assert log.read_text() == wanted + '"step": 1}\n'


def test_told_to_stop_it_saves_leaves_with_75_and_continues(tmp_path):
    flags = f"{EXACT} --checkpoints {tmp_path / 'saved'} --save-every 50"
    with pytest.raises(RunFailed, match="exit status 75"):
        run(
            f"pretrain_llama.py {flags} --steps 40 --pace 4 8",
            warm=True,
            show=False,
            limit=60,
            send=("SIGUSR1", 1, "step 2"),
        )
    stopped = int((tmp_path / "saved" / "stopped").read_text().split(" after ")[1].split()[0])
    losses, _ = train(f"{flags} --steps {stopped + 1}")
    assert list(losses) == [stopped]


def test_a_lost_rank_ends_the_training_with_its_name():
    with pytest.raises(RunFailed, match="rank 2"):
        run(
            f"pretrain_llama.py {EXACT} --steps 200 --replicas 2 --pace 4 8",
            warm=True,
            show=False,
            limit=60,
            send=("SIGKILL", 2, "step 2"),
        )
