"""Digests of the computation of Python functions, which are equal on two hosts for equal code.

The digest of a function covers its bytecode and constants, its defaults, its closure, and the names
of its module that it reads; then everything that these reach, and so on: functions, classes,
values, tensors in the CPU's memory, objects of the author's own classes with their attributes.

Only the author's code is read: the packages of the functions, and modules without a
``__version__``, such as a file beside a script. Any other package counts by its version. Python and
torch count by their names alone, because the ranks compare their versions. An object of a class
from there counts by its class: a logger, a lock or a device may differ from rank to rank.

Paths and line numbers do not count, nor does the order of a set or a dict, which may differ from
process to process. Bytecode depends on the minor version of Python, which the ranks compare, too.
"""

from __future__ import annotations

import ctypes
import dis
import os
import sys
import types
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

from opkiln.base.digest import key

_BY_NAME = sys.stdlib_module_names | {"torch"}
_PLAIN = (bool, float, complex, bytes, range, slice, types.NoneType, types.EllipsisType)
_MAPPINGS = (dict, types.MappingProxyType)
_CONTAINERS = (tuple, list, set, frozenset, deque, types.SimpleNamespace, *_MAPPINGS)
_BY_TEXT = ("dtype", "layout", "memory_format", "OpOverload", "OpOverloadPacket")  # of torch
_BY_PARTS = {
    types.MethodType: ("__func__", "__self__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset"),
    partial: ("func", "args", "keywords"),
}
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")


class ProgramPart(NamedTuple):
    """Something that decides what is computed: a function, a class, a value of a module."""

    name: str
    digest: str


class _Node(NamedTuple):
    """The digest of a value, and the values that it reaches."""

    of: Any  # keeps its id()
    name: str
    digest: str
    # The values that count with it, in order: each with its name, which is empty if it has its own.
    reached: tuple[tuple[str, Any], ...]


class Programs:
    """Reads functions, and keeps what was read: ops share functions."""

    def __init__(self) -> None:
        self._reader = cache(_Reader)  # of the packages whose code counts

    def parts(
        self, distribution: str, functions: Sequence[tuple[str, Any]]
    ) -> tuple[ProgramPart, ...]:
        """All that decides what these named functions of a package compute."""
        modules = [_text(function, "__module__") for _, function in functions]
        own = frozenset({"__main__", "", distribution.replace("-", "_"), *map(_top, modules)})
        return self._reader(own).parts(functions)


