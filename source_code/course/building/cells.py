# SPDX-License-Identifier: Apache-2.0
"""Finds the text with which a notebook's cells, or a file, define a function, a class or a value."""

import ast
import inspect
import sys
import textwrap
from collections import deque
from functools import partial
from pathlib import Path

from course.source import read_source

BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match)
CONTAINERS = (dict, list, set, deque)
FILLING = ("append", "appendleft", "extend", "add", "update", "insert", "setdefault")
NOT_RUN = ("writefile", "file")  # cell magics that do not run the text below them


def text_of(name, value, module):
    """The text that defines `name` in a module, which can be a notebook; None if there is none."""
    own = None
    if _has_own_text(name, value):
        try:
            own = textwrap.dedent(inspect.getsource(value))
        except (OSError, TypeError):
            pass  # Python finds no class of a cell, and no function below %%time
    if own and not vars(value):
        return own
    found = own
    for cell in _cells_of(module):
        for text, fills in _definitions(cell, name):
            if found and (fills or _uses_itself(text, name)):
                found += f"\n{text}"
            elif not fills:
                found = own or text  # the last one counts
    return found


def _uses_itself(text, name):
    """Whether a statement needs the earlier value of `name`, as `step = partial(step, 2)` does."""
    node = ast.parse(text).body[0]
    values = [node.value] if isinstance(node, (ast.Assign, ast.AnnAssign)) else []
    for value in values:
        if isinstance(value, ast.Name) and value.id == name:
            return True
        values += [] if isinstance(value, ast.Lambda) else ast.iter_child_nodes(value)
    return False


def name_of(function):
    """The name that the notebook gives to a function, which another function may have made.

    It is None for a partial, a method or another object to which the notebook gives no name.
    """
    own, *names = names_of(function)
    default = own if inspect.isfunction(function) else None
    return own if own in names else min(names, default=default, key=lambda n: n.startswith("_"))


def names_of(function):
    """A function's own name, and then every name that its module gives to it."""
    known = known_to(function)
    own = getattr(function, "__name__", None)
    return [own, *(name for name, value in known.items() if value is function)]


def known_to(function):
    """{name: value} of the module of a function, or of a partial, a method or another object."""
    if inspect.isfunction(function):
        return inspect.unwrap(function).__globals__
    return vars(sys.modules.get(module_of(function), object))


def module_of(function):
    """The module's name of a function, of the function in a partial, or of an object's class."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__module__", None)


def _has_own_text(name, value):
    """Whether `value` was made by a def or class statement with its own name."""
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        return False
    if "PACKED" in getattr(value, "__globals__", ()):
        return False  # a handout has packed its file, so its lines are not there
    return value.__name__ == name and "<locals>" not in value.__qualname__


def _cells_of(module):
    """The text of a file, or the texts of a notebook's cells in the order in which they ran."""
    module = sys.modules.get(module)
    file = getattr(module, "__file__", None)
    return [read_source(Path(file))] if file else getattr(module, "_ih", [])


def _definitions(text, name):
    """Yield (statement, False) for each one that defines `name` outside functions and classes.

    For each statement that adds something to the value of `name`, yield (statement, True).
    """
    try:
        statements = ast.parse(text).body
    except SyntaxError:
        return  # a cell that Python rejected
    for node in statements:
        if below := _below_magic(node):
            yield from _definitions(below, name)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            first = min(each.lineno for each in [node, *node.decorator_list])
            yield "\n".join(text.splitlines()[first - 1 : node.end_lineno]), False
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    source = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
                    yield f"{source}import {alias.name} as {name}", False
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, *BLOCKS)):
            names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
            stored = any(each.id == name and isinstance(each.ctx, ast.Store) for each in names)
            fills = any(_is_filled(each, name) for each in ast.walk(node))
            if stored or fills:
                added = fills or isinstance(node, ast.AugAssign)
                yield _alone(text, node, name), added


def _alone(text, node, name):
    """The text of a statement; of `a, b = x, y` only the part that sets `name`."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
        targets = getattr(node.targets[0], "elts", [])
        if len(node.targets) == 1 and len(targets) == len(node.value.elts):
            for target, value in zip(targets, node.value.elts):
                if getattr(target, "id", "") == name:
                    return f"{name} = {ast.get_source_segment(text, value)}"
    return ast.get_source_segment(text, node)


def _is_filled(node, name):
    """Whether a part of a statement adds something to `name`, or sets its element or attribute."""
    if isinstance(node, (ast.Subscript, ast.Attribute)):
        return isinstance(node.ctx, ast.Store) and _owner_of(node) == name
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
        return bool(node.args) and _owner_of(node.args[0]) == name
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in FILLING and _owner_of(node.func) == name
    return False


def _owner_of(node):
    """The name with which an expression such as `peers[0].ranks` begins, or ""."""
    while isinstance(node, (ast.Subscript, ast.Attribute)):
        node = node.value
    return getattr(node, "id", "")


def _below_magic(node):
    """The text below the cell magic, such as %%time, that `node` calls; or None."""
    call = getattr(node, "value", None)
    if not isinstance(call, ast.Call) or getattr(call.func, "attr", "") != "run_cell_magic":
        return None
    from IPython.core.inputtransformer2 import TransformerManager  # only a notebook gets here

    magic, _, below = (argument.value for argument in call.args)
    return None if magic in NOT_RUN else TransformerManager().transform_cell(below)
