"""What the source says of a public name: where it is defined, its signature, docstring, members.

A front end such as ``opkiln.quant`` imports its names on first use. For type checkers it also
imports them under ``TYPE_CHECKING``; that is how a name is followed to its definition here.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"

Function = ast.FunctionDef
_FOR_TOOLS = re.compile(r"\s*#?\s*(noqa|type:|fmt:|pragma).*")


class Module:
    """A source file: its top-level definitions and imports."""

    def __init__(self, name: str) -> None:
        base = SOURCE.joinpath(*name.split("."))
        stub, package, plain = base / "__init__.pyi", base / "__init__.py", base.with_suffix(".py")
        self.name = name
        self.path = package if package.is_file() else plain
        text = self.path.read_text()
        self.lines = text.splitlines()
        self.tree = ast.parse(text)
        self.defined: dict[str, ast.stmt] = {}
        self.imported: dict[str, tuple[str, str]] = {}  # name here: (module, name there)
        self._collect(self.tree.body)
        if stub.is_file():  # the only place that says where the names of a lazy package are
            self._collect(ast.parse(stub.read_text()).body, imports_only=True)

    def _collect(self, body: list[ast.stmt], *, imports_only: bool = False) -> None:
        for statement in body:
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    place = (statement.module or "", alias.name)
                    self.imported[alias.asname or alias.name] = place
            elif isinstance(statement, ast.If):
                self._collect(statement.body)
            elif imports_only:
                continue
            elif isinstance(statement, (Function, ast.ClassDef)):
                self.defined[statement.name] = statement  # the last one: after its overloads
            else:
                for name in assigned(statement):
                    self.defined[name] = statement

    @property
    def doc(self) -> str:
        """The module's docstring."""
        return ast.get_docstring(self.tree) or ""

    def listed(self) -> list[str]:
        """The names in ``__all__``."""
        return list(import_module(self.name).__all__)

    def segment(self, node: ast.expr) -> str:
        """The text of an expression, on one line."""
        first, last = node.lineno - 1, node.end_lineno
        lines = [line.encode() for line in self.lines[first:last]]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        return " ".join(b" ".join(lines).decode().split())

    def comment(self, node: ast.stmt) -> str:
        """The comment at the end of a statement's last line, or on the lines above it."""
        line = self.lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
        after = line.partition("#")[2].strip()
        if after and not _FOR_TOOLS.fullmatch(after):
            return _FOR_TOOLS.sub("", after) if "# noqa" in after else after
        above = []
        for line in reversed(self.lines[: node.lineno - 1]):
            if not line.strip().startswith("#"):
                break
            above.append(line.strip().lstrip("#").strip())
        return " ".join(reversed(above))


@cache
def module(name: str) -> Module:
    """The parsed source of a module."""
    return Module(name)


