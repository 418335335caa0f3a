"""Seeded changes of a reader's program: what a slip of the hand makes of it."""

import ast
import random


def mutated(text, seed):
    """`text` with one thing changed: a statement gone or moved, a number, or a sign."""
    tree, choose = ast.parse(text), random.Random(seed)
    blocks = [
        getattr(node, field)
        for node in ast.walk(tree)
        for field in ("body", "orelse")
        if isinstance(getattr(node, field, None), list) and not isinstance(node, ast.Module)
    ]
    numbers = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and type(n.value) is int]
    signs = [n for n in ast.walk(tree) if isinstance(n, ast.BinOp)]
    ways = ["drop", "swap", *["number"] * bool(numbers), *["sign"] * bool(signs)]
    way = choose.choice(ways)
    block = choose.choice([block for block in blocks if len(block) > 1])
    at = choose.randrange(len(block) - 1)
    if way == "drop":
        del block[choose.randrange(len(block))]
    elif way == "swap":
        block[at], block[at + 1] = block[at + 1], block[at]
    elif way == "number":
        choose.choice(numbers).value += choose.choice([-1, 1])
    else:
        choose.choice(signs).op = choose.choice([ast.Add(), ast.Sub(), ast.Mult()])
    return ast.unparse(tree)


def slipped(text, seed):
    """`text` with one slip in an expression: another name, number, sign, comparison or argument."""
    tree, choose = ast.parse(text), random.Random(seed)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    function = functions[0] if len(functions) == 1 else choose.choice(functions)
    names = [argument.arg for argument in function.args.args]
    slips = []
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id in names and len(names) > 1:
            other = choose.choice([name for name in names if name != node.id])
            slips.append(lambda node=node, other=other: setattr(node, "id", other))
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            more = choose.choice([-1, 1])
            slips.append(lambda n=node, more=more: setattr(n, "value", n.value + more))
        elif isinstance(node, ast.Constant) and type(node.value) is str and node.value:
            slips.append(lambda node=node: setattr(node, "value", node.value[:-1]))
        elif isinstance(node, ast.BinOp):
            signs = [sign for sign in (ast.Add, ast.Sub, ast.Mult) if not isinstance(node.op, sign)]
            sign = choose.choice(signs)()
            slips.append(lambda node=node, sign=sign: setattr(node, "op", sign))
        elif isinstance(node, ast.Compare):
            slips.append(lambda node=node: setattr(node, "ops", [ast.NotEq()]))
        elif isinstance(node, ast.Call) and node.keywords:
            slips.append(lambda node=node: node.keywords.pop())
        elif isinstance(node, ast.Call) and node.args:
            slips.append(lambda node=node: node.args.pop())
        elif isinstance(node, ast.If):
            slips.append(lambda node=node: setattr(node, "test", ast.Constant(False)))
        elif isinstance(node, ast.Return):
            slips.append(lambda node=node: setattr(node, "value", ast.Constant(None)))
    choose.choice(slips)()
    return ast.unparse(ast.fix_missing_locations(tree))
