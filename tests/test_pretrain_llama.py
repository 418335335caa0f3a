"""The pretraining program trains exactly, whatever it combines, and learns, continues, refuses."""

import json
import re
import sys
import types
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pretrain_llama
import pytest
import torch
from further import first_of

from course.failed_run import RunFailed
from course.launch import PRELOAD, run
from extensions.optimization.mixed_precision import computing_copy, refresh
from extensions.pretraining.forward_only import ForwardOnly
from extensions.pretraining.metrics import Metrics
from extensions.pretraining.padding import PADDING
from extensions.pretraining.throughput import PEAKS, flops_per_token, known_peak
from extensions.pretraining.tokens import (
    filled_up,
    in_rows,
    load_corpus,
    read_content,
    stream_content,
)
from extensions.pretraining.training_flags import default_dtype
from extensions.pretraining.weight_count import count_weights
from pipeline.data import DataError, load_text
from pipeline.model import ModelConfig, build_part, token_loss
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


def difference_of(output):
    return float(re.search(r"largest difference from one process: (\S+), as promised", output)[1])


# The same losses as one process on the whole batch.


@pytest.mark.parametrize(
    ("ranks", "flags"),
    first_of(
        [
            (4, "--schedule 1f1b"),
            (4, "--schedule gpipe --replicas 2 --accumulate 2 --recompute layer --cut auto"),
            (
                4,
                "--schedule interleaved-1f1b --chunks 2 --replicas 2 --documents --microbatches 2 "
                "--clip 0.3",
            ),
            (2, "--schedule zb-v --recompute stage --documents --accumulate 4"),
            (4, "--schedule zb-h1 --replicas 4 --recompute selective --vocabulary 300"),
            (
                3,
                "--schedule dualpipe-v --layers 7 --batch-size 24 --microbatches 6 --accumulate 2 --documents",
            ),
            (
                1,
                "--schedule looped-bfs --chunks 2 --layers 4 --accumulate 2 --optimizer sgd "
                "--compile aot_eager",
            ),
        ],
        4,
    ),
)
def test_losses_are_those_of_one_process_to_1e_12(ranks, flags):
    losses, output = train(f"{EXACT} --steps 3 --verify {flags}", ranks)
    assert sorted(losses) == [0, 1, 2]
    assert difference_of(output) <= 1e-12


def test_accumulation_and_replicas_change_no_loss_by_more_than_1e_12_and_documents_do():
    plain, _ = train(f"{EXACT} --steps 3", ranks=1)
    other, _ = train(f"{EXACT} --steps 3 --accumulate 2 --replicas 2")
    assert max(abs(plain[step] - other[step]) for step in plain) <= 1e-12
    documents, _ = train(f"{EXACT} --steps 1 --documents", ranks=1)
    assert abs(documents[0] - plain[0]) > 1e-3


def test_micro_batches_of_documents_have_unequally_many_tokens_and_each_token_counts_once():
    corpus = load_corpus(load_text(), documents=True, seq_len=200)
    inputs, targets = corpus.batch(0, 16, 200)
    counts = [(rows != PADDING).sum().item() for rows in targets.chunk(4)]
    assert len(set(counts)) > 1
    model = build_part(ModelConfig(4, 16, 2, 2, 200), 0, 4)
    parts = [token_loss(model(i), t) for i, t in zip(inputs.chunk(4), targets.chunk(4))]
    whole = token_loss(model(inputs), targets)
    weighted = sum(loss * count for loss, count in zip(parts, counts)) / sum(counts)
    assert abs(weighted - whole) <= 1e-12
    assert abs(sum(parts) / 4 - whole) > 1e-4  # what a mean of means would have been


@pytest.mark.parametrize("schedule", first_of(["zb-h1", "1f1b"], 1))
def test_bfloat16_stays_near_one_process_in_float32(schedule):
    _, output = train(f"{SMALL} --dtype bfloat16 --steps 4 --verify --schedule {schedule}", 2)
    assert 0 < difference_of(output) <= 5e-2


# Held-out text, samples, log.


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


def test_the_sample_is_the_same_from_any_number_of_ranks_and_replicas():
    samples = [
        re.findall(r"^after \d steps  '.*$", train(f"{EXACT} --steps 2 --sample 8 {f}", n)[1], re.M)
        for n, f in ((1, ""), (3, ""), (4, "--replicas 2 --schedule zb-v --recompute layer"))
    ]
    assert len(samples[0]) == 2
    assert samples[0] == samples[1] == samples[2]


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


def test_a_checkpoint_of_another_text_or_tokenizer_is_refused(tmp_path):
    folder = f"--checkpoints {tmp_path / 'saved'}"
    train(f"{EXACT} --steps 1 {folder}", ranks=2)
    with pytest.raises(RunFailed, match="--vocabulary"):
        train(f"{EXACT} --steps 2 --vocabulary 300 {folder}", ranks=2)
    with pytest.raises(RunFailed, match="--documents"):
        train(f"{EXACT} --steps 2 --documents {folder}", ranks=2)


# Refusals: one sentence, before the first message.


