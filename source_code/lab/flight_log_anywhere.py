"""A flight log for any program: three lines attach it to modules that are called stage by stage.

    from lab.flight_log_anywhere import record

    log = record("build/monday", {0: first_half})    # or [stage], torch's PipelineStage
    ...
    log.end_step()                                   # in each step, after clipping, before the update

Each rank calls `record` once, for the stages that it has. The log sends no message, so a rank may
have it alone. It writes what flight_log.py writes; `read_recording`, `compare` and the time machine
read it. Messages are not seen, but what a stage takes in and what it gives are: a tensor that left
one stage and did not arrive at the next one differs there.

The k-th forward of a stage in a step is micro-batch k. A backward begins when the gradient of the
stage's output arrives, and ends with the gradient of its input, or with the whole backward.
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

START_OF_2026 = 1767225600  # seconds since 1970: a zero for the clocks of all ranks


class NotRecorded(ValueError):
    """What cannot be recorded; the text says why, and what to do."""


def record(folder, stages, name="program"):
    """Attach a flight log to this rank's stages; returns it. Call it after the process group is there.

    `stages` has nn.Modules by the index of their stage, or is a list of torch's PipelineStages.
    `name` is what the run is called in pictures. Raises NotRecorded for anything else, and for a
    folder that has a log of this rank.
    """
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    views = _views_of(stages)
    weight = next((w for view, _ in views for w in view.part.parameters()), torch.empty(0))
    log = ProgramLog(folder, rank, num_ranks, name, weight.device)
    for view, stage in views:
        log.attach(view, stage)
    return log


def _views_of(stages):
    """[(StageView, what is attached to)] of the argument of `record`."""
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
    """A stage, as it appears to the instruments. `version` counts its different weights."""

    def __init__(self, index, part):
        self.index, self.part = index, part
        self.state, self.prints, self.number = None, None, None
        self.numbers = {}  # digest of all weights -> version
        self.places, self.few = None, []  # where the weights lie, and the first values of each

    @property
    def version(self):
        """The number of the weights as they are; those of an earlier version keep its number."""
        state = self.look_for_changes()
        if state != self.state:
            named = sorted(self.part.named_parameters())
            self.state, self.prints = state, {name: fingerprint(w) for name, w in named}
            digests = "".join(digest for digest, _, _ in self.prints.values())
            whole = hashlib.blake2b(digests.encode(), digest_size=8).hexdigest()
            self.number = self.numbers.setdefault(whole, len(self.numbers))
        return self.number

    def look_for_changes(self):
        """What is another after an update, in far less time than a fingerprint of all weights takes.

        A program that writes into `weight.data` is not counted by autograd; so a few values are
        looked at, too.
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
            self.open(folder, rank, run, clock, memory, new=True)
        except FileExistsError:
            raise NotRecorded(
                f"{folder} has a flight log of rank {rank}; name a new folder"
            ) from None
        self.observer = Observer(None, [self, memory, clock])
        self.views, self.modules, self.known_versions = [], [], set()
        self.under_way, self.context = None, None  # the backward whose end no call announces

    def attach(self, view, stage):
        self.views.append(view)
        if stage is view.part:
            self.modules.append(ModuleStage(self, view))
        else:
            attach_torch_stage(self.observer, stage, view)

    def end_step(self):
        """Say that all forwards and backwards of a step are done, and the update is still to come."""
        self.end_backward()
        self.observer.end_pass()
        for module in self.modules:
            module.count = 0

    @contextmanager
    def acting(self, work):
        """Around an action. It is written at once: nothing marks when the rank begins to wait."""
        with super().acting(work):
            yield
        self.flush()

    def has_new_weights(self, stage, version):
        """Whether weights have not been written yet in this pass, or never."""
        known = (stage.index, version) in self.known_versions
        self.known_versions.add((stage.index, version))
        return super().has_new_weights(stage, version) or not known

    def begin_backward(self, view, microbatch, gradient):
        """The gradient of a stage's output has arrived."""
        before = self.under_way
        if before and before.action[::2] == (view.index + 1, microbatch) and before.made is None:
            before.made = gradient  # in one process a graph may go through several stages
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
        """The module's forward as one action; evaluations and forwards run again are none."""
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
