"""The schemas of a library's functions, read from the text of the module that declares them.

Commands know a library by them without importing torch, which takes a second. The annotations are
evaluated as they are when the module is imported, with stand-ins for the types of torch.
"""

from __future__ import annotations

import ast
import pkgutil
import re
import sys
from importlib.machinery import PathFinder
from importlib.util import resolve_name
from types import SimpleNamespace
from typing import Any

from opkiln.base.model import texts
from opkiln.loading import schema

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# What is below the head of a function or class, as formatters lay it out: parsing it would take
# most of the time.
_HEAD = r"(?:def|class) [^\n]*:|\)[^\n]*:(?:  #[^\n]*)?"
_BODY = re.compile(rf"^({_HEAD})\n(?:(?:[ \t][^\n]*)?\n)+", re.MULTILINE)
_TORCH = SimpleNamespace(
    **{name: type(name, (), {"__module__": "torch"}) for name in ("Tensor", "dtype", "device")}
)


def schemas_in(module: str, functions: object) -> tuple[str, ...]:
    """The schemas that a module, or the modules of a package, declare for the library whose builder
    has these functions; none if only importing it can tell."""
    try:
        return tuple(each for spec in _specs(module) for each in _read_schemas(spec, functions))
    except Exception:  # as many kinds as Python has
        return ()


def _spec_of(module: str) -> Any:
    """Where a module is. Its packages are not imported for that: they may import torch."""
    package, _, _ = module.rpartition(".")
    if package in sys.modules:
        return PathFinder.find_spec(module, sys.modules[package].__path__)
    return PathFinder.find_spec(
        module, _spec_of(package).submodule_search_locations if package else None
    )


def _specs(module: str) -> Iterator[Any]:
    """Those of a module, or of a package and its modules."""
    spec = _spec_of(module)
    yield spec
    for each in pkgutil.iter_modules(spec.submodule_search_locations or ()):
        yield _spec_of(f"{module}.{each.name}")


def _read_schemas(spec: Any, functions: object) -> Iterator[str]:
    scope: dict[str, Any] = {"__name__": spec.name, "torch": sys.modules.get("torch", _TORCH)}
    text = _BODY.sub(r"\1\n    ...\n", f"{spec.loader.get_source(spec.name)}\n")
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom):
            name = resolve_name("." * node.level + (node.module or ""), spec.parent)
            given = scope["torch"] if name == "torch" else sys.modules.get(name)
            scope |= {
                each.asname or each.name: getattr(given, each.name)
                for each in node.names
                if hasattr(given, each.name)
            }
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            try:
                _run(node, scope)
            except Exception:  # noqa: S112 (of no use for annotations, or evaluating them tells)
                continue
        elif isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                written = _read_mutates(decorator, functions, scope)
                if written is not None:
                    node.decorator_list, node.body = [], node.body[:1]
                    _run(node, scope)
                    yield schema.schema_of(node.name, scope[node.name], written)
                    break


def _read_mutates(
    decorator: ast.expr, functions: object, scope: dict[str, Any]
) -> tuple[str, ...] | None:
    """The arguments that a decorated function writes to; None for the decorator of another
    library, and for any other."""
    match decorator:
        case ast.Call(func=ast.Attribute(value=library, attr="op"), keywords=given):
            builder = getattr(_evaluate(library, scope), "builder", None)
            if getattr(builder, "FUNCTIONS", None) is not functions:
                return None
            values = [_evaluate(each.value, scope) for each in given if each.arg == "mutates"]
            return texts("mutates=", values[0]) if values else ()
    return None


def _evaluate(node: ast.expr, scope: dict[str, Any]) -> Any:
    return eval(compile(ast.Expression(node), scope["__name__"], "eval"), scope)  # noqa: S307


def _run(node: ast.stmt, scope: dict[str, Any]) -> None:
    # The text is that of a module which the caller imports before it calls any function of it.
    code = compile(ast.Module([node], []), scope["__name__"], "exec", dont_inherit=True)
    exec(code, scope)  # noqa: S102
