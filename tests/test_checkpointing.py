"""A training run that is saved and continued, also on other ranks, has the losses of one that was not.

Bit for bit on the same cut of the model, to 1e-12 on another, for every optimizer.
"""

import functools
import importlib
import io
import json
import os
import shlex
import shutil
import signal
import sys
import time
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import convert
import distributed_checkpointing
import pytest
import torch
import torch.distributed.checkpoint as dcp
from further import first_of
from ranks import run_on_ranks
from torch.distributed.checkpoint.planner import SavePlan

from course.followed_run import follow
from course.launch import LaunchedRanks, launch_words, run
from extensions.checkpointing import checkpoint, checkpoint_arguments, checkpoint_folder
from extensions.checkpointing.whole_checkpoint import read_weights
from extensions.optimization.clipping import norm_of, scale_gradients, squares_of
from extensions.optimization.learning_rate import share_of_peak
from files import outputs
from pipeline import model
from pipeline.model import FeedForward, ModelConfig, build_part

SIZES = "--layers 8 --dim 16 --heads 2 --kv-heads 2 --seq-len 8 --batch-size 8 --microbatches 4"
FLAGS = f"distributed_checkpointing.py {SIZES} --device cpu --clip 1 --decay-steps 9"


def train(folder, flags="", ranks=4, steps=9, checkpoints=True, **options):
    """Run the script on warm ranks; {step: loss} in full precision, and what was printed."""
    losses = Path(folder) / "losses"
    losses.unlink(missing_ok=True)
    where = f"--checkpoints {Path(folder) / 'saved'} --save-every 3" if checkpoints else ""
    command = f"{FLAGS} --steps {steps} --losses {losses} {where} {flags}"
    done = run(command, ranks, warm=True, show=False, limit=60, **options)
    rows = map(json.loads, losses.read_text().splitlines()) if losses.exists() else []
    return {row["step"]: row["loss"] for row in rows}, done.output


@functools.cache
def undisturbed(optimizer="sgd", ranks=4):
    """{step: loss} of nine steps in one go, nothing saved."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        return train(folder, f"--optimizer {optimizer}", ranks, checkpoints=False)[0]


def largest_difference(ours, theirs):
    return max(abs(ours[step] - theirs[step]) for step in ours)


@pytest.mark.parametrize(
    ("optimizer", "how"),
    first_of(
        [
            ("adamw", ""),
            ("momentum", "--asynchronous"),
            ("sgd", ""),
            ("sgd", "--asynchronous"),
            ("momentum", ""),
            ("adamw", "--asynchronous"),
        ],
        2,
    ),
)
def test_continued_on_the_same_cut_all_losses_are_equal_to_the_last_bit(tmp_path, optimizer, how):
    flags = f"--optimizer {optimizer} {how}"
    before, _ = train(tmp_path, flags, steps=4)
    after, output = train(tmp_path, flags)
    assert "continues after 4 steps" in output
    assert {**before, **after} == undisturbed(optimizer)
    assert sorted(before) == [0, 1, 2, 3] and sorted(after) == [4, 5, 6, 7, 8]


@pytest.mark.parametrize("optimizer", first_of(["sgd", "momentum", "adamw"], 1))
def test_continued_on_4_2_1_and_2_ranks_with_2_chunks_the_losses_stay_within_1e_12(
    tmp_path, optimizer
):
    losses = {}
    for ranks, steps, flags in [
        (4, 3, "--schedule 1f1b"),
        (2, 5, "--schedule gpipe --microbatches 2"),
        (1, 6, ""),
        (2, 8, "--schedule interleaved-1f1b --chunks 2 --asynchronous"),
        (3, 9, "--cut 1,5,2"),
    ]:
        some, _ = train(tmp_path, f"{flags} --optimizer {optimizer}", ranks, steps)
        losses.update(some)
    assert sorted(losses) == list(range(9))
    assert largest_difference(losses, undisturbed(optimizer)) <= 1e-12
    # Another learning rate, or an optimizer without its past, would be seen: losses move.
    assert max(losses.values()) - min(losses.values()) > 0.1


def test_the_losses_are_those_of_one_process_with_the_same_schedule_and_clipping(tmp_path):
    _, output = train(tmp_path, "--optimizer adamw --verify", steps=5)
    assert "as promised" in output
    _, output = train(tmp_path, "--optimizer adamw --verify", ranks=2)
    assert "as promised" in output and "   5  " in output and "   0  " not in output


# What a checkpoint holds


def saved_state(folder):
    """The newest checkpoint in one dictionary, its tensors read by torch alone."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    checkpoint = checkpoint_folder.find_checkpoint(folder / "saved")
    dcp_to_torch_save(checkpoint.path, folder / "whole.pt")
    plain = {name: checkpoint.description[name] for name in checkpoint_folder.PLAIN}
    return plain | torch.load(folder / "whole.pt", weights_only=True)


