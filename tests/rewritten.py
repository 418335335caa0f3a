"""Seeded rewrites of a reader's program that do the same: other names, another order, a class."""

import ast
import random

HIDDEN = (ast.Lambda, ast.IfExp, ast.BoolOp, ast.ListComp, ast.SetComp, ast.DictComp,
          ast.GeneratorExp)  # fmt: skip
SIMPLE = (ast.Assign, ast.Expr, ast.Return)
NO_EFFECT = "pass", "'a note'", "print(end='')", "__import__('time').sleep(0)", "unused = 0, ''"


def rewritten(text, seed):
    """`text` with up to six changes after which it does the same."""
    tree, choose = ast.parse(text), random.Random(seed)
    for way in choose.choices(WAYS, k=choose.randint(2, 6)):
        way(tree, choose)
    return ast.unparse(ast.fix_missing_locations(tree))


def functions_of(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def plain_functions(tree):
    """The functions of the module, without decorators and defaults."""
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [n for n in found if not n.decorator_list and not n.args.defaults + n.args.kw_defaults]


def blocks_of(tree):
    """The lists of statements of all functions."""
    return [
        block
        for function in functions_of(tree)
        for node in ast.walk(function)
        for field in ("body", "orelse", "finalbody")
        if isinstance(block := getattr(node, field, None), list) and block
    ]


def names_in(node, context):
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, context)}


def calls(node):
    return any(isinstance(each, (ast.Call, ast.Yield, ast.Await)) for each in ast.walk(node))


def is_name_and_value(node):
    """Whether a statement gives one variable a value without a call."""
    one = isinstance(node, ast.Assign) and len(node.targets) == 1
    return one and isinstance(node.targets[0], ast.Name) and not calls(node.value)


def renamed(tree, choose):
    """Another name for a local variable."""
    for function in choose.sample(found := functions_of(tree), len(found)):
        nodes = list(ast.walk(function))
        fixed = {node.arg for node in nodes if isinstance(node, ast.arg)}
        fixed |= {name for node in nodes if isinstance(node, (ast.Global, ast.Nonlocal))
                  for name in node.names}  # fmt: skip
        fixed |= {node.name for node in nodes if hasattr(node, "name")}
        names = sorted(names_in(function, ast.Store) - fixed)
        if names:
            old, number = choose.choice(names), choose.randint(1, 99)
            new = choose.choice([f"{old}_of_mine", f"{old[0]}{number}", f"the_{old}"])
            if new in names or new in fixed or new in names_in(function, ast.Load):
                return
            for node in nodes:
                if isinstance(node, ast.Name) and node.id == old:
                    node.id = new
            return


def turned(tree, choose):
    """`if not` in place of `if`, with the two branches the other way round."""
    found = [n for n in ast.walk(tree) if isinstance(n, (ast.If, ast.IfExp)) and n.orelse]
    if found:
        node = choose.choice(found)
        node.test = ast.UnaryOp(ast.Not(), node.test)
        node.body, node.orelse = node.orelse, node.body


def noted(tree, choose):
    """A statement without an effect between two others."""
    block = choose.choice(blocks_of(tree) or [tree.body])
    block.insert(choose.randint(1, len(block)) - 1, ast.parse(choose.choice(NO_EFFECT)).body[0])


def named(tree, choose):
    """A name for what is returned."""
    found = [(b, s) for b in blocks_of(tree) for s in b if isinstance(s, ast.Return) and s.value]
    if found:
        block, node = choose.choice(found)
        name = f"result_{node.lineno if hasattr(node, 'lineno') else 0}"
        block.insert(block.index(node), ast.Assign([ast.Name(name, ast.Store())], node.value))
        node.value = ast.Name(name, ast.Load())


def inlined(tree, choose):
    """No name for a value that only the next statement uses."""
    found = []
    for function in functions_of(tree):
        uses = [n.id for n in ast.walk(function) if isinstance(n, ast.Name)]
        for block in blocks_of(function):
            for one, next_one in zip(block, block[1:]):
                if is_name_and_value(one) and isinstance(next_one, SIMPLE):
                    name = one.targets[0].id
                    seen = [n for n in open_nodes(next_one) if getattr(n, "id", "") == name]
                    if uses.count(name) == 2 and len(seen) == 1:
                        found.append((block, one, next_one, name))
    if found:
        block, one, next_one, name = choose.choice(found)

        class Inline(ast.NodeTransformer):
            def visit_Name(self, node):
                return one.value if node.id == name else node

        block[block.index(next_one)] = Inline().visit(next_one)
        block.remove(one)


