"""A training run that diverges ends with status 1 and one sentence, and its good checkpoints stay."""

import contextlib
import importlib
import io
import json
import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from further import first_of
from ranks import run_on_ranks
from saved_models import write_model

from course.failed_run import RunFailed
from course.launch import run
from extensions.checkpointing import checkpoint_folder
from extensions.optimization.clipping import norm_of
from extensions.optimization.finite import find_not_finite
from extensions.real_models.saved_folder import read_model
from extensions.real_models.tensor_files import write_tensors
from extensions.tensor_parallel import sharded_training
from files.inputs import InputError
from files.outputs import json_line
from guard.sizes import check_rate
from pipeline.job import join_job
from pipeline.one_process import LEARNING_RATES, build_optimizer
from pipeline.training import DTYPES

SIZES = "--layers 4 --dim 8 --heads 2 --kv-heads 1 --seq-len 8 --batch-size 8 --microbatches 2"
FLAGS = f"{SIZES} --device cpu --dtype float64 --optimizer sgd --steps 8"
SAVING = {
    "distributed_checkpointing": "--save-every 1",
    "pipeline_with_data_parallel": "--save-every 1 --replicas 2 --layers 2",
    "tensor_parallel": "--save-every 1 --tensor 2 --kv-heads 2",
    "pretrain_llama": "--save-every 1 --evaluate-every 1 --evaluate-windows 2 --sample 2",
}


def train(rank, script, flags, spoil=None):
    """On one rank: the script's exit status, and what it wrote to standard error.

    `spoil` is (rank, step): there a weight becomes infinite in the update, which no loss shows.
    """
    module = importlib.import_module(script)
    if spoil and spoil[0] == rank:
        builder = module if hasattr(module, "build_optimizer") else sharded_training
        builder.build_optimizer = spoiling(builder.build_optimizer, spoil[1])
    sys.argv = [f"{script}.py", *flags.split()]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = module.main()
    return status, said.getvalue()


def spoiling(build, at_step):
    """`build`, whose optimizers make a weight infinite in update number `at_step`, from 0."""

    def build_spoiling(name, parameters, *further, **options):
        parameters = list(parameters)
        optimizer = build(name, parameters, *further, **options)
        step, calls = optimizer.step, iter(range(100))

        def step_and_spoil():
            step()
            if next(calls) == at_step:
                parameters[-1].data.view(-1)[0] = math.inf

        optimizer.step = step_and_spoil
        return optimizer

    return build_spoiling


def saved_steps(folder):
    return checkpoint_folder.steps_of(folder, "run-0001")


