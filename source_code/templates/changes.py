"""What a copy in one file does without, and what it says otherwise than its script.

A copy leaves out what measures, draws and compares, and of a script's choices it has the usual one:
one schedule, and not ten. What remains is said as the script says it. There are three ways to say
it otherwise, from the smallest to the largest:

- a `Recipe` below changes words of the script,
- `compact/scripts/SCRIPT.py` has definitions that come in place of the script's,
- `compact/FILE.py` is a file of pipeline/ in short, in whichever folder that is.
"""

from dataclasses import dataclass, field

# What exists to measure, to draw and to compare: left out with all that is only there for it.
MEASURING = {
    "Recorder",
    "recorder",
    "paced",
    "verify",
    "keeps_promise",
    "watch",
    "watched",
    "waiting_for_all",
    "_wait_again",
    "message_has_arrived",
    "require_positive",
    "require_several_chunks",
}
# Calls that check what a generator made, or show what the library does: their argument alone.
UNWRAPPED = {"validate", "recorded"}

# (old, new) in every file. White space stands for any other; where `new` is empty, lines go.
EVERYWHERE = [
    ("Report(arguments, job, schedule", "Report(arguments, job"),
    (
        "build_part(arguments.config, first, last, arguments.seed, arguments.torch_dtype, "
        "job.device)",
        "build_part(arguments, first, last, job.device)",
    ),
    ('"cpu" if job.through_host else job.device', "job.transport"),
    ("raise ScheduleError(", "refuse("),
]
# What a worker does not need if the schedule does not have it.
HALVES = ('elif kind == "W": stage.backward_weight(k)', "")
UPDATES = ('elif kind == "U": stage.update(k)', "")


@dataclass
class Recipe:
    """What is special about the copy of one script.

    `says` is a sentence for its head about what it has of the script's choices. `changes` has (old,
    new) for the script itself, each of which must be found there, and `elsewhere` for the other
    files. `left_out` has further names to leave out. `parts` names the compact form of a file where
    it is not the one with the file's own name.
    """

    says: str = ""
    changes: list = field(default_factory=list)
    elsewhere: list = field(default_factory=lambda: [HALVES, UPDATES])
    left_out: set = field(default_factory=set)
    parts: dict = field(default_factory=dict)


# Where stage r is on rank r, a rank has one stage and needs no map of the others.
ONE_STAGE = [
    ("stages = build_stages(arguments, job, schedule)", "stage = build_stage(arguments, job)"),
    ("weights = [weight for stage in stages.values() for weight in stage.part.parameters()]", ""),
    ("arguments.optimizer, weights,", "arguments.optimizer, stage.part.parameters(),"),
    ("Worker(job, schedule, stages,", "Worker(job, schedule.orders[job.rank], stage,"),
    ("arguments.timeout, schedule.pairs)", "arguments.timeout)"),
]
BUILD_ONE_STAGE = [
    ("def build_stages(arguments, job, schedule):", "def build_stage(arguments, job):"),
    (
        "This rank's stages by index; whichever has the last one has the loss.",
        "This rank's stage: its layers and, on the last rank, the loss.",
    ),
    ("stages = {}", ""),
    (
        "for index in schedule.stages_of(job.rank): first, last = arguments.stage_layers[index] "
        "part = build_part(arguments, first, last, job.device) stages[index] = Stage(part, index, "
        "schedule.num_stages, share_of_loss) return stages",
        "first, last = arguments.stage_layers[job.rank]\n"
        "    part = build_part(arguments, first, last, job.device)\n"
        "    return Stage(part, job.rank, job.num_ranks, share_of_loss)",
    ),
]
BY_HAND = Recipe(
    "The step is the loop written out by hand.",
    changes=[
        ("if arguments.by_hand: loss =", "loss ="),
        ("else: loss = worker.run_step(inputs, targets)", ""),
        (
            'parser.add_argument("--by-hand", action="store_true", '
            'help="run the loop written out here")',
            "",
        ),
        ("worker = Worker(job, schedule, {stage.index: stage}, shape, arguments.torch_dtype)", ""),
        (
            "distributed import Receiving, Sending,",
            "distributed import Receiving, Sending, fitting,",
        ),
        (
            "sent.append(Sending(job, output, following,",
            "output = fitting(stage, output, shape, dtype)\n"
            "            sent.append(Sending(job, output, following,",
        ),
    ],
)

