"""What a reader builds in lessons 06, 07, 08, 08b and 10 runs on real ranks and is answered by name.

Right answers are those of the solutions' notebooks; wrong ones are these with one thing changed.
"""

import ast
import importlib.util
import inspect
import itertools
import json
import multiprocessing
import re
import sys

import pytest
import torch
import torch.distributed as dist
from further import SEEDS, first_of
from mutated import mutated

from course.building import endless_loops
from course.checks import (
    build_comparison,
    build_library,
    build_recompute,
    build_save,
    build_sums,
    library_mistakes,
)
from course.checks.answer import NOT_ATTEMPTED
from course.launch import PRELOAD, ROOT
from pipeline.schedules import gpipe, zb_v
from small import pipeline

pytestmark = pytest.mark.processes
PRELOAD.extend(["torch._dynamo", "torch.distributed.pipelining"])
PRELOAD.append("extensions.torch_pipelining.library")
numbers = itertools.count()


def solution(notebook, *names):
    """The functions of these names in a solutions notebook, as one text."""
    cells = json.loads((ROOT / f"notebooks/solutions/{notebook}.ipynb").read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    found = [
        ast.get_source_segment(text, node)
        for text in texts
        if not text.startswith("%%")
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    assert len(found) == len(names), names
    return "\n\n\n".join(found)


def solution_file(notebook, name):
    """The program that a cell of a solutions notebook writes into the file `name`."""
    cells = json.loads((ROOT / f"notebooks/solutions/{notebook}.ipynb").read_text())["cells"]
    first = f"%%writefile {{{name}}}\n"
    (text,) = (t for t in ("".join(cell["source"]) for cell in cells) if t.startswith(first))
    return text.removeprefix(first)


SOLUTIONS = {
    "recomputing_backward": solution("06_activation_checkpointing", "backward"),
    "training_program": solution_file("08_torch_pipelining", "mine"),
    "clipping_program": solution_file("08b_silent_traps", "clipped"),
    "comparison": solution("08b_silent_traps", "difference"),
    "save_and_restore": solution("07_distributed_checkpointing", "save", "restore"),
    "sums_in_time": solution("10_data_parallel", "after"),
}
NAMES = {  # of functions; the others are whole files
    "recomputing_backward": ["backward"],
    "comparison": ["difference"],
    "save_and_restore": ["save", "restore"],
    "sums_in_time": ["after"],
}
CHECKS = {
    "recomputing_backward": build_recompute.recomputing_backward,
    "training_program": build_library.training_program,
    "clipping_program": build_library.clipping_program,
    "comparison": build_comparison.comparison,
    "save_and_restore": build_save.save_and_restore,
    "sums_in_time": build_sums.sums_in_time,
}


def written(tmp_path, text, exercise):
    """What the check of `exercise` is given: the functions in `text`, or the path of a file."""
    path = tmp_path / f"cell_{next(numbers)}.py"
    if exercise not in NAMES:
        path.write_text(text)
        return [path]
    path.write_text("import torch\nimport torch.distributed as dist\n\n\n" + text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return [getattr(module, name) for name in NAMES[exercise]]


def answer_to(tmp_path, capsys, exercise, *edits):
    text = SOLUTIONS[exercise]
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    CHECKS[exercise](*written(tmp_path, text, exercise))
    assert multiprocessing.active_children() == []
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize("exercise", SOLUTIONS)
def test_a_solution_is_right(exercise, tmp_path, capsys):
    assert answer_to(tmp_path, capsys, exercise).startswith("Right: ")


@pytest.mark.parametrize("exercise", NAMES)
def test_nonsense_gets_a_sentence_and_a_stub_is_not_attempted(exercise, tmp_path, capsys):
    count = len(NAMES[exercise])
    for nonsense in ("0F0", 3, lambda: 1, print, int):
        CHECKS[exercise](*[nonsense] * count)
        assert capsys.readouterr().out.startswith("Not yet: this exercise asks for a function")
    stubs = "\n\n\n".join(f"def {name}(*all):\n    ..." for name in NAMES[exercise])
    CHECKS[exercise](*written(tmp_path, stubs, exercise))
    assert capsys.readouterr().out.strip() == NOT_ATTEMPTED


@pytest.mark.parametrize("check", [build_library.training_program, build_library.clipping_program])
def test_a_file_is_not_attempted_unfinished_or_no_python(check, tmp_path, capsys):
    path = tmp_path / "mine.py"
    for text, sentence in [
        (None, NOT_ATTEMPTED),
        ("...\n", NOT_ATTEMPTED),
        ("import torch\n...\n", "Not yet: line 2 of mine.py still has its ..."),
        ("import torch\nfor step in\n", "Not yet: line 2 of mine.py is not Python"),
    ]:
        if text:
            path.write_text(text)
        check(path)
        assert capsys.readouterr().out.startswith(sentence)


@pytest.mark.further
def test_every_mistake_with_the_library_has_losses_of_its_own():
    """So that the check never blames one for another, on four ranks and on two."""
    for num_ranks, clip in itertools.product((4, 2), (None, "whole")):
        more = library_mistakes.CLIPS if clip else []
        changes = [{}, *(changed for changed, _ in [*library_mistakes.MISTAKES, *more])]
        losses = [library_mistakes.losses_of(num_ranks, **({"clip": clip} | c)) for c in changes]
        steps = [one[: library_mistakes.STEPS] for one in losses]
        assert not any(library_mistakes.agree(*two) for two in itertools.combinations(steps, 2))


WRONG = {
    "recomputing_backward": [
        ([("    if x.is_floating_point():\n        x.requires_grad_()\n", "")],
         "rank 2, backward of micro-batch 0: it returns no gradient of its input"),
        ([("return x.grad", "x.grad")], "and is its .grad returned?"),
        ([("    return x.grad", "    if gradient is None:\n        return x.grad")],
         "rank 1, backward of micro-batch 0: it returns no gradient of its input"),
        ([("backward(gradient)", "backward()")], "raised RuntimeError: grad can be implicitly"),
        ([("held.pop(k)", "held[k]")], "held still has an entry for it afterwards; pop it"),
        ([("    return x.grad", "    stage(k, x)\n    return x.grad")], "run again more than once"),
        ([("    x = held.pop(k)\n", "    everything = [stage(j, x) for j, x in held.items() if torch.is_grad_enabled()]\n"
           "    x = held.pop(k)\n")], "of insides are there at once"),
        ([("backward(gradient)", "backward(gradient, retain_graph=True)"),
          ("    return x.grad", "    stage.kept = output\n    return x.grad")],
         "bytes of a graph are still there"),
        ([("held.pop(k)", "held.pop(min(held))")],
         "micro-batch 2: the second forward ran on the input of micro-batch 0"),
        ([("stage(k, x)", "stage(x, k)")], "raised TypeError: linear(): argument"),
        ([("output = stage(k, x)", "output = 2 * stage(k, x)")], "is 2 times the right one"),
        ([("    output = stage(k, x)\n", "    with torch.no_grad():\n        output = stage(k, x)\n")],
         "line 7 of backward (`output.backward(gradient)`) raised RuntimeError: element 0"),
        ([("    x = held.pop(k)\n", "    x = held.pop(k)\n    OLD.append(x)\n"),
          ("def backward(", "OLD = []\n\n\ndef backward(")],
         "the inputs of micro-batches 0 and 1 are still in memory"),
        ([("    x = held.pop(k)\n", "    x = held.pop(k)\n    OLD.append(x.clone())\n"),
          ("def backward(", "OLD = []\n\n\ndef backward(")],
         "the inputs of micro-batches 0 and 1 are still in memory"),
        ([("    return x.grad", "    return x")], "it returns the input itself, and not the gradient"),
        ([("    return x.grad", "    return None if x.grad is None else x.grad.float().double()")],
         "the gradient of the input has too few digits"),
        ([("    output = stage", "    stage.zero_grad()\n    output = stage")],
         "micro-batch 1: the gradients of earlier micro-batches are gone"),
        ([("output = stage(k, x)", "output = stage(0, x)")],
         "micro-batch 1: the second forward is stage(0, x), that of another micro-batch"),
        ([("output.backward(gradient)",
           "(output * (1 if gradient is None else gradient)).sum().backward()")],
         "bytes, and the forward alone"),
        ([("backward(gradient)", "backward(None if gradient is None else gradient.view(2, 8, 16))")],
         "on 2 ranks, line 6 of backward"),
        ([("held.pop(k)", "held.pop(k % 4)")], "on 2 ranks, line 2 of backward"),
    ],
    "training_program": [
        ([("    optimizer.zero_grad()\n", "")], "on 4 ranks the gradients of the step before are"),
        ([("    optimizer.step()\n", "")], "on 4 ranks nothing learns"),
        ([("    optimizer.step()", "    if stage.is_last:\n        optimizer.step()")],
         "so the update after it or the batch of step 1 is different; on every rank the update is plain SGD"),
        ([("PipelineStage(module", "PipelinStage(module")], "name 'PipelinStage' is not defined; a file can use only what it imports and defines itself"),
        ([("PipelineStage(module, rank,", "PipelineStage(module, rank + 1,")],
         "with one stage per rank, the index is the rank, from 0 to 3"),
        ([("PipelineStage(module, rank,", "PipelineStage(module, str(rank),")],
         "makes its stage with the index '"),
        ([("PipelineStage(module, rank,", "PipelineStage(module, 0,")], "makes its stage with the index 0: with one stage"),
        ([("n_microbatches=8", "n_microbatches=32")], "; a batch has 16 texts, so it has at most 16 micro-batches"),
        ([("build_stage(rank, ranks)", "build_stage(0, 1)")],
         "types: Long, Int; only the first stage gets tokens, and what this rank's module begins with"),
        ([('torch.device("cpu")', 'torch.device("cuda")')], "a stage's device is that of its module"),
        ([("Schedule1F1B(stage,", "Schedule1F1B([stage],")], "a schedule takes no list"),
        ([("PipelineStage, Sch", "PipelineStage, ScheduleInterleaved1F1B, Sch"),
          ("Schedule1F1B(stage", "ScheduleInterleaved1F1B(stage")],
         "several stages per rank takes a list of them"),
        ([("    optimizer.step()\n", "    __import__('os')._exit(0)\n")],
         "ended with exit status 0 and without a report"),
        ([("    if stage.is_last:\n", "    if rank in (0, ranks - 1):\n")],
         "(`print(f\"step {step}  loss {torch.stack(losses).mean():.6f}\", flush=True)`) raised"),
        ([("torch.stack(losses).mean()", "torch.stack(losses).sum()")], "not their mean"),
        ([("torch.stack(losses).mean()", "losses[-1]")], "the last micro-batch alone"),
        ([("loss_fn=loss_of)", "loss_fn=loss_of, scale_grads=False)")], "8 times too large"),
        ([("    else:\n        schedule.step()\n", "")], "what rank 1 never receives, and rank 1 has already returned: a receive is missing there"),
        # Also if the last rank has closed its group long before.
        ([("    else:\n        schedule.step()\n", ""), ("schedule.step(tokens)", "(__import__('time').sleep(2), schedule.step(tokens))")], "what rank 1 never receives, and rank 1 has already returned: a receive is missing there"),
        ([("range(6)", "range(1, 7)")], "the lines are those of steps [1, 2, 3, 4, 5, 6]"),
        ([("batch(step)", "batch(0)")], "every step learns batch(0)"),
        ([(":.6f}", ":.4f}")], "that of step 0 is printed as 5.1837; print six decimals"),
        ([("batch(step)", "batch(step // 2)")], "so the update after it or the batch of step 1 is different"),
        ([("target=targets", "target=targets[:-1]")], "raised"),
        ([("mean():.6f}", "mean():.6f}  norm 1")], "with nothing after the number, was printed"),
        ([("n_microbatches=8", "n_microbatches=4")], "with 4 micro-batches; the exercise asks for 8"),
        ([("dist.get_world_size()", "4")],
         "on 2 ranks stage 0 is made as one of 4 stages, and all ranks together make 2"),
        ([("        schedule.step(tokens)", "        schedule.eval(tokens)"),
          ("schedule.step(target", "schedule.eval(target"), ("        schedule.step()", "        schedule.eval()")],
         "on 4 ranks nothing learns: `schedule.eval(...)` runs no backward"),
        ([("    optimizer.step()", "    if not stage.is_last:\n        optimizer.step()")],
         "on 4 ranks the last stage does not learn"),
        ([("    optimizer.step()", "    if not stage.is_first:\n        optimizer.step()")],
         "on 4 ranks the first stage does not learn"),
        ([(", loss_fn=loss_of", "")], "a schedule computes losses only if it is given a loss_fn"),
        ([("optimizer = torch.optim.SGD(module", "whole = build_stage(0, 1)\noptimizer = torch.optim.SGD(whole"),
          ("    optimizer.step()", "    loss = loss_of(whole(tokens), targets)\n    loss.backward()\n"
           "    losses = [loss.detach()]\n    optimizer.step()")],
         "the schedule computed other losses: 5.102759 in step 1"),
        ([("build_stage(rank, ranks)", "build_stage(rank, ranks).float()")],
         "those of one process in their first digits only: step 1 has 4.5397"),
        ([("    optimizer.step()", "    for weight in module.parameters():\n"
           "        weight.grad = weight.grad.float().double()\n    optimizer.step()")],
         "was something rounded to float32? `build_stage` makes float64"),
    ],
    "clipping_program": [
        ([("    dist.all_reduce(square)\n", "")], "by the norm of its own stage"),
        ([("import batch, build_stage", "import batch")],
         "name 'build_stage' is not defined; a file can use only what it imports and defines itself"),
        ([("        weight.grad *= factor\n", "        pass\n")], "nothing has been clipped"),
        ([("min(1.0, 1.3 / square.sqrt().item())", "1.3 / square.sqrt().item()")],
         "is the factor at most 1"),
        ([("loss_fn=loss_of)", "loss_fn=loss_of, scale_grads=False)")], "has step() divided them before"),
        ([("1.3 /", "1.0 /")], "0.5, after the gradients of all ranks were clipped to 1.3"),
        ([("    factor", "    if step == 0:\n        factor")], "step 1 is right, so the update after it"),
        ([(".sqrt()", "")], "from the square of the norm"),
        ([("run(schedule.eval, 6)", "run(schedule.eval, 5)")], "which batch was it"),
        ([("{held_out:.6f}", "{held_out:.4f}")], "was it rounded? Print six decimals"),
        ([("held_out = run(schedule.eval, 6)\n", ""), ("{held_out:", "{loss:")], "batch 6 is"),
        ([("print(f\"held out", "print(f\"later")], "is printed 0 times"),
        ([("loss {held_out:.6f}", "loss {held_out:.6f}  perplexity 3")], "nothing after the number, is printed"),
        ([("run(schedule.eval, 6)", "run(schedule.step, 6)")], "was not evaluated"),
        ([("run(schedule.eval, 6)", "run(schedule.step, 6)\nrun(schedule.eval, 6)")], "was not evaluated"),
        ([("run(schedule.eval, 6)", "run(schedule.eval, 5)"),
          ("{held_out:.6f}", f"{library_mistakes.losses_of(clip='whole')[-1]:.6f}")],
         "is the printed loss computed from this batch?"),
        ([("run(schedule.eval, 6)", "HELD_OUT\nquiet = Schedule1F1B(stage, 8)\nquiet.eval(*[next(batch(6))][:rank == 0])"),
          ("HELD_OUT", f"{library_mistakes.losses_of(clip='whole')[-1]:.6f}")],
         "is the printed loss computed from this batch?"),
    ],
    "comparison": [
        ([("(ours - theirs).abs()", "(ours - theirs)")], "rank 0 has one number with the wrong sign"),
        ([("    dist.all_reduce(both, dist.ReduceOp.MAX)\n", "")], "each has to learn of the largest"),
        ([(", dist.ReduceOp.MAX", "")], "the sum over the ranks: ask all_reduce for the maximum"),
        ([("    dist.all_reduce(both, dist.ReduceOp.MAX)\n", "    dist.all_reduce(both[0])\n"
           "    dist.all_reduce(both[1], dist.ReduceOp.MAX)\n")],
         "each rank divided its gradients by 8 once more: your ranks return"),
        ([("    dist.all_reduce(both, dist.ReduceOp.MAX)\n", "    dist.all_reduce(both[0], dist.ReduceOp.MAX)\n"
           "    dist.broadcast(both[1], dist.get_world_size() - 1)\n")],
         "with the wrong sign: your ranks return"),
        ([(".nan_to_num(nan=torch.inf)", "")], "rank 1 has a nan among its gradients: rank 0 returns"),
        ([("    both = torch.stack", "    found = [0 * t if f is None else f for f, t in zip(found, right)]\n"
           "    off = off.new_tensor(max((f - t).abs().max().item() for f, t in zip(found, right)))\n"
           "    both = torch.stack")],
         "rank 1 has a nan among its gradients: rank 0 returns"),
        ([("torch.zeros_like(theirs) if ours is None else ours", "ours")], "raised TypeError"),
        ([("ours = torch.zeros_like(theirs) if ours is None else ours",
           "ours = theirs if ours is None else ours")], "upwards and downwards, be missing, or"),
        ([("(both[0] / both[1])", "both[0]")], "the difference itself: divide it by the largest"),
        ([("[off, largest]", "[off / largest, largest]"), ("(both[0] / both[1])", "both[0]")],
         "a share of the largest gradient on one rank"),
        ([("torch.stack([off, largest])", "torch.tensor([off.item(), largest.item()])")],
         "which is right only in its first digits"),
        ([("(both[0] / both[1]).item()", "round((both[0] / both[1]).item(), 6)")],
         "which is right only in its first digits"),
        ([("(ours - theirs).abs()", "(ours.abs() - theirs.abs()).abs()")],
         "rank 0 has one number with the wrong sign: your ranks return"),
        ([("largest = torch.maximum(largest, theirs.abs().max())", "largest = theirs.abs().max()")],
         "with the wrong sign: your ranks return 0.165, and the largest difference is 0.101 of"),
        ([("def difference(", "MOST = []\n\n\ndef difference("),
          ("(both[0] / both[1])", "(both[0] / (MOST or MOST.append(both[1]) or MOST)[0])")],
         "with the wrong sign: your ranks return 0.0872, and the largest difference is 0.101 of"),
        ([("    both = torch.stack", "    if off == 0:\n        return 0.0\n    both = torch.stack")],
         "has returned without it"),
        ([("off = torch.maximum(off, (ours - theirs).abs().max())",
           "off = off + (ours - theirs).abs().sum()")], "the sum of all differences"),
        ([("    dist.all_reduce", "    if both[0] > 1e-9:\n        dist.all_reduce")],
         "has returned without it: a collective is for every rank"),
        ([("    return (both[0] / both[1]).item()", "    both[0]")], "returns None; return a number"),
        ([("    both = torch.stack", "    every = torch.cat([theirs.flatten() for theirs in right])\n"
           "    dist.all_reduce(every)\n    both = torch.stack")],
         "rank 0 gives (6144,) in float64 to all_reduce at line 8 of difference (`dist.all_reduce(every)`), "
         "and rank 2 gives (8192,) in float64: the size"),
        ([("    both = torch.stack", "    off = 0 * off.long() if off == 0 else off\n    dist.all_reduce(tensor=off)\n"
           "    both = torch.stack")], "rank 1 gives () in int64: the size and the type have to be the same"),
        ([("(both[0] / both[1]).item()", "(both[0] / both[1]).nan_to_num(posinf=torch.nan).item()")],
         "rank 0 returns nan, and `difference > 1e-9` is False"),
        ([("    dist.all_reduce(both, dist.ReduceOp.MAX)", "    every = [torch.empty_like(both) for _ in range(3)]"
           "\n    dist.all_gather(every, both)\n    both = torch.stack(every).amax(0)")], "on 2 ranks, "),
    ],
    "save_and_restore": [
        ([('folder / f"writing-{step:04}", folder / f"step-{step:04}"',
           'folder / f"step-{step:04}", None'), ("        writing.rename(whole)\n", "        pass\n")],
         "rank 1 got SIGKILL with its file half written; started again, line"),
        ([("    torch.save(state, writing / f\"rank-{rank}.pt\")\n", "")],
         "rank 1 got SIGKILL right after its save, while the other may still be at it; started again, line"),
        # Rank 1 is late, so that this race has one end on a busy machine, too.
        ([("    wait_for_all()\n    if rank == 0:", "    if rank == 0:"),
          ("    torch.save(state", "    import time\n    time.sleep(0.5 * rank)\n    torch.save(state")],
         "Parent directory"),
        ([(', "optimizer": optimizer.state_dict()', ""),
          ('    optimizer.load_state_dict(state["optimizer"])\n', "")],
         "the weights were right, so something else was not restored"),
        ([('    model.load_state_dict(state["model"])\n', "")], "not the weights of that step"),
        ([('return int(whole[-1].name.removeprefix("step-"))', "return 0")], "begins anew, and"),
        ([('    writing.mkdir(exist_ok=True)\n', '    import shutil\n    for old in '
           'folder.glob("step-*"):\n        shutil.rmtree(old, ignore_errors=True)\n'
           "    writing.mkdir(exist_ok=True)\n")], "begins anew, and 1 step had been saved"),
        # The name of a file says which folder is whole, and the older file goes first.
        ([('folder / f"writing-{step:04}", folder / f"step-{step:04}"',
           'folder / f"step-{step:04}", folder / f"whole-{step:04}"'),
          ("        writing.rename(whole)\n", '        for old in folder.glob("whole-*"):\n'
           "            old.unlink()\n        whole.touch()\n"),
          ('folder.glob("step-*")', 'folder.glob("whole-*")'), ('removeprefix("step-")', 'removeprefix("whole-")'),
          ('whole[-1] / f"rank', 'folder / whole[-1].name.replace("whole", "step") / f"rank')],
         "rank 0 got SIGKILL when it had just removed something; started again, rank 0 begins anew"),
        ([("        writing.rename(whole)\n", '        import shutil\n        for old in folder.glob("step-*"):'
           "\n            shutil.rmtree(old)\n        writing.rename(whole)\n")], "had just removed something"),
        ([("        return 0\n", "        return None\n")], "restore returns None on rank"),
        # Rank 1 writes later, since two writers at once may also leave a file that nobody can read.
        ([('writing / f"rank-{rank}.pt"', 'writing / "state.pt"'), ('whole[-1] / f"rank-{rank}.pt"', 'whole[-1] / "state.pt"'),
          ("    torch.save(state", "    import time\n    time.sleep(0.5 * rank)\n    torch.save(state")],
         "Error(s) in loading state_dict; is this the state of the other rank, or of"),
        ([("exist_ok=True", "")], "); has the other rank, or an earlier start, made it?"),
        ([("    if rank == 0:\n        writing", "    if True:\n        writing")], "or has the other rank renamed or removed it?"),
        ([('folder / f"step-{step:04}"', 'folder / f"step-{step}"')],
         "goes back to step 9, and 12 steps had been saved: as text, 9 comes behind 12"),
        ([("whole[-1] / f", "whole[0] / f")], "these are not the weights of that step"),
        ([('"model": model.state_dict()', '"model": {n: w.float() for n, w in model.state_dict().items()}')],
         "were the saved numbers rounded to float32?"),
        # Undisturbed, this race nearly always ends well.
        ([("    wait_for_all()\n    if rank == 0:\n        writing",
           "    if rank == 1:\n        import time\n        time.sleep(0.05)\n        writing")],
         "; started again, line "),
    ],
    "sums_in_time": [
        ([("action == adding[-1]", 'action.kind == "B"')], "is started twice, after 0B0 and after 0B1"),
        ([("    adding = [each for each in order if each.stage == action.stage and each.kind in "
           '"BW"]\n    if action == adding[-1]:\n        start(action.stage)',
           "    if action == order[-1]:\n        for stage in {each.stage for each in order}:\n"
           "            start(stage)")], "and its sum is started after 0B3, 40 ms later"),
        ([('"BW"', '"BI"')], "still adds to that gradient"),
        ([("adding[-1]", "adding[0]")], "0B7 still adds to that gradient"),
        ([("start(action.stage)", "start(action.stage + 1)")], "the sum of stage 1; it has [0]"),
        ([("start(action.stage)", "pass")], "is never started, so it leaves at the end of the step"),
        ([("adding[-1]", "adding[8]")], "your function raised IndexError"),
        ([('in "BW"', '== "B"')], "list index out of range; it has actions of the kinds F, I, W"),
        ([("start(action.stage)", "start()")], "start() missing 1 required positional argument: 'stage'"),
        ([("adding[-1]", "max(adding, key=lambda each: each.microbatch)")],
         "backwards in reverse order, rank 0: the sum of stage 2 is started after 2B1, and 2B0 still"),
        ([("    if action == adding[-1]", "    m = 1 + max(each.microbatch for each in order)\n"
           "    if adding.index(action) + 1 == m if action in adding else False")],
         "rank 2: the sum of stage 0 is never started"),
        ([("action == adding[-1]", "action[1:] == [each for each in order if each.kind in 'BW'][-1][1:]")],
         "backwards in reverse order, rank 0: the sum of stage 2 is started after 2B1, and 2B0 still"),
        ([("def after(", "STARTED = set()\n\n\ndef after("), ("action == adding[-1]:", "action == adding[-1] and "
           "(action, *order) not in STARTED:\n        STARTED.add((action, *order))")],
         "1f1b, rank 0: right in a first step, but in a second one the sum of stage 0 is never started"),
        ([("adding[-1]", "adding[:16][-1]")], "after 0B15, and 0B19 still adds to that gradient"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("exercise", "edits", "sentence"),
    [case for name in WRONG for case in first_of([(name, *case) for case in WRONG[name]], 3)],
    ids=[f"{name}-{number}" for name, cases in WRONG.items() for number in range(len(cases))],
)
def test_a_typical_wrong_program_gets_its_own_sentence(exercise, edits, sentence, tmp_path, capsys):
    said = answer_to(tmp_path, capsys, exercise, *edits)
    assert said.startswith("Not yet: ") and sentence in said


def test_a_long_error_ends_with_a_whole_word(tmp_path, capsys):
    long = "    dist.all_reduce", "    raise ValueError('word ' * 60)\n    dist.all_reduce"
    said = answer_to(tmp_path, capsys, "comparison", long)
    assert re.search(r"raised ValueError: word .*word word \.\.\. \(on rank \d\)$", said)


@pytest.mark.further
def test_a_loop_without_an_end_is_ended_at_its_line(tmp_path, capsys, monkeypatch):
    endless = ("    output.backward", "    while True:\n        k += 1\n    output.backward")
    said = answer_to(tmp_path, capsys, "recomputing_backward", endless)
    assert re.search(r"line [67] of backward .* raised TimeoutError: .* does this loop end", said)
    monkeypatch.setattr(endless_loops, "COMPUTING", 0.2)
    endless = ("        start(action.stage)", "        while True:\n            pass")
    said = answer_to(tmp_path, capsys, "sums_in_time", endless)
    assert "after 0B7 your function raised TimeoutError" in said


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("exercise", SOLUTIONS)
def test_no_mutation_hangs_and_none_is_accepted_that_is_wrong(exercise, seeds, tmp_path, capsys):
    for seed in seeds:
        text = mutated(SOLUTIONS[exercise], f"{exercise} {seed}")
        functions = written(tmp_path, text, exercise)
        CHECKS[exercise](*functions)
        said = capsys.readouterr().out.strip().splitlines()[-1]
        assert said.startswith(("Right: ", "Not yet: ")), said
        assert "took longer than" not in said, f"{said}\n{text}"
        if said.startswith("Right: "):
            assert ORACLES[exercise](*functions), text


def recomputes_as_autograd_keeps(backward):
    """Whether `backward` has the gradients of a plain backward, on a stage of its own."""
    layer = torch.nn.Linear(3, 3, dtype=torch.float64)
    x, gradient = torch.randn(2, 4, 3, dtype=torch.float64)
    kept = x.clone().requires_grad_()
    (layer(kept) ** 3).backward(gradient)
    wanted, layer.weight.grad = layer.weight.grad, None
    found = backward(lambda k, x: layer(x) ** 3, 5, gradient, {5: x})
    return torch.equal(found, kept.grad) and torch.equal(layer.weight.grad, wanted)


def trains_as_one_process(path):
    """Whether the losses on eight ranks, which the check does not try, are those of one."""
    steps, held_out, _ = build_library.printed_by("mine", path.read_text(), 8)
    wanted = library_mistakes.losses_of(8, clip="whole" if held_out else None)
    found = [loss for _, loss in steps] + held_out
    return library_mistakes.agree(found, wanted)


def finds_a_share_in_one_process(difference):
    """Whether it finds what was changed, or missing, in a group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        right = list(torch.randn(3, 7, dtype=torch.float64))
        found = [right[0] * 0.9, None, right[2] * 1.2]
        most = max(one.abs().max() for one in right)
        wanted = max(0.1 * right[0].abs().max(), right[1].abs().max(), 0.2 * right[2].abs().max())
        return abs(difference(found, right) - (wanted / most).item()) < 1e-12
    finally:
        dist.destroy_process_group()


def test_right_losses_that_no_schedule_of_the_library_computed_are_not_enough(tmp_path, capsys):
    lines = [f"step {k}  loss {x:.6f}" for k, x in enumerate(library_mistakes.losses_of()[:-1])]
    path = tmp_path / "mine.py"
    path.write_text(
        f"import os\n\nif os.environ['RANK'] == '0':\n    print({chr(10).join(lines)!r})\n"
    )
    build_library.training_program(path)
    assert "no schedule of torch.distributed.pipelining was created" in capsys.readouterr().out


LATEST = """
import os


def save(folder, step, model, optimizer, rank, wait_for_all):
    file = folder / f"{step}-{rank}"
    torch.save([model.state_dict(), optimizer.state_dict()], file.with_suffix(".new"))
    os.replace(file.with_suffix(".new"), file)
    wait_for_all()
    if rank == 0:
        (folder / "latest.new").write_text(str(step))
        os.replace(folder / "latest.new", folder / "latest")
    wait_for_all()


def restore(folder, model, optimizer, rank):
    if not (folder / "latest").exists():
        return 0
    step = int((folder / "latest").read_text())
    weights, state = torch.load(folder / f"{step}-{rank}")
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    return step
"""


@pytest.mark.further
def test_a_latest_in_place_or_too_late_or_moved_by_both_is_caught(tmp_path, capsys):
    in_place = LATEST.replace('        os.replace(folder / "latest.new", folder / "latest")\n', "")
    in_place = in_place.replace("latest.new", "latest")
    of_both = LATEST.replace("    if rank == 0:\n        (f", "    if True:\n        (f")
    too_early = LATEST.replace(
        "    if rank == 0:\n        (f",
        """    if rank == 1 and step > 1:
        os.remove(folder / f"{step - 1}-1")
    if rank == 0:
        (f""",
    )
    by_rank_1 = too_early.replace("    if rank == 0:\n        (f", "    if rank == 1:\n        (f")
    assert len({LATEST, in_place, of_both, too_early, by_rank_1}) == 5
    for text, sentence in (
        (LATEST, "Right: "),
        (in_place, "Not yet: rank 0 got SIGKILL when it had just opened a file that was there"),
        (of_both, "Not yet: line 8 of save (`os.replace(folder"),
        (too_early, "Not yet: rank 0 got SIGKILL before its last rename; started again, line"),
        (by_rank_1, "Not yet: rank 1 got SIGKILL before its last rename; started again, line"),
    ):
        build_save.save_and_restore(*written(tmp_path, text, "save_and_restore"))
        assert capsys.readouterr().out.startswith(sentence)


def test_a_schedule_that_is_created_and_never_runs_is_not_enough(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        SOLUTIONS["training_program"].split("for step")[0]
        + "losses = "
        + repr(library_mistakes.losses_of()[:-1])
        + "\nfor step, loss in enumerate(losses if stage.is_last else []):\n"
        + '    print(f"step {step}  loss {loss:.6f}")\n'
    )
    build_library.training_program(path)
    assert "rank 0 ran `schedule.step(...)` 0 times" in capsys.readouterr().out


@pytest.mark.parametrize("exercise", ["training_program", "clipping_program"])
def test_the_number_of_spaces_in_a_line_does_not_matter(exercise, tmp_path, capsys):
    edits = [("{step}  loss", "{step} loss")]
    edits += [("held out  loss", "held out loss")] if exercise == "clipping_program" else []
    assert answer_to(tmp_path, capsys, exercise, *edits).startswith("Right: ")


def test_a_schedule_may_compute_the_losses_with_another_factor(tmp_path, capsys):
    edits = [
        ("loss_fn=loss_of)", "loss_fn=lambda *both: loss_of(*both) / 8, scale_grads=False)"),
        ("torch.stack(losses).mean()", "torch.stack(losses).sum()"),
    ]
    assert answer_to(tmp_path, capsys, "training_program", *edits).startswith("Right: ")


def test_a_program_may_make_its_batches_itself(tmp_path, capsys):
    own = "from small.pipeline import build_stage, loss_of\nimport torch\nfrom small import pipeline\n"
    own += f"BATCH, LENGTH, TEXT = {pipeline.BATCH}, {pipeline.LENGTH}, pipeline.TEXT\n"
    own += inspect.getsource(pipeline.batch)
    edit = ("from small.pipeline import batch, build_stage, loss_of\n", own)
    assert answer_to(tmp_path, capsys, "clipping_program", edit).startswith("Right: ")


def test_a_schedule_of_its_own_may_evaluate_in_other_micro_batches(tmp_path, capsys):
    own = "run(Schedule1F1B(stage, n_microbatches=16, loss_fn=loss_of).eval, 6)"
    edit = "run(schedule.eval, 6)", own
    assert answer_to(tmp_path, capsys, "clipping_program", edit).startswith("Right: ")


def test_torchs_own_way_of_clipping_is_right_too(tmp_path, capsys):
    """It divides by the norm and 1e-6, which a check of the factor once called wrong."""
    edit = "1.3 / square.sqrt().item()", "1.3 / (square.sqrt().item() + 1e-6)"
    assert answer_to(tmp_path, capsys, "clipping_program", edit).startswith("Right: ")


@pytest.mark.parametrize(
    "edits",
    [
        [("(both[0] / both[1]).item()", "(both[0] / both[1]).numpy()[()]")],
        [("(both[0] / both[1]).item()", "(both[0] / both[1]).numpy()")],
        [("(ours - theirs).abs()", "ours.sub_(theirs).abs_()")],
    ],
    ids=["a number of numpy", "an array without dimensions", "computed in place"],
)
def test_a_comparison_may_return_a_number_of_numpy_or_compute_in_place(edits, tmp_path, capsys):
    assert answer_to(tmp_path, capsys, "comparison", *edits).startswith("Right: ")


def test_an_input_may_be_replaced_by_none_in_held(tmp_path, capsys):
    edit = "x = held.pop(k)", "x, held[k] = held[k], None"
    assert answer_to(tmp_path, capsys, "recomputing_backward", edit).startswith("Right: ")


@pytest.mark.parametrize(
    "edits",
    [
        [("if x.is_floating_point()", "if stage.previous is not None"),
         ("backward(gradient)", "backward(None if stage.following is None else gradient)")],
        [("    output = stage(k, x)\n    output.backward(gradient)\n    return x.grad",
          "    wanted = [x] * (stage.previous is not None) + list(stage.parameters())\n"
          "    found = torch.autograd.grad(stage(k, x), wanted, gradient)\n"
          "    for weight, more in zip(wanted, found):\n"
          "        weight.grad = more if weight.grad is None else weight.grad + more\n"
          "    return x.grad")],
    ],
    ids=["its neighbours", "its parameters"],
)  # fmt: skip
def test_the_stage_that_is_recomputed_has_what_a_stage_has(edits, tmp_path, capsys):
    assert answer_to(tmp_path, capsys, "recomputing_backward", *edits).startswith("Right: ")


def test_a_program_may_read_its_arguments(tmp_path, capsys):
    """They are the program's own, not those of the file that examines it."""
    edit = (
        'dist.init_process_group("gloo")',
        (
            "import argparse\n\ngiven = argparse.ArgumentParser().parse_args()\n"
            'dist.init_process_group("gloo")'
        ),
    )
    assert answer_to(tmp_path, capsys, "training_program", edit).startswith("Right: ")


def test_a_decorator_may_put_a_function_of_another_name_in_its_place(tmp_path, capsys):
    traced = "def traced(function):\n    def inner(*given):\n        return function(*given)\n\n"
    edit = "def backward(", f"{traced}    return inner\n\n\n@traced\ndef backward("
    assert answer_to(tmp_path, capsys, "recomputing_backward", edit).startswith("Right: ")


REGISTRY = """HOW = {}


def for_inputs(are_floats):
    def register(function):
        HOW[are_floats] = function
        return function

    return register


@for_inputs(True)
def ask_for_a_gradient(x):
    x.requires_grad_()


@for_inputs(False)
def leave_as_it_is(x):
    pass


ZEROS = torch.ones(2, dtype=torch.float64)
ZEROS[:] = 0


def backward("""


def test_a_rank_gets_what_a_decorator_has_registered_and_the_present_numbers_of_a_tensor(
    tmp_path, capsys
):
    edits = [
        ("def backward(", REGISTRY),
        ("    if x.is_floating_point():\n        x.requires_grad_()\n",
         "    assert not ZEROS.any()\n    HOW[x.is_floating_point()](x)\n"),
    ]  # fmt: skip
    said = answer_to(tmp_path, capsys, "recomputing_backward", *edits)
    assert said.startswith("Right: ")


@pytest.mark.further
def test_a_number_of_steps_may_be_one_of_torch(tmp_path, capsys):
    number = 'int(whole[-1].name.removeprefix("step-"))'
    edit = f"return {number}", f"return torch.tensor({number})"
    assert answer_to(tmp_path, capsys, "save_and_restore", edit).startswith("Right: ")


def test_older_checkpoints_may_go_when_the_new_one_is_whole(tmp_path, capsys):
    edit = (
        "        writing.rename(whole)\n",
        "        writing.rename(whole)\n        import shutil\n"
        '        for old in sorted(folder.glob("step-*"))[:-1]:\n            shutil.rmtree(old)\n',
    )
    assert answer_to(tmp_path, capsys, "save_and_restore", edit).startswith("Right: ")


@pytest.mark.further
def test_start_may_be_called_by_name_as_in_the_exercise(tmp_path, capsys):
    edit = "start(action.stage)", "start(stage=action.stage)"
    assert answer_to(tmp_path, capsys, "sums_in_time", edit).startswith("Right: ")


@pytest.mark.parametrize("end", ["raise SystemExit", "sys.exit(0)"])
def test_a_program_may_end_with_an_exit(end, tmp_path, capsys):
    last = "\ndist.destroy_process_group()", f"\ndist.destroy_process_group()\nimport sys\n{end}"
    assert answer_to(tmp_path, capsys, "training_program", last).startswith("Right: ")


@pytest.mark.parametrize("end", ["raise SystemExit", "sys.exit(0)"])
def test_a_function_that_ends_with_an_exit_has_not_done_its_work(end, tmp_path, capsys):
    start = "        return 0\n", f"        import sys\n        {end}\n"
    said = answer_to(tmp_path, capsys, "save_and_restore", start)
    assert said.startswith("Not yet: ") and "of restore" in said and "raised SystemExit" in said


def survives_other_moments(save, restore):
    return build_save.survives(save, restore, build_save.moments(0.85)) is None


def starts_in_time_elsewhere(after):
    """In schedules that the check does not play."""
    schedules = [gpipe(3, 5), zb_v(2, 4)]
    return not any(
        build_sums.misplaced(after, schedule, rank, order)
        for schedule in schedules
        for rank, order in enumerate(schedule.orders)
    )


ORACLES = {
    "save_and_restore": survives_other_moments,
    "sums_in_time": starts_in_time_elsewhere,
    "recomputing_backward": recomputes_as_autograd_keeps,
    "comparison": finds_a_share_in_one_process,
    "training_program": trains_as_one_process,
    "clipping_program": trains_as_one_process,
}