def newest_is_finite(folder, tmp_path):
    """Whether all weights in the newest checkpoint are finite, read by torch alone."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(checkpoint_folder.find_checkpoint(folder).path, tmp_path / "whole.pt")
    weights = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
    assert weights
    return all(weight.isfinite().all() for weight in weights.values())


def strict_rows(file):
    """The JSON objects in a file; NaN and Infinity, which are not JSON, fail."""

    def not_json(constant):
        raise ValueError(constant)

    return [json.loads(line, parse_constant=not_json) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_saved_model_with_a_number_that_is_not_finite_is_named_when_it_is_loaded(tmp_path, value):
    model = read_model(write_model(tmp_path / "model"), 8)
    model.build_part(0, 4, torch.float32, "cpu")
    tensors = {name: stored.read() for name, stored in model.tensors.items()}
    tensors["model.norm.weight"][3] = value
    write_tensors(tmp_path / "model/model.safetensors", tensors)
    model.build_part(0, 3, torch.float32, "cpu")  # another rank's layers
    with pytest.raises(InputError, match="model.norm.weight was saved with a number that is not"):
        model.build_part(3, 4, torch.float32, "cpu")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "ranks"),
    [
        ("finetune.py --data README.md --steps 1 --seq-len 16 --model {0} --save {0}-new", 1),
        ("convert.py --from-hf {0} --checkpoints {0}-new", None),
    ],
)
def test_a_base_model_that_is_not_finite_is_named_and_leaves_no_folder(tmp_path, program, ranks):
    folder = write_model(tmp_path / "model")
    tensors = {name: stored.read() for name, stored in read_model(folder, 8).tensors.items()}
    tensors["model.norm.weight"][3] = math.nan
    write_tensors(folder / "model.safetensors", tensors)
    with pytest.raises(RunFailed, match="model.norm.weight was saved with a number that is not"):
        run(program.format(folder), ranks, warm=True, show=False)
    assert not (tmp_path / "model-new").exists()


def test_embedding_and_head_that_are_tied_and_not_finite_are_not_called_apart(tmp_path):
    folder = write_model(tmp_path / "model", tied=True)
    tensors = {name: stored.read() for name, stored in read_model(folder, 8).tensors.items()}
    tensors["model.embed_tokens.weight"][3, 0] = math.nan
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    write_tensors(folder / "model.safetensors", tensors)
    with pytest.raises(InputError, match="embed_tokens.weight was saved with a number that is not"):
        read_model(folder, 8)


@pytest.mark.processes
@pytest.mark.parametrize("how", first_of(["", "--asynchronous"], 1))
@pytest.mark.parametrize("script", SAVING)
def test_a_loss_that_is_not_finite_ends_the_training_and_keeps_the_good_checkpoints(
    tmp_path, script, how
):
    folder, losses = tmp_path / "saved", tmp_path / "losses"
    flags = f"{FLAGS} {SAVING[script]} {how} --learning-rate 1e300"
    ends = run_on_ranks(train, 2, script, f"{flags} --checkpoints {folder} --losses {losses}")
    assert [status for status, _ in ends] == [1, 1]
    sentence = "".join(said for _, said in ends)
    assert sentence.count("\n") == 1
    step = int(re.match(r"the loss of step (\d+) is (nan|inf): ", sentence)[1])
    assert f"{folder}/run-0001/step-{step:08} is kept" in sentence
    assert "--learning-rate" in sentence and "--clip" in sentence
    # It ended at once, with what was saved before.
    assert [row["step"] for row in strict_rows(losses)] == list(range(step + 1))
    assert strict_rows(losses)[-1]["loss"] is None
    assert saved_steps(folder)[-1] == step
    assert newest_is_finite(folder, tmp_path)


def train_with_a_norm_of_nan(rank, script, flags, at_step):
    """On one rank: as `train`, with a gradient norm of NaN in step `at_step`."""
    module = importlib.import_module(script)
    clip, calls = module.clip_gradients, iter(range(100))

    def clip_and_spoil(*arguments):
        norm = clip(*arguments)
        return math.nan if next(calls) == at_step else norm

    module.clip_gradients = clip_and_spoil
    return train(rank, script, flags)


@pytest.mark.processes
@pytest.mark.parametrize("script", SAVING)
def test_a_norm_that_is_not_finite_ends_the_training_before_its_update(tmp_path, script):
    flags = f"{FLAGS} {SAVING[script]} --clip 1 --checkpoints {tmp_path}"
    ends = run_on_ranks(train_with_a_norm_of_nan, 2, script, flags, 2)
    assert [status for status, _ in ends] == [1, 1]
    said = "".join(said for _, said in ends)
    assert said.startswith("the gradient norm of step 2 is nan: ") and said.count("\n") == 1
    assert saved_steps(tmp_path) == [1, 2]


@pytest.mark.processes
@pytest.mark.parametrize("rank", first_of([0, 1], 1))
@pytest.mark.parametrize("script", SAVING)
def test_weights_that_an_update_has_spoilt_are_not_saved_though_the_loss_was_finite(
    tmp_path, script, rank
):
    folder = tmp_path / "saved"
    flags = f"{FLAGS} {SAVING[script]} --checkpoints {folder}"
    ends = run_on_ranks(train, 2, script, flags, (rank, 2))
    assert [status for status, _ in ends] == [1, 1]
    sentence = "".join(said for _, said in ends)
    assert sentence.startswith("after the update of step 2, ") and "holds inf" in sentence
    assert f"{folder}/run-0001/step-00000002 is kept" in sentence
    assert saved_steps(folder) == [1, 2]
    assert newest_is_finite(folder, tmp_path)


@pytest.mark.processes
def test_the_command_ends_with_status_1_and_shows_the_sentence(tmp_path):
    """As it is typed: eight steps, of which a NaN would have left the two last checkpoints."""
    command = (
        f"distributed_checkpointing.py {FLAGS} --learning-rate 1e300 --save-every 1 "
        f"--checkpoints {tmp_path / 'saved'}"
    )
    with pytest.raises(RunFailed, match=r"the loss of step \d+ is (nan|inf).*is kept") as failed:
        run(command, 2, warm=True, show=False, limit=60)
    assert "exit status 1" in str(failed.value)
    assert newest_is_finite(tmp_path / "saved", tmp_path)


@pytest.mark.processes
def test_without_checkpoints_the_sentence_says_that_nothing_was_saved(tmp_path):
    metrics = tmp_path / "metrics"
    flags = f"{FLAGS} --evaluate-every 1 --learning-rate 1e300 --metrics {metrics}"
    ends = run_on_ranks(train, 2, "pretrain_llama", flags)
    assert [status for status, _ in ends] == [1, 1]
    assert "no checkpoint was saved" in ends[0][1] and ends[1][1] == ""
    rows = strict_rows(metrics)
    assert [row["loss"] for row in rows if "loss" in row][-1] is None


def agree(rank, values):
    job = join_job("cpu", 20.0)
    loss, norm = values[rank]
    found = find_not_finite(job, 3, None if loss is None else torch.tensor(loss), norm)
    job.leave()
    return found


@pytest.mark.processes
@pytest.mark.parametrize(
    ("loss", "norms", "found"),
    [
        (5.5, (1.0, 1.0), None),
        (5.5, (None, None), None),
        (math.nan, (None, None), "the loss of step 3 is nan"),
        (math.inf, (math.nan, math.nan), "the loss of step 3 is inf"),
        (5.5, (math.inf, 1.0), "the gradient norm of step 3 is inf"),
    ],
)
def test_all_ranks_learn_which_number_is_not_finite(loss, norms, found):
    values = [(None, norms[0]), (loss, norms[1])]
    assert run_on_ranks(agree, 2, values) == [found, found]


def test_a_norm_whose_squares_overflow_together_is_infinite():
    assert norm_of({"a": 1.7e308, "b": 1.7e308}) == math.inf
    assert math.isnan(norm_of({"a": math.inf, "b": math.nan}))


@pytest.mark.processes
def test_a_script_without_checkpoints_ends_with_status_1_and_names_the_first_such_step(tmp_path):
    losses = tmp_path / "losses"
    flags = f"{FLAGS} --learning-rate 1e300 --losses {losses}"
    ends = run_on_ranks(train, 2, "gpipe", flags)
    # Only the rank with the losses can tell; a launcher reports the job as failed all the same.
    assert [status for status, _ in ends] == [0, 1]
    rows = strict_rows(losses)
    first = [row["loss"] for row in rows].index(None)
    assert len(rows) == 8 and ends[0][1] == "" and ends[1][1].count("\n") == 1
    assert re.match(rf"the loss of step {first} is (nan|inf): ", ends[1][1])
    assert "--learning-rate" in ends[1][1]


@pytest.mark.processes
def test_so_does_one_process_with_several_stages():
    flags = f"{FLAGS} --learning-rate 1e300 --single-process 2"
    [(status, said)] = run_on_ranks(train, 1, "naive_model_parallelism", flags)
    assert status == 1 and re.match(r"the loss of step \d is (nan|inf): ", said)


def test_no_update_overflows_with_the_largest_rate_that_is_taken():
    """The weights' type limits the rate, and AdamW divides the first one by 0.1."""
    for dtype in DTYPES:
        flags = SimpleNamespace(dtype=dtype, torch_dtype=DTYPES[dtype])
        flags.learning_rate = torch.finfo(flags.torch_dtype).max / 11
        check_rate(flags)
        for name in LEARNING_RATES:
            weight = torch.ones(1, requires_grad=True, dtype=flags.torch_dtype)
            weight.grad = torch.ones_like(weight)
            build_optimizer(name, [weight], flags.learning_rate).step()


def test_a_loss_that_is_large_ends_nothing():
    ends = run_on_ranks(train, 2, "distributed_checkpointing", f"{FLAGS} --learning-rate 30")
    assert ends == [(0, ""), (0, "")]


def test_json_lines_hold_null_for_what_is_not_finite():
    row = {"step": 3, "loss": math.nan, "norm": math.inf, "rate": 0.25}
    assert json.loads(json_line(row)) == {"step": 3, "loss": None, "norm": None, "rate": 0.25}
