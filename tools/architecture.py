"""What the files of source_code import, for the tests of the architecture and for the website."""

import ast
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "source_code"
PACKAGES = tuple("small pipeline files guard lab extensions planning course broken".split())
BY_TOPIC = ("extensions", "course")  # packages whose folders and files are topics
SCRIPTS = "the scripts"


def module_imports(source):
    """{module: the modules of `source` that it imports}.

    Names are as in `course.checks.lesson_01`. A folder's `__init__.py` has the name of the folder.
    Imports within functions count, because they must obey the same direction.
    """
    modules = {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(source.rglob("*.py"))
    }
    imports = {}
    for module, path in modules.items():
        names = imported_names(path.read_text(encoding="utf-8"))
        imports[module] = (names & modules.keys()) - {module}
    return imports


def imported_names(source):
    """Every dotted name that Python source imports; `from a import b` gives `a` and `a.b`."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def package_of(module):
    """The package of a module, or SCRIPTS."""
    first = module.split(".")[0]
    return first if first in PACKAGES else SCRIPTS


def topic_of(module):
    """The topic of a module: a package, a folder or file of a package of BY_TOPIC, or SCRIPTS."""
    package = package_of(module)
    parts = module.split(".")[1:2]
    if package == "course" and not (SOURCE / "/".join([package, *parts])).is_dir():
        parts = []  # the files of course/ itself
    return "/".join([package, *parts]) if package in BY_TOPIC else package


def topics_of(imports):
    """The imports between topics, from those between modules."""
    topics = merged(imports, topic_of)
    topics.pop("extensions", None)  # an empty __init__.py
    return topics


def merged(imports, group_of):
    """{group: the other groups that its modules import}, by the group of each module."""
    groups = {}
    for module, others in imports.items():
        own = group_of(module)
        groups.setdefault(own, set()).update({group_of(other) for other in others} - {own})
    return groups


def cycle_in(imports):
    """Modules that import each other in a cycle, the first one again at the end; or None."""
    done = set()

    def search(module, path):
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        for other in sorted(imports[module]):
            if found := search(other, [*path, module]):
                return found
        done.add(module)
        return None

    return next(filter(None, (search(module, []) for module in sorted(imports))), None)
