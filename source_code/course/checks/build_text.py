"""Collects the source of a reader's function and of the reader's other definitions that it uses."""

import ast
import inspect
import symtable
import textwrap
import types

from course.checks.answer import NotAttempted, WrongAnswer

PLAIN = (int, float, str, bytes, tuple, list, dict, type(None))


def request_of(function, places=1, **more):
    """The request with which `on_ranks.py` defines `function`; `more` is added to it.

    Raises NotAttempted for an untouched stub, which has `...` at `places` places, and WrongAnswer
    for anything that is not a function written in a cell.
    """
    if not inspect.isfunction(function) or function.__name__ == "<lambda>":
        raise WrongAnswer("this exercise asks for a function, written with def in a cell")
    sources, imports = collect(function)
    if len(holes(sources[0][1])) >= places:
        raise NotAttempted
    for name, text in sources:
        if holes(text):
            raise WrongAnswer(f"line {holes(text)[0]} of {name} still has its ...")
    return {"function": function.__name__, "sources": sources, "imports": imports, **more}


def collect(function):
    """([(name, text)], [import lines]): first the function, then the definitions of its module
    that it uses."""
    import torch  # not at the top of the file: the import takes long

    from small import pipeline as my_pipeline

    known = vars(my_pipeline)
    sources, imports, waiting, seen = [], [], [function], set()
    while waiting:
        thing = waiting.pop(0)
        try:
            text = textwrap.dedent(inspect.getsource(thing))
        except (OSError, TypeError):
            raise WrongAnswer(
                f"the text of {thing.__name__} cannot be found; run its cell"
            ) from None
        sources.append((thing.__name__, text))
        for name in sorted(names_in(text) - seen):
            seen.add(name)
            value = function.__globals__.get(name, seen)
            if name in known and (known[name] is value or known[name] == value):
                continue
            if isinstance(value, types.ModuleType):
                imports.append(f"import {value.__name__} as {name}")
            elif inspect.isroutine(value) or inspect.isclass(value):
                if value.__module__ == function.__module__:
                    waiting += [value] if value is not function else []
                elif value.__module__:  # a bound method of a built-in type has none
                    imports.append(f"from {value.__module__} import {value.__name__} as {name}")
            elif isinstance(value, torch.dtype) or (
                isinstance(value, PLAIN) and can_be_written(value)
            ):
                imports.append(f"{name} = {value!r}")
    return sources, imports


def can_be_written(value):
    """Whether `repr(value)` gives the value back; a list of objects does not."""
    try:
        return ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError):
        return False


def names_in(text):
    """The names that the definitions in `text` take from their module.

    A local variable is none of them, even if the notebook has a global variable of that name.
    """
    names, tables = set(), [symtable.symtable(text, "<cell>", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (table.get_type() == "module" or symbol.is_global()):
                names.add(symbol.get_name())
    return names


def zero_as_none(text, names=("previous", "following")):
    """(line, attribute) of the first condition that is false for rank 0 as for None, or None."""
    found = []
    for node in ast.walk(ast.parse(text)):
        conditions = [node.test] if isinstance(node, (ast.If, ast.IfExp)) else []
        conditions += node.values if isinstance(node, ast.BoolOp) else []
        conditions += [node.operand] if isinstance(node, ast.UnaryOp) else []
        found += [
            (each.lineno, each.attr)
            for each in conditions
            if isinstance(each, ast.Attribute) and each.attr in names
        ]
    return min(found, default=None)


def holes(text):
    """The numbers of the lines that still have a stub's `...`."""
    nodes = list(ast.walk(ast.parse(text)))
    indices = [node.slice for node in nodes if isinstance(node, ast.Subscript)]  # as in x[..., 0]
    indices += [value for index in indices for value in getattr(index, "elts", [])]
    values = [node for node in nodes if isinstance(node, ast.Constant) and node.value is ...]
    return sorted(value.lineno for value in values if value not in indices)