@pytest.mark.parametrize(
    ("ranks", "flags", "sentence"),
    first_of(
        [
            (2, "--accumulate 3", "--accumulate 3"),
            (4, "--replicas 3", "--replicas 3"),
            (1, "--vocabulary 100", "--vocabulary 100"),
            (1, "--dataset a/b", "pip install datasets"),
            (1, "--dataset a/b --data x", "use one of them"),
            (1, "--tokenizer nowhere.json", "--tokenizer: nowhere.json cannot be read"),
            (1, "--warm-up-steps 8", "--decay-steps 8"),
            (1, "--metrics nowhere/log", "--metrics"),
            (1, "--seq-len 30000", "--seq-len 30000"),
            (1, "--vocabulary 2000 --seq-len 900", "--vocabulary"),
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


def test_byte_pairs_come_back_as_the_same_text_and_are_the_same_each_time():
    first, second = (load_corpus(load_text(), vocabulary=500) for _ in range(2))
    assert torch.equal(first.training, second.training)
    assert len(first.training) < 0.6 * len(load_text().training)
    assert first.decode(first.training.tolist()).encode() == bytes(load_text().training.tolist())
    assert first.decode(first.encode("a line of stations")) == "a line of stations"
    assert first.num_tokens == 500 and first.training.max() < 500


def test_a_tokenizer_is_read_from_a_file(tmp_path):
    trained = load_corpus(load_text(), vocabulary=400)
    trained.tokenizer.save(str(tmp_path / "tokenizer.json"))
    read = load_corpus(load_text(), 1000, tmp_path / "tokenizer.json")
    assert torch.equal(read.training, trained.training)
    with pytest.raises(DataError, match="use at least 400"):
        load_corpus(load_text(), 300, tmp_path / "tokenizer.json")


def test_rows_are_documents_and_padding_is_behind_them():
    documents = [torch.arange(1, n + 1) for n in (3, 5, 9)]
    inputs, targets = in_rows(documents, 4)
    assert inputs.tolist() == [[1, 2, 0, 0], [1, 2, 3, 4], [1, 2, 3, 4]]
    assert targets.tolist() == [[2, 3, PADDING, PADDING], [2, 3, 4, 5], [2, 3, 4, 5]]
    inputs, targets = filled_up((inputs, targets), 2)
    assert inputs.shape == targets.shape == (4, 4)
    assert targets[3].tolist() == [PADDING] * 4


def test_a_folder_is_all_of_its_text_files(tmp_path):
    (tmp_path / "b.txt").write_text("second " * 50)
    (tmp_path / "a.txt").write_text("first " * 50)
    (tmp_path / "c.md").write_text("no text")
    text = read_content(tmp_path, 8)
    content = bytes(torch.cat([text.training, text.held_out]).tolist()).decode()
    assert content == "first " * 50 + "\n\n" + "second " * 50
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no .txt files"):
        read_content(tmp_path / "empty", 8)


def stand_in(rows, asked):
    """A module in the place of Hugging Face's `datasets`."""
    module = types.ModuleType("datasets")

    def load_dataset(path, name=None, split=None, streaming=False):
        asked.append((path, name, split, streaming))
        for row in rows:
            asked.append(row)
            yield row

    module.load_dataset = load_dataset
    return module


def test_a_data_set_is_streamed_only_as_far_as_it_is_needed(monkeypatch):
    asked, rows = [], [{"text": f"story {number} " * 20} for number in range(100)]
    monkeypatch.setitem(sys.modules, "datasets", stand_in(rows, asked))
    text = stream_content("somebody/stories:small", 1000, 8)
    content = bytes(torch.cat([text.training, text.held_out]).tolist()).decode()
    assert asked[0] == ("somebody/stories", "small", "train", True)
    assert content == "\n\n".join(row["text"] for row in rows[:7])[:1000]
    assert asked[-1] == rows[6]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [([{"words": "x"}], "no column named text"), ([{"text": "short"}], "--dataset: .* 5 bytes")],
)
def test_a_data_set_of_no_use_is_refused(rows, sentence, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", stand_in(rows, []))
    with pytest.raises(DataError, match=sentence):
        stream_content("somebody/stories", 1000, 8)


@pytest.mark.parametrize("form", ["dataset_dict.json", "state.json"])
def test_a_folder_of_save_to_disk_is_read_by_its_own_function(form, tmp_path, monkeypatch):
    rows = [{"text": f"story {number} " * 20} for number in range(100)]
    module = stand_in([{"text": "of load_dataset"}], [])
    parts = {"train": rows} if form == "dataset_dict.json" else rows
    module.load_from_disk = lambda path: {str(tmp_path): parts}[path]
    monkeypatch.setitem(sys.modules, "datasets", module)
    (tmp_path / form).write_text("{}")
    text = stream_content(str(tmp_path), 1000, 8)
    content = bytes(torch.cat([text.training, text.held_out]).tolist()).decode()
    assert content == "\n\n".join(row["text"] for row in rows[:7])[:1000]
    if form == "dataset_dict.json":
        module.load_from_disk = lambda path: {"test": rows, "dev": rows}
        with pytest.raises(DataError, match="has the parts test, dev and no train"):
            stream_content(str(tmp_path), 1000, 8)


# Speed and precision.


@pytest.mark.parametrize("name", pretrain_llama.MODELS)
def test_a_model_has_about_as_many_weights_as_its_name_says(name):
    layers, dim, heads, kv_heads, vocabulary = pretrain_llama.MODELS[name]
    weights = count_weights(ModelConfig(layers, dim, heads, kv_heads, 128, vocabulary))[0]
    said = int(name[:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]
    assert abs(weights - said) <= 0.08 * said
    assert dim // heads % 2 == 0 and heads % kv_heads == 0


def test_model_flops_are_those_that_torch_counts_in_a_forward_and_a_backward():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    config = ModelConfig(2, 32, 4, 4, 16)
    model = build_part(config, 0, config.layers)
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


def test_mfu_is_useful_work_over_possible_work():
    class Alone:
        device = torch.device("cpu")

    metrics = Metrics(Alone(), None, ModelConfig(), torch.float64, True, False, peak=1e9)
    assert metrics.utilisation(1e9 / flops_per_token(ModelConfig())) == pytest.approx(1.0)


# What ends a training run early.


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
