# SPDX-License-Identifier: Apache-2.0
"""Shows the scripts' code in a notebook, so that the notebook needs no copy of it."""

import ast
import base64
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

SOURCE_CODE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Source:
    """A piece of a source file; a notebook shows it in colour, with its place in the file."""

    where: str
    text: str

    def _repr_mimebundle_(self, include=None, exclude=None):
        heading = f"`{self.where}`"
        return {
            "text/markdown": f"{heading}\n```python\n{self.text}\n```",
            "text/plain": f"{self.where}\n{self.text}",
        }


def source_of(file, name=None):
    """The Source of the function, class or method `name` (`Class.method`) of a file in source_code.

    Without a name it is the Source of the whole file. Raises LookupError if the file does not have
    this definition.
    """
    text = read_source(SOURCE_CODE / file)
    if name is None:
        return Source(f"source_code/{file}", text.rstrip())
    body = ast.parse(text).body
    node = None
    for part in name.split("."):
        definitions = [n for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
        node = next((n for n in definitions if n.name == part), None)
        if node is None:
            raise LookupError(f"{file} defines no {name}")
        body = node.body
    return Source(f"source_code/{file}", _dedent(text, node))


def read_source(path):
    """The text of a Python file; if a handout has packed the file, its text is unpacked."""
    text = path.read_text(encoding="utf-8")
    packed = re.search(r'^PACKED = """\n(.*?)"""$', text, re.MULTILINE | re.DOTALL)
    return zlib.decompress(base64.b64decode(packed[1])).decode() if packed else text


def _dedent(text, node):
    lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
    return "\n".join(line[node.col_offset :] for line in lines)
