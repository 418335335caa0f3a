"""Which tests start a process: those whose code leads to something that starts one."""

import functools
import inspect
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OURS = tuple(str(ROOT / folder) for folder in ("source_code", "tests", "tools"))
STARTERS = ("jupyter_client", "multiprocessing", "nbval.kernel", "subprocess")  # modules


@functools.cache
def starts_processes(function):
    """Whether `function`, or what it names of this repository, names something of STARTERS.

    Names are followed through functions, classes and modules, not through values: a process that a
    method of an argument starts is not seen. course_plugin.py sees it when it starts.
    """
    seen, waiting = set(), [function]
    while waiting:
        thing = waiting.pop()
        module = thing.__name__ if inspect.ismodule(thing) else getattr(thing, "__module__", None)
        if not isinstance(module, str) or id(thing) in seen:
            continue
        if any(module == starter or module.startswith(f"{starter}.") for starter in STARTERS):
            return True
        seen.add(id(thing))
        if is_ours(sys.modules.get(module)):
            waiting += named_in(thing)
    return False


def named_in(thing):
    """What a function names, or the bases and methods of a class."""
    if inspect.isclass(thing):
        return [*thing.__bases__, *filter(inspect.isfunction, vars(thing).values())]
    function = inspect.unwrap(thing) if callable(thing) else thing
    if not inspect.isfunction(function):
        return []
    names = set().union(*(code.co_names for code in codes_of(function.__code__)))
    named = [function.__globals__[name] for name in names & function.__globals__.keys()]
    modules = [value for value in named if inspect.ismodule(value) and is_ours(value)]
    attributes = [getattr(module, name, None) for module in modules for name in names]
    return named + attributes


def is_ours(module):
    return (getattr(module, "__file__", None) or "").startswith(OURS)


def codes_of(code):
    """The code of a function with those of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)
