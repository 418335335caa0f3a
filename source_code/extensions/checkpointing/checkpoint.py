# SPDX-License-Identifier: Apache-2.0
"""Saves a training run that lies on many ranks, and restores it, also onto another number of ranks.

No rank has the whole model, so each rank writes its own parameters under their names in the whole
model. A checkpoint does not record from which rank, stage or schedule a tensor came. On restore a
rank requests the names that it has now, and torch.distributed.checkpoint finds their files.
checkpoint_folder.py describes how a checkpoint becomes visible all at once.

A foreign checkpoint may hold wrong weights, but checkpoint_reader.py never runs code from it.
"""

import os
import shutil
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from extensions.checkpointing.checkpoint_folder import (
    PLAIN,
    CheckpointError,
    begin_writing,
    check_files,
    check_unchanged,
    claim,
    describe_files,
    publish,
    remove_leftovers,
    run_to_write,
)
from extensions.checkpointing.checkpoint_reader import PlainReader, reason_of, reject_other_weights
from files.claims import content_of, is_in_place
from files.outputs import sentence_of


@dataclass
class Training:
    """The part of a rank's training that a checkpoint stores.

    `parameters` are those of all stages of this rank, by their names in the whole model, and
    `optimizer` updates all of them. `step` counts updates, `batches` the batches taken from the
    data. `configuration` has, by flag, the values that a continued run must share.
    """

    parameters: dict
    optimizer: object
    rate: object
    configuration: dict
    seed: int = 0
    step: int = 0
    batches: int = 0

    def advance(self):
        """Note that one batch was taken and one update made."""
        self.step += 1
        self.batches += 1
        self.rate.advance()

    def state(self, job):
        """What a checkpoint holds of this rank; tensors are the live ones, not copies."""
        return {
            "model": {
                name: self.in_file(name, parameter.detach())
                for name, parameter in self.parameters.items()
            },
            "optimizer": {
                name: {
                    kind: self.state_in_file(name, tensor)
                    for kind, tensor in self.optimizer.state[self.updated(name)].items()
                }
                for name in self.parameters
                if self.updated(name) in self.optimizer.state
            },
            "rate": self.rate.state_dict(),
            "progress": {"step": self.step, "batches": self.batches},
            "random": {random_name(job): random_state(job.device)},
            "configuration": dict(self.configuration),
        }

    def updated(self, name):
        """Return the tensor that the optimizer updates for the parameter `name`."""
        return self.parameters[name]

    def in_file(self, name, tensor):
        """Return the parameter `name` in the form that a checkpoint stores."""
        return tensor

    def state_in_file(self, name, tensor):
        """Return a tensor of that parameter's optimizer state in the form that is stored."""
        return self.in_file(name, tensor)

    def from_file(self, tensor):
        """Return this rank's tensor from the stored form: the inverse of `state_in_file`."""
        return tensor

    def take(self, job, state):
        """Continue from `state`; the model's weights in it have been read into this rank's own."""
        for name, kinds in state["optimizer"].items():
            own = {kind: self.from_file(tensor) for kind, tensor in kinds.items()}
            if getattr(self.optimizer, "defaults", {}).get("fused"):  # step count is on the device
                device = self.parameters[name].device
                own = {kind: tensor.to(device) for kind, tensor in own.items()}
            self.optimizer.state[self.updated(name)] = own
        self.rate.load_state_dict(state["rate"])
        self.step, self.batches = state["progress"]["step"], state["progress"]["batches"]
        own = state["random"].get(random_name(job))
        if own is not None and own["cpu"].shape == torch.get_rng_state().shape:
            set_random_state(job.device, own)
        else:  # the number of ranks has changed: each rank seeds a new state
            torch.manual_seed(
                zlib.crc32(f"{random_name(job)} step {self.step}".encode(), self.seed)
            )


def random_name(job):
    return f"rank {job.rank} of {job.num_ranks}"


