# SPDX-License-Identifier: Apache-2.0
"""A flight log for any program: three lines attach it to modules that are called stage by stage.

    from lab.flight_log_anywhere import record

    log = record("build/monday", {0: first_half})    # or [stage], torch's PipelineStage
    ...
    log.end_step()                                   # in each step, after clipping, before the update

Each rank calls `record` once, for the stages that it has. The log sends no messages, so it can be
attached to a single rank. It has the format of flight_log.py; `read_recording`, `compare` and the
time machine read it. It does not record messages, but it records the input and the output of each
stage: a tensor that was changed on its way differs at the next stage.

The k-th forward of a stage in a step is micro-batch k. A backward starts when the gradient of the
stage's output arrives. It ends with the gradient of the stage's input, or with the whole backward.
"""

import hashlib
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lab.activation_memory import ActivationMemory
from lab.clock import Clock
from lab.flight_log import FlightLog, fingerprint
from lab.observer import Observer
from lab.torch_stages import attach_torch_stage
from lab.work import Work, first_tensor
from pipeline.schedule import Action

START_OF_2026 = 1767225600  # seconds since 1970: the common start of all ranks' clocks


class NotRecorded(ValueError):
    """Something cannot be recorded; the text says why, and what to do."""


def record(folder, stages, name="program"):
    """Attach a flight log to this rank's stages and return it. Call it after init_process_group.

    `stages` is {index of a stage: nn.Module}, or a list of torch's PipelineStages. `name` is the
    name of the run in pictures. Raises NotRecorded for other stages, and for a folder that already
    has a log of this rank.
    """
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    views = _views_of(stages)
    weight = next((w for view, _ in views for w in view.part.parameters()), torch.empty(0))
    log = ProgramLog(folder, rank, num_ranks, name, weight.device)
    for view, stage in views:
        log.attach(view, stage)
    return log


def _views_of(stages):
    """[(WatchedStage, module or PipelineStage)] of the argument `stages` of `record`."""
    pairs = stages.items() if isinstance(stages, dict) else [(None, stage) for stage in stages]
    views = []
    for index, stage in pairs:
        if hasattr(stage, "forward_one_chunk"):
            views.append((WatchedStage(stage.stage_index, stage.submod), stage))
        elif isinstance(stage, torch.nn.Module) and type(index) is int and index >= 0:
            views.append((WatchedStage(index, stage), stage))
        else:
            raise NotRecorded(
                "record takes nn.Modules by the index of their stage, as in {0: module}, or a list "
                f"of PipelineStages; not {type(stage).__name__}"
            )
    if not views:
        raise NotRecorded("record needs at least one stage of this rank")
    return views


class WatchedStage:
    """A stage as the instruments see it. `version` numbers the different states of its weights."""

    def __init__(self, index, part):
        self.index, self.part = index, part
        self.state, self.prints, self.number = None, None, None
        self.numbers = {}  # digest of all weights -> version
        self.places, self.few = None, []  # addresses of the weights, and their first values

    @property
    def version(self):
        """The version of the present weights; equal weights have the same version."""
        state = self.look_for_changes()
        if state != self.state:
            named = sorted(self.part.named_parameters())
            self.state, self.prints = state, {name: fingerprint(w) for name, w in named}
            digests = "".join(digest for digest, _, _ in self.prints.values())
            whole = hashlib.blake2b(digests.encode(), digest_size=8).hexdigest()
            self.number = self.numbers.setdefault(whole, len(self.numbers))
        return self.number

    def look_for_changes(self):
        """A state that changes with every update; it takes far less time than a fingerprint.

        Autograd does not count changes through `weight.data`, so a few values of each weight are
        part of the state, too.
        """
        weights = list(self.part.parameters())
        places = [(weight.data_ptr(), weight.dtype) for weight in weights]
        if places != self.places:
            contiguous = [weight.detach() for weight in weights if weight.is_contiguous()]
            self.places, self.few = places, [weight.view(-1)[:2] for weight in contiguous]
        counted = places, [weight._version for weight in weights]
        return counted, torch.cat(self.few).tolist() if self.few else []


class ProgramLog(FlightLog):
    """The flight log of one rank of a program that has no schedule as data."""

    def __init__(self, folder, rank, num_ranks, name, device):
        origin = time.perf_counter() - (time.time() - START_OF_2026)
        clock, memory = Clock(rank, device, origin), ActivationMemory(every_pass=True)
        run = {"name": name, "ranks": num_ranks}
        try:
            self.open(folder, rank, run, clock, memory)
        except FileExistsError:
            raise NotRecorded(
                f"{folder} is a file, or has a flight log of rank {rank}; name a new folder"
            ) from None
        self.observer = Observer(None, [self, memory, clock])
        self.views, self.modules, self.known_versions = [], [], set()
        self.under_way, self.context = None, None  # the present backward; no call marks its end

    def attach(self, view, stage):
        self.views.append(view)
        if stage is view.part:
            self.modules.append(ModuleStage(self, view))
        else:
            attach_torch_stage(self.observer, stage, view)

    def end_step(self):
        """Mark the end of a step: call it after all forwards and backwards, before the update."""
        self.end_backward()
        self.observer.end_pass()
        for module in self.modules:
            module.count = 0

    @contextmanager
    def acting(self, work):
        """A context for an action, which is written at once: no call marks the start of a wait."""
        with super().acting(work):
            yield
        self.flush()

    def has_new_weights(self, stage, version):
        """Whether the weights have not been written in this pass, or this version never has."""
        known = (stage.index, version) in self.known_versions
        self.known_versions.add((stage.index, version))
        return super().has_new_weights(stage, version) or not known

    def begin_backward(self, view, microbatch, gradient):
        """Note the start of a backward: the gradient of a stage's output has arrived."""
        before = self.under_way
        if before and before.action[::2] == (view.index + 1, microbatch) and before.made is None:
            before.made = gradient  # in one process a graph may have several stages
        self.end_backward()
        self.under_way = Work(view, Action(view.index, "B", microbatch), gradient, starts_now=True)
        self.context = self.observer.entered("acting", self.under_way)
        torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def end_backward(self):
        if self.context:
            context, self.under_way, self.context = self.context, None, None
            context.close()


class ModuleStage:
    """Shows the forwards and backwards of an nn.Module to a log."""

    def __init__(self, log, view):
        self.log, self.view, self.count = log, view, 0
        self.forward, view.part.forward = view.part.forward, self.observed_forward

    def observed_forward(self, *arguments, **keywords):
        """The module's forward as one action; evaluations and recomputations are not recorded."""
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return self.forward(*arguments, **keywords)
        self.log.end_backward()
        microbatch, self.count = self.count, self.count + 1
        used = first_tensor(arguments, keywords)
        action = Action(self.view.index, "F", microbatch)
        with self.log.observer.around(Work(self.view, action, used, starts_now=True)) as work:
            output = self.forward(*arguments, **keywords)
            work.made = first_tensor(output)
        self.watch_gradients(microbatch, used, work.made)
        return output

    def watch_gradients(self, microbatch, used, made):
        if made is not None and made.requires_grad:
            made.register_hook(
                lambda gradient: self.log.begin_backward(self.view, microbatch, gradient)
            )
        if used is not None and used.requires_grad and used.is_leaf:
            used.register_post_accumulate_grad_hook(self.gradient_of_input)

    def gradient_of_input(self, used):
        if self.log.under_way:
            self.log.under_way.made = used.grad
