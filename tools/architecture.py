"""Prints the diagrams of source_code for CONTRIBUTING.md, from its imports.

python tools/architecture.py
"""

import ast
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "source_code"
PACKAGES = ("small", "pipeline", "lab", "extensions", "planning", "course", "broken")
BY_TOPIC = ("extensions", "course")  # packages of which each folder and file is a topic of its own
SCRIPTS = "the scripts"


def main():
    print("\n\n".join(pictures(module_imports(SOURCE))))


def pictures(imports):
    """Diagrams: of the packages with all scripts as one box, of the core's files, of the lab's."""
    return [
        mermaid(topics_of(imports)),
        mermaid(files_of(imports, "pipeline"), "pipeline/"),
        mermaid(files_of(imports, "lab"), "lab/"),
    ]


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
        imports[module] = (imported_names(path.read_text()) & modules.keys()) - {module}
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
    """The box of a module in the first diagram: a package, a topic of a package, or SCRIPTS."""
    package = package_of(module)
    parts = module.split(".")[1:2]
    if package == "course" and not (SOURCE / "/".join([package, *parts])).is_dir():
        parts = []  # the files of course/ itself
    return "/".join([package, *parts]) if package in BY_TOPIC else package


def packages_of(imports):
    """The same imports between packages."""
    return merged(imports, package_of)


def topics_of(imports):
    """The same imports between the boxes of the first picture."""
    topics = merged(imports, topic_of)
    topics.pop("extensions", None)  # an empty __init__.py
    return topics


def files_of(imports, package):
    """The same imports between the files of one package; a folder counts as one file."""
    within = {module: others for module, others in imports.items() if package_of(module) == package}
    within.pop(package, None)
    inside = {module: others & within.keys() for module, others in within.items()}
    return merged(inside, lambda module: "/".join(module.split(".")[:2]))


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


def reachable(imports, module):
    """All modules that `module` imports, directly or through others."""
    found = set()
    waiting = list(imports[module])
    while waiting:
        other = waiting.pop()
        if other not in found:
            found.add(other)
            waiting += imports[other]
    return found


def mermaid(imports, folder=""):
    """A Mermaid block: floors from the ground up, and only the arrows that no others imply.

    Labels leave out `folder`, which contains all boxes.
    """
    direct = {
        module: others - set().union(*(reachable(imports, other) for other in others))
        for module, others in imports.items()
    }
    floors = {}

    def floor(module):
        if module not in floors:
            floors[module] = 1 + max(map(floor, imports[module]), default=-1)
        return floors[module]

    lines = ["```mermaid", "flowchart LR"]
    for number in range(1 + max(map(floor, imports))):
        lines.append(f"    %% floor {number}")
        for module in sorted(module for module in imports if floors[module] == number):
            lines.append(f'    {name_of(module)}["{label_of(module).removeprefix(folder)}"]')
            others = sorted(direct[module])
            lines += [f"    {name_of(module)} --> {name_of(other)}" for other in others]
    return "\n".join([*lines, "```"])


def name_of(group):
    """The name of a box in Mermaid."""
    return group.replace("/", "_").replace(" ", "_")


def label_of(group):
    """The label of the box of a file, of a folder, or of the scripts."""
    if group == SCRIPTS:
        return group
    return f"{group}/" if (SOURCE / group).is_dir() else f"{group}.py"


if __name__ == "__main__":
    main()
