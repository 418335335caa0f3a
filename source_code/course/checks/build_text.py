# SPDX-License-Identifier: Apache-2.0
"""Collects the source of a reader's function and of the reader's other definitions that it uses."""

import ast
import builtins
import inspect
import symtable
import sys
import types

from course.building.cells import CONTAINERS, known_to, module_of, name_of, text_of
from course.checks.answer import NotAttempted, WrongAnswer

MOST_NUMBERS = 64  # of a tensor that is written as a list
PLAIN = (int, float, str, bytes, tuple, list, dict, type(None))


def request_of(*functions, places=1, **more):
    """The request with which `on_ranks.py` defines `functions`; `more` is added to it.

    Raises NotAttempted while each of them is an untouched stub, which has `...` at `places` places,
    and WrongAnswer for anything whose text cannot be found in a cell: a partial, a method or another
    object needs a name there.
    """
    sources, imports = default_dtype(), []
    for function in functions:
        texts = []
        if callable(function) and not inspect.isbuiltin(function):
            texts, lines = collect(function)
        if not texts:
            raise WrongAnswer(
                "this exercise asks for a function that a cell defines by name, with def or with =: "
                "the ranks run the text of that cell"
            )
        sources |= dict(texts)
        imports += [line for line in lines if line not in imports]
    names = list(map(name_of, functions))
    begun = places == 1 and any(_calls_something(sources[name]) for name in names)
    if not begun and all(len(holes(sources[name])) >= places for name in names):
        raise NotAttempted
    for name, text in sources.items():
        if holes(text):
            raise WrongAnswer(f"line {holes(text)[0]} of {name} still has its ...")
    return {"functions": names, "sources": list(sources.items()), "imports": imports, **more}


def default_dtype():
    """{"": statement} that gives a rank the default type that a cell has set; else {}."""
    torch = sys.modules.get("torch")  # an import would take long
    if torch is None or torch.get_default_dtype() is torch.float32:
        return {}
    return {"": f"import torch\n\ntorch.set_default_dtype({torch.get_default_dtype()})"}


def collect(function):
    """([(name, text)], [import lines]): the definitions of its module that `function` uses, each
    after those that it uses itself; the last one is `function`. Both are empty if it has no name."""
    name, known, module = name_of(function), known_to(function), module_of(function)
    sources, imports, seen = [], [], {name}

    def add(name, value, user=""):
        text = text_of(name, value, module)
        if text is None and hasattr(builtins, name):
            return  # Jupyter puts an `open` of its own into the notebook; a rank has Python's
        if text is None and (inspect.isroutine(value) or inspect.isclass(value)):
            raise WrongAnswer(f"the text of {name} cannot be found; run its cell")
        if text is None or text in [earlier for _, earlier in sources]:
            return
        if f"\n{text}\n" in f"\n{user}\n":
            return  # as that of a variable of the loop that uses it
        if text.startswith(("import ", "from ")):
            imports.append(text)
            return
        for other in sorted(names_in(text) - seen):
            seen.add(other)
            if other not in known:
                continue  # it is built in, or not yet defined
            used = known[other]
            line = line_of(other, used, module)
            if line is None:
                add(other, used, text)
            elif line:
                imports.append(line)
        sources.append((name, text))
        for other in functions_in(value):  # a decorator may have put them there
            if other.__name__ not in seen:
                seen.add(other.__name__)
                add(other.__name__, other)

    if name not in (None, "<lambda>"):
        add(name, function)
    return sources, imports


def functions_in(value):
    """The functions and classes that a list, a dictionary or another container holds."""
    held = value.values() if isinstance(value, dict) else value
    held = held if isinstance(value, CONTAINERS) else []
    return [each for each in held if inspect.isfunction(each) or inspect.isclass(each)]


def line_of(name, value, module):
    """The line with which a rank gets a value that is plain or comes from another module.

    It is empty for a name that every rank has, and None for what `module` itself defines.
    """
    import torch  # not at the top of the file: the import takes long

    from small import pipeline as my_pipeline

    known = vars(my_pipeline)
    if name in known and (known[name] is value or (is_plain(value) and known[name] == value)):
        return ""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    if isinstance(value, torch.dtype) or is_plain(value):
        return f"{name} = {value!r}"
    if type(value) is torch.Tensor and value.numel() <= MOST_NUMBERS and not value.requires_grad:
        if is_plain(value.tolist()):  # its present numbers, also those assigned to it later
            return f"{name} = torch.tensor({value.tolist()!r}, dtype={value.dtype})"
    home, own_name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if home != module and getattr(sys.modules.get(home), str(own_name), None) is value:
        return f"from {home} import {own_name} as {name}"
    return None