def equal(ours, theirs):
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(equal(ours[k], theirs[k]) for k in ours)
    return torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


@pytest.mark.further
def test_asynchronous_and_synchronous_saving_write_the_same_bits(tmp_path):
    states = []
    for how in ("", "--asynchronous"):
        folder = tmp_path / f"with{how}"
        folder.mkdir()
        # Saved in every step: what the background writes, the next step already changes.
        train(folder, f"--optimizer adamw --save-every 1 {how}", ranks=2, steps=4)
        states.append(saved_state(folder))
    assert equal(*states)
    assert len(states[0]["model"]) == len(states[0]["optimizer"]) == 8 * 9 + 3


class SlowToWrite(checkpoint.Checkpoints):
    """Training is two steps further when the writing begins."""

    def write(self, *arguments):
        time.sleep(0.3)
        return super().write(*arguments)


def train_while_it_is_slow_to_write(rank, flags, copies):
    with mock.patch.object(sys, "argv", shlex.split(flags)):
        with mock.patch.object(checkpoint_arguments, "Checkpoints", SlowToWrite):
            if copies:
                return distributed_checkpointing.main()
            with mock.patch.object(checkpoint, "copy_to_host", lambda state: state):
                return distributed_checkpointing.main()


@pytest.mark.further
def test_without_the_copy_a_checkpoint_in_the_background_holds_weights_of_later_steps(tmp_path):
    train(tmp_path, "--optimizer momentum", ranks=2, steps=3)
    expected = saved_state(tmp_path)
    for copies in (True, False):
        folder = tmp_path / f"copies {copies}"
        where = f"--checkpoints '{folder / 'saved'}' --save-every 3 --keep 9 --asynchronous"
        flags = f"{FLAGS} --optimizer momentum --steps 5 {where}"
        folder.mkdir()
        run_on_ranks(train_while_it_is_slow_to_write, 2, flags, copies)
        shutil.rmtree(folder / "saved" / "run-0001" / "step-00000005")
        state = saved_state(folder)
        assert state["progress"] == expected["progress"] == {"step": 3, "batches": 3}
        assert equal(state["model"], expected["model"]) is copies


def test_names_are_those_of_the_whole_model_and_nothing_tells_the_cut(tmp_path):
    train(tmp_path, "--optimizer adamw", ranks=2, steps=2)
    state = saved_state(tmp_path)
    model = build_part(ModelConfig(8, 16, 2, 2, 8), 0, 8)
    model.load_state_dict(state["model"])  # every name, and no other
    assert state["progress"] == {"step": 2, "batches": 2}
    assert state["rate"] == {"updates": 2}
    assert set(state["optimizer"]["head.weight"]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    "optimizer, numbers", first_of([("sgd", 1), ("momentum", 2), ("adamw", 3)], 1)
)
def test_bytes_are_those_of_the_weights_and_of_what_the_optimizer_remembers(
    tmp_path, optimizer, numbers
):
    train(tmp_path, f"--optimizer {optimizer}", ranks=2, steps=1)
    state = saved_state(tmp_path)
    tensors = [*state["model"].values()]
    for remembered in state.get("optimizer", {}).values():
        tensors += remembered.values()
    weights = sum(p.numel() for p in build_part(ModelConfig(8, 16, 2, 2, 8), 0, 8).parameters())
    scalars = len(state["model"]) if optimizer == "adamw" else 0  # its count of steps, float32
    assert sum(t.numel() * t.element_size() for t in tensors) == 8 * weights * numbers + 4 * scalars


def draw_after_training(rank, flags):
    """Train, then draw from this rank's generator."""
    drawn = {}

    def draw(log, *rest, **options):
        drawn["number"] = torch.rand(1).item()
        return 0

    with mock.patch.object(sys, "argv", shlex.split(flags)):
        with mock.patch.object(distributed_checkpointing.LossLog, "finish", draw):
            assert distributed_checkpointing.main() == 0
    return drawn["number"]


