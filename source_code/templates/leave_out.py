"""Leaves names out of Python source: what was only there for them goes with them.

The rest of the text stays as it was written, with its comments. A call loses the arguments that
mention a name, a function its parameter, a `with` its context, and a statement that cannot do
without the name goes as a whole. One place is changed at a time, then the text is read anew, so
that no rule has to know of the others.
"""

import ast

DEFINITIONS = (ast.FunctionDef, ast.ClassDef)


def leave_out(text, names, unwrapped=()):
    """`text` without `names`; each call `f(x, ...)` of an f in `unwrapped` becomes x."""
    while True:
        for node in ast.walk(ast.parse(text)):
            place = place_to_change(node, names, unwrapped, text)
            if place:
                start, end, new = place
                text = text[:start] + new + text[end:]
                break
        else:
            return text


def place_to_change(node, names, unwrapped, text):
    """(start, end, new text) of one change within `node`, or None."""
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in unwrapped:
            return *span(node, text), ast.get_source_segment(text, node.args[0])
        for given in [*node.args, *node.keywords]:
            if mentions(given, names) and not mentions(node.func, names):
                return with_comma(given, text)
    if isinstance(node, ast.FunctionDef):
        for parameter in node.args.args:
            if parameter.arg in names:
                return with_comma(parameter, text)
        for statement in ast.walk(node):
            if is_never_read(statement, node):
                return whole_lines(statement, text)
    for part in ("body", "orelse"):
        body = getattr(node, part, None)
        for statement in body if isinstance(body, list) else []:
            place = statement_to_change(statement, names, text)
            if place:
                return place
    return None


def statement_to_change(statement, names, text):
    """The same for one statement."""
    if isinstance(statement, DEFINITIONS):
        return whole_lines(statement, text) if statement.name in names else None
    if isinstance(statement, (ast.Import, ast.ImportFrom, ast.For, ast.While, ast.Try)):
        return None
    if isinstance(statement, ast.With):
        left = [item for item in statement.items if not mentions(item, names)]
        if len(left) == len(statement.items):
            return None
        if not left:
            return instead(statement, statement.body, text)
        start, end = span(statement.items[0], text)[0], span(statement.items[-1], text)[1]
        return start, end, ", ".join(text[slice(*span(item, text))] for item in left)
    if isinstance(statement, ast.If) and not statement.orelse:
        if all(mentions_outside_calls(inner, names) for inner in statement.body):
            return whole_lines(statement, text)
    if isinstance(statement, ast.If):
        return (
            instead(statement, statement.orelse, text) if mentions(statement.test, names) else None
        )
    return whole_lines(statement, text) if mentions_outside_calls(statement, names) else None


def mentions(node, names):
    """Whether one of `names` occurs in `node`, as a name or as an attribute."""
    return any(getattr(part, "id", getattr(part, "attr", None)) in names for part in ast.walk(node))


def mentions_outside_calls(node, names):
    """The same without the arguments of calls, which can be left out alone."""
    if getattr(node, "id", getattr(node, "attr", None)) in names:
        return True
    if isinstance(node, ast.Call) and not mentions(node.func, names):
        return False
    return any(mentions_outside_calls(child, names) for child in ast.iter_child_nodes(node))


def is_never_read(statement, function):
    """Whether a statement gives a value to a local name that nothing reads any more."""
    if not (isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)):
        return False
    name = statement.targets[0].id
    return not any(
        isinstance(node, ast.Name)
        and node.id == name
        and not isinstance(node.ctx, ast.Store)
        or isinstance(node, (ast.Nonlocal, ast.Global))
        and name in node.names
        for node in ast.walk(function)
    )


# Places in the text. ast counts columns in bytes, and some comments hold more than ASCII.


def offset(text, line, column):
    lines = text.splitlines(keepends=True)
    return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())


def span(node, text):
    """Where a node begins and ends."""
    if isinstance(node, ast.withitem):
        last = node.optional_vars or node.context_expr
        return span(node.context_expr, text)[0], span(last, text)[1]
    return (
        offset(text, node.lineno, node.col_offset),
        offset(text, node.end_lineno, node.end_col_offset),
    )


def with_comma(node, text):
    """Take one of several things out of a list, with the comma behind it or before it."""
    start, end = span(node, text)
    default = text[end:].lstrip()
    if isinstance(node, ast.arg) and default.startswith("="):
        end += len(text[end:].split(",")[0].split(")")[0])
    behind = text[end:].lstrip()
    if behind.startswith(","):
        after = behind[1:]
        return start, len(text) - len(after.lstrip()), ""
    before = text[:start].rstrip()
    return len(before.removesuffix(",")), end, ""


def whole_lines(statement, text):
    """Take a statement out, with its decorators."""
    first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))])
    return offset(text, first, 0), after_line(text, statement.end_lineno), ""


def instead(statement, body, text):
    """Put the statements of `body`, one level further out, in place of `statement`."""
    start, end = offset(text, statement.lineno, 0), after_line(text, statement.end_lineno)
    if not body:
        return start, end, ""
    lines = text.splitlines(keepends=True)[body[0].lineno - 1 : body[-1].end_lineno]
    shift = body[0].col_offset - statement.col_offset
    return start, end, "".join(line[shift:] if line.strip() else line for line in lines)


def after_line(text, line):
    return sum(map(len, text.splitlines(keepends=True)[:line]))