@cache
def _texts() -> dict[str, str]:
    """The source of every module of opkiln. Parsing all of it takes seconds."""
    paths = sorted((SOURCE / "opkiln").rglob("*.py"))
    places = (".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in paths)
    names = (place.removesuffix(".__init__") for place in places)
    return dict(zip(names, (path.read_text() for path in paths), strict=True))


def containing(pattern: str) -> list[str]:
    """The modules that have a line of this form."""
    found = re.compile(pattern, re.MULTILINE)
    return [name for name, text in _texts().items() if found.search(text)]


class Definition(NamedTuple):
    """A class, function or value, and the module that defines it."""

    module: Module
    name: str
    node: ast.stmt

    @property
    def doc(self) -> str:
        """Its docstring; of a value, the comment on it."""
        if isinstance(self.node, (Function, ast.ClassDef)):
            return ast.get_docstring(self.node) or ""
        return self.module.comment(self.node)

    @property
    def place(self) -> tuple[str, str]:
        """(module, name): what it is known by here."""
        return self.module.name, self.name


def find(where: str, name: str) -> Definition | None:
    """The definition of a name that a module defines or imports; None for another package's."""
    if not where.startswith("opkiln"):
        return None
    home = module(where)
    if name in home.defined:
        return Definition(home, name, home.defined[name])
    if name in home.imported:
        there, original = home.imported[name]
        return None if (there, original) == (where, name) else find(there, original)
    return None


def decorators(node: Function | ast.ClassDef) -> list[str]:
    """The names of a definition's decorators, without their arguments."""
    called = (each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)
    return [each.attr if isinstance(each, ast.Attribute) else ast.unparse(each) for each in called]


def assigned(statement: ast.stmt) -> Iterator[str]:
    """The names that an assignment gives values to."""
    if isinstance(statement, ast.AnnAssign):
        targets: Iterable[ast.expr] = [statement.target]
    else:
        targets = statement.targets if isinstance(statement, ast.Assign) else ()
    yield from (each.id for each in targets if isinstance(each, ast.Name))


# Classes


class Member(NamedTuple):
    """A public part of a class, and the class that defines it."""

    owner: Definition
    name: str
    node: ast.stmt
    doc: str  # its own, or that of the method it overrides

    @property
    def is_attribute(self) -> bool:
        return not isinstance(self.node, Function)


def lineage(found: Definition) -> list[Definition]:
    """A class and its bases in opkiln, in the order in which Python looks names up."""
    line = [found]
    assert isinstance(found.node, ast.ClassDef)
    for base in found.node.bases:
        named = base.value if isinstance(base, ast.Subscript) else base
        above = find(found.module.name, named.id) if isinstance(named, ast.Name) else None
        if above is not None and isinstance(above.node, ast.ClassDef):
            line += lineage(above)
    # A class comes after all that derive from it: of several times, the last one counts.
    order = {each.place: index for index, each in enumerate(line)}
    return [each for index, each in enumerate(line) if order[each.place] == index]


def members(found: Definition, stop: Callable[[Definition], bool]) -> list[Member]:
    """The public members of a class and of its bases.

    ``stop`` tells bases that are described elsewhere. What such a base has is left out, unless the
    class says something of its own about it.
    """
    line = lineage(found)
    elsewhere = [base for base in line[1:] if stop(base)]
    inherited = {name for base in elsewhere for node in _body(base) for name in _names(node)}
    shown: dict[str, Member] = {}
    for owner in line:
        if owner in elsewhere:
            continue
        for node in _body(owner):
            for name in _names(node):
                called = name == "__call__" and _doc([owner], name)
                if name in shown or (name.startswith("_") and not called):
                    continue
                if name not in inherited or _doc([owner], name):
                    shown[name] = Member(owner, name, node, _doc(line, name))
    return list(shown.values())


def _names(node: ast.stmt) -> list[str]:
    return [node.name] if isinstance(node, Function) else list(assigned(node))


def _body(owner: Definition) -> Iterator[ast.stmt]:
    assert isinstance(owner.node, ast.ClassDef)
    for node in owner.node.body:
        if isinstance(node, Function) and {"overload", "setter"} & set(decorators(node)):
            continue
        yield node


def _doc(line: list[Definition], name: str) -> str:
    for owner in line:
        for node in _body(owner):
            if isinstance(node, Function) and node.name == name:
                if doc := ast.get_docstring(node):
                    return doc
            elif name in assigned(node) and (doc := owner.module.comment(node)):
                return doc
    return ""


def method(found: Definition, name: str) -> tuple[Definition, Function] | None:
    """A method of a class or of its bases in opkiln."""
    for owner in lineage(found):
        for node in _body(owner):
            if isinstance(node, Function) and node.name == name:
                return owner, node
    return None


def is_record(found: Definition) -> bool:
    """Whether a class is made of its fields: a NamedTuple, a Record or a dataclass."""
    if any(
        "dataclass" in decorators(each.node)
        for each in lineage(found)
        if isinstance(each.node, ast.ClassDef)
    ):
        return True
    assert isinstance(found.node, ast.ClassDef)
    return any(getattr(base, "id", "") in ("NamedTuple", "Record") for base in found.node.bases)


def fields(found: Definition) -> list[tuple[Definition, ast.AnnAssign]]:
    """The fields of a record, in the order of its constructor."""
    found_fields: dict[str, tuple[Definition, ast.AnnAssign]] = {}
    for owner in reversed(lineage(found)):
        if owner.name == "Record":
            continue
        for node in _body(owner):
            if isinstance(node, ast.AnnAssign) and "ClassVar" not in owner.module.segment(
                node.annotation
            ):
                (name,) = assigned(node)
                found_fields[name] = (owner, node)
    return list(found_fields.values())


# Signatures


def annotation(home: Module, node: ast.expr) -> str:
    """A type as it is written; an alias of opkiln's as what it stands for."""

    def spelled_out(word: re.Match[str]) -> str:
        found = find(home.name, word[0])
        if found is None or not isinstance(found.node, ast.Assign):
            return word[0]
        return found.module.segment(found.node.value)

    return re.sub(r"(?<![.\w\"'])[A-Z]\w+", spelled_out, home.segment(node).strip('"'))


def value(home: Module, node: ast.expr) -> str:
    """A default as its text; of a constant, its value."""
    if isinstance(node, ast.Name):
        constant = find(home.name, node.id)
        if constant is not None and isinstance(constant.node, (ast.Assign, ast.AnnAssign)):
            held = constant.node.value
            if isinstance(held, ast.Constant):
                return constant.module.segment(held)
    return home.segment(node)


def parameters(home: Module, node: Function, *, bound: bool) -> list[str]:
    """The parameters of a function as they are written; ``bound`` leaves out the first one."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(given.defaults))
    defaults += given.defaults
    written = [
        _parameter(home, each, default) for each, default in zip(positional, defaults, strict=True)
    ]
    if given.posonlyargs:
        written.insert(len(given.posonlyargs), "/")
    if bound:
        written = written[1:]
    if given.vararg is not None:
        written.append("*" + _parameter(home, given.vararg, None))
    elif given.kwonlyargs:
        written.append("*")
    for each, keyword in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        written.append(_parameter(home, each, keyword))
    if given.kwarg is not None:
        written.append("**" + _parameter(home, given.kwarg, None))
    return written


def _parameter(home: Module, argument: ast.arg, default: ast.expr | None) -> str:
    text = argument.arg
    if argument.annotation is not None:
        text += f": {annotation(home, argument.annotation)}"
    if default is not None:
        text += f" = {value(home, default)}" if argument.annotation else f"={value(home, default)}"
    return text


def signature(name: str, written: list[str], returns: str) -> str:
    """A call on one line, or with a line for each parameter if that is too long."""
    arrow = f" -> {returns}" if returns else ""
    line = f"{name}({', '.join(written)}){arrow}"
    if len(line) <= 88:
        return line
    return "\n".join([f"{name}(", *(f"    {each}," for each in written), f"){arrow}"])
