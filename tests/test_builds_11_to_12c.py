"""Seeded mutations of what a reader builds in lessons 11, 12b and 12c.

None hangs. A mutant is accepted only if it does what the solution does: an oracle beside the check,
one for each exercise, says so.
"""

import ast
import functools
import importlib.util
import itertools
import json
import math
import random
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from further import seeds_up_to
from mutated import mutated, slipped

from broken.pipelines.faults import Cured
from course.checks import build_job, build_llama
from course.checks import lesson_12b as find_the_fault
from course.launch import PRELOAD, ROOT
from lab.simulator import Costs, simulate
from pipeline.schedule import Action
from pipeline.schedules import build_schedule

pytestmark = pytest.mark.processes
PRELOAD.extend(["torch._dynamo", "torch.distributed.checkpoint"])
numbers = itertools.count()


def cells_of(notebook):
    cells = json.loads((ROOT / f"notebooks/solutions/{notebook}.ipynb").read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def solution(notebook, name):
    """The function `name`, or the value of the variable `name`, of a solutions notebook."""
    for node in (node for cell in cells_of(notebook) for node in ast.parse(cell).body):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return ast.unparse(node)
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            return ast.literal_eval(node.value)
    raise LookupError(name)


def written(tmp_path, text):
    """The function in `text`, as if it stood in a cell of a notebook."""
    path = tmp_path / f"cell_{next(numbers)}.py"
    path.write_text(f"import math\n\nimport torch\n\n\n{text}\n")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, re.search(r"^def (\w+)", text, re.MULTILINE)[1])


def answer_to(capsys, ask, *answers):
    ask(*answers)
    said = capsys.readouterr().out.strip().splitlines()[-1]
    assert said.startswith(("Right: ", "Not yet: ", "Not attempted yet")), said
    assert "took longer than" not in said and "limit" not in said.partition("Not yet: ")[0], said
    return said


def seeds(few, *more):
    return pytest.mark.parametrize("seeds", seeds_up_to(few, *more))


# Lesson 11: a job script

JOB = solution("11_from_laptop_to_cluster", "job")


def changed_job(seed):
    """The job script with a line gone or moved, a word gone, or a number changed."""
    choose, lines = random.Random(f"job {seed}"), JOB.splitlines()
    at = choose.randrange(len(lines))
    way = choose.choice(["drop", "swap", "word", "number", "comment"])
    if way == "drop":
        del lines[at]
    elif way == "swap":
        lines[at - 1], lines[at] = lines[at], lines[at - 1]
    elif way == "word":
        words = lines[-1].split()
        del words[choose.randrange(len(words))]
        lines[-1] = " ".join(words)
    elif way == "comment":
        lines[at] = f"# {lines[at]}"
    else:
        places = list(re.finditer(r"\d+", "\n".join(lines)))
        place = choose.choice(places)
        text = "\n".join(lines)
        new = str(max(0, int(place[0]) + choose.choice([-1, 1]))).zfill(len(place[0]))
        return text[: place.start()] + new + text[place.end() :] + "\n"
    return "\n".join(lines) + "\n"


def is_the_same_job(text):
    """Whether it asks for the same and calls the same, a limit of up to half an hour aside."""

    def parts(job):
        shell, *lines = job.splitlines() or [""]
        options = [line for line in lines[:-1] if not line.startswith("# ")]
        limits = re.findall(r"--time=00:(\d\d):\d\d$", "\n".join(options), re.MULTILINE)
        others = {line for line in options if "--time" not in line}
        words = lines[-1].split() if lines else []
        call = [word for word in words if word not in ("exec", *flags_of(words))]
        return shell, others, len(limits), limits < ["30"], flags_of(words), call

    def flags_of(words):
        return frozenset(word for word in words if word.startswith("--"))

    return parts(text) == parts(JOB)


@seeds(40)
def test_a_mutant_of_the_job_script_is_right_only_if_it_is_the_same_job(seeds, capsys):
    right = 0
    for seed in seeds:
        text = changed_job(seed)
        accepted = answer_to(capsys, build_job.job_script, text, 0).startswith("Right: ")
        assert accepted == is_the_same_job(text), text
        right += accepted
    assert 0 < right < len(seeds) / 2