def random_state(device):
    """The states of torch's generators, by name: the CPU's, and that of a rank's GPU."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(device, states):
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


# Reading


def read_state(job, training, checkpoint, names, group=None):
    """The state in a Checkpoint for the parameters of this rank; the model's go straight into them.

    `names` are those of all ranks' parameters. Raises CheckpointError if they are not the saved
    ones. The optimizer has no state before its first step, so the checkpoint's names and sizes tell
    which of its tensors to make and fill.
    """
    reader = PlainReader(checkpoint)
    saved = reader.read_metadata().state_dict_metadata
    reject_other_weights(saved, names, checkpoint.path)
    optimizer = {
        name: room_for(
            saved,
            f"optimizer.{name}.",
            training.state_in_file(name, training.updated(name).detach()),
        )
        for name in training.parameters
    }
    state = {"model": training.state(job)["model"], "optimizer": optimizer, "random": {}}
    if any(name.startswith(f"random.{random_name(job)}.") for name in saved):
        state["random"] = {
            random_name(job): room_for(saved, f"random.{random_name(job)}.", torch.empty(0))
        }
    try:
        dcp.load(state, storage_reader=reader, process_group=group)
    except CheckpointException as error:
        raise CheckpointError(f"{checkpoint.path}: {reason_of(error)}") from None
    return state | {name: checkpoint.description[name] for name in PLAIN}


def room_for(saved, prefix, like):
    """Return empty tensors for all names that start with `prefix`, by the rest of the name.

    A tensor with the shape of the parameter `like` has its device, and its shards if it is sharded.
    AdamW's step count is a scalar, and stays on the CPU.
    """
    found = {name[len(prefix) :]: saved[name] for name in saved if name.startswith(prefix)}
    return {
        kind: torch.empty_like(like, dtype=entry.properties.dtype)
        if entry.size == like.shape
        else torch.empty(
            entry.size,
            dtype=entry.properties.dtype,
            device=like.device if len(entry.size) else "cpu",
        )
        for kind, entry in found.items()
    }


def find_not_finite_tensor(state):
    """Return the first weight or optimizer state that is not finite, with a value, or None."""
    tensors = dict(state["model"])
    for name, kinds in state["optimizer"].items():
        tensors |= {f"{kind} of {name}": tensor for kind, tensor in kinds.items()}
    for name, tensor in tensors.items():
        own = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # FSDP2: the shard
        if not own.isfinite().all():
            return f"{name} holds {own[~own.isfinite()][0].item()}"
    return None


def copy_to_host(state):
    """Return the same dictionaries with copies of the tensors on the CPU."""
    if isinstance(state, dict):
        return {name: copy_to_host(value) for name, value in state.items()}
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    return state


# Saving


class Checkpoints:
    """Saves a training run as it goes on. All ranks make the same calls.

    `folder` and `run` say where (see checkpoint_folder.py), `begin` is the Checkpoint to continue
    from, or None; the `keep` newest checkpoints of the run stay. `timeout` in seconds is the
    longest wait, also for the slowest rank of a save. `problem` is None after a successful save,
    else a sentence; `newest` is the path of the newest checkpoint, or None; all ranks agree.
    """

    def __init__(self, job, folder, run, begin=None, keep=2, asynchronous=False, timeout=60.0):
        self.job, self.folder, self.run, self.begin, self.keep = job, folder, run, begin, keep
        self.limit = timedelta(seconds=2 * timeout + 5)
        self.group = None  # the process group of all ranks, made in `prepare`
        self.background = ThreadPoolExecutor(1) if asynchronous else None
        self.pending = None  # the save in the background
        self.problem = self.claim = self.claimed = None
        self.newest = begin.path if begin else None

    def prepare(self):
        """Claim the folder, remove leftovers of crashes, check every byte of `begin`.

        Call it before all other methods. Returns None, or a sentence that says why training cannot
        begin; the result is the same on every rank.
        """
        # A separate group on the CPU, so that a background save neither mixes its messages with
        # others nor waits in a GPU's queue.
        self.group = dist.new_group(backend="cpu:gloo", timeout=self.limit)
        problem = None
        try:
            if self.job.rank == 0:
                self.claim_folder()
                check_unchanged(self.folder, self.run, self.begin)
                remove_leftovers(self.folder)
            if self.begin:
                # Each rank checks a share of the files, so that no rank reads all of them.
                names = sorted(self.begin.description["files"])[self.job.rank :: self.job.num_ranks]
                check_files(self.begin, names)
        except (CheckpointError, OSError) as error:
            problem = sentence_of(error)
        with self.job.waiting_for_all("its look at the checkpoint"):
            return self.first(problem)

    def restore(self, training):
        """Continue `training` from `begin`. Returns None, or a sentence that says why it failed."""
        try:
            with self.job.waiting_for_all("its part of the checkpoint"):
                names = {name for own in self.gather(list(training.parameters)) for name in own}
                state = read_state(self.job, training, self.begin, names, self.group)
        except CheckpointError as error:
            return str(error)
        training.take(self.job, state)
        return None

    def save(self, training):
        """Save now, or copy the state now and save it in the background.

        Prints how long training was held up. A failed save is reported, and leaves the training and
        all earlier checkpoints as they are. Weights that are not finite are not saved, because they
        would replace good ones. Returns what is not finite, the same on every rank, or None.
        """
        started = time.perf_counter()
        self.wait()  # one save at a time
        state = training.state(self.job)
        with self.job.waiting_for_all(f"the weights after {training.step} steps"):
            not_finite = self.first(find_not_finite_tensor(state))
        if not_finite:
            return f"after the update of step {training.step - 1}, {not_finite}"
        if self.background:
            state = copy_to_host(state)
            self.pending = self.background.submit(self.try_to_write, state, training.step, started)
        else:
            with self.job.waiting_for_all(f"the checkpoint after {training.step} steps"):
                self.problem = self.try_to_write(state, training.step, started)
        held_up = (time.perf_counter() - started) * 1000
        self.say(f"checkpoint after {training.step} steps: training held up {held_up:.1f} ms")
        return None

    def wait(self):
        """Block until the save in the background has ended, if there is one."""
        if self.pending:
            with self.job.waiting_for_all("the checkpoint that is being written"):
                self.problem = self.pending.result()
            self.pending = None

    def finish(self):
        """Wait for the save in the background, and release the claim on the folder."""
        self.wait()
        if self.background:
            self.background.shutdown()
        if self.claim:
            self.claim.close()

    def try_to_write(self, state, step, started):
        """Call `write`, and say on standard error why it failed. Returns that, too."""
        problem = self.write(state, step, started)
        if problem:
            self.say(f"the checkpoint after {step} steps was NOT saved ({problem})", sys.stderr)
        return problem

    def write(self, state, step, started):
        """Write and publish one checkpoint. Returns None, or on every rank why it failed."""
        temporary = None
        try:
            temporary = self.on_rank_0(self.begin_writing, step)
            plain = {name: state.pop(name) for name in PLAIN}
            description = {**plain, "files": self.write_files(state, temporary)}
            place = self.folder, self.run, step
            path = self.on_rank_0(publish, temporary, *place, description, self.keep)
        except CheckpointError as error:
            if self.job.rank == 0 and temporary:
                shutil.rmtree(temporary, ignore_errors=True)
            return str(error)
        self.newest = path
        took = (time.perf_counter() - started) * 1000
        self.say(f"checkpoint after {step} steps: whole in {took:.1f} ms, {path}")
        return None

    def begin_writing(self, step):
        """Make the temporary folder; if somebody has removed the whole folder, claim it anew first."""
        if not is_in_place(self.claim, self.folder):
            is_filled = os.path.isdir(self.folder) and content_of(self.folder)
            if is_filled and not os.path.samestat(os.stat(self.folder), self.claimed):
                raise CheckpointError(f"another folder has the name {self.folder} by now")
            lost = self.claim
            self.claim_folder()
            lost.close()
            self.run = run_to_write(self.folder, None, False)  # another job may have saved there
        temporary = begin_writing(self.folder, self.run, step)
        if not is_in_place(self.claim, self.folder):
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(f"another folder has the name {self.folder} by now")
        return temporary

    def claim_folder(self):
        """Claim the folder for this job, and note which one it is, whatever its name becomes."""
        self.claim, self.claimed = claim(self.folder), os.stat(self.folder)

    def write_files(self, state, temporary):
        """Write and sync this rank's tensors. Returns size and checksum of all ranks' files."""
        writer = dcp.FileSystemWriter(temporary, sync_files=True, overwrite=False)
        try:
            dcp.save(state, storage_writer=writer, process_group=self.group)
        except CheckpointException as error:
            raise CheckpointError(reason_of(error)) from None
        own, problem = {}, None
        try:
            own = describe_files(temporary, f"__{self.job.rank}_")
            if self.job.rank == 0:
                own |= describe_files(temporary, ".metadata")
        except OSError as error:
            problem = sentence_of(error)
        everything = self.gather((own, problem))
        if problem := next((each for _, each in everything if each), None):
            raise CheckpointError(problem)
        return {name: entry for files, _ in everything for name, entry in files.items()}

    def on_rank_0(self, function, *arguments):
        """Call `function` on rank 0 and return its result on all ranks.

        Raises CheckpointError on all ranks when it fails.
        """
        result = problem = None
        if self.job.rank == 0:
            try:
                result = function(*arguments)
            except (CheckpointError, OSError) as error:
                problem = sentence_of(error)
        result, problem = self.gather((result, problem))[0]
        if problem:
            raise CheckpointError(problem)
        return result

    def first(self, problem):
        """Return on all ranks the problem of the lowest rank that has one, or None."""
        return next(filter(None, self.gather(problem)), None)

    def gather(self, value):
        """Return on all ranks the list of every rank's value."""
        values = [None] * self.job.num_ranks
        dist.all_gather_object(values, value, group=self.group)
        return values

    def say(self, text, stream=None):
        if self.job.rank == 0:
            print(text, flush=True, file=stream)