class _Reader:
    """Reads functions; ``own`` are the packages whose code counts."""

    def __init__(self, own: frozenset[str]) -> None:
        self._own = own
        self._nodes: dict[tuple[str, int], _Node] = {}
        self._reached: list[tuple[str, Any]] = []  # by the node that is being read
        self._inside: set[int] = set()  # the containers that are being read
        files = [getattr(sys.modules.get(each), "__file__", None) for each in own - _BY_NAME]
        places = {os.path.dirname(os.path.abspath(file)) for file in files if file}
        self._places = sorted({*places, *map(os.path.realpath, places)} - {"/"}, key=len)[::-1]

    def parts(self, functions: Sequence[tuple[str, Any]]) -> tuple[ProgramPart, ...]:
        names = ", ".join(name for name, _ in functions)
        nodes = [_Node(None, names, key("names", names), tuple(("", f) for _, f in functions))]
        numbers: dict[tuple[str, int], int] = {}
        for node in nodes:  # it grows
            for name, value in node.reached:
                if (name, id(value)) not in numbers:
                    numbers[name, id(value)] = len(numbers)
                    nodes.append(self._node(name, value))
        parts = []
        for node in nodes:
            reached = [numbers[name, id(value)] for name, value in node.reached]
            parts.append(ProgramPart(node.name, key("part", (node.digest, reached))))
        return tuple(parts)

    def _node(self, name: str, value: Any) -> _Node:
        known = self._nodes.get((name, id(value)))
        if known is None:
            self._reached = []
            content = self._describe_plain(value) if name else self._read(value)
            shown = name or _name(value)
            known = _Node(value, shown, key("node", content), tuple(self._reached))
            self._nodes[name, id(value)] = known
        return known

    # Each of these returns the contents of a digest, and adds values that are nodes to `_reached`.

    def _read(self, value: Any) -> Any:
        kind = type(value)
        if issubclass(kind, types.FunctionType):
            return self._describe_function(value)
        if issubclass(kind, type):
            return self._describe_class(value)
        for made, parts in _BY_PARTS.items():
            if issubclass(kind, made):
                return (kind.__name__, *(self._describe(getattr(value, each)) for each in parts))
        return self._describe_object(value)

    def _describe(self, value: Any, name: str = "") -> Any:
        """A plain value in full; None for a node. A value with a name is always a node."""
        before = len(self._reached)
        said = self._describe_plain(value)
        if said is None:
            self._reached.append(("", value))
        elif name:
            self._reached[before:] = [(name, value)]
            return None
        return said

    def _describe_plain(self, value: Any) -> Any:
        """A plain value; None if it is not plain."""
        kind = type(value)
        if kind is str:
            return self._hide_places(value)
        if kind is int:
            return ("int", hex(value))
        if kind in _PLAIN:
            return (kind.__name__, repr(value))
        if issubclass(kind, _CONTAINERS) and not self._counts_by_code(kind.__module__):
            return self._describe_contents(value)
        if kind is types.CodeType:
            return self._describe_code(value)
        if issubclass(kind, types.ModuleType):
            return ("module", value.__name__, self._version(value.__name__))
        if kind.__module__ in ("torch", "torch._ops") and kind.__name__ in _BY_TEXT:
            return ("torch", repr(value))
        return None

    def _hide_places(self, text: str) -> str:
        for place in self._places:
            text = text.replace(place, "{src}")
        return text

    def _describe_contents(self, value: Any) -> Any:
        kind = type(value).__name__
        if id(value) in self._inside:
            return (kind, "within itself")
        self._inside.add(id(value))
        items: Iterable[Any] = vars(value) if isinstance(value, types.SimpleNamespace) else value
        if isinstance(items, _MAPPINGS):
            pairs = sorted(items.items(), key=lambda pair: _order(pair[0]))
            items = [each for pair in pairs for each in pair]
        elif isinstance(items, (set, frozenset)):
            items = sorted(items, key=_order)
        said = (kind, *(self._describe(each) for each in tuple(items)))
        self._inside.remove(id(value))
        return said

    def _describe_code(self, code: types.CodeType) -> Any:
        return (
            code.co_code, code.co_exceptiontable, code.co_flags, code.co_argcount,
            code.co_posonlyargcount, code.co_kwonlyargcount, code.co_names, code.co_varnames,
            code.co_freevars, code.co_cellvars, self._describe_contents(code.co_consts),
        )  # fmt: skip

    def _describe_function(self, function: types.FunctionType) -> Any:
        own = vars(function)
        if "overload" in own and "reference" in own:  # an op: its wrapper has a state
            return ("op", self._describe((own["overload"], own["reference"])))
        code, scope = function.__code__, function.__globals__
        module = str(scope.get("__name__") or "")
        closure = [("", _attribute(each, "cell_contents")) for each in function.__closure__ or ()]
        if not self._counts_by_code(module):
            made = (module, code.co_qualname, self._version(module))
            return ("named", *made, self._describe_used(closure), self._describe_wrapped(function))
        names, loads, imports = _scan(code)
        loaded = [self._follow(each, scope) for each in loads if each[0] in scope]
        imported = [("", self._import(each, scope)) for each in imports]
        own_parts = (code, function.__defaults__, function.__kwdefaults__)
        used = self._describe_used([*closure, *loaded, *imported], names)
        return (self._describe(own_parts), used)

    def _describe_used(self, used: list[tuple[str, Any]], names: Iterable[str] = ()) -> Any:
        """The values that code with these names uses. A module stands for its attributes of these
        names."""
        said, modules = [], set()
        for name, value in used:  # it grows
            if not self._is_own_module(value):
                said.append((name, self._describe(value, name)))
            elif value.__name__ not in modules:
                modules.add(value.__name__)
                found = [(f"{value.__name__}.{each}", _attribute(value, each)) for each in names]
                used += [each for each in found if each[1] is not None]
        return said

    def _follow(self, chain: tuple[str, ...], scope: dict[str, Any]) -> tuple[str, Any]:
        """The value that code reads by a name and its attributes (``module.function``,
        ``object.value``). Of a module only this attribute counts, of another object everything."""
        module, name, value = str(scope.get("__name__") or ""), chain[0], scope[chain[0]]
        for attribute in chain[1:]:
            if not self._is_own_module(value):
                break
            module, name, value = value.__name__, attribute, _attribute(value, attribute)
        return f"{module}.{name}", value

    def _import(self, statement: tuple[Any, Any, str], scope: dict[str, Any]) -> Any:
        """The module that a function imports when it is called. Only modules of its own package are
        imported for that; any other counts if it is imported already."""
        level, fromlist, name = statement
        if not level and _top(name) not in self._own:
            module = sys.modules.get(name)
            return module if self._is_own_module(module) else None
        try:
            module = import_module("." * level + name, scope.get("__package__"))
            for each in fromlist or ():
                if not hasattr(module, each):
                    import_module(f"{module.__name__}.{each}")
        except Exception as error:  # as the function will find
            return type(error).__name__
        return module

    def _describe_class(self, kind: type) -> Any:
        name = _name(kind)
        if not self._counts_by_code(kind.__module__):
            return ("class", name, self._version(kind.__module__))
        made = (types.FunctionType, staticmethod, classmethod, property)
        return (
            "class", name, self._describe((type(kind), *kind.__bases__)),
            [(each, self._describe(value)) for each, value in sorted(vars(kind).items())
             if not each.startswith("__") or isinstance(value, made)],
        )  # fmt: skip

    def _describe_object(self, value: Any) -> Any:
        kind = type(value)
        torch = sys.modules.get("torch")
        if issubclass(kind, getattr(torch, "Tensor", ())):
            form = (_name(kind), str(value.dtype), tuple(value.shape))
            return ("tensor", *form, _bytes_of_tensor(value))
        if not self._counts_by_code(kind.__module__):
            made = (_name(kind), self._version(kind.__module__), _name(value))
            wrapped = self._describe_wrapped(value)
            return ("object", *made, _bytes_of_array(value), wrapped)
        held = self._describe_contents(value) if issubclass(kind, _CONTAINERS) else None
        state = self._describe(object.__getstate__(value))
        return ("object", self._describe(kind), _name(value), held, state)

    def _describe_wrapped(self, value: Any) -> list[Any]:
        """The functions that an object of another package holds: it wraps them."""
        held = _attribute(value, "__dict__")
        return [
            (name, self._describe(each))
            for name, each in (sorted(held.items()) if isinstance(held, dict) else ())
            if isinstance(each, types.FunctionType)
        ]

    def _counts_by_code(self, module: str) -> bool:
        """Whether the code of a module counts, not its version."""
        top = _top(module)
        return top not in _BY_NAME and (top in self._own or not self._version(module))

    def _is_own_module(self, value: Any) -> bool:
        # isinstance would ask the value for its class, which a proxy may refuse.
        return issubclass(type(value), types.ModuleType) and self._counts_by_code(value.__name__)

    def _version(self, module: str) -> str:
        package = sys.modules.get(_top(module))
        return "" if package is None else _text(package, "__version__")


