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