class Drawing:
    """A worker that draws one number in each step, as dropout would."""

    def __init__(self, *arguments):
        self.worker = worker_class(*arguments)

    def run_step(self, inputs, targets):
        torch.rand(1)
        return self.worker.run_step(inputs, targets)


worker_class = distributed_checkpointing.Worker


def train_and_draw(rank, flags, seed):
    torch.manual_seed(seed + rank)
    with mock.patch.object(distributed_checkpointing, "Worker", Drawing):
        return draw_after_training(rank, flags)


def test_random_state_goes_on_where_it_was_on_as_many_ranks_and_is_its_own_on_others(tmp_path):
    def draws(ranks, steps, seed, folder):
        flags = f"{FLAGS} --steps {steps} --checkpoints {tmp_path / folder}"
        return run_on_ranks(train_and_draw, ranks, flags, seed)

    at_once = draws(2, 4, 7, "once")
    draws(2, 2, 7, "again")
    assert draws(2, 4, 1000, "again") == at_once
    others = draws(3, 5, 2000, "again")
    assert len({*others, *at_once}) == 5


# Forgotten things are noticed: each fault is planted in Training, and the losses change


def forget(what):
    def take(self, job, state):
        state = dict(state)
        if what == "optimizer":
            state["optimizer"] = {}
        elif what == "batches":
            state["progress"] = {**state["progress"], "batches": 0}
        elif what == "rate":
            state["rate"] = {"updates": 0}
        else:
            for name, parameter in self.parameters.items():
                if name.startswith(what):
                    parameter.data.mul_(1 + 1e-9)
        whole_take(self, job, state)

    return take


whole_take = checkpoint.Training.take


def train_forgetfully(rank, flags, what):
    with mock.patch.object(sys, "argv", shlex.split(flags)):
        with mock.patch.object(checkpoint.Training, "take", forget(what)):
            return distributed_checkpointing.main()


@pytest.mark.parametrize("what", first_of(["optimizer", "batches", "rate", "layers.5."], 2))
def test_a_training_that_forgets_something_has_other_losses(tmp_path, what):
    flags = "--optimizer adamw"
    train(tmp_path, flags, ranks=2, steps=4)
    losses = tmp_path / "losses"
    run_on_ranks(
        train_forgetfully,
        2,
        f"{FLAGS} --steps 9 --losses {losses} --checkpoints {tmp_path / 'saved'} {flags}",
        what,
    )
    rows = map(json.loads, losses.read_text().splitlines())
    after = {row["step"]: row["loss"] for row in rows}
    assert sorted(after) == [4, 5, 6, 7, 8]
    assert largest_difference(after, undisturbed("adamw")) > 1e-12


class SquaredReLU(FeedForward):
    """A feed-forward network of the same width without the gate."""

    def __init__(self, config):
        super().__init__(config)
        del self.gate

    def forward(self, x):
        return self.down(self.up(x).relu() ** 2)


def train_without_gate(rank, flags, said):
    with mock.patch.object(sys, "argv", shlex.split(flags)):
        with mock.patch.object(model, "FeedForward", SquaredReLU):
            with open(said, "a") as error, redirect_stderr(error):
                with pytest.raises(SystemExit) as end:
                    distributed_checkpointing.main()
    return end.value.code


def test_a_weight_that_the_model_no_longer_has_is_named_and_not_left_out_in_silence(tmp_path):
    train(tmp_path, ranks=2, steps=1)
    flags = f"{FLAGS} --steps 2 --checkpoints {tmp_path / 'saved'}"
    said = tmp_path / "said"
    assert run_on_ranks(train_without_gate, 2, flags, said) == [2, 2]
    assert "has the weight layers.0.feed_forward.gate.weight, and this model" in said.read_text()
    names = [name for name in saved_state(tmp_path)["model"] if "gate" not in name]
    with pytest.raises(checkpoint_folder.CheckpointError, match=r"has the weight layers\.0.*gate"):
        read_weights(checkpoint_folder.find_checkpoint(tmp_path / "saved"), names)


# Clipping


