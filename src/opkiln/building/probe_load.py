"""The program of the load test's child: loads a library and exits.

Started as ``python -I -S probe_load.py PARENT NONCE KEYS FUNCTIONS LIBRARY...`` with torch's
libraries first. ``PARENT`` is the process that starts it. The last library may not be there yet: it
is loaded when there is a byte on standard input. This program imports neither torch nor opkiln:
dlopening ``libtorch_cpu`` takes a fifth of the time of importing torch. If the library crashes, it
crashes here and not in a user's process.

Libraries are opened as ``import torch`` and a load open them: locally, so that a library finds the
symbols of those that it needs itself, and of no others. ``libtorch_global_deps`` is the one that
torch opens for all.

The line ``LOADED`` with the nonce means that all libraries are loaded. A library that prints such a
line itself, and then ends the process, does not know the nonce. Each of ``FUNCTIONS`` must have a
kernel for one of the dispatch ``KEYS``. Both are lists joined by commas, and may be empty. If torch
can be asked, a line ``MISSING`` follows. It lists the functions without a kernel, and registered
functions of the same names in other namespaces.

The last library may be written with ``opkiln/op.h``. It registers nothing by itself and lists its
functions. Then there is a line ``LISTED`` for each, and none ``MISSING``.
"""

import ctypes
import os
import sys

LOADED = "opkiln: loaded"
MISSING = "opkiln: missing "
LISTED = "opkiln: listed "

_FOR_ALL = "libtorch_global_deps.so"
_DISPATCHER = "libtorch_cpu.so"

# c10::Dispatcher::realSingleton(), c10::parseDispatchKey(const std::string&) and
# c10::Dispatcher::getRegistrationsForDispatchKey(std::optional<c10::DispatchKey>) const
_SINGLETON = "_ZN3c1010Dispatcher13realSingletonEv"
_PARSE = "_ZN3c1016parseDispatchKeyERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
_REGISTERED = "_ZNK3c1010Dispatcher30getRegistrationsForDispatchKeyESt8optionalINS_11DispatchKeyEE"


class _String(ctypes.Structure):
    """``std::string`` of libstdc++."""

    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t), ("own", ctypes.c_char * 16))


class _OperatorName(ctypes.Structure):
    """``c10::OperatorName``."""

    _fields_ = (("name", _String), ("overload", _String))


class _OpRecord(ctypes.Structure):
    """``struct opkiln_op`` of ``opkiln/op/record.h``."""


_OpRecord._fields_ = [
    ("abi", ctypes.c_uint32),
    ("dtype", ctypes.c_int32),
    ("name", ctypes.c_char_p),
    ("device", ctypes.c_char_p),
    ("signature", ctypes.c_char_p),
    ("next", ctypes.POINTER(_OpRecord)),
]


def _list_functions(library: ctypes.CDLL) -> list[tuple[str, str, str]] | None:
    """The name, device and signature of each function; None if the library has no such list."""
    first = getattr(library, "opkiln_ops", None)
    if first is None:
        return None
    first.restype = ctypes.POINTER(_OpRecord)
    pointer, found = first(), []
    while pointer:
        each = pointer.contents
        found.append((each.name.decode(), each.device.decode(), each.signature.decode()))
        pointer = each.next
    return found


class _Vector(ctypes.Structure):
    """``std::vector``."""

    _fields_ = (("begin", ctypes.c_void_p), ("end", ctypes.c_void_p), ("limit", ctypes.c_void_p))


def _find_registered(torch: ctypes.CDLL, keys: list[str]) -> set[str] | None:
    """The functions that have a kernel for one of these keys; None if torch cannot be asked.

    This calls torch's dispatcher in C++. The mangled names contain the parameters' types and the
    ABI of the string class, so a torch with another interface does not have these names.
    """
    try:
        singleton = getattr(torch, _SINGLETON)
        parse = getattr(torch, _PARSE)
        registered = getattr(torch, _REGISTERED)
    except AttributeError:
        return None
    singleton.restype = ctypes.c_void_p
    parse.argtypes, parse.restype = [ctypes.POINTER(_String)], ctypes.c_uint16
    registered.argtypes, registered.restype = [ctypes.c_void_p, ctypes.c_uint32], _Vector
    found = set()
    for key in keys:
        text = ctypes.create_string_buffer(key.encode())
        number = parse(ctypes.byref(_String(ctypes.addressof(text), len(key))))
        # std::optional<DispatchKey>: two bytes for the key, and one that says it has a value.
        each = registered(singleton(), number | 1 << 16)
        count = ((each.end or 0) - (each.begin or 0)) // ctypes.sizeof(_OperatorName)
        names = (_OperatorName * count).from_address(each.begin) if count else ()
        for name in names:
            parts = [ctypes.string_at(part.data, part.size) for part in (name.name, name.overload)]
            found.add(b".".join(filter(None, parts)).decode())
    return found


def _end_with_parent(parent: int) -> None:
    """Have the kernel end this process when the thread that started it ends: a constructor that
    hangs must not outlive a builder that is killed together with its watchdog."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
        if os.getppid() != parent:  # it ended before that
            os._exit(1)


def main() -> int:
    parent, nonce, keys, functions, *libraries = sys.argv[1:]
    _end_with_parent(int(parent))
    opened = {}
    for path in libraries:
        name = os.path.basename(path)
        if path == libraries[-1] and not os.read(0, 1):
            return 1  # there will be no library
        try:
            scope = os.RTLD_GLOBAL if name == _FOR_ALL else os.RTLD_LOCAL
            library = opened[name] = ctypes.CDLL(path, mode=os.RTLD_NOW | scope)
        except OSError as error:
            print(error)
            return 1
    print(f"\n{LOADED} {nonce}", flush=True)
    listed = _list_functions(library)
    for each in listed or ():
        print(LISTED + "\t".join(each), flush=True)
    found, torch = None, opened.get(_DISPATCHER)
    if functions and listed is None and torch is not None:
        found = _find_registered(torch, keys.split(","))
    if found is not None:
        missing = [name for name in functions.split(",") if name not in found]
        bare = {name.partition("::")[2] for name in missing}
        others = sorted(name for name in found if name.partition("::")[2] in bare)
        print(MISSING + " ".join(missing) + ";" + " ".join(others), flush=True)
    # A normal exit would run static destructors, in an order that torch never uses itself.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