def is_plain(value):
    """Whether `repr(value)` gives the value back; a list of objects does not."""
    try:
        return isinstance(value, PLAIN) and ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError):
        return False


def names_in(text):
    """The names that the definitions in `text` take from their module.

    Local variables do not count, even if the notebook has a global variable of the same name.
    """
    names, tables = set(), [symtable.symtable(text, "<cell>", "exec")]
    sums = [node.target for node in ast.walk(ast.parse(text)) if isinstance(node, ast.AugAssign)]
    added = {getattr(each, "id", None) for each in sums}  # read, too, which symtable does not say
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            used = symbol.is_referenced() or symbol.get_name() in added
            if used and (table.get_type() == "module" or symbol.is_global()):
                names.add(symbol.get_name())
    return names


def zero_as_none(text, names=("previous", "following")):
    """(line, attribute) of the first condition that is false for rank 0 as for None, or None."""
    found, nodes = [], list(ast.walk(ast.parse(text)))
    variables = {to.id: of for to, of in pairs_of(nodes) if attribute_of(of, names)}
    for node in nodes:
        conditions = [node.test] if isinstance(node, (ast.If, ast.IfExp, ast.While)) else []
        conditions += node.values if isinstance(node, ast.BoolOp) else []
        conditions += [node.operand] if isinstance(node, ast.UnaryOp) else []
        conditions += node.ifs if isinstance(node, ast.comprehension) else []
        for each in conditions:
            each = each.value if isinstance(each, ast.NamedExpr) else each
            if attribute_of(each, names):
                found.append((each.lineno, each.attr))
            elif getattr(each, "id", None) in variables:
                found.append((each.lineno, each.id))
    return min(found, default=None)


def attribute_of(node, names):
    """Whether `node` is an attribute of one of `names`, such as `stage.previous`."""
    return isinstance(node, ast.Attribute) and node.attr in names


def pairs_of(nodes):
    """(name, value) for each variable that a plain assignment, or one of a tuple, sets."""
    for node in nodes:
        if isinstance(node, ast.NamedExpr):
            yield node.target, node.value
        for target in node.targets if isinstance(node, ast.Assign) else []:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(target.elts, node.value.elts)
            yield from ((to, of) for to, of in pairs if isinstance(to, ast.Name))


def holes(text):
    """The numbers of the lines that still have a stub's `...`.

    A `...` that was left above code or never runs, or that is all that a class has, does not count.
    """
    nodes = list(ast.walk(ast.parse(text)))
    indices = [node.slice for node in nodes if isinstance(node, ast.Subscript)]  # as in x[..., 0]
    indices += [value for index in indices for value in getattr(index, "elts", [])]
    blocks = [getattr(node, field, None) for node in nodes for field in ("body", "orelse")]
    left = [each.value for block in blocks if isinstance(block, list) for each in _left(block)]
    bodies = [each for node in nodes if _needs_no_code(node) for each in node.body]
    left += [each.value for each in bodies if _is_only(type(...), each)]
    values = [node for node in nodes if isinstance(node, ast.Constant) and node.value is ...]
    return sorted(value.lineno for value in values if value not in indices + left)


def _calls_something(text):
    """Whether a text has a call, which no stub with one place has."""
    return any(isinstance(node, ast.Call) for node in ast.walk(ast.parse(text)))


def _left(block):
    """The statements `...` of a block that stand above code of the reader's, or below its return.

    In a stub, one can also stand below given code: last, or before the `return`.
    """
    code = [node for node in block if not _is_only(str, node)]
    dead = []
    while code and _is_only(type(...), code[-1]):
        dead.append(code.pop())
    dots = [node for node in code if _is_only(type(...), node)]
    given = [node for node, below in zip(code[1:], code[2:]) if isinstance(below, ast.Return)]
    never_run = dead if code and isinstance(code[-1], ast.Return) else []
    return [node for node in dots if node not in given] + never_run


def _needs_no_code(node):
    """Whether `...` is a whole body: of an empty class, an abstract method or an `if False`."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Constant) and not node.test.value
    decorators = getattr(node, "decorator_list", [])
    names = {getattr(each, "attr", getattr(each, "id", "")) for each in decorators}
    return isinstance(node, ast.ClassDef) or bool(names & {"abstractmethod", "overload"})


def _is_only(kind, node):
    """Whether a statement is a constant of that kind, such as a docstring, and nothing else."""
    constant = node.value if isinstance(node, ast.Expr) else None
    return isinstance(constant, ast.Constant) and isinstance(constant.value, kind)