# Lesson 12b: repairs


def repair_text(case):
    piece = find_the_fault.CASES[case].piece
    if case > 1:
        return solution("12b_find_the_fault", piece)
    return "def next_to_send(outputs):\n    return outputs.pop(0)"


def takes_the_oldest(piece):
    left = ["a", "b", "c"]
    return [piece(left), piece(left), left] == ["a", "b", ["c"]]


def divides_by_the_number(piece):
    return all(math.isclose(piece(x, m), x / m) for x in (6.0, 0.5) for m in (1, 3, 8))


def cuts_evenly(piece):
    cases = [(n, p) for p in (1, 2, 3, 5) for n in range(p, 14)]
    return all(sum(c) == n and max(c) == -(-n // p) for n, p in cases for c in [piece(n, p)])


def keeps_what_came(piece):
    came, buffers = torch.ones(3), []
    kept = piece(came, buffers)
    piece(torch.zeros(3), buffers)
    return torch.equal(kept, torch.ones(3))


def keeps_the_order(piece):
    actions = [Action(2, kind, k) for k in range(3) for kind in "FB"]
    return list(piece(actions)) == actions


def has_the_norm_of_all(piece):
    squares = [{"a": 4.0, "b": 1.0}, {}, {"c": 11.0}]
    return all(math.isclose(piece(rank, squares), 4.0) for rank in range(3))


def leaves_the_old_memory(piece):
    weight = torch.nn.Parameter(torch.ones(2))
    old = weight.data
    piece([weight], 1)
    return weight.data.data_ptr() != old.data_ptr() and torch.equal(weight.data, old)


def adds_both(piece):
    mine, other = torch.tensor([1.0, 2.0]), torch.tensor([4.0, 8.0])
    return torch.equal(piece(mine, other), torch.tensor([5.0, 10.0]))


def gives_all_to_its_stage(piece):
    """Whether the calls of both ranks hand on what the solution does."""
    calls = []
    schedule = SimpleNamespace(step=lambda *given, **named: calls.append((given, named)))
    for rank in (0, 1):
        piece(schedule, rank, "tokens", "targets", "mask", "losses")
    last = {"target": "targets", "losses": "losses", "mask": "mask"}
    return calls == [(("tokens",), {"mask": "mask"}), ((), last)]


ORACLES = dict(
    enumerate(
        [
            takes_the_oldest, divides_by_the_number, cuts_evenly, keeps_what_came, keeps_the_order,
            has_the_norm_of_all, leaves_the_old_memory, adds_both, gives_all_to_its_stage,
        ],
        start=1,
    )
)  # fmt: skip


def is_right(oracle, piece):
    try:
        return bool(oracle(piece))
    except Exception:
        return False


@pytest.mark.parametrize("case", ORACLES)
def test_the_oracle_of_a_repair_knows_the_solution_and_the_cure(case, tmp_path):
    assert is_right(ORACLES[case], written(tmp_path, repair_text(case)))
    if case < 9:
        assert is_right(ORACLES[case], getattr(Cured, find_the_fault.CASES[case].piece))


@seeds(1)
@pytest.mark.parametrize("case", ORACLES)
def test_a_mutant_of_a_repair_is_right_only_if_it_repairs(case, seeds, tmp_path, capsys):
    for seed in seeds:
        piece = written(tmp_path, slipped(repair_text(case), f"repair {case} {seed}"))
        said = answer_to(capsys, find_the_fault.repair, case, piece)
        if said.startswith("Right: "):
            assert is_right(ORACLES[case], piece), (tmp_path / f"{piece.__module__}.py").read_text()


def test_of_all_diagnoses_of_a_case_only_one_is_right():
    """Every fault on every set of ranks: 150 answers to each of nine cases."""
    subsets = [s for count in range(1, 5) for s in itertools.combinations(range(4), count)]
    for number, case in find_the_fault.CASES.items():
        right = [
            (fault, ranks)
            for fault in find_the_fault.FAULTS
            for ranks in subsets
            if find_the_fault._complaint_on(number, fault, list(ranks)) is None
        ]
        assert right == [(case.fault, case.ranks)]


# Lesson 12c: plans, and a layer

FLAGS = solution("12c_pretrain_llama", "flags")


def changed_flags(machine, seed):
    """The flags of one machine with one of its choices made in another way."""
    choose, words = random.Random(f"{machine} {seed}"), FLAGS[machine].split()
    name = choose.choice(["schedule", "microbatches", "recompute"])
    others = {
        "schedule": ["gpipe", "1f1b", "zb-h1", "interleaved-1f1b --chunks 2"],
        "microbatches": ["4", "8", "16", "64"],
        "recompute": ["none", "selective", "layer", "stage"],
    }
    pairs = dict(zip(words[::2], words[1::2])) | {f"--{name}": choose.choice(others[name])}
    return " ".join(f"{name} {value}" for name, value in pairs.items())


def is_short_and_fits(machine, flags):
    """Whether the program's own forecast fits, and no plan that fits is a tenth shorter."""
    devices, room = build_llama.MACHINES[machine]
    if max(build_llama._planned(machine, flags, devices)) > room:
        return False
    words = flags.split()
    chosen = {"--chunks": None, "--recompute": "none"} | dict(zip(words[::2], words[1::2]))

    def length(schedule, chunks, count, recompute):
        order = build_schedule(schedule, devices, count, chunks)
        rows = max(64 / count, 2) * devices / order.num_stages
        again = {"none": 0, "selective": 0.1, "layer": 1, "stage": 1}[recompute]
        return simulate(order, Costs(rows, rows * (2 + again), rows)).makespan

    fitting = [choice for most, _, choice in build_llama._all_plans(devices) if most <= room]
    own = length(
        chosen["--schedule"],
        chosen["--chunks"] and int(chosen["--chunks"]),
        int(chosen["--microbatches"]),
        chosen["--recompute"],
    )
    return own <= 1.1 * min(length(*choice) for choice in fitting)


@seeds(1, 40, 40)  # of twelve ways to change the flags of a machine
@pytest.mark.parametrize("machine", FLAGS)
def test_a_mutant_of_a_plan_is_right_only_if_it_fits_and_is_short(
    machine, seeds, capsys, monkeypatch
):
    monkeypatch.setattr(build_llama, "_planned", functools.cache(build_llama._planned))
    monkeypatch.setattr(build_llama, "MACHINES", {machine: build_llama.MACHINES[machine]})
    for seed in seeds:
        flags = changed_flags(machine, seed)
        accepted = answer_to(capsys, build_llama.plans, {machine: flags}).startswith("Right: ")
        assert accepted == is_short_and_fits(machine, flags), flags


def is_a_layer(layer):
    """Whether it treats each position alone, keeps the shape, and learns with all its weights."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    weights = [torch.randn(shape, dtype=torch.float64) for shape in ((6, 4), (6, 4), (4, 6))]
    for weight in weights:
        weight.requires_grad_()
    made = layer(x, *weights)
    alone = torch.stack([torch.stack([layer(p[None], *weights)[0] for p in row]) for row in x])
    made.sum().backward()
    learns = all(weight.grad is not None for weight in weights)
    return learns and made.shape == x.shape and torch.allclose(made, alone, atol=1e-12)


@seeds(3)
def test_a_mutant_of_the_layer_is_right_only_if_it_is_a_layer(seeds, tmp_path, capsys):
    text = solution("12c_pretrain_llama", "feed_forward")
    assert is_right(is_a_layer, written(tmp_path, text))
    for seed in seeds:
        layer = written(tmp_path, slipped(text, f"layer {seed}"))
        if answer_to(capsys, build_llama.feed_forward, layer).startswith("Right: "):
            assert is_right(is_a_layer, layer), seed


def test_a_slip_changes_one_thing_and_a_mutation_another():
    text = "def f(a, b):\n    c = a + 1\n    return c * b"
    assert len({slipped(text, seed) for seed in range(30)}) > 4
    assert all(slipped(text, seed) != ast.unparse(ast.parse(text)) for seed in range(30))
    assert len({mutated(text, seed) for seed in range(30)}) > 4
