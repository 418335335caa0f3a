"""What a copy in one file does without, and what it says otherwise than its script.

A copy leaves out what measures, draws and compares. Of a script's choices it has the first, so that
it needs one schedule and not ten. What remains is said as the script says it.
"""

from dataclasses import dataclass, field

# What exists to measure, to draw and to compare: left out with all that is only there for it.
MEASURING = {
    "Recorder", "recorder", "meter", "paced", "pace_with_recompute", "verify", "keeps_promise",
    "waiting_for_all", "watch", "watched", "message_has_arrived", "require_positive", "require_several_chunks",
    "_wait_again",
}  # fmt: skip
# Calls that check what a generator made, or show what the library does: their argument alone.
UNWRAPPED = {"validate", "recorded"}

# (old, new) for all scripts. White space counts as any other white space.
EVERYWHERE = [
    ("Report(arguments, job, schedule", "Report(arguments, job"),
    ("Report(arguments, job, expected", "Report(arguments, job"),
    ("build_part(arguments.config, first, last, arguments.seed, arguments.torch_dtype, job.device)",
     "build_part(arguments, first, last, job.device)"),
    ('"cpu" if job.through_host else job.device', "job.transport"),
    ("raise ScheduleError(", "refuse("),
]  # fmt: skip


@dataclass
class Recipe:
    """What is special about the copy of one script.

    `parts` names the compact form of a file of pipeline/ where it is not the usual one, `left_out`
    further names that are left out, `changes` has (old, new) for the script itself, each of which
    must be found there.
    """

    parts: dict = field(default_factory=dict)
    left_out: set = field(default_factory=set)
    changes: list = field(default_factory=list)


def flag(name):
    """The pattern of a flag's whole definition."""
    return f'(parser\\.add_argument|add)\\(\\s*"--{name}".*?\\n(?=    \\w)'


# Where stage r is on rank r, a rank needs no map of the others.
IN_MAIN = [
    ("stages = build_stages(arguments, job, schedule)", "stage = build_stage(arguments, job)"),
    ("weights = [weight for stage in stages.values() for weight in stage.part.parameters()]", ""),
    ("arguments.optimizer, weights,", "arguments.optimizer, stage.part.parameters(),"),
    ("Worker(job, schedule, stages,", "Worker(job, schedule.orders[job.rank], stage,"),
    ("arguments.timeout, schedule.pairs)", "arguments.timeout)"),
]  # fmt: skip
ONE_STAGE = [
    *IN_MAIN,
    ("def build_stages(arguments, job, schedule):", "def build_stage(arguments, job):"),
    ("This rank's stages by index; whichever has the last one has the loss.",
     "This rank's stage: its layers and, on the last rank, the loss."),
    ("stages = {}", ""),
    ("for index in schedule.stages_of(job.rank): first, last = arguments.stage_layers[index]"
     " part = build_part(arguments, first, last, job.device) stages[index] = Stage(part, index,"
     " schedule.num_stages, share_of_loss) return stages",
     "first, last = arguments.stage_layers[job.rank]\n"
     "    part = build_part(arguments, first, last, job.device)\n"
     "    return Stage(part, job.rank, job.num_ranks, share_of_loss)"),
]  # fmt: skip
BY_HAND = Recipe(
    changes=[
        ("if arguments.by_hand: loss =", "loss ="),
        ("else: loss = worker.run_step(inputs, targets)", ""),
        (
            'parser.add_argument("--by-hand", action="store_true", help="run the loop written out here")',
            "",
        ),
        ("worker = Worker(job, schedule, {stage.index: stage}, shape, arguments.torch_dtype)", ""),
    ]
)
ONLY_AS_FOLDER = {"torch_pipelining_gpt2"}
RECIPES = {
    "naive_model_parallelism": Recipe(
        left_out={"single_process", "train_in_one_process", "devices_of_one_process"},
        changes=[
            ("channels[job.rank, destination]", "channels[what.split()[0]]"),
            ("channels[source, job.rank]", "channels[what.split()[0]]"),
            ('parser.add_argument("--single-process", type=positive_integer, metavar="N",'
             ' help="N stages on N devices of one process, started with python",)', ""),
        ],
    ),
    "gpipe": BY_HAND,
    "one_f_one_b": BY_HAND,
    "interleaved_1f1b": Recipe(
        parts={"worker": "looped_worker"},
        changes=[
            ('parser.add_argument("--schedule", choices=["interleaved-1f1b", "looped-bfs"],'
             ' default="interleaved-1f1b", help="order of the actions",)', ""),
            ("choose_schedule, parse_training", "parse_training"),
            ("from pipeline.stage import", "from pipeline.schedules import interleaved_1f1b\nfrom pipeline.stage import"),
            ("choose_schedule(arguments)", "interleaved_1f1b(arguments.num_ranks, arguments.microbatches, arguments.chunks)"),
            ("schedule.pairs)", "job)"),
            ("arguments.timeout, job)", "arguments.timeout)"),
            ("Worker(job, schedule,", "Worker(job, schedule.orders[job.rank],"),
            ("for index in schedule.stages_of(job.rank):", "for index in range(job.rank, len(arguments.stage_layers), job.num_ranks):"),
            ("schedule.num_stages", "len(arguments.stage_layers)"),
            ("build_stages(arguments, job, schedule)", "build_stages(arguments, job)"),
        ],
    ),
    "zero_bubble": Recipe(
        parts={"worker": "split_worker", "stage": "split_stage", "schedules": "split_schedule"},
        changes=[
            ('parser.add_argument("--schedule", choices=["zb-h1", "zb-h2", "zb-v", "dualpipe-v"],'
             ' default="zb-h1", help="order of the actions",)', ""),
            ("choose_schedule, parse_training", "parse_training"),
            ("import CHUNKED", "import zb_h1"),
            ("parser, lambda flags: flags.num_ranks * (2 if flags.schedule in CHUNKED else 1)", "parser"),
            ("choose_schedule(arguments)", "zb_h1(arguments.num_ranks, arguments.microbatches)"),
            *ONE_STAGE,
        ],
    ),
    "activation_checkpointing": Recipe(changes=IN_MAIN),
    "pipedream": Recipe(parts={"worker": "updating_worker"}),
    "torch_pipelining_mlp": Recipe(changes=[(", pairs=[])", ")")]),
}  # fmt: skip
