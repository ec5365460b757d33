"""Small changes of the sources, drawn with a seed over all of ``src``, and put into a checkout.

A change replaces the text of one place in a statement. It carries the lines of its statement, so
that it can be put into another checkout in which those lines have moved. Docstrings, annotations,
help texts, ``__all__`` and what only a type checker reads are left alone.
"""

from __future__ import annotations

import ast
import json
import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

COMPARISONS = {
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*"), ast.Pow: ("**", "*"), ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.BitXor: ("^", "&"),
}  # fmt: skip
BLOCKS = {"body", "orelse", "finalbody", "handlers", "cases"}
FOR_TYPES = {"cast", "TypeVar", "ParamSpec", "NewType", "Literal"}
FOR_PEOPLE = {"help", "short_help", "epilog", "metavar"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class Change:
    """``before`` becomes ``after`` at byte ``offset`` of ``statement``, whole lines of ``file``
    that begin at ``first``. ``line`` and ``col`` are those of ``before``."""

    id: int
    file: str
    line: int
    col: int
    kind: str
    before: str
    after: str
    first: int
    offset: int
    statement: str

    def locate(self, text: bytes) -> int | None:
        """The statement's byte in a file's text: of its occurrences, the one nearest to its old
        line. None if it is gone."""
        pattern = re.compile(rb"^" + re.escape(self.statement.encode()), re.MULTILINE)
        found = [match.start() for match in pattern.finditer(text)]
        return min(
            found, key=lambda at: abs(text.count(b"\n", 0, at) + 1 - self.first), default=None
        )

    def apply(self, text: bytes) -> bytes | None:
        """A file's text with the change, with as many lines; None if the statement is gone."""
        if (at := self.locate(text)) is None:
            return None
        start = at + self.offset
        before = self.before.encode()
        assert text[start : start + len(before)] == before, self
        return text[:start] + self.after.encode() + text[start + len(before) :]


def read_changes(path: Path) -> list[Change]:
    return [Change(**json.loads(line)) for line in path.read_text().splitlines()]


def draw(checkout: Path, count: int, seed: int) -> list[str]:
    """Draw changes as lines of JSON. Each statement that can be changed has the same chance, then
    each kind of change that it allows: else most changes would be of strings."""
    chance = random.Random(seed)
    statements = [
        (path, text, node)
        for path in sorted((checkout / "src").rglob("*.py"))
        for text in [path.read_bytes()]
        for node in find_statements(ast.parse(text))
    ]
    chance.shuffle(statements)
    drawn: list[str] = []
    for path, text, node in statements:
        found = _draw_one(chance, text, node)
        if found is not None:
            file = path.relative_to(checkout).as_posix()
            drawn.append(json.dumps(asdict(Change(id=len(drawn), file=file, **found))))
        if len(drawn) == count:
            break
    return drawn


def _draw_one(chance: random.Random, text: bytes, node: ast.stmt) -> dict[str, object] | None:
    starts = [0, *(match.end() for match in re.finditer(rb"\n", text))]
    first, last = find_lines(node)
    base = starts[first - 1]
    statement = text[base : starts[last] if last < len(starts) else len(text)]
    possible = sorted(set(list_changes(node, text, starts)))
    while possible:
        kind = chance.choice(sorted({each[0] for each in possible}))
        change = chance.choice([each for each in possible if each[0] == kind])
        possible.remove(change)
        _, start, end, after = change
        before = text[start:end]
        after += b"\n" * (before.count(b"\n") - after.count(b"\n"))
        if _differs(text, text[:start] + after + text[end:]):
            line = text.count(b"\n", 0, start) + 1
            return {
                "line": line, "col": start - starts[line - 1], "kind": kind,
                "before": before.decode(), "after": after.decode(), "first": first,
                "offset": start - base, "statement": statement.decode(),
            }  # fmt: skip
    return None


def _differs(text: bytes, changed: bytes) -> bool:
    """Whether the changed text is still Python, and another program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        try:
            compile(changed, "changed", "exec")
        except (SyntaxError, ValueError):
            return False
    return ast.dump(ast.parse(text)) != ast.dump(ast.parse(changed))


def find_statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Statements that run, those in blocks too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for each in child.orelse:
                yield each
                yield from find_statements(each)
            continue
        if isinstance(child, ast.stmt) and not _is_exempt(child):
            yield child
        yield from find_statements(child)


def _is_exempt(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    names = ("__all__", "TYPE_CHECKING")
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in names


def find_lines(node: ast.stmt) -> tuple[int, int]:
    """First and last line of a statement; of one with a block, of its head."""
    decorators = getattr(node, "decorator_list", [])
    first = min(each.lineno for each in (node, *decorators))
    if not BLOCKS & set(node._fields):
        return first, node.end_lineno or first
    return first, max([node.lineno, *(each.end_lineno or 0 for each in find_expressions(node))])


def find_expressions(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions of a statement that count when it runs, not those of its block."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns") or (isinstance(node, ast.stmt) and field in BLOCKS):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_for_readers(child):
                continue
            if isinstance(child, ast.expr):
                yield child
            if not isinstance(child, ast.JoinedStr):  # Python 3.11 has wrong columns inside
                yield from find_expressions(child)


def _is_for_readers(node: ast.AST) -> bool:
    """Whether only a type checker or a reader of ``--help`` sees it."""
    if isinstance(node, ast.keyword):
        return node.arg in FOR_PEOPLE
    called = getattr(node, "func", getattr(node, "value", None))
    name = getattr(called, "attr", getattr(called, "id", None))
    return isinstance(node, (ast.Call, ast.Subscript)) and name in FOR_TYPES


Found = tuple[str, int, int, bytes]  # the kind, the first and the last byte, the new text


def list_changes(node: ast.stmt, text: bytes, starts: list[int]) -> Iterator[Found]:
    """All changes of one statement. Some are not Python."""

    def span(each: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        assert each.end_lineno is not None
        assert each.end_col_offset is not None
        start = starts[each.lineno - 1] + each.col_offset
        return start, starts[each.end_lineno - 1] + each.end_col_offset

    def operator(
        kind: str, left: ast.expr, right: ast.expr, words: tuple[str, str]
    ) -> Iterator[Found]:
        start, end = span(left)[1], span(right)[0]
        old, new = (word.encode() for word in words)
        if (at := text.find(old, start, end)) >= 0 and b"#" not in text[start:end]:
            yield kind, at, at + len(old), new

    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "statement removed", *span(node), b"pass"
    if isinstance(node, ast.Return) and node.value is not None:
        yield "returns None", *span(node.value), b"None"
    if isinstance(node, ast.AugAssign):
        yield from operator("arithmetic", node.target, node.value, ARITHMETIC[type(node.op)])  # type: ignore[index]
    if isinstance(node, ast.If):
        yield _negate(node.test, text, *span(node.test))
    for each in find_expressions(node):
        start, end = span(each)
        if isinstance(each, ast.IfExp):
            yield _negate(each.test, text, *span(each.test))
        elif isinstance(each, ast.Compare):
            sides = [each.left, *each.comparators]
            for left, op, right in zip(sides, each.ops, sides[1:], strict=False):
                yield from operator("comparison", left, right, COMPARISONS[type(op)])
        elif isinstance(each, ast.BoolOp):
            words = ("and", "or") if isinstance(each.op, ast.And) else ("or", "and")
            for left, right in zip(each.values, each.values[1:], strict=False):
                yield from operator("boolean", left, right, words)
        elif isinstance(each, ast.BinOp) and type(each.op) in ARITHMETIC:
            yield from operator("arithmetic", each.left, each.right, ARITHMETIC[type(each.op)])  # type: ignore[index]
        elif isinstance(each, ast.Constant) and isinstance(each.value, bool):
            yield "constant", start, end, str(not each.value).encode()
        elif isinstance(each, ast.Constant) and isinstance(each.value, (int, float)):
            yield "constant", start, end, repr(each.value + 1).encode()
        elif isinstance(each, ast.JoinedStr) or isinstance(
            getattr(each, "value", None), (str, bytes)
        ):
            more = b'b"XX"' if isinstance(getattr(each, "value", None), bytes) else b'"XX"'
            yield "string", start, end, b"(" + more + b" + " + text[start:end] + b")"
        elif isinstance(each, ast.Call):
            # From the end of the argument before it, so that its comma goes with it.
            given = sorted(span(argument)[1] for argument in (*each.args, *each.keywords))
            for keyword in each.keywords:
                begin, stop = span(keyword)
                earlier = [at for at in given if at < begin]
                yield "argument dropped", earlier[-1] if earlier else begin, stop, b""


def _negate(test: ast.expr, text: bytes, start: int, end: int) -> Found:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return "condition", start, end, b"(" + text[start:end].removeprefix(b"not").strip() + b")"
    return "condition", start, end, b"(not (" + text[start:end] + b"))"


def names_of(tree: ast.Module, line: int) -> tuple[set[str], bool]:
    """The names by which the rest of the code reaches a line, and whether tests that do not run it
    can depend on it: it runs when a module is imported, or in a function whose results are kept."""
    names: set[str] = set()
    shared = True
    node: ast.AST = tree
    while True:
        inner = [
            child
            for child in ast.iter_child_nodes(node)
            if getattr(child, "end_lineno", 0)
            and min(each.lineno for each in (child, *getattr(child, "decorator_list", [])))  # type: ignore[attr-defined]
            <= line
            <= child.end_lineno  # type: ignore[attr-defined]
        ]
        if not inner:
            return names, shared
        node = inner[-1]
        if isinstance(node, Function | ast.ClassDef):
            names = {node.name} if not node.name.startswith("__") else names
            if isinstance(node, Function) and line >= node.body[0].lineno:
                shared = any("cache" in ast.unparse(each) for each in node.decorator_list)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and shared:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found = {each.id for each in targets if isinstance(each, ast.Name)}
            names = names | found
