"""A fault: another text in one function of source_code, and the tests that should notice it."""

import ast
from dataclasses import dataclass

DEFINITIONS = ast.FunctionDef, ast.ClassDef


class StaleFaultError(ValueError):
    """The code has changed, so that a fault cannot be planted any more; the text names the fault."""


@dataclass(frozen=True)
class Fault:
    """`old` is found exactly once in the source of a function or class, and becomes `new`.

    `place` is FILE::NAME, with the file below source_code and a name such as Class.method. `wrong`
    says what the fault does. `tests` are functions of `test_file`, in tests, with [PARAMETERS] if
    one case is enough.
    """

    name: str
    place: str
    old: str
    new: str
    wrong: str
    test_file: str
    tests: tuple[str, ...]

    @property
    def path(self):
        """The file in which it is planted, from the root of the repository."""
        return "source_code/" + self.place.partition("::")[0]

    @property
    def node_ids(self):
        return [f"tests/{self.test_file}::{test}" for test in self.tests]

    def plant(self, text):
        """Return the text of its file with the fault. Raises StaleFaultError."""
        lines = text.splitlines(keepends=True)
        first, last = self.lines_of_place(text)
        source = "".join(lines[first:last])
        if source.count(self.old) != 1:
            times = f"{source.count(self.old)} times"
            raise StaleFaultError(f"{self.name}: {self.place} has {self.old!r} {times}, not once")
        return "".join([*lines[:first], source.replace(self.old, self.new), *lines[last:]])

    def lines_of_place(self, text):
        """The lines of the function or class, as the two ends of a slice."""
        node = ast.parse(text)
        for name in self.place.partition("::")[2].split("."):
            inside = (n for n in ast.walk(node) if isinstance(n, DEFINITIONS) and n.name == name)
            node = next(inside, None)
            if node is None:
                raise StaleFaultError(f"{self.name}: there is no {self.place}")
        return node.lineno - 1, node.end_lineno
