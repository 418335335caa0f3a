"""Inference through a pipeline writes what one process writes, and fills the pipeline as planned."""

import os
import random
import shlex
import sys

import inference
import pytest
import torch
import transformers
from further import first_of
from ranks import run_on_ranks
from saved_models import save_library_model

from course.failed_run import RunFailed
from course.launch import PRELOAD, run
from extensions.checkpointing import checkpoint_folder
from extensions.inference import saved_model
from extensions.inference.cached_stage import CachedStage
from extensions.inference.passes import Pass, Row, plan_passes, schedule_of
from extensions.inference.requests import Request, choose_token
from lab.simulator import Costs, simulate
from pipeline.model import ModelConfig, build_part

PRELOAD.extend(["torch.distributed.checkpoint", "tokenizers"])

SMALL = "--layers 4 --dim 16 --heads 2 --kv-heads 1 --seq-len 40 --device cpu"
CONFIG = ModelConfig(layers=4, dim=16, heads=4, kv_heads=2, seq_len=40)


def infer(flags, ranks, limit=60):
    """What rank 0 prints."""
    return run(f"inference.py {SMALL} {flags}", ranks, warm=True, show=False, limit=limit).output


def texts_in(output):
    return [line for line in output.splitlines() if line.startswith("request ")]


# The same text as one process, character for character


@pytest.mark.parametrize(
    ("ranks", "flags"),
    first_of(
        [
            (1, "--requests 3"),
            (2, "--requests 5 --tokens-per-pass 4 --groups 3"),
            (4, "--requests 6 --slots 1 --tokens 5"),
            (4, "--requests 5 --groups 2 --slots 4 --tokens-per-pass 5 --temperature 0"),
            (3, "--groups 5 --prompt Pipelines --prompt a --tokens 20 --cut 1,2,1"),
        ],
        3,
    ),
)
def test_the_texts_are_those_of_one_process_without_a_cache(ranks, flags):
    output = infer(f"{flags} --verify", ranks)
    assert "texts are those of one process without a cache" in output


def test_who_shares_the_pipeline_changes_no_text():
    alone = texts_in(infer("--requests 6 --groups 1 --slots 1", 2))
    assert len(alone) == 6
    for flags in ("--groups 3 --slots 2", "--groups 2 --slots 3"):
        assert texts_in(infer(f"--requests 6 {flags} --tokens-per-pass 7", 2)) == alone


def test_the_model_of_a_training_is_taken_from_its_checkpoint(tmp_path):
    flags = f"{SMALL} --steps 2 --batch-size 8 --microbatches 4 --checkpoints {tmp_path}/saved"
    run(f"distributed_checkpointing.py {flags}", 2, warm=True, show=False, limit=60)
    words = f"inference.py --device cpu --seq-len 40 --requests 2 --checkpoints {tmp_path}/saved"
    output = run(f"{words} --verify", 4, warm=True, show=False, limit=60).output
    assert "all 2 texts are those of one process" in output
    assert texts_in(output) != texts_in(infer("--requests 2", 4))
    for size in ("--dim 64", "--layers 8"):  # 8 would be the default of a new model
        with pytest.raises(RunFailed, match=f"{size} contradicts --checkpoints"):
            run(f"{words} {size}", 1, warm=True, show=False, limit=60)


def read_while_a_training_saves(rank, folders, newest):
    """In a rank of inference: the status, and the checkpoints from which it has read weights.

    For the rank, the newest checkpoint in its folder is that of its step in `newest`.
    """
    os.chdir(folders[rank])
    find, read, seen = checkpoint_folder.find_checkpoint, saved_model.is_read, []

    def note(checkpoint, *rest):
        seen.append(checkpoint.step)
        return read(checkpoint, *rest)

    saved_model.find_checkpoint = lambda folder: find(folder, newest[rank])
    saved_model.is_read = note
    sys.argv = ["inference.py", *f"--checkpoints saved {SMALL} --requests 2 --tokens 2".split()]
    return inference.main(), seen


def save_two_steps(folder, seed):
    flags = f"{SMALL} --steps 2 --save-every 1 --seed {seed}"
    run(f"distributed_checkpointing.py {flags} --checkpoints {folder}", 1, warm=True, show=False)


