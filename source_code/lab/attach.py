# SPDX-License-Identifier: Apache-2.0
"""The three lines that attach the lab to a script: import, flags, observe.

Without them, a script prints the same losses to the last digit and does not need the lab.
"""

import faulthandler
import signal
import sys

from files.outputs import write_output
from guard.ending import end_process
from lab import checks, rehearsal
from lab.activation_memory import ActivationMemory
from lab.clock import Clock, shared_origin
from lab.flight_log import FlightLog
from lab.held_bytes import print_held_bytes
from lab.observer import Observer
from lab.profile import Profile
from lab.report import Report
from lab.slow_network import attach_network
from pipeline.command_line import positive_number
from pipeline.schedules import build_schedule
from pipeline.training import cut_layers


def add_flags(parser):
    """Add the lab's flags to a training script's parser."""
    parser.set_defaults(describe=lambda job: None)  # the report describes the job
    add = parser.add_argument
    add(
        "--pace",
        type=positive_number,
        nargs="+",
        metavar="MS",
        help="least time of a stage's forward, of its backward, and of its weights' part",
    )
    add("--pace-per-layer", action="store_true", help="--pace is the time of one layer")
    add("--timeline", metavar="FILE", help="write the performed timeline of the last step")
    add(
        "--profile",
        metavar="FILE",
        help="write torch.profiler's trace of the second step, all ranks",
    )
    add("--record", metavar="FOLDER", help="write what every action of every rank used and made")
    add("--rehearse", choices=rehearsal.MODES, help="let gloo keep NCCL's rules of order")
    parser.writes += ["--timeline", "--profile", "--record"]
    parser.checks += [
        checks.check_has_ranks,
        checks.check_actions,
        checks.check_pace,
        checks.check_pace_per_layer,
        checks.check_recording,
        rehearsal.check_rehearsal,
    ]


def observe(arguments, job, stages, schedule, what="step", first_step=0, held=None):
    """Attach the lab to a job and this rank's `stages`. All ranks call it, before the first step.

    `schedule` is a Schedule or a name. `what` is the name of one pass through the schedule, and
    `first_step` is above 0 in a continued run. The summary is printed when the job is left. With
    `held`, the parts that are updated and their optimizer, it includes a table of the bytes of each
    rank. Returns the Laboratory, which has the instruments as attributes.
    """
    if isinstance(schedule, str):
        schedule = build_schedule(schedule, job.num_ranks, arguments.microbatches)
    pace = arguments.pace_costs
    if arguments.pace_per_layer:
        pace = checks.pace_by_layers(pace, cut_layers(arguments, schedule.num_stages))
    lab = Laboratory(arguments, job, schedule, pace, what, first_step)
    stages = list(stages)
    lab.held = held and (stages, *held)
    lab.report.counts_activations = bool(stages)
    for stage in stages:
        lab.observer.attach_stage(stage)
    return lab


class Laboratory:
    """The instruments of one rank; all ranks set them up."""

    def __init__(self, arguments, job, schedule, pace, what, first_step):
        self.job = job
        dump_stacks_when_asked()
        # The watch of a guarded program is called for each action: the rank does not wait in it.
        self.observer = Observer(job, [])
        if hasattr(job, "watch"):
            self.observer.methods["acting"].append(job.watch.acting)
        self.network = attach_network(job)
        origin = shared_origin(job, self.network.nodes[job.rank])
        self.clock = job.clock = Clock(job.rank, job.device, origin, pace)
        self.memory = ActivationMemory(every_pass=bool(arguments.record))
        self.log, self.profile, further = None, None, []
        if arguments.record:
            files = arguments.record, job.rank, schedule, self.clock, self.memory
            try:
                self.log = FlightLog(*files, first_step)
            except FileExistsError:  # two runs found the folder empty
                end_process(
                    f"--record {arguments.record}: another run is being recorded there; name a new "
                    "folder"
                )
            except OSError as error:  # the folder has changed since it was checked
                end_process(
                    f"--record {arguments.record} cannot be written ({error.strerror}); name another "
                    "folder"
                )
            further.append(self.log)
        further += [self.memory, self.clock]
        if arguments.profile:
            # The first of several steps includes work that is done once, so it is left out.
            steps = arguments.steps - first_step if what == "step" else 0
            self.profile = Profile(job, self.clock, int(steps > 1))
            further.append(self.profile)
        self.report = Report(job, schedule, self.clock, self.memory, self.network, what)
        self.observer.add(*further)
        if self.profile:
            self.profile.begin()
        self.files = arguments.timeline, arguments.profile
        self.leave_job, job.leave = job.leave, self.leave

    def leave(self):
        """Write the requested files, print the summary, leave the job."""
        timeline_file, profile_file = self.files
        if self.log:
            self.log.close()
        self.report.finish(timeline_file)
        if self.held and self.clock.passes:
            print_held_bytes(self.job, *self.held, self.memory.peak)
        trace = self.profile and self.profile.trace(self.network.nodes)
        if trace:
            write_output("--profile", profile_file, trace)
        self.leave_job()


def dump_stacks_when_asked():
    """Make this rank print the stacks of all its threads on SIGUSR2; it then continues."""
    if hasattr(signal, "SIGUSR2"):
        # Not sys.stderr, which a notebook or a test may have replaced by an object without a file.
        faulthandler.register(signal.SIGUSR2, file=sys.__stderr__ or sys.stderr, all_threads=True)
