"""The parts of the acceptance. Each takes a Part and the machine, and fills the part's table.

If a run of a part fails, the failure is noted, its row is missing, and the part continues.
"""

import json
import os
import re
import tempfile
import time
from pathlib import Path
from unittest import mock

from accept_runs import RATE, VERDICT, summary_of

from course import launch
from pipeline.schedules import SCHEDULES, synchronous_schedules

# (command, whether it needs transformers, the number of ranks that it needs a multiple of)
SCRIPTS = [
    ("naive_model_parallelism.py --microbatches 2", False, 1),
    ("gpipe.py", False, 1),
    ("one_f_one_b.py", False, 1),
    ("interleaved_1f1b.py", False, 1),
    ("zero_bubble.py --schedule zb-h2", False, 1),
    ("pipedream.py --steps 6", False, 1),
    ("train.py --schedule zb-v", False, 1),
    ("activation_checkpointing.py --recompute layer", False, 1),
    ("distributed_checkpointing.py --checkpoints {folder}/checkpoints", False, 1),
    ("pipeline_with_data_parallel.py --replicas 2", False, 2),
    ("pipeline_with_data_parallel.py --replicas 2 --reduce ddp", False, 2),
    ("pipeline_with_data_parallel.py --replicas 2 --reduce fsdp2", False, 2),
    ("vocabulary_parallel.py --spread --tied", False, 1),
    ("tensor_parallel.py --tensor 2", False, 2),
    ("inference.py --requests 5 --groups 2 --tokens 4 --seq-len 32", False, 1),
    ("experts.py --replicas 2 --experts 4", False, 2),
    ("torch_pipelining.py --schedule Interleaved1F1B", False, 1),
    ("torch_pipelining.py --schedule ZBVZeroBubble", False, 1),
    ("pretrain_llama.py --dtype float64 --vocabulary 256 --checkpoints {folder}/trained", False, 1),
    ("finetune.py --dtype float64 --model {folder}/model --seq-len 32", True, 1),
    ("torch_pipelining_gpt2.py", True, 1),
]
SIZES = "--layers 16 --dim 64 --heads 4 --kv-heads 2 --seq-len 32"
SMALL_SIZES = "--layers 4 --dim 16 --heads 4 --kv-heads 2 --seq-len 8"
SMALL_SCHEDULES = ["1f1b", "zb-v"]
# As in the tables of lesson 06: the allocator's peak on a GPU beside the bytes that hooks count.
HELD = (
    "--dim 256 --heads 8 --kv-heads 4 --seq-len 256 --batch-size 64 --microbatches 16 "
    "--dtype float32 --learning-rate 0.05 --steps 4"
)
RECOMPUTED = ["none", "stage", "layer", "selective"]
TRAINED = "--model 350m --seq-len 1024 --batch-size 32 --microbatches 8 --steps 10"
SMALL_TRAINED = "--model 1m --seq-len 16 --batch-size 8 --microbatches 4 --steps 3"


def sizes_of(machine):
    return SMALL_SIZES if machine.small else SIZES


def preflight(part, machine):
    """Software, hardware, and messages between all neighbouring ranks."""
    part.columns = ["check", "result", "status"]
    command = "preflight.py --json --timeout 50" + " --messages-only" * machine.small
    output = part.run(command)
    for line in (output or "").splitlines():
        if line.startswith("{"):
            check = json.loads(line)
            part.rows.append([check["name"], check["result"], check["status"]])


def scripts(part, machine):
    """Every training script with --verify: the largest difference of a loss from one process."""
    part.columns = ["script", "largest difference from one process"]
    (launch.ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=launch.ROOT / "build") as folder:  # all nodes see it
        for command, needs_library, multiple in SCRIPTS:
            if machine.ranks % multiple or (machine.small and needs_library):
                continue
            part.rows += verified(part, command.format(folder=folder), steps_of(machine, command))
            if command.startswith("pretrain_llama"):
                part.run(f"convert.py --checkpoints {folder}/trained --to-hf {folder}/model", 1)


def steps_of(machine, command):
    """The flags for sizes and steps of a script, as far as the script has them."""
    sizes = "" if command.startswith(("finetune", "torch_pipelining_gpt2")) else sizes_of(machine)
    if command.startswith("inference"):
        return re.sub(r"--seq-len \d+", "", sizes)
    return sizes + ("" if "--steps" in command else f" --steps {2 if machine.small else 5}")


def verified(part, command, flags, **options):
    """A list with the row of a run with --verify; empty if the run failed."""
    output = part.run(f"{command} {flags} --verify", **options)
    if output is None:
        return []
    found = VERDICT.search(output)
    return [[re.sub(r" ?--\S+ /\S+", "", command), found[1] if found else "the same texts"]]


def orders(part, machine):
    """Every schedule of the worker where the order of issue is the order of launch.

    NCCL keeps this order if it is told to; on CPUs --rehearse strict makes gloo keep it.
    """
    part.columns = ["schedule", "largest difference from one process"]
    rule = " --rehearse strict" if machine.device == "cpu" else ""
    with mock.patch.dict(os.environ, {} if rule else {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}):
        for name in SMALL_SCHEDULES if machine.small else synchronous_schedules():
            flags = f"{steps_of(machine, 'train.py')}{rule}"
            # A warm rank has the environment of the server that it is forked from.
            rows = verified(part, f"train.py --schedule {name}", flags, warm=bool(rule))
            part.rows += [[name, difference] for _, difference in rows]