def gradients_clipped_by_stage(job, named_parameters, largest_norm):
    """The common mistake: each rank clips by the norm of what it has."""
    parameters = [parameter for _, parameter in named_parameters]
    torch.nn.utils.clip_grad_norm_(parameters, largest_norm)


def train_clipping_by_stage(rank, flags):
    name = "clip_gradients"
    with mock.patch.object(sys, "argv", shlex.split(flags)):
        with mock.patch.object(distributed_checkpointing, name, gradients_clipped_by_stage):
            return distributed_checkpointing.main()


CLIPPED = f"{FLAGS} --clip 0.5 --steps 4 --learning-rate 0.6 --verify"


def test_clipping_by_the_norm_of_the_whole_model_equals_one_process():
    for ranks in (1, 2, 4):
        output = run(CLIPPED, ranks, warm=True, show=False).output
        assert "as promised" in output
    assert run(f"{CLIPPED} --clip 1e9", 2, warm=True, show=False).losses[-1] != pytest.approx(
        run(CLIPPED, 2, warm=True, show=False).losses[-1], abs=1e-3
    )  # it clips indeed


def test_clipping_each_stage_by_its_own_norm_is_found_out():
    assert run_on_ranks(train_clipping_by_stage, 2, CLIPPED) == [0, 1]


def test_the_norm_has_the_same_digits_in_whatever_order_ranks_bring_their_parts():
    squares = {f"layers.{i}.weight": 10.0 ** (i % 17) / 3 for i in range(40)}
    norm = norm_of(squares)
    backwards = dict(reversed(squares.items()))
    assert norm_of(backwards) == norm
    added = [functools.reduce(float.__add__, part.values()) for part in (squares, backwards)]
    assert added[0] != added[1]  # plain adding would depend on it


def test_one_process_clips_as_torch_does():
    parameters = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    expected = [parameter.grad.clone() for parameter in parameters]
    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    for copy, gradient in zip(copies, expected):
        copy.grad = gradient.clone()
    theirs = torch.nn.utils.clip_grad_norm_(copies, 0.7)
    named = [(str(i), parameter) for i, parameter in enumerate(parameters)]
    norm = norm_of(squares_of(named))
    scale_gradients(named, norm, 0.7)
    assert norm == pytest.approx(theirs.item(), rel=1e-14)
    for parameter, copy in zip(parameters, copies):
        assert torch.allclose(parameter.grad, copy.grad, rtol=1e-14, atol=0)


# The learning rate


