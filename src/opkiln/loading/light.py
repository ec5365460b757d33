"""Libraries that are written with ``opkiln/op.h``: what they hold, and its registration.

Such a library registers nothing when it is opened. It lists its functions, each with its signature.
Each is compared with the schema of the op's declaration, and only then registered. So a wrong type
is an error before the first call, where torch would read the wrong bits or crash, and a new version
of an op replaces the old one.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

from opkiln import signature
from opkiln.errors import LoadError
from opkiln.model import OpSpec, function_name
from opkiln.record import Record
from opkiln.signature import Function

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

ABI = 1  # of the record, and of the functions that a library exports for it

_Name = tuple[str, str, str]


class _COp(ctypes.Structure):
    """``struct opkiln_op`` of ``op/record.h``, as far as it is read here."""


_COp._fields_ = [
    ("abi", ctypes.c_uint32),
    ("name", ctypes.c_char_p),
    ("device", ctypes.c_char_p),
    ("signature", ctypes.c_char_p),
    ("next", ctypes.POINTER(_COp)),
]


class _Registered(Record):
    library: Any
    pointers: tuple[Any, ...]


_registered: dict[_Name, _Registered] = {}  # by distribution, op and backend
_lock = threading.Lock()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def is_light(path: str) -> bool:
    """Whether a file is such a library."""
    from opkiln.binary import elf

    return "opkiln_ops" in elf.defined(path)


def adopt(spec: OpSpec, library: Any, overloads: tuple[str, ...]) -> None:
    """Register the functions of a library that was just opened, in place of an older version's.

    Each is registered as all of ``overloads``; "" is the default one.

    A library that registers itself when it is opened is left alone. Raises LoadError if a function
    is missing or does not fit its schema; the older version then stays.
    """
    listed = getattr(library, "opkiln_ops", None)
    if listed is None:
        if _registered:
            with _lock:
                _retire(spec)
        return
    pointers = tuple(_walk(spec, listed))
    functions = [_described(each) for each in pointers]
    _require_fit(spec, functions)
    schemas = {function_name(each): each for each in spec.schemas}
    namespace = spec.kernels[0].partition("::")[0].encode()
    library.opkiln_register.restype = ctypes.c_char_p
    with _lock:
        _retire(spec)
        for pointer, function in zip(pointers, functions, strict=True):
            names = ",".join(signature.argument_names(schemas[function.name])).encode()
            called = [f"{function.name}.{each}" if each else function.name for each in overloads]
            answers = (
                library.opkiln_register(pointer, namespace, each.encode(), names) for each in called
            )
            wrong = next(filter(None, answers), None)
            if wrong:
                for each in pointers:
                    library.opkiln_unregister(each)
                raise LoadError(
                    f"op {spec.name}: torch cannot register {function.name}",
                    why=wrong.decode(errors="replace"),
                )
        _registered[_name(spec)] = _Registered(library, pointers)


def _walk(spec: OpSpec, listed: Any) -> Iterator[Any]:
    listed.restype = ctypes.POINTER(_COp)
    pointer = listed()
    while pointer:
        if pointer.contents.abi != ABI:
            raise LoadError(
                f"op {spec.name}: its library was built with the op.h of another opkiln",
                why=f"its list of functions has version {pointer.contents.abi}, this opkiln reads "
                f"version {ABI}",
                hint=f"opkiln build {spec.name}",
            )
        yield pointer
        pointer = pointer.contents.next


def _described(pointer: Any) -> Function:
    each = pointer.contents
    return Function(each.name.decode(), each.device.decode(), each.signature.decode())


def _require_fit(spec: OpSpec, functions: list[Function]) -> None:
    if not signature.fits(spec, functions):
        from opkiln.building.wording import misfit

        what, why, hint = misfit(spec, functions)
        raise LoadError(what, why=why, hint=hint)


def retire(distribution: str, op: str) -> None:
    """Unregister all libraries of an op: it is declared anew."""
    with _lock:
        for name in [each for each in _registered if each[:2] == (distribution, op)]:
            _unregister(name)


def _retire(spec: OpSpec) -> None:
    """Unregister what an older version of the op has registered."""
    _unregister(_name(spec))


def _unregister(name: _Name) -> None:
    old = _registered.pop(name, None)
    if old is not None:
        for pointer in old.pointers:
            old.library.opkiln_unregister(pointer)


def _name(spec: OpSpec) -> _Name:
    return spec.distribution, spec.name, spec.backend