def lost_ranks(part, machine):
    """A killed rank, and one that stops answering: who is named, and after how many seconds."""
    part.columns = ["a rank gets", "seconds to the end of all ranks", "what was said"]
    # On several nodes the rank has to be on this node, which is the first.
    rank = 1 if machine.ranks // machine.nodes > 1 else 0
    timeout = 2 if machine.small else 5
    command = f"gpipe.py {sizes_of(machine)} --steps 1000000 --timeout {timeout}"
    for signal, named in (
        ("SIGKILL", rf"rank {rank} was ended by SIGKILL|task {rank}: Killed|lost rank {rank} "),
        ("SIGSTOP", rf"rank \d+ waited {timeout} s for .*: rank {rank} has stopped answering"),
    ):
        said = part.run(command, send=(signal, rank, "step 2"), fails=True)
        if said is None:
            continue
        took = time.monotonic() - part.signalled
        sentence = next((line for line in said.splitlines() if re.search(named, line)), None)
        if sentence is None:
            part.fail(f"{command}, {signal}", f"rank {rank} is not named: {said[-500:]}")
        part.rows.append([signal, round(took, 1), sentence or "no name"])


def timelines(part, machine):
    """A step paced at 10 and 20 ms beside theory, and one at full speed beside its own forecast."""
    part.columns = ["schedule", "theory, ms", "paced, ms", "idle, %", "forecast, ms", "real, ms"]
    sizes = sizes_of(machine) if machine.small else f"{SIZES} --dim 1024 --seq-len 256"
    batch = f"--microbatches {2 * machine.ranks} --batch-size {2 * machine.ranks}"
    steps = f"--steps {3 if machine.small else 12}"
    for name in ["1f1b"] if machine.small else ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1"]:
        command = f"train.py --schedule {name} {batch} {steps}"
        paced = part.run(f"{command} {sizes_of(machine)} --pace 10 20")
        real = part.run(f"{command} {sizes} --dtype float32")
        if paced and real:
            paced, real = summary_of(paced), summary_of(real)
            row = [paced["predicted"], paced["step"], paced["idle"], real["predicted"]]
            part.rows.append([name, *row, real["step"]])


def memory(part, machine):
    """What four ranks hold at most, MiB by rank: the allocator's, and what hooks count.

    On a CPU the first column is the whole process.
    """
    part.columns = ["schedule", "--recompute", "allocator's peak", "of it counted"]
    shared = machine.nodes == 1 and not machine.small  # four ranks share fewer GPUs
    ranks = 4 if shared or machine.ranks >= 4 else machine.ranks
    schedules = ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1"]
    flags = f"{SMALL_SIZES} --steps 2" if machine.small else HELD
    for schedule in schedules[:1] if machine.small else schedules:
        for recompute in RECOMPUTED[::2] if machine.small else RECOMPUTED:
            command = f"activation_checkpointing.py --schedule {schedule} --recompute {recompute}"
            chunks = " --chunks 2" if SCHEDULES[schedule].chunks else ""
            output = part.run(f"{command}{chunks} {flags}", ranks)
            if output:
                found = summary_of(output)
                part.rows.append([schedule, recompute, found["peaks"], found["held"]])


def training(part, machine):
    """pretrain_llama.py on one rank beside a plain loop, and on all beside torch's own library.

    The programs take turns. Neither the library's step nor pretrain_llama.py's includes an update.
    """
    part.columns = ["program", "ranks", "tokens per second", "MFU, %", "a pass, ms"]
    flags = SMALL_TRAINED if machine.small else TRAINED
    plain = "../tools/plain_loop.py"
    for _ in range(1 if machine.small else 2):
        for script, ranks in ("pretrain_llama.py", 1), (plain, None), ("pretrain_llama.py", "all"):
            output = part.run(f"{script} {flags}", ranks)
            if output:
                part.rows.append([Path(script).stem, ranks or 1, *rates_in(output)])
    bytes_only = f"{flags} --vocabulary 256"
    output = part.run(f"pretrain_llama.py {bytes_only}")
    if output:
        part.rows.append(["pretrain_llama, bytes", "all", *rates_in(output)])
    library = part.run(f"torch_pipelining.py --schedule 1F1B {as_sizes(flags, machine)}")
    if library:
        step = summary_of(library)["step"]
        part.rows.append(["torch_pipelining, bytes", "all", None, None, step])


def rates_in(output):
    """[tokens per second, MFU, milliseconds of a pass without its update or None] of an output."""
    rate, utilisation = RATE.search(output).groups()
    step = summary_of(output)["step"] if "  idle " in output else None
    return [float(rate.replace(",", "")), float(utilisation), step]


def as_sizes(flags, machine):
    """The flags of pretrain_llama.py for a script that has no --model."""
    import pretrain_llama

    from extensions.pretraining.training_flags import default_dtype

    name = re.search(r"--model (\S+)", flags)[1]
    layers, dim, heads, kv_heads, _ = pretrain_llama.MODELS[name]
    sizes = f"--layers {layers} --dim {dim} --heads {heads} --kv-heads {kv_heads}"
    dtype = default_dtype(machine.device)
    return flags.replace(f"--model {name}", sizes) + f" --optimizer adamw --dtype {dtype}"


PARTS = [  # title, function, minutes that it may take
    ("Preflight", preflight, 1),
    ("Every script with --verify", scripts, 6),
    ("The order of messages", orders, 4),
    ("A rank that is lost", lost_ranks, 1.5),
    ("Timelines", timelines, 3),
    ("Memory of four ranks, MiB by rank", memory, 5),
    ("Training", training, 7),
]