def test_the_rate_warms_up_falls_along_a_cosine_and_stays_at_a_tenth():
    share = share_of_peak
    shares = [share(update, 4, 10) for update in range(13)]
    assert shares[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert shares[7] == pytest.approx(0.55)  # half of the way down
    assert shares[10:] == [0.1, 0.1, 0.1]
    assert shares[4:10] == sorted(shares[4:10], reverse=True)


# Taking a model out


@pytest.mark.parametrize(
    "flags",
    [
        {"--layers": 10**9}, {"--dim": 10**9}, {"--settings": [1]},
        {"--settings": {"a": 1}}, {"--settings": {"config": "{", "rotary": {}}},
    ],
)  # fmt: skip
def test_flags_that_do_not_fit_the_files_are_rejected_before_a_model_is_laid_out(flags):
    sizes = {"--layers": 2, "--dim": 8, "--heads": 2, "--kv-heads": 2, "--vocabulary": 256}
    description = {"configuration": sizes, "files": {"a": [4000, 0]}}
    saved = SimpleNamespace(path="saved", description=description)
    assert convert.checked_settings(saved)[0].layers == 2
    saved.description = {**description, "configuration": {**sizes, **flags}}
    with pytest.raises(checkpoint_folder.CheckpointError, match="^saved"):
        convert.checked_settings(saved)


# Stopping


def stop_rank(rank, flags, victim, number, step):
    """Send this process a signal when its rank has come to `step`."""
    program = importlib.import_module(flags.partition(".py")[0])
    add = program.LossLog.add

    def add_and_signal(log, at, loss):
        add(log, at, loss)
        if (rank, at) == (victim, step):
            os.kill(os.getpid(), number)

    with mock.patch.object(sys, "argv", shlex.split(flags)):
        with mock.patch.object(program.LossLog, "add", add_and_signal):
            return program.main()


@pytest.mark.parametrize("number, victim", first_of([(signal.SIGTERM, 0), (signal.SIGUSR1, 1)], 1))
@pytest.mark.parametrize("how", first_of(["", "--asynchronous"], 1))
def test_a_signal_to_any_rank_lets_the_step_end_saves_and_ends_all_with_75(
    tmp_path, number, victim, how
):
    flags = f"{FLAGS} --steps 9 --checkpoints {tmp_path / 'saved'} {how}"
    assert run_on_ranks(stop_rank, 2, flags, victim, number, 4) == [75, 75]
    assert (tmp_path / "saved" / "latest").read_text() == "run-0001/step-00000005\n"
    marker = tmp_path / "saved" / "stopped"
    assert marker.read_text() == f"{number.name} after 5 steps\n"
    after, _ = train(tmp_path, how, ranks=2)
    assert sorted(after) == [5, 6, 7, 8] and not marker.exists()
    expected = undisturbed(ranks=2)
    assert after == {step: expected[step] for step in after}


def stop_rank_beside_a_folder(rank, flags, place):
    """The same for rank 1, once a folder has the name of the file that marks a stop."""
    add, said = distributed_checkpointing.LossLog.add, io.StringIO()

    def make_and_add(*loss):
        place.mkdir(exist_ok=True)
        add(*loss)

    with mock.patch.object(distributed_checkpointing.LossLog, "add", make_and_add):
        with redirect_stderr(said):
            return stop_rank(rank, flags, 1, signal.SIGTERM, 4), said.getvalue()


def test_a_stop_that_cannot_be_marked_is_one_sentence_and_ends_with_75(tmp_path):
    place = tmp_path / "saved" / "stopped"
    flags = f"{FLAGS} --steps 9 --checkpoints {tmp_path / 'saved'}"
    first, second = run_on_ranks(stop_rank_beside_a_folder, 2, flags, place)
    assert (first[0], second) == (75, (75, ""))
    assert str(place) in first[1] and first[1].count("\n") == 1
    assert (tmp_path / "saved" / "latest").read_text() == "run-0001/step-00000005\n"


def test_a_stop_is_not_marked_in_another_folder_that_has_got_the_name(tmp_path, capfd):
    folder, other = tmp_path / "saved", tmp_path / "other"
    ours = checkpoint.Checkpoints(SimpleNamespace(rank=0), str(folder), "run-0001")
    ours.claim_folder()
    folder.rename(tmp_path / "moved")
    other.mkdir()
    other.rename(folder)
    job, training = SimpleNamespace(rank=0), SimpleNamespace(step=3)
    checkpoint_arguments.status_of_end(job, training, ours, signal.SIGTERM)
    assert os.listdir(folder) == [] and outputs.not_written.pop() == "--checkpoints"
    assert "another folder has this name by now" in capfd.readouterr().err


@pytest.mark.parametrize(
    "program", ["pipeline_with_data_parallel.py --replicas 2", "tensor_parallel.py --tensor 2"]
)
def test_a_signal_lets_replicas_and_shares_of_a_layer_save_and_end_with_75(tmp_path, program):
    saved = tmp_path / "saved"
    flags = f"{program} {SIZES} --device cpu --steps 9 --checkpoints {saved}"
    assert run_on_ranks(stop_rank, 2, flags, 1, signal.SIGUSR1, 3) == [75, 75]
    assert (saved / "latest").read_text() == "run-0001/step-00000004\n"
    assert (saved / "stopped").read_text() == "SIGUSR1 after 4 steps\n"


@pytest.mark.further
def test_under_torchrun_a_stop_that_was_asked_for_is_a_success_of_one_line(tmp_path):
    flags = f"{FLAGS} --steps 99 --checkpoints {tmp_path / 'saved'} --pace 10 20".split()
    ranks = LaunchedRanks(launch_words(flags[0], flags[1:], 2))
    errors = []
    ranks.streams["stderr"] = (errors.append(line) or line for line in ranks.streams["stderr"])
    try:
        output = follow(ranks, show=False, limit=60, send=("SIGUSR1", 1, "step 1"))
    finally:
        ranks.end()
    assert output.count("stopped by SIGUSR1 after ") == 1
    assert errors == []
    assert (tmp_path / "saved" / "stopped").read_text().startswith("SIGUSR1 after ")


@pytest.mark.further
def test_torchrun_restarts_the_ranks_of_a_killed_training_which_continues(tmp_path):
    where = f"--checkpoints {tmp_path / 'saved'} --save-every 3 --pace 10 20"
    script, *flags = f"{FLAGS} --steps 9 {where}".split()
    words = launch_words(script, flags, 2)
    words.insert(words.index("--standalone"), "--max-restarts=1")
    ranks = LaunchedRanks(words)
    try:
        output = follow(ranks, show=False, limit=60, send=("SIGKILL", 1, "step 4"))
    finally:
        ranks.end()
    assert "continues after 3 steps" in output and "step 8 " in output


def test_a_training_that_is_done_says_so_and_ends_well(tmp_path):
    train(tmp_path, ranks=2, steps=3)
    losses, output = train(tmp_path, ranks=2, steps=3)
    assert losses == {} and "nothing is left to do: 3 steps of --steps 3 are done" in output


def test_a_training_that_is_done_keeps_the_losses_of_the_run_before(tmp_path):
    kept = tmp_path / "kept"
    train(tmp_path, f"--losses {kept}", ranks=2, steps=3)
    before = kept.read_text()
    train(tmp_path, f"--losses {kept}", ranks=2, steps=3)
    assert before.count("loss") == 3 and kept.read_text() == before


# What a folder holds


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_k_are_kept_and_nothing_else_is_left(tmp_path):
    train(tmp_path, "--save-every 1 --keep 3", ranks=2, steps=6)
    saved = tmp_path / "saved"
    assert entries(saved / "run-0001") == [f"step-{step:08}" for step in (4, 5, 6)]
    assert entries(saved) == ["latest", "lock", "run-0001"]


@pytest.mark.further
def test_fresh_and_from_step_write_beside_what_was_saved_and_touch_none_of_it(tmp_path):
    train(tmp_path, "--save-every 2 --keep 9", ranks=2, steps=6)
    saved = tmp_path / "saved"
    content = {path: path.read_bytes() for path in (saved / "run-0001").rglob("*.*")}
    fresh, _ = train(tmp_path, "--fresh --keep 1 --save-every 1", ranks=2, steps=3)
    assert sorted(fresh) == [0, 1, 2]
    assert (saved / "latest").read_text() == "run-0002/step-00000003\n"
    train(tmp_path, "--keep 1", ranks=2, steps=4)  # continues the fresh one
    assert entries(saved / "run-0002") == ["step-00000004"]
    checkpoint_folder.write_line(saved, "latest", "run-0001/step-00000006")
    older, output = train(tmp_path, "--from-step 2 --keep 1", ranks=2)
    assert "continues after 2 steps" in output
    assert (saved / "latest").read_text() == "run-0003/step-00000009\n"
    assert older == {step: loss for step, loss in undisturbed(ranks=2).items() if step >= 2}
    assert content == {path: path.read_bytes() for path in (saved / "run-0001").rglob("*.*")}
    assert content


def test_a_folder_that_is_removed_while_a_training_runs_is_claimed_anew(tmp_path):
    folder = tmp_path / "outer" / "saved"
    folder.parent.mkdir()
    ours = checkpoint.Checkpoints(SimpleNamespace(rank=0), folder, "run-0001")
    ours.claim_folder()
    assert ours.begin_writing(1).parent.name == "run-0001"
    shutil.rmtree(folder.parent)
    assert ours.begin_writing(2).parent.parent == folder
    with pytest.raises(checkpoint_folder.CheckpointError, match="another job is saving there"):
        checkpoint_folder.claim(folder)
    (folder / "lock").unlink()
    with checkpoint_folder.claim(folder):
        with pytest.raises(checkpoint_folder.CheckpointError, match="another job is saving there"):
            ours.begin_writing(3)
    assert ours.begin_writing(4).parent.name == "run-0002"  # the other job may have saved


@pytest.mark.parametrize("by_link", [False, True])
def test_a_training_does_not_save_into_another_folder_that_has_got_the_name(tmp_path, by_link):
    outer, other = tmp_path / "outer", tmp_path / "other" / "saved"
    outer.mkdir()
    (other / "run-0001").mkdir(parents=True)
    (other / "latest").write_text("run-0001/step-00000009\n")
    ours = checkpoint.Checkpoints(SimpleNamespace(rank=0), str(outer / "saved"), "run-0001")
    ours.claim_folder()
    assert ours.begin_writing(1).is_dir()
    if by_link:  # of the folder above it
        outer.rename(tmp_path / "moved")
        outer.symlink_to(other.parent)
    else:
        (outer / "saved").rename(outer / "moved")
        other.rename(outer / "saved")
    with pytest.raises(checkpoint_folder.CheckpointError, match="another folder has the name"):
        ours.begin_writing(2)
    assert os.listdir(outer / "saved" / "run-0001") == []
    (outer / "saved" / "latest").unlink()
    (outer / "saved" / "run-0001").rmdir()
    assert ours.begin_writing(3).is_dir()  # an empty folder is anybody's


def test_a_folder_that_gets_the_name_just_before_a_save_begins_is_left_as_it_was(
    tmp_path, monkeypatch
):
    folder, other = tmp_path / "saved", tmp_path / "other"
    (other / "run-0001").mkdir(parents=True)
    (other / "latest").write_text("run-0001/step-00000009\n")
    ours = checkpoint.Checkpoints(SimpleNamespace(rank=0), folder, "run-0001")
    ours.claim_folder()

    def begin_writing(*place):
        folder.rename(tmp_path / "moved")
        other.rename(folder)
        return checkpoint_folder.begin_writing(*place)

    monkeypatch.setattr(checkpoint, "begin_writing", begin_writing)
    with pytest.raises(checkpoint_folder.CheckpointError, match="another folder has the name"):
        ours.begin_writing(1)
    assert os.listdir(folder / "run-0001") == []


@pytest.mark.parametrize("moment", ["tensors", "rename", "latest", "older"])
def test_nothing_is_lost_in_a_folder_that_gets_the_name_in_the_middle_of_a_save(
    tmp_path, monkeypatch, moment
):
    folder, other = tmp_path / "saved", tmp_path / "other"
    for step in 1, 2, 3:
        (other / f"run-0001/step-{step:08}").mkdir(parents=True)
    (other / "latest").write_text("run-0001/step-00000002\n")
    for step in 1, 2:
        (folder / f"run-0001/step-{step:08}").mkdir(parents=True)
    temporary = checkpoint_folder.begin_writing(folder, "run-0001", 3)
    before = sorted(other.rglob("*"))
    place_of = {"tensors": folder, "rename": temporary, "latest": folder / "run-0001"}

    def exchange(place):
        if place == place_of.get(moment, folder) and other.exists():
            folder.rename(tmp_path / "moved")
            other.rename(folder)
            if moment == "rename":  # torch has made it there in an earlier exchange
                temporary.mkdir()

    monkeypatch.setattr(checkpoint_folder, "sync_folder", exchange)
    if moment == "tensors":
        exchange(folder)
        dcp.FileSystemWriter(temporary).prepare_local_plan(SavePlan([]))  # torch makes it anew
    description = {"files": {}, "configuration": {}}
    with pytest.raises(checkpoint_folder.CheckpointError, match="another folder has the name"):
        checkpoint_folder.publish(temporary, folder, "run-0001", 3, description, keep=1)
    if moment in ("tensors", "rename"):
        temporary.rmdir()  # as the save that failed does
    assert [other / path.relative_to(folder) for path in sorted(folder.rglob("*"))] == before
    assert (folder / "latest").read_text() == "run-0001/step-00000002\n"


def test_latest_moves_after_the_checkpoint_has_its_name_and_before_an_older_one_goes(tmp_path):
    """The calls that make names, in their order."""
    calls = []

    def note(name):
        original = getattr(os, name)

        def call(source, target, **options):
            calls.append((name, Path(target).name))
            return original(source, target, **options)

        return mock.patch.object(os, name, call)

    folder = tmp_path / "saved"
    with note("rename"), note("replace"):
        for step in (1, 2):
            temporary = checkpoint_folder.begin_writing(folder, "run-0001", step)
            description = {"files": {}, "configuration": {}}
            checkpoint_folder.publish(temporary, folder, "run-0001", step, description, keep=1)
    assert calls[:3] == [
        ("rename", "step-00000001"),
        ("replace", "latest"),
        ("rename", "step-00000002"),
    ]
    assert calls[3] == ("replace", "latest") and calls[4][1].startswith(".deleting-step-00000001")
    assert len(calls) == 5