@pytest.mark.parametrize("newest", [(1, 2), (2, 1)])
def test_ranks_that_find_different_checkpoints_to_be_the_newest_read_that_of_rank_0(
    tmp_path, newest
):
    save_two_steps(tmp_path / "saved", 0)
    both = run_on_ranks(read_while_a_training_saves, 2, [str(tmp_path)] * 2, newest)
    assert both == [(0, [newest[0]])] * 2


def test_ranks_whose_folders_have_different_checkpoints_of_one_name_do_not_start(tmp_path):
    folders = [tmp_path / "here", tmp_path / "there"]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        save_two_steps(folder / "saved", seed)
    with pytest.raises(RunFailed, match="not all ranks find the same checkpoint there; name a"):
        run_on_ranks(read_while_a_training_saves, 2, [str(each) for each in folders], (2, 2))


@pytest.mark.parametrize("reader", ["inference.py", "convert.py"])
@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "__1_0.distcp"])
def test_a_changed_file_of_a_checkpoint_of_equal_size_is_named_and_not_read(tmp_path, file, reader):
    saved = tmp_path / "saved"
    flags = f"{SMALL} --steps 1 --batch-size 4 --microbatches 2 --checkpoints {saved}"
    run(f"distributed_checkpointing.py {flags}", 2, warm=True, show=False, limit=60)
    (path,) = saved.glob(f"run-0001/step-*/{file}")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    words = {
        "inference.py": f"inference.py --device cpu --requests 2 --checkpoints {saved}",
        "convert.py": f"convert.py --checkpoints {saved} --to-hf {tmp_path / 'out'}",
    }
    with pytest.raises(RunFailed) as refused:
        run(words[reader], 2 if reader == "inference.py" else 1, warm=True, show=False, limit=60)
    assert f"{path.parent}: {file} has changed since it was written" in str(refused.value)
    assert "Traceback" not in str(refused.value) and not (tmp_path / "out").exists()


