"""What functions in Python compute, as digests that are the same on two hosts.

A function counts with its bytecode and constants, its defaults, what it closes over, and what it
reads of its module. What it reaches that way counts too, and so on: functions, classes, values,
tensors in the CPU's memory, objects of the author's own classes with their attributes.

Only the author's code is read: the packages of the functions, and modules that state no
``__version__``, such as a file beside a script. Any other package counts by its version, Python and
torch by their names alone: the ranks compare their versions. An object of a class from there counts
by its class: a logger, a lock or a device may differ from rank to rank.

Paths and lines of files do not count, nor does the order of a set or a dict, which may be another
one in each process. Bytecode is that of one minor version of Python: the ranks compare that, too.
"""

from __future__ import annotations

import ctypes
import dis
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import (
    CellType,
    CodeType,
    EllipsisType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    NoneType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

from opkiln.digest import key

_BY_NAME = sys.stdlib_module_names | {"torch"}
_PLAIN = (bool, float, complex, bytes, range, slice, NoneType, EllipsisType)
_CONTAINERS = (tuple, list, set, frozenset, dict, deque, MappingProxyType, SimpleNamespace)
_BY_TEXT = ("dtype", "layout", "memory_format", "OpOverload", "OpOverloadPacket")  # of torch
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")


class Part(NamedTuple):
    """Something that decides what is computed: a function, a class, a value of a module."""

    name: str
    digest: str


class _Global(NamedTuple):
    """A value that a function reads of its module."""

    name: str
    value: Any


class _Node(NamedTuple):
    """What was read of an object. ``reached`` are the objects that count with it, in order."""

    of: Any  # keeps its id()
    name: str
    digest: str
    reached: tuple[Any, ...]


class Programs:
    """Reads functions, and keeps what was read: ops share functions."""

    def __init__(self) -> None:
        self._readers: dict[frozenset[str], _Reader] = {}

    def parts(self, distribution: str, functions: Sequence[tuple[str, Any]]) -> tuple[Part, ...]:
        """All that decides what these named functions of a package compute."""
        modules = [_text(function, "__module__") for _, function in functions]
        own = frozenset({"__main__", "", distribution.replace("-", "_"), *map(_top, modules)})
        if own not in self._readers:
            self._readers[own] = _Reader(own)
        return self._readers[own].parts(functions)


class _Reader:
    """Reads functions; ``own`` are the packages whose code counts."""

    def __init__(self, own: frozenset[str]) -> None:
        self._own = own
        self._nodes: dict[int, _Node] = {}
        self._globals: dict[tuple[str, int], _Global] = {}
        self._reached: list[Any] = []  # by the node that is being read
        self._inside: set[int] = set()  # the containers and modules that are being read
        files = [getattr(sys.modules.get(each), "__file__", None) for each in own - _BY_NAME]
        places = {os.path.dirname(os.path.abspath(file)) for file in files if file}
        self._places = sorted({*places, *map(os.path.realpath, places)} - {"/"}, key=len)[::-1]

    def parts(self, functions: Sequence[tuple[str, Any]]) -> tuple[Part, ...]:
        names = ", ".join(name for name, _ in functions)
        nodes = [_Node(functions, names, key("names", names), tuple(f for _, f in functions))]
        numbers: dict[int, int] = {}
        for node in nodes:  # it grows
            for each in node.reached:
                if id(each) not in numbers:
                    numbers[id(each)] = len(numbers)
                    nodes.append(self._node(each))
        return tuple(
            Part(each.name, key("part", (each.digest, [numbers[id(to)] for to in each.reached])))
            for each in nodes
        )

    def _node(self, value: Any) -> _Node:
        known = self._nodes.get(id(value))
        if known is None:
            self._reached = []
            content = self._read(value)
            name = value.name if isinstance(value, _Global) else _name(value)
            known = _Node(value, name, key("node", content), tuple(self._reached))
            self._nodes[id(value)] = known
        return known

    # Each of these gives what enters a digest, and adds to `_reached` what is a node of its own.

    def _read(self, value: Any) -> Any:
        kind = type(value)
        if issubclass(kind, _Global):
            return self._describe(value.value)
        if issubclass(kind, FunctionType):
            return self._describe_function(value)
        if issubclass(kind, type):
            return self._describe_class(value)
        if issubclass(kind, MethodType):
            parts: Sequence[Any] = (value.__func__, value.__self__)
        elif issubclass(kind, (staticmethod, classmethod)):
            parts = (value.__func__,)
        elif issubclass(kind, property):
            parts = (value.fget, value.fset)
        elif issubclass(kind, partial):
            parts = (value.func, value.args, value.keywords)
        else:
            return self._describe_object(value)
        return (kind.__name__, *(self._describe(each) for each in parts))

    def _describe(self, value: Any) -> Any:
        """A value: in full if it is plain, and None for a node."""
        kind = type(value)
        if kind is str:
            return self._without_places(value)
        if kind is int:
            return ("int", hex(value))
        if kind in _PLAIN:
            return (kind.__name__, repr(value))
        if issubclass(kind, _CONTAINERS) and not self._counts_by_code(kind.__module__):
            return self._describe_contents(value)
        if kind is CodeType:
            return self._describe_code(value)
        if issubclass(kind, ModuleType):
            return ("module", value.__name__, self._version(value.__name__))
        if kind.__module__ in ("torch", "torch._ops") and kind.__name__ in _BY_TEXT:
            return ("torch", repr(value))
        self._reached.append(value)
        return None

    def _without_places(self, text: str) -> str:
        for place in self._places:
            text = text.replace(place, "{src}")
        return text

    def _describe_contents(self, value: Any) -> Any:
        kind = type(value).__name__
        with self._enter(value) as first:
            if not first:
                return (kind, "within itself")
            items: Iterable[Any] = vars(value) if isinstance(value, SimpleNamespace) else value
            if isinstance(items, (dict, MappingProxyType)):
                pairs = sorted(items.items(), key=lambda pair: _order(pair[0]))
                items = [each for pair in pairs for each in pair]
            elif isinstance(items, (set, frozenset)):
                items = sorted(items, key=_order)
            return (kind, *(self._describe(each) for each in tuple(items)))

    @contextmanager
    def _enter(self, value: Any) -> Iterator[bool]:
        """Whether a value is not being read already."""
        first = id(value) not in self._inside
        self._inside.add(id(value))
        try:
            yield first
        finally:
            if first:
                self._inside.remove(id(value))

    def _describe_code(self, code: CodeType) -> Any:
        return (
            code.co_code, code.co_exceptiontable, code.co_flags, code.co_argcount,
            code.co_posonlyargcount, code.co_kwonlyargcount, code.co_names, code.co_varnames,
            code.co_freevars, code.co_cellvars, self._describe_contents(code.co_consts),
        )  # fmt: skip

    def _describe_function(self, function: FunctionType) -> Any:
        own = vars(function)
        if "overload" in own and "reference" in own:  # an op: what calls it has a state
            return ("op", self._describe((own["overload"], own["reference"])))
        code, scope = function.__code__, function.__globals__
        module = str(scope.get("__name__") or "")
        counts = self._counts_by_code(module)
        names, loads, imports = _scan(code) if counts else ((), (), [])
        closure = [self._describe_used(_value_in(each), names)
                   for each in function.__closure__ or ()]  # fmt: skip
        if not counts:
            made = (module, code.co_qualname, self._version(module), closure)
            return ("named", *made, self._describe_wrapped(function))
        own_parts = (code, function.__defaults__, function.__kwdefaults__)
        read = [self._describe_load(each, scope, names)
                for each in loads if each[0] in scope]  # fmt: skip
        imported = [self._describe_import(each, scope, names) for each in imports]
        return (self._describe(own_parts), closure, read, imported)

    def _describe_load(
        self, chain: tuple[str, ...], scope: dict[str, Any], names: tuple[str, ...]
    ) -> Any:
        """What code reads by a name and attributes of it: ``module.function``, ``object.value``.
        Of a module only this attribute counts, of another object all of it."""
        module, name, value = str(scope.get("__name__") or ""), chain[0], scope[chain[0]]
        for attribute in chain[1:]:
            if not self._is_own_module(value):
                break
            module, name, value = value.__name__, attribute, _attribute(value, attribute)
        return (name, self._describe_global(module, name, value, names))

    def _describe_used(self, value: Any, names: tuple[str, ...]) -> Any:
        """A value that code with these names uses. Of a module, what has one of these names."""
        if not self._is_own_module(value):
            return self._describe(value)
        module = value.__name__
        with self._enter(value) as first:
            found = [(name, each) for name in names if first
                     and (each := _attribute(value, name)) is not None]  # fmt: skip
            return (module, [(name, self._describe_global(module, name, each, names))
                             for name, each in found])  # fmt: skip

    def _describe_global(self, module: str, name: str, value: Any, names: tuple[str, ...]) -> Any:
        """What code reads of a module. A plain value is a node of its own, so that it has a name
        where the parts are listed."""
        before = len(self._reached)
        said = self._describe_used(value, names)
        if len(self._reached) > before or self._is_own_module(value):
            return said
        named = f"{module}.{name}"
        self._reached.append(self._globals.setdefault((named, id(value)), _Global(named, value)))
        return None

    def _describe_import(
        self, statement: tuple[Any, Any, str], scope: dict[str, Any], names: tuple[str, ...]
    ) -> Any:
        """What a function imports when it is called. Only modules of its own package are imported
        for that; any other counts if it is imported already."""
        level, fromlist, name = statement
        module: ModuleType | None
        if level or _top(name) in self._own:
            try:
                module = import_module("." * level + name, scope.get("__package__"))
                for each in fromlist or ():
                    if not hasattr(module, each):
                        import_module(f"{module.__name__}.{each}")
            except Exception as error:  # as the function will find
                return type(error).__name__
        else:
            module = sys.modules.get(name)
        if not self._is_own_module(module):
            return None  # its name is among the function's own
        return self._describe_used(module, names)

    def _describe_class(self, kind: type) -> Any:
        name = _name(kind)
        if not self._counts_by_code(kind.__module__):
            return ("class", name, self._version(kind.__module__))
        made = (FunctionType, staticmethod, classmethod, property)
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
            if isinstance(each, FunctionType)
        ]

    def _counts_by_code(self, module: str) -> bool:
        """Whether the code of a module counts, not its version."""
        top = _top(module)
        return top not in _BY_NAME and (top in self._own or not self._version(module))

    def _is_own_module(self, value: Any) -> bool:
        # Not isinstance: it asks the value for its class, which a proxy may refuse.
        return issubclass(type(value), ModuleType) and self._counts_by_code(value.__name__)

    def _version(self, module: str) -> str:
        package = sys.modules.get(_top(module))
        return "" if package is None else _text(package, "__version__")


def _scan(
    code: CodeType,
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...], list[tuple[Any, Any, str]]]:
    """The names in a code, what it reads of its module, each as a name and the attributes that
    follow, and its imports, each as (level, names, module); with the code of the functions that are
    made in it."""
    names, loads = dict.fromkeys(code.co_names), dict[tuple[str, ...], None]()
    imports: list[tuple[Any, Any, str]] = []
    before: tuple[Any, Any] = None, None
    chain: tuple[str, ...] = ()
    for each in dis.get_instructions(code):
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
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more_names, more_loads, more_imports = _scan(inner)
            names |= dict.fromkeys(more_names)
            loads |= dict.fromkeys(more_loads)
            imports += more_imports
    return tuple(names), tuple(loads), imports


def _top(module: object) -> str:
    return str(module).partition(".")[0]


def _value_in(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # of a name that has no value yet
        return None


def _attribute(value: Any, name: str) -> Any:
    try:
        return getattr(value, name, None)
    except Exception:  # what a module makes when it is asked for may fail
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
