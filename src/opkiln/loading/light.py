"""Libraries that are written with ``opkiln/op.h``: what they hold, and its registration.

Such a library registers nothing when it is opened. It lists its functions, each with its signature.
Each is compared with the schema of the op's declaration, and only then registered. So a wrong type
is an error before the first call, where torch would read the wrong bits or crash, and a new version
of an op replaces the old one.

Several libraries may have one function, each for a dtype. torch knows the first of them; a call
with another dtype goes from library to library until one is for it. Where none is, and where a
kernel does not serve a call, the overload ``unserved`` of the function takes it, in Python.
"""

from __future__ import annotations

import ctypes
from typing import Any

from opkiln import signature
from opkiln.errors import LoadError
from opkiln.loading.here import here
from opkiln.model import OpSpec, function_name
from opkiln.record import Record
from opkiln.signature import Function

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from opkiln.model import Registration

ABI = 2  # of the record, and of the functions that a library exports for it

_Name = tuple[str, str, str]


class _COp(ctypes.Structure):
    """``struct opkiln_op`` of ``op/record.h``, as far as it is read here."""


_COp._fields_ = [
    ("abi", ctypes.c_uint32),
    ("dtype", ctypes.c_int32),
    ("name", ctypes.c_char_p),
    ("device", ctypes.c_char_p),
    ("signature", ctypes.c_char_p),
    ("next", ctypes.POINTER(_COp)),
]


class Listed(Record):
    """One function of a library."""

    library: Any
    pointer: Any
    function: Function
    namespace: str
    overloads: tuple[str, ...]
    arguments: str  # their names

    @property
    def place(self) -> tuple[str, str]:
        """What it implements: (device, function)."""
        return self.function.device, f"{self.namespace}::{self.function.name}"

    def register(self) -> None:
        """Tell torch. Raises LoadError."""
        self.library.opkiln_register.restype = ctypes.c_char_p
        for each in self.overloads:
            name = f"{self.function.name}.{each}" if each else self.function.name
            words = (text.encode() for text in (self.namespace, name, self.arguments))
            wrong = self.library.opkiln_register(self.pointer, *words)
            if wrong:
                raise LoadError(
                    f"torch cannot register {self.function.name}",
                    why=wrong.decode(errors="replace"),
                )

    def link(self, other: Listed | None) -> None:
        """Pass calls with another dtype on."""
        self.library.opkiln_link(self.pointer, None if other is None else other.pointer)


def is_light(path: str) -> bool:
    """Whether a file is such a library."""
    from opkiln.binary import elf

    return "opkiln_ops" in elf.defined(path)


def adopt(spec: OpSpec, library: Any, registration: Registration | None) -> None:
    """Register the functions of a library that was just opened, in place of an older version's.

    Each is registered as all overloads that the registration names. One that torch was told of by
    a decorator also has the overload ``unserved``, for the calls that a kernel does not serve.

    A library that registers itself when it is opened is left alone. Raises LoadError if a function
    is missing or does not fit its schema; the older version then stays.
    """
    listed = getattr(library, "opkiln_ops", None)
    if listed is None:
        unregister(*_name(spec))
        return
    pointers = tuple(_walk(spec, listed))
    functions = [_described(each) for each in pointers]
    if not signature.fits(spec, functions):
        from opkiln.building.wording import misfit

        what, why, hint = misfit(spec, functions)
        raise LoadError(what, why=why, hint=hint)
    schemas = {function_name(each): each for each in spec.schemas}
    namespace = spec.kernels[0].partition("::")[0]
    overloads = ("",) if registration is None else registration.overloads
    with here.listing:
        unregister(*_name(spec))
        mine = here.listed[_name(spec)] = []
        for pointer, function in zip(pointers, functions, strict=True):
            names = ",".join(signature.argument_names(schemas[function.name]))
            each = Listed(library, pointer, function, namespace, overloads, names)
            if registration is not None and registration.defined:
                library.opkiln_refer(pointer, each.place[1].encode())
            mine.append(each)
            try:
                _enter(each)
            except LoadError as error:
                unregister(*_name(spec))
                raise LoadError(f"op {spec.name}: {error.what}", why=error.why) from error


def _enter(new: Listed) -> None:
    """Have calls reach a function: of torch, or of the libraries for other dtypes."""
    chain = here.chains.setdefault(new.place, [])
    if new.pointer.contents.dtype < 0 or not chain:
        new.register()
    if new.pointer.contents.dtype >= 0:
        if chain:
            chain[-1].link(new)
        chain.append(new)


def _leave(old: Listed) -> None:
    """Have no call reach a function."""
    chain = here.chains.get(old.place, [])
    place = next((i for i, each in enumerate(chain) if each is old), None)
    old.library.opkiln_unregister(old.pointer)
    if place is None:
        return
    del chain[place]
    if place > 0:
        chain[place - 1].link(chain[place] if place < len(chain) else None)
    elif chain:
        chain[0].register()


def has_registered(spec: OpSpec) -> bool:
    """Whether the functions of a library of this kind are registered for the op."""
    return _name(spec) in here.listed


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


def unregister(distribution: str, op: str, backend: str = "") -> None:
    """Unregister the libraries of an op, for one backend or for all: its reference serves."""
    with here.listing:
        for name in list(here.listed):
            if name[:2] == (distribution, op) and backend in ("", name[2]):
                for each in here.listed.pop(name):
                    _leave(each)


def _name(spec: OpSpec) -> _Name:
    return spec.distribution, spec.name, spec.backend
