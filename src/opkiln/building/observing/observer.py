"""The observer: a small library that is preloaded into compilers and linkers.

It is compiled once per host and kept in the store, under a name that has its digest. Each build
uses a copy in its own directory, which nobody else removes. If there cannot be one, steps run
without it, and what they make serves the process that made it alone.

It sees calls of the C library. A program that has system calls of its own, as one written
in Go has, reads files that no log mentions. It shows in its code: the machine's instruction for a
system call stands nowhere but in the C library and the dynamic linker.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import shutil
import struct
from typing import Any, NamedTuple

from opkiln.base.digest import Signature, key, open_regular, read_file, sha256_file, write_private
from opkiln.base.model import PACKAGE
from opkiln.base.trust import make_private
from opkiln.building.observing.log import start
from opkiln.errors import BuildTimeout, LoadError, ToolchainError
from opkiln.machine import uname
from opkiln.machine.binary import elf
from opkiln.machine.facts import digest_of
from opkiln.machine.toolchain import find, host, probing
from opkiln.run.process import run

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from opkiln.base.build_model import Toolchain


_SOURCE = os.path.join(PACKAGE, "building", "observing", "observer.c")
_LOG = "OPKILN_OBSERVER_LOG"
_PARENT = "OPKILN_OBSERVER_PARENT"
_COMPILE_SECONDS = 60


def library(memory: tuple[str, ...], toolchain: Toolchain | None, stage: str) -> str:
    """The path of the observer for a build in the directory ``stage``; empty if there is none.

    ``memory`` is where the store keeps what it knows of compilers; the first can be written to.
    """
    if uname.system() != "linux":
        return ""
    path = os.path.join(stage, "observer")
    process, wait = _early
    if process == os.getpid():
        wait()
    # A cross compiler runs here, but what it makes does not.
    cxx = None if toolchain is None or toolchain.cross else toolchain.cxx
    try:
        if not os.path.exists(path):
            make(memory, _SOURCE, path + ".part", cxx)
            os.rename(path + ".part", path)
        # LD_PRELOAD is a list, separated by blanks and colons.
        return _hold(path) if any(mark in path for mark in " :\t\n") else path
    except (OSError, ValueError, ToolchainError, BuildTimeout):
        return ""  # no space, no compiler any more, a machine that hangs: the build reports it


# (the process that has begun, what waits for its thread)
_early: tuple[int, Callable[[], None]] = (0, lambda: None)


def begin(memory: tuple[str, ...], cxx: str) -> None:
    """Begin to make the observer with a compiler, before it is known whether that can be used: both
    take long on a machine where nothing was built yet."""
    global _early

    def work() -> None:
        with contextlib.suppress(OSError, ToolchainError, BuildTimeout), probing.scratch() as stage:
            make(memory, _SOURCE, os.path.join(stage, "observer"), cxx)

    if uname.system() == "linux":
        _early = os.getpid(), probing.begin_in_thread(work)


def make(
    memory: tuple[str, ...], source: str, path: str, cxx: str | None, *, program: bool = False
) -> None:
    """Put the library or program of this source there: a copy of the one that is kept, or a new
    one, which is kept. Raises OSError, ToolchainError, BuildTimeout."""
    here = (uname.architecture(), os.confstr("CS_GNU_LIBC_VERSION"), sha256_file(source))
    name = f"{_PREFIX}{key('observer', here)}-"
    for kept in (each for directory in memory for each in _list_stored(directory, name)):
        with contextlib.suppress(FileNotFoundError):  # `opkiln cache gc` may run
            shutil.copyfile(kept, path)
            if is_intact(kept, path):
                return
    kind = () if program else ("-shared", "-fPIC")
    # With -O2, they take twice as long to compile; they mostly wait for the kernel.
    flags = ("-x", "c", "-O1", "-s", *kind, "-o", path, source, "-ldl")
    for each in (cxx,) if cxx else _list_compilers(memory):
        done = run((each, *flags), timeout=_COMPILE_SECONDS, tmpdir=os.path.dirname(path))
        if done.returncode == 0:
            break
    else:
        raise ToolchainError(f"{each} cannot compile {source}", why=done.output)
    with contextlib.suppress(OSError):  # the store is full or cannot be written
        for directory in memory[:1]:
            make_private(directory)
            write_private(os.path.join(directory, name + sha256_file(path)), read_file(path))


def _list_compilers(memory: tuple[str, ...]) -> Iterator[str]:
    """What may be compiled with, unprobed: a probe takes as long as the compile. Then the one that
    passes it, or ToolchainError."""
    yield from (each.path for each in find.cxx_candidates() if not each.refused)
    yield host.choose(memory).cxx


_descriptors: dict[str, int] = {}  # by digest: an open copy, for as long as this process runs


def _hold(path: str) -> str:
    """A plain path by which children can open the observer."""
    data = read_file(path)
    name = sha256_file(path)
    if name not in _descriptors:
        _descriptors[name] = os.memfd_create("observer")
        os.write(_descriptors[name], data)
    return f"/proc/{os.getpid()}/fd/{_descriptors[name]}"


_PREFIX = "observer-"
_NAME = re.compile(_PREFIX + "[0-9a-f]{40}-[0-9a-f]{64}")


def is_intact(kept: str, path: str = "") -> bool:
    """Whether a stored observer, or its copy at ``path``, is what its name says."""
    return sha256_file(path or kept) == kept.rpartition("-")[2]


def _list_stored(directory: str, name: str) -> Iterator[str]:
    """Those that are kept, and not what another process is just writing there."""
    try:
        found = [each for each in os.listdir(directory) if each.startswith(name)]
    except OSError:
        return  # nothing was kept there yet
    yield from (os.path.join(directory, each) for each in found if _NAME.fullmatch(each))


def find_damaged(directory: str) -> list[str]:
    """The observers in a memory of compilers that are not what their names say."""
    names = os.listdir(directory) if os.path.isdir(directory) else ()
    stored = (os.path.join(directory, name) for name in names if _NAME.fullmatch(name))
    return [path for path in stored if not is_intact(path)]


def environment(observer: str, log: str) -> dict[str, str]:
    """What makes a step write this log, and end with this process. Raises OSError."""
    if not observer:
        return {}
    start(log)
    return {"LD_PRELOAD": observer, _LOG: log, _PARENT: str(os.getpid())}


_LARGE = 1 << 20  # bytes of a file whose digest is worth remembering
_C_LIBRARY = ("libc.so.", "ld-linux", "ld64.so.", "libpthread.so.", "librt.so.")


class Program(NamedTuple):
    """What is known of a program or a library."""

    opaque: bool  # it has system calls of its own
    searches: tuple[str, ...]  # the directories where it says that its libraries are


_known: dict[str, tuple[Signature, Program]] = {}


def identify(path: str, memory: tuple[str, ...]) -> Program:
    """A program or library that ran. Every step of a build loads the same ones, of a hundred
    megabytes together: each is looked through once. Raises OSError."""
    found = _known.get(path)
    if found is not None and found[0].holds(path):
        return found[1]
    signature = Signature.of(path)

    def look() -> dict[str, Any]:
        return {"opaque": is_opaque(path), "searches": _searches(path)}

    record = _recall("program", path, memory, look)
    program = Program(record["opaque"], tuple(record["searches"]))
    _known[path] = signature, program
    return program


def digest(path: str, memory: tuple[str, ...]) -> str:
    """The digest of any file. Raises OSError."""
    found: str = _recall("file", path, memory, lambda: {"sha256": digest_of(path)})["sha256"]
    return found


def _recall(
    what: str, path: str, memory: tuple[str, ...], look: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """What a look at a file finds. That of a large one is remembered in ``memory`` as long as its
    signature holds."""
    if os.stat(path).st_size <= _LARGE:
        return look()
    record = probing.recall_or_ask(memory, f"{what} {path}", lambda: (look(), [path]))
    assert record is not None
    return record


def is_opaque(path: str) -> bool:
    """Whether a program or library has system calls of its own. Raises OSError."""
    if os.path.basename(path).startswith(_C_LIBRARY):
        return False
    with open_regular(path) as (fd, found):
        if not found.st_size:
            return False
        with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as data:
            return any(_has_system_call(data, *each) for each in _code(data))


def _searches(path: str) -> tuple[str, ...]:
    origin = os.path.dirname(path)  # of a library, as it was found: links are not followed
    try:
        found = elf.search_path(path)
    except LoadError:
        return ()  # a file of another kind; a program that was stripped of its tables
    # It may name the machine and its directory of libraries, too: nobody does.
    named = (re.sub(r"\$(ORIGIN\b|\{ORIGIN\})", lambda _: origin, each) for each in found)
    return tuple(each for each in named if os.path.isabs(each) and "$" not in each)


_AARCH64, _X86_64 = 183, 62  # the machine that an ELF file is for
_RUN = 4  # a flag of a section: its contents are instructions


def _code(data: mmap.mmap) -> Iterator[tuple[int, int, int]]:
    """(machine, first byte, last byte) of the instructions in an ELF file. One without a table of
    its sections is taken for instructions as a whole."""
    if data[:6] != b"\x7fELF\x02\x01" or len(data) < 64:
        return
    (machine,), (table,) = struct.unpack_from("<H", data, 18), struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    if not (table and count) or size < 64 or table + size * count > len(data):
        yield machine, 0, len(data)
        return
    for place in range(table, table + size * count, size):
        (flags,) = struct.unpack_from("<Q", data, place + 8)
        first, length = struct.unpack_from("<QQ", data, place + 24)
        if flags & _RUN:
            yield machine, first, first + length


def _has_system_call(data: mmap.mmap, machine: int, first: int, last: int) -> bool:
    if machine == _AARCH64:
        places = _places(data, b"\x01\0\0\xd4", first, last)
        return any((place - first) % 4 == 0 for place in places)
    if machine != _X86_64:
        return True
    # Instructions begin anywhere, so these bytes may be part of another one. What goes with a
    # system call tells: registers are set before it, rax to its number among them, or its result is
    # compared after it. (Tried on 500 MB of compilers and libraries: 5,000 places have the bytes,
    # and none of those passes.)
    return any(
        _SET_TWICE.search(data[max(first, place - 48) : place])
        or data[place + 2 : place + 8] == _COMPARED
        for place in _places(data, b"\x0f\x05", first, last)
    )


def _operands(*registers: int) -> bytes:
    """The bytes for one of these registers and any other register or place in memory."""

    def begin(mode: int, *places: int) -> bytes:
        found = (mode << 6 | register << 3 | place for register in registers for place in places)
        return b"[%b]" % b"".join(b"\\x%02x" % each for each in found)

    near = (0, 1, 2, 3, 6, 7)
    forms = (
        begin(3, *near, 4, 5), begin(0, *near), begin(0, 4) + b".", begin(0, 5) + b".{4}",
        begin(1, *near, 5) + b".", begin(1, 4) + b"..", begin(2, *near, 5) + b".{4}",
        begin(2, 4) + b".{5}",
    )  # fmt: skip
    return b"(?:%b)" % b"|".join(forms)


_COMPARED = b"\x48\x3d\x01\xf0\xff\xff"  # cmp $-4095, %rax
_RAX = (
    rb"(?:\x48?\xb8.[\0-\3]\0\0|\x48\xc7\xc0.[\0-\3]\0\0|[\x31\x33]\xc0|\x6a.\x58"  # a number
    rb"|[\x40-\x4f]?(?:\x89[\xc0\xc8\xd0\xd8\xe0\xe8\xf0\xf8]|[\x63\x8b\x8d]%b))" % _operands(0)
)
_SETS = (
    rb"(?:[\x40-\x4f]?(?:(?:[\x01\x03\x09\x0b\x21\x23\x29\x2b\x31\x33\x63\x89\x8b\x8d]"
    rb"|\x0f[\x40-\x4f\xb6\xb7\xbe\xbf])%b|[\x83\xc1][\xc0-\xff].|\x81[\xc0-\xff].{4}"
    rb"|\xc7%b.{4}|[\xb8-\xbf].{4}|[\x50-\x5f])|\x6a.|\x90)"
) % (_operands(*range(8)), _operands(0))
_SET_TWICE = re.compile(b"(?:%b%b|%b%b)%b{0,6}\\Z" % (_SETS, _RAX, _RAX, _SETS, _SETS), re.DOTALL)


def _places(data: mmap.mmap, wanted: bytes, first: int, last: int) -> Iterator[int]:
    place = data.find(wanted, first, last)
    while place >= 0:
        yield place
        place = data.find(wanted, place + 1, last)
