"""Faults of one operator each in Python: dilkit/pattern/runs.py::rows_of::compare::1 is the second comparison of rows_of."""

import ast
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from helpers.project import ROOT

PACKAGES = "dilkit", "backends", "comm"
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv},
    **{ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift},
}


@dataclass(frozen=True)
class Fault:
    """`operator`: compare, compute, join, number, choose, drop or keyword. `function`: its qualified name."""

    file: str
    function: str
    operator: str
    nth: int
    needs: str = ""
    is_compiled: bool = False

    def __str__(self) -> str:
        return f"{self.file}::{self.function}::{self.operator}::{self.nth}"

    @property
    def lines(self) -> range:
        node, _ = _places(self.file, (ROOT / self.file).read_text())[self]
        return range(node.lineno, node.end_lineno + 1)

    @property
    def breaks(self) -> str:
        node, wrong = _places(self.file, (ROOT / self.file).read_text())[self]
        right = " ".join(ast.unparse(node).split())
        return f"{self.function}:{node.lineno}: {right[:60]}  ->  {' '.join(wrong.split())[:60]}"

    @property
    def tests(self) -> str:
        package = self.file.split("/")[0]
        return f"tests/{'core' if package == 'dilkit' else package}"

    @property
    def nearest(self) -> str:
        place = ROOT / self.tests
        for folder in self.file.split("/")[1:-1]:
            if not (place / folder).is_dir():
                break
            place /= folder
        return str(place.relative_to(ROOT))

    def applied(self, text: str) -> str:
        if self not in (places := _places(self.file, text)):
            raise ValueError(f"{self.file} has no such place: {self}")
        node, wrong = places[self]
        lines = text.encode().splitlines(keepends=True)  # columns of the tree are bytes
        before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
        after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
        return (before + wrong.encode() + after).decode()

    def applied_in(self, root: Path) -> str:
        return self.applied((root / self.file).read_text())


def drawn(count: int, seed: int, word: str = "") -> list[Fault]:
    """`count` faults of the Python files whose path holds `word`, each file by how many places it has."""
    files = sorted(str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    everywhere = [fault for file in files if word in file for fault in _places(file, (ROOT / file).read_text())]
    return random.Random(seed).sample(everywhere, min(count, len(everywhere)))


@cache
def _places(file: str, text: str) -> dict[Fault, tuple[ast.expr | ast.stmt, str]]:
    found, seen = {}, Counter[tuple[str, str]]()
    for function, node in _nodes(ast.parse(text), ""):
        for operator, wrong in _wrong(node):
            found[Fault(file, function, operator, seen[function, operator])] = node, wrong
            seen[function, operator] += 1
    return found


def _nodes(tree: ast.AST, name: str) -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    """Yield a file's code by function name, without annotations, decorators, error texts and types."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in child.body:
                inner = f"{name}.{child.name}".lstrip(".")
                if isinstance(statement, ast.ClassDef | ast.FunctionDef):
                    yield from _nodes(ast.Module([statement], []), inner)
                elif isinstance(child, ast.FunctionDef):
                    yield from _inside(statement, inner)
        elif not name and isinstance(child, ast.If | ast.Try):
            yield from _nodes(child, name)


def _inside(node: ast.AST, name: str) -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield from _nodes(ast.Module([node], []), name)
        return
    if isinstance(node, ast.expr | ast.stmt):
        yield name, node
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert):
        return
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and field != "annotation":
                yield from _inside(child, name)


def _wrong(node: ast.expr | ast.stmt) -> Iterator[tuple[str, str]]:
    """The operators that change this node, and what they make of it."""
    match node:
        case ast.Compare(left, [operation, *rest], others) if type(operation) in COMPARED:
            yield "compare", f"({ast.unparse(ast.Compare(left, [COMPARED[type(operation)](), *rest], others))})"
        case ast.BinOp(left, operation, right) if type(operation) in COMPUTED and not _is_text(left, right):
            yield "compute", f"({ast.unparse(ast.BinOp(left, COMPUTED[type(operation)](), right))})"
        case ast.BoolOp(operation, values):
            yield "join", f"({ast.unparse(ast.BoolOp(ast.Or() if isinstance(operation, ast.And) else ast.And(), values))})"
        case ast.UnaryOp(ast.Not(), operand):
            yield "join", f"bool({ast.unparse(operand)})"
        case ast.Constant(bool() as value):
            yield "number", str(not value)
        case ast.Constant(int() as value):
            yield "number", str(value + 1)
        case ast.IfExp(test, body, otherwise):
            yield "choose", f"({ast.unparse(ast.IfExp(test, otherwise, body))})"
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Raise():
            yield "drop", "pass"
        case ast.Call(function, arguments, [_, *_] as keywords):
            for number in range(len(keywords)):
                yield "keyword", ast.unparse(ast.Call(function, arguments, keywords[:number] + keywords[number + 1 :]))


def _is_text(*operands: ast.expr) -> bool:
    return any(
        isinstance(one, ast.JoinedStr) or (isinstance(one, ast.Constant) and isinstance(one.value, str)) for one in operands
    )
