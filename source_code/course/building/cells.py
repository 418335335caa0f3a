# SPDX-License-Identifier: Apache-2.0
"""Finds the text with which a notebook's cells, or a file, define a function, a class or a value."""

import ast
import inspect
import sys
import textwrap
from pathlib import Path

NOT_RUN = ("writefile", "file")  # cell magics that do not run the text below them


def name_in_cells(function):
    """The name of a function in its notebook, also if a decorator has put another one in its place."""
    known = getattr(function, "__globals__", {})
    names = [name for name, value in known.items() if value is function and name[0] != "_"]
    own = function.__name__
    return own if known.get(own) is function or not names else names[0]


def text_of(name, value, module):
    """The text that defines `name` in a module, which can be a notebook; None if there is none."""
    if _has_own_text(name, value):
        try:
            return textwrap.dedent(inspect.getsource(value))
        except (OSError, TypeError):
            pass  # Python finds no class of a cell, and no function below %%time
    found = None
    for cell in _cells_of(module):
        for text in _definitions(cell, name):
            found = text  # the last one counts
    return found


def _has_own_text(name, value):
    """Whether `value` was made by a def or class statement with its own name."""
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        return False
    return value.__name__ == name and "<locals>" not in value.__qualname__


def _cells_of(module):
    """The text of a file, or the texts of a notebook's cells in the order in which they ran."""
    module = sys.modules.get(module)
    file = getattr(module, "__file__", None)
    return [Path(file).read_text(encoding="utf-8")] if file else getattr(module, "_ih", [])


def _definitions(text, name):
    """The statements in `text`, outside functions and classes, that define `name`."""
    try:
        statements = ast.parse(text).body
    except SyntaxError:
        return  # a cell that Python rejected
    for node in statements:
        if below := _below_magic(node):
            yield from _definitions(below, name)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            first = min(each.lineno for each in [node, *node.decorator_list])
            yield "\n".join(text.splitlines()[first - 1 : node.end_lineno])
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    source = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
                    yield f"{source}import {alias.name} as {name}"
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.If)):
            names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
            if any(each.id == name and isinstance(each.ctx, ast.Store) for each in names):
                yield ast.get_source_segment(text, node)


def _below_magic(node):
    """The text below the cell magic, such as %%time, that `node` calls; or None."""
    call = getattr(node, "value", None)
    if not isinstance(call, ast.Call) or getattr(call.func, "attr", "") != "run_cell_magic":
        return None
    from IPython.core.inputtransformer2 import TransformerManager  # only a notebook gets here

    magic, _, below = (argument.value for argument in call.args)
    return None if magic in NOT_RUN else TransformerManager().transform_cell(below)
