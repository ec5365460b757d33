"""Where the dynamic linker finds the shared libraries of a program.

It looks in the directories that programs and libraries name, in those of ``LD_LIBRARY_PATH``, and
in a list that ``ldconfig`` made. The observer sees what it loads, not what it looked for in vain.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable

PRELOADS = "/etc/ld.so.preload"  # names what it loads into every program
LIST = "/etc/ld.so.cache"

# Directories below those of libraries that it prefers. Since 2.37 glibc knows the first alone; the
# others are all that older ones look into on x86-64 and aarch64 (``ld.so --help`` lists them).
_PREFERRED = ("glibc-hwcaps", "tls", "aarch64", "atomics", "x86_64", "haswell", "xeon_phi",
              "avx512_1")  # fmt: skip


def search(directories: Iterable[str], libraries: Iterable[str]) -> tuple[list[str], list[str]]:
    """Where a library of one of these names would be found: the paths where nothing is, and the
    files that are there. A file that was not loaded either comes later, or does not suit this
    machine; with other contents it may be taken."""
    names = (*_PREFERRED, *libraries)
    absent, there = [], []
    waiting = list(directories)
    entered = set()
    for directory in waiting:  # it grows
        candidates = [os.path.join(directory, name) for name in names]
        preferred, files = candidates[: len(_PREFERRED)], candidates[len(_PREFERRED) :]
        absent += [path for path in candidates if not os.path.exists(path)]
        there += [path for path in files if os.path.isfile(path) and os.access(path, os.R_OK)]
        real = os.path.realpath(directory)
        if real not in entered:
            entered.add(real)
            waiting += filter(os.path.isdir, (*preferred, *_contents(preferred[0])))
    return absent, there


def _contents(directory: str) -> list[str]:
    found = os.listdir(directory) if os.path.isdir(directory) else ()
    return [os.path.join(directory, name) for name in found]


_MAGIC, _HEADER, _ENTRY = b"glibc-ld.so.cache1.1", 48, struct.Struct("<iIIIQ")


def listed(file: str, names: Iterable[str]) -> list[str]:
    """What the linker's list says of libraries: each name, with the paths that it leads to after
    it. A list that is not glibc's counts as a whole. Raises OSError."""
    found = {name.encode(): [name] for name in sorted(names)}
    try:
        with open(file, "rb") as opened:
            data = opened.read()
    except FileNotFoundError:
        data = b""
    try:
        begin = data.index(_MAGIC)  # the same in an older form may stand before it
        (count,) = struct.unpack_from("<I", data, begin + len(_MAGIC))
        for number in range(count):
            place = begin + _HEADER + number * _ENTRY.size
            _, name, path, _, _ = _ENTRY.unpack_from(data, place)
            paths = found.get(_text(data, begin + name))
            if paths is not None:
                paths.append(os.fsdecode(_text(data, begin + path)))
    except (struct.error, ValueError):
        return ["".join(each) + "/" + hashlib.sha256(data).hexdigest() for each in found.values()]
    return ["".join(each) for each in found.values()]


def _text(data: bytes, place: int) -> bytes:
    return data[place : data.index(b"\0", place)]