RECIPES = {
    "naive_model_parallelism": Recipe(
        "Of its two ways it has the one with several ranks.",
        changes=[
            ("distributed import join_job", "distributed import fitting, join_job"),
            (
                "send(job, output, following,",
                "output = fitting(stage, output, shape, arguments.torch_dtype)\n"
                "            send(job, output, following,",
            ),
            ("channels[job.rank, destination]", "channels[what.split()[0]]"),
            ("channels[source, job.rank]", "channels[what.split()[0]]"),
            (
                'parser.add_argument("--single-process", type=positive_integer, metavar="N", '
                'help="N stages on N devices of one process, started with python",)',
                "",
            ),
        ],
        left_out={"single_process", "train_in_one_process", "devices_of_one_process"},
    ),
    "gpipe": BY_HAND,
    "one_f_one_b": BY_HAND,
    "pipedream": Recipe(
        "Of its rules it has weight stashing, with a rank a stage.",
        elsewhere=[
            HALVES,
            ("order, stage, shape, dtype):", "order, stage, shape, dtype, record):"),
            (
                "self.job, self.order, self.stage = job, order, stage",
                "self.job, self.order, self.stage, self.record = job, order, stage, record",
            ),
            ("losses.append(output)", "self.record(k, output)"),
            (
                "stage, self.sent, losses = self.stage, deque(), []",
                "stage, self.sent = self.stage, deque()",
            ),
            ("return sum(losses) if losses else None", ""),
            (
                "Run all actions once. Returns the loss of the batch on the last rank, else None.",
                "Run all actions once. On the last rank `record` takes the losses as they come.",
            ),
        ],
    ),
    "interleaved_1f1b": Recipe(
        "Of its schedules it has interleaved 1F1B.",
        changes=[
            (
                'parser.add_argument("--schedule", choices=["interleaved-1f1b", "looped-bfs"], '
                'default="interleaved-1f1b", help="order of the actions",)',
                "",
            ),
            ("choose_schedule, parse_training", "parse_training"),
            (
                "from pipeline.stage import",
                "from pipeline.schedules import interleaved_1f1b\nfrom pipeline.stage import",
            ),
            ("choose_schedule(flags).num_stages", "flags.num_ranks * flags.chunks"),
            (
                "choose_schedule(arguments)",
                "interleaved_1f1b(arguments.num_ranks, arguments.microbatches, arguments.chunks)",
            ),
            ("arguments.timeout, schedule.pairs)", "arguments.timeout)"),
            ("Worker(job, schedule,", "Worker(job, schedule.orders[job.rank],"),
            (
                "for index in schedule.stages_of(job.rank):",
                "for index in range(job.rank, len(arguments.stage_layers), job.num_ranks):",
            ),
            ("schedule.num_stages", "len(arguments.stage_layers)"),
            ("build_stages(arguments, job, schedule)", "build_stages(arguments, job)"),
        ],
        parts={"worker": "looped_worker"},
    ),
    "zero_bubble": Recipe(
        "Of its schedules it has ZB-H1.",
        changes=[
            (
                'parser.add_argument("--schedule", choices=["zb-h1", "zb-h2", "zb-v", '
                '"dualpipe-v"], default="zb-h1", help="order of the actions",)',
                "",
            ),
            ("choose_schedule, parse_training", "parse_training"),
            (
                "from pipeline.stage import",
                "from pipeline.schedules import zb_h1\nfrom pipeline.stage import",
            ),
            ("parser, lambda flags: choose_schedule(flags).num_stages", "parser"),
            ("choose_schedule(arguments)", "zb_h1(arguments.num_ranks, arguments.microbatches)"),
            *ONE_STAGE,
            *BUILD_ONE_STAGE,
        ],
        elsewhere=[
            UPDATES,
            ("stage.backward(k, gradient)", "stage.backward_input(k, gradient)"),
        ],
        parts={"stage": "split_stage", "schedules": "split_schedule"},
    ),
    "activation_checkpointing": Recipe(
        "Of its schedules it has GPipe, and the recomputing is torch.utils.checkpoint's.",
        changes=ONE_STAGE,
    ),
    "pipeline_with_data_parallel": Recipe(
        "Of its choices it has 1F1B and a plain sum of the gradients, without padding.",
        parts={"schedules": "one_order"},
    ),
    "custom_schedule": Recipe(
        "It performs whole forwards and backwards.", parts={"worker": "any_worker"}
    ),
    "distributed_checkpointing": Recipe(
        "Of its choices it has 1F1B, and checkpoints that are written while training waits, "
        "without clipping and without the signals that stop a training.",
        parts={"schedules": "one_order"},
    ),
    "pretrain_llama": Recipe(
        "Of what a folder has it keeps 1F1B, AdamW, warm-up and cosine, clipping and checkpoints.",
        parts={"schedules": "one_order"},
    ),
    "torch_pipelining": Recipe("It has all schedules of the library, and stages cut by hand."),
    "torch_pipelining_mlp": Recipe("It is all there.", changes=[(", pairs=[])", ")")]),
    "torch_pipelining_gpt2": Recipe(
        "Of its models it has GPT-2, traced, with random weights; not the classifier, the Llama and "
        "weights from a folder.",
        changes=[
            ('os.environ["HF_HUB_OFFLINE"] = "1"', ""),
            ('os.environ["TRANSFORMERS_VERBOSITY"] = "error"', ""),
        ],
    ),
}
