"""Prints the pictures of source_code/pipeline for CONTRIBUTING.md, from its real imports.

python tools/architecture.py
"""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "source_code" / "pipeline"
CORE = "core"  # the files of the package itself, and the folder below
CORE_FOLDER = "schedules"


def main():
    print("\n\n".join(pictures(module_imports(PACKAGE))))


def pictures(imports):
    """The topics, with all of the core as one box, and the files of the core."""
    return [mermaid(topics_of(imports)), mermaid(core_of(imports))]


def module_imports(package):
    """{module: the modules of the package that it imports}, names as in `checks.lesson_01`.

    A folder's `__init__.py` goes by the name of the folder. Imports within functions count: they
    run the same way.
    """
    modules = {
        ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted(package.rglob("*.py"))
        if path != package / "__init__.py"
    }
    imports = {}
    for module, path in modules.items():
        named = imported_names(path.read_text())
        prefix = f"{package.name}."
        inside = {name.removeprefix(prefix) for name in named if name.startswith(prefix)}
        imports[module] = {other for other in modules if inside & {other}} - {module}
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


def topic_of(module):
    """The topic folder that a module lies in, or CORE."""
    first = module.split(".")[0]
    return first if first != CORE_FOLDER and (PACKAGE / first).is_dir() else CORE


def topics_of(imports):
    """The same imports between topic folders, all of the core being one."""
    return merged(imports, topic_of)


def core_of(imports):
    """The same imports between the files of the core; a folder counts as one."""
    core = {module: others for module, others in imports.items() if topic_of(module) == CORE}
    return merged(core, lambda module: module.split(".")[0])


def merged(imports, group_of):
    """{group: the other groups that its modules import}, by the group of each module."""
    groups = {}
    for module, others in imports.items():
        own = group_of(module)
        groups.setdefault(own, set()).update({group_of(other) for other in others} - {own})
    return groups


def cycle_in(imports):
    """Modules that import each other in a ring, the first one again at the end; or None."""
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
    """What `module` builds on, directly or through others."""
    found = set()
    waiting = list(imports[module])
    while waiting:
        other = waiting.pop()
        if other not in found:
            found.add(other)
            waiting += imports[other]
    return found


def mermaid(imports):
    """A Mermaid block: floors from the ground up, and only the arrows that no others imply."""
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
            lines.append(f'    {module}["{label_of(module)}"]')
            lines += [f"    {module} --> {other}" for other in sorted(direct[module])]
    return "\n".join([*lines, "```"])


def label_of(group):
    """What stands in the box of a file, of a folder, or of the core."""
    if group == CORE:
        return f"the files of {PACKAGE.name}/ itself and {CORE_FOLDER}/"
    return f"{group}/" if (PACKAGE / group).is_dir() else f"{group}.py"


if __name__ == "__main__":
    main()
