"""Finds what a script uses: which definitions, which of their methods, which imports.

Names are followed through imports from definition to definition. A method is taken when anything
that is taken calls something of that name: which object it is called on is not asked, so there may
be one too many and never one too few.
"""

import ast
import sys
from dataclasses import dataclass, field

DEFINITIONS = (ast.FunctionDef, ast.ClassDef)


class CannotCopy(Exception):
    """Why no copy can be made, in one sentence that says what to change."""


@dataclass
class Module:
    """One file: what it defines at its top level, and what it imports from where."""

    name: str
    text: str
    definitions: dict = field(default_factory=dict)  # name -> node
    own: dict = field(default_factory=dict)  # name -> (module of the course, name there)
    foreign: dict = field(default_factory=dict)  # name -> the import statement that gives it

    def __post_init__(self):
        for node in ast.parse(self.text).body:
            if isinstance(node, DEFINITIONS):
                self.definitions[node.name] = node
            elif isinstance(node, ast.Assign):
                targets = [n for target in node.targets for n in ast.walk(target)]
                self.definitions |= {n.id: node for n in targets if isinstance(n, ast.Name)}
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    name = alias.asname or alias.name
                    if node.module.split(".")[0] == "pipeline":
                        self.own[name] = (
                            node.module.removeprefix("pipeline").lstrip("."),
                            alias.name,
                        )
                    else:
                        renamed = f" as {alias.asname}" if alias.asname else ""
                        self.foreign[name] = f"from {node.module} import {alias.name}{renamed}"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    renamed = f" as {alias.asname}" if alias.asname else ""
                    name = alias.asname or alias.name.split(".")[0]
                    self.foreign[name] = f"import {alias.name}{renamed}"


class Used:
    """All that `script`, a Module, uses. `read(module)` gives the text of a module of the course.

    `order` has (module, name) of every definition, the module of the script's own being "": first
    the script's in their order, then the others in the order of use, each behind what it needs while
    it is defined. `imports` has the import statement that gives each name from elsewhere.
    """

    def __init__(self, script, read):
        self.read = read
        self.modules = {"": script}
        self.attributes = set()  # every name that something taken asks an object for
        before = None
        while before != self.attributes:  # a name that is new may reach a method, and so on
            before = set(self.attributes)
            self.order, self.imports, self.taken = [], {}, set()
            self.take("", "main")
        own = [name for name in script.definitions if ("", name) in self.taken]
        self.order, self.imports, self.taken = [], {}, set()
        for name in own:
            self.take("", name, follow=False)
        for name in own:
            for used in self.names_in("", name):
                self.follow("", used)

    def module(self, name):
        if name not in self.modules:
            self.modules[name] = Module(name, self.read(name))
        return self.modules[name]

    def follow(self, module, name):
        """Take what `name` means in `module`; a name that is neither defined nor imported is local."""
        here = self.module(module)
        if name in here.definitions:
            self.take(module, name)
        elif name in here.own:
            self.follow(*here.own[name])
        elif name in here.foreign:
            statement = here.foreign[name]
            if self.imports.setdefault(name, statement) != statement:
                raise CannotCopy(
                    f"{name} is '{statement}' in {module} and '{self.imports[name]}' elsewhere; "
                    "in one file a name means one thing, so rename one of them"
                )

    def take(self, module, name, follow=True):
        """Put a definition into the copy, behind what it needs at once and before what it calls."""
        if (module, name) in self.taken:
            return
        twin = next((other for other, taken in self.taken if taken == name), None)
        if twin is not None:
            raise CannotCopy(
                f"{name} is defined in {twin or 'the script'} and in {module or 'the script'}; in one "
                "file a name means one thing, so rename one of them"
            )
        self.taken.add((module, name))
        node = self.module(module).definitions[name]
        for used in names_needed_at_once(node):
            self.follow(module, used)
        self.order.append((module, name))
        self.attributes |= self.attributes_in(module, name)
        for used in self.names_in(module, name) if follow else []:
            self.follow(module, used)

    def parts(self, module, name):
        """The node, and of a class only its head and the methods that are taken."""
        node = self.module(module).definitions[name]
        if not isinstance(node, ast.ClassDef):
            return [node]
        methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
        dropped = [method for method in methods if not self.is_taken(node, method)]
        return [*node.bases, *node.decorator_list, *(i for i in node.body if i not in dropped)]

    def is_taken(self, node, method):
        """A method that others call; one of a class from elsewhere may be called from there."""
        from_elsewhere = any(isinstance(base, ast.Attribute) for base in node.bases)
        return from_elsewhere or method.name.startswith("__") or method.name in self.attributes

    def names_in(self, module, name):
        """Every name in a definition, in the order in which they stand there."""
        found = [n for part in self.parts(module, name) for n in ast.walk(part)]
        names = [n for n in found if isinstance(n, ast.Name)]
        return [n.id for n in sorted(names, key=lambda n: (n.lineno, n.col_offset))]

    def attributes_in(self, module, name):
        found = [n for part in self.parts(module, name) for n in ast.walk(part)]
        return {n.attr for n in found if isinstance(n, ast.Attribute)}


def names_needed_at_once(node):
    """The names that must have a meaning when a definition is read, not only when it is called."""
    if isinstance(node, ast.Assign):
        parts = [node.value]
    elif isinstance(node, ast.FunctionDef):
        parts = [*node.decorator_list, *node.args.defaults]
    else:
        fields = [item for item in node.body if not isinstance(item, ast.FunctionDef)]
        methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
        parts = [*node.bases, *node.decorator_list, *fields]
        parts += [part for m in methods for part in [*m.decorator_list, *m.args.defaults]]
    return [n.id for part in parts for n in ast.walk(part) if isinstance(n, ast.Name)]


def sorted_imports(statements):
    """Import statements as one block: the standard library, then the rest, `import` before `from`."""
    plain = sorted({s for s in statements if s.startswith("import")})
    names = {}
    for statement in statements:
        if statement.startswith("from"):
            module, name = statement.removeprefix("from ").split(" import ")
            names.setdefault(module, set()).add(name)
    lines = plain + [f"from {module} import {', '.join(sorted(names[module], key=str.lower))}"
                     for module in sorted(names)]  # fmt: skip
    standard = [s for s in lines if s.split()[1].split(".")[0] in sys.stdlib_module_names]
    others = [s for s in lines if s not in standard]
    return "\n".join(standard) + "\n\n" + "\n".join(others) + "\n"