def open_nodes(node):
    """The nodes of a statement that are computed once, whenever it runs."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, HIDDEN):
            yield from open_nodes(child)


def extracted(tree, choose):
    """A name for a part of a sum or a product, computed in the line before."""
    found = [
        (block, statement, node)
        for block in blocks_of(tree)
        for statement in block
        if isinstance(statement, SIMPLE)
        for node in open_nodes(statement)
        if isinstance(node, ast.BinOp) and not calls(node)
    ]
    if found:
        block, statement, old = choose.choice(found)
        new = ast.Name(f"part_{len(block)}", ast.Load())
        block.insert(block.index(statement), ast.Assign([ast.Name(new.id, ast.Store())], old))

        class Extract(ast.NodeTransformer):
            def visit_BinOp(self, node):
                return new if node is old else self.generic_visit(node)

        Extract().visit(statement)


def split(tree, choose):
    """`a = x` and `b = y` for `a, b = x, y`."""
    found = []
    for block in blocks_of(tree):
        for node in block:
            if not (isinstance(node, ast.Assign) and len(node.targets) == 1):
                continue
            left, right = node.targets[0], node.value
            if isinstance(left, ast.Tuple) and isinstance(right, ast.Tuple):
                apart = all(isinstance(each, ast.Name) for each in left.elts)
                apart = apart and len(left.elts) == len(right.elts)
                if apart and not names_in(left, ast.Store) & names_in(right, ast.Load):
                    found.append((block, node))
    if found:
        block, node = choose.choice(found)
        pairs = zip(node.targets[0].elts, node.value.elts)
        block[block.index(node) : block.index(node) + 1] = [ast.Assign([a], b) for a, b in pairs]


def commuted(tree, choose):
    """Two assignments that do not depend on each other, in the other order."""
    found = []
    for block in blocks_of(tree):
        for place, (one, other) in enumerate(zip(block, block[1:])):
            if is_name_and_value(one) and is_name_and_value(other):
                written = names_in(one, ast.Store), names_in(other, ast.Store)
                read = names_in(one, ast.Load), names_in(other, ast.Load)
                if not (written[0] & (written[1] | read[1]) or written[1] & read[0]):
                    found.append((block, place))
    if found:
        block, place = choose.choice(found)
        block[place], block[place + 1] = block[place + 1], block[place]


def listed(tree, choose):
    """A loop over a list in place of a range."""
    found = [n for n in ast.walk(tree) if isinstance(n, ast.For) and isinstance(n.iter, ast.Call)]
    found = [node for node in found if getattr(node.iter.func, "id", "") == "range"]
    if found:
        node = choose.choice(found)
        node.iter = ast.List([ast.Starred(node.iter, ast.Load())], ast.Load())


def made_global(tree, choose):
    """A number of a function as a variable of the notebook."""
    found = [
        node
        for function in functions_of(tree)
        for statement in function.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Constant) and type(node.value) in (int, float)
    ]
    if found:
        node = choose.choice(found)
        name = f"NUMBER_{len(ast.dump(tree))}"
        number = ast.Assign([ast.Name(name, ast.Store())], ast.Constant(node.value))

        class Replace(ast.NodeTransformer):
            def visit_Constant(self, each):
                return ast.Name(name, ast.Load()) if each is node else each

        Replace().visit(tree)
        places = [i for i, each in enumerate(tree.body) if isinstance(each, ast.FunctionDef)]
        tree.body.insert(min(places), number)


def arguments_of(function):
    """The arguments with which a function calls one with the same parameters."""
    given = [ast.Name(each.arg, ast.Load()) for each in function.args.args]
    if function.args.vararg:
        given.append(ast.Starred(ast.Name(function.args.vararg.arg, ast.Load()), ast.Load()))
    named = [ast.keyword(e.arg, ast.Name(e.arg, ast.Load())) for e in function.args.kwonlyargs]
    return given, named


def nested(tree, choose):
    """The function in a function that calls it."""
    if found := plain_functions(tree):
        function = choose.choice(found)
        inner = ast.FunctionDef("inner", function.args, function.body, [])
        call = ast.Call(ast.Name("inner", ast.Load()), *arguments_of(function))
        function.body = [inner, ast.Return(call)]


def in_a_class(tree, choose):
    """A class whose method does the work."""
    if found := plain_functions(tree):
        function = choose.choice(found)
        own = f"Work_of_{function.name}_{len(tree.body)}"
        method = ast.FunctionDef(
            "do", function.args, function.body, [ast.Name("staticmethod", ast.Load())]
        )
        work = ast.ClassDef(own, [], [], [method], [])
        do = ast.Attribute(ast.Call(ast.Name(own, ast.Load()), [], []), "do", ast.Load())
        function.body = [ast.Return(ast.Call(do, *arguments_of(function)))]
        tree.body.insert(tree.body.index(function), work)


WAYS = (renamed, turned, noted, named, inlined, extracted, split, commuted, listed, made_global,
        nested, in_a_class)  # fmt: skip