def test_the_texts_of_a_saved_qwen2_are_those_of_transformers(tmp_path):
    folder = save_library_model(tmp_path / "qwen2", "qwen2", shards=3)
    prompts = ["A stage", "The bubble of "]
    flags = f"--model {folder} --seq-len 40 --temperature 0 --tokens 12 --device cpu --verify"
    words = " ".join(f"--prompt {shlex.quote(prompt)}" for prompt in prompts)
    output = run(f"inference.py {flags} {words}", 4, warm=True, show=False, limit=60).output
    assert "all 2 texts are those of one process" in output
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for line, prompt in zip(texts_in(output), prompts):
        tokens = torch.tensor([list(prompt.encode())])
        mask = torch.ones_like(tokens)
        written = model.generate(
            tokens, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        answer = bytes(written[0, tokens.shape[1] :].tolist()).decode("utf-8", "replace")
        assert line.endswith(f"-> {answer!r}")


# The cache


def test_a_prompt_read_in_chunks_has_the_scores_of_one_that_is_read_at_once_1e_12():
    part, whole = build_part(CONFIG, 0, 4), build_part(CONFIG, 0, 4)
    tokens = torch.randint(256, (23,), generator=torch.Generator().manual_seed(1))
    expected = whole(tokens[None])[0, -1]
    for chunks in ([23], [1] * 23, [5, 9, 8, 1]):
        stage, start = CachedStage(part, 0, 1, groups=1, slots=2, length=40), 0
        for size in chunks:
            rows = (Row(0, 1, start, start + size, chooses=True),)
            scores = stage.forward(0, tokens[start : start + size], Pass(0, 0, 0, rows))
            start += size
        assert (scores[0] - expected).abs().max() < 1e-12


def test_the_cache_has_2_x_layers_x_tokens_x_kv_heads_x_head_dim_numbers():
    stage = CachedStage(build_part(CONFIG, 0, 2), 0, 2, groups=3, slots=4, length=40)
    assert stage.cache.nbytes == 2 * 2 * (3 * 4 * 40) * CONFIG.kv_heads * CONFIG.head_dim * 8


# The plan


def random_requests(seed):
    draw = random.Random(seed)
    requests = [
        Request((0,) * draw.randint(1, 12), draw.randint(1, 9)) for _ in range(draw.randint(1, 9))
    ]
    slots = draw.randint(1, 3)
    return requests, draw.randint(1, 4), slots, draw.randint(slots, 8)


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_computed_once_in_order_and_every_place_has_one_request(seed):
    requests, groups, slots, most = random_requests(seed)
    passes = plan_passes(requests, groups, slots, most)
    done = [0] * len(requests)
    home = {}  # request -> its group and slot
    last_use = {}  # group and slot -> the request that has it
    for one in passes:
        assert 0 < one.num_tokens <= most
        for row in one.rows:
            place = one.group, row.slot
            assert home.setdefault(row.request, place) == place
            if last_use.get(place, row.request) != row.request:  # the one before has been answered
                before = last_use[place]
                assert done[before] == requests[before].positions
            last_use[place] = row.request
            assert row.start == done[row.request] < row.end
            done[row.request] = row.end
            assert row.chooses == (row.end >= len(requests[row.request].prompt))
    assert done == [request.positions for request in requests]


@pytest.mark.parametrize("seed", range(20))
def test_a_pass_waits_for_the_tokens_that_its_group_has_chosen_and_for_no_others(seed):
    requests, groups, slots, most = random_requests(seed)
    before = {}
    for one in plan_passes(requests, groups, slots, most):
        last = before.get(one.group)
        assert (one.depth > 0) == bool(last and last.choosing)
        if one.depth:
            assert (one.chain, one.depth) == (last.chain, last.depth + 1)
        before[one.group] = one


# What fills the bubble


def time_per_token(ranks, groups, tokens=48):
    requests = [Request((0,), tokens) for _ in range(groups)]
    passes = plan_passes(requests, groups, 1, 1)
    return simulate(schedule_of(passes, ranks), Costs(forward=10)).makespan / (groups * tokens)


def test_in_decode_p_groups_give_p_times_the_tokens_of_one_and_more_groups_give_no_more():
    assert time_per_token(4, 1) == 40
    assert time_per_token(4, 2) == pytest.approx(20, rel=0.02)
    assert time_per_token(4, 4) == pytest.approx(10, rel=0.02)
    assert time_per_token(4, 8) == pytest.approx(10, rel=0.02)


def test_chunks_of_one_prompt_follow_each_other_and_fill_the_pipeline_without_other_requests():
    passes = plan_passes([Request((0,) * 32, 1)], 1, 1, 4)
    assert [one.depth for one in passes] == [0] * 8
    assert simulate(schedule_of(passes, 4), Costs(forward=1)).makespan == 8 + 3


# What is rejected


@pytest.mark.parametrize(
    ("flags", "words"),
    first_of(
        [
            ("--tokens 60", ["--seq-len 40", "positions"]),
            ("--slots 4 --tokens-per-pass 3", ["--tokens-per-pass 3", "at least 4"]),
            ("--temperature -1", ["--temperature", "at least 0"]),
            ("--groups 1000000", ["--groups 1000000", "1024"]),
            ("--temperature 1000", ["--temperature 1000", "below 1000"]),
            ("--requests 2000000000", ["--requests", "1,000,000 are the most"]),
            ("--groups 1024 --seq-len 2000 --tokens 1500", ["--groups", "1,000,000 are the most"]),
            ("--prompt ''", ["--prompt", "empty"]),
            ("--checkpoints /nowhere/at/all", ["--checkpoints", "no checkpoint"]),
            ("--model /nowhere/at/all", ["--model", "config.json"]),
            ("--model a --checkpoints b", ["--model and --checkpoints"]),
            ("--slots 2147483647", ["--slots 2147483647", "use fewer"]),
        ],
        4,
    ),
)
def test_what_cannot_be_answered_is_rejected_in_one_sentence(flags, words):
    with pytest.raises(RunFailed) as failed:
        infer(flags, 2)
    assert "Traceback" not in str(failed.value)
    for word in words:
        assert word in str(failed.value)


def test_a_token_depends_on_its_scores_and_its_place_alone():
    scores = torch.randn(256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for places in ([(0, k, 5) for k in range(20)], [(0, 3, k) for k in range(20)]):
        assert len({choose_token(scores, *place, 0.8) for place in places}) > 5
    assert len({choose_token(scores, seed, 3, 5, 0.8) for seed in range(20)}) > 5
    assert {choose_token(scores, 0, k, 5, 1e-3) for k in range(20)} == {int(scores.argmax())}
    assert choose_token(scores, 0, 3, 5, 0.8) == choose_token(scores, 0, 3, 5, 0.8)
    assert choose_token(scores, 0, 3, 5, 0) == scores.argmax()