def _scan(code: types.CodeType) -> tuple[Iterable[str], Iterable[tuple[str, ...]], list[Any]]:
    """The names in a code, what it reads of its module, each as a name and the attributes that
    follow, and its imports, each as (level, names, module); with the code of the functions that are
    made in it."""
    names, loads = dict[str, None](), dict[tuple[str, ...], None]()
    imports, codes = [], [code]
    for part in codes:  # it grows
        codes += [inner for inner in part.co_consts if isinstance(inner, types.CodeType)]
        names |= dict.fromkeys(part.co_names)
        before: tuple[Any, Any] = None, None
        chain: tuple[str, ...] = ()
        for each in dis.get_instructions(part):
            if each.opname == "EXTENDED_ARG":
                continue
            if chain and each.opname in _ATTRIBUTES:
                chain = (*chain, each.argval)
                continue
            if chain:
                loads[chain] = None
            chain = (each.argval,) if each.opname in _LOADS else ()
            if each.opname == "IMPORT_NAME":
                imports.append((*before, each.argval))
            before = before[1], each.argval
    return names, loads, imports


def _top(module: object) -> str:
    return str(module).partition(".")[0]


def _attribute(value: Any, name: str) -> Any:
    try:
        return getattr(value, name, None)
    except Exception:  # what a module makes on demand may fail; a cell may have no value yet
        return None


def _text(value: Any, name: str) -> str:
    found = _attribute(value, name)
    return found if isinstance(found, str) else ""


def _name(value: Any) -> str:
    own = _text(value, "__qualname__") or _text(value, "__name__") or type(value).__qualname__
    return f"{_text(value, '__module__')}.{own}".removeprefix(".")


def _order(value: Any) -> tuple[str, str]:
    """Sorts a set in the same way in each process."""
    kind = type(value)
    plain = kind in (*_PLAIN, str, int, tuple)
    return kind.__qualname__, repr(value) if plain else _name(value)


def _bytes_of_tensor(tensor: Any) -> bytes | None:
    """The values of a tensor in the CPU's memory. Those of a parameter may differ before they are
    sent to all ranks, and a subclass may ask other ranks for them."""
    import torch

    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.requires_grad:
        return None
    try:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        return ctypes.string_at(flat.data_ptr(), flat.numel())
    except RuntimeError:  # it is sparse, or has no memory
        return None


def _bytes_of_array(value: Any) -> Any:
    """The bytes of an array, such as NumPy's."""
    try:
        with memoryview(value) as view:
            return None if "O" in view.format else (view.format, view.shape, view.tobytes())
    except (TypeError, ValueError, BufferError, NotImplementedError):
        return None
