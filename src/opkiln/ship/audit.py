"""Checks of a library before it is shipped: the platform tag of its wheel, and the ABI audit.

**The tag** (PEP 600). ``manylinux_2_34_x86_64`` means: any Linux with glibc 2.34 or later. The
versions of glibc's symbols say which glibc they need. libstdc++ and libgcc have versions of their
own; which glibc comes with which of these depends on the distributions. The table below is that of
auditwheel 6.8 (``manylinux-policy.json``).

**The audit.** A library on torch's stable ABI is shipped once, as ``py3-none-…``, for every Python
and for every torch from the oldest supported one on. This works only if it uses nothing else from
Python or torch: one symbol of torch's C++ interface can make it fail with the next release. The
audit finds such a symbol when the library is built, not when it is loaded.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from opkiln.base.model import XPU
from opkiln.errors import BuildError, UsageError
from opkiln.machine.binary import elf
from opkiln.machine.binary.elf import Elf
from opkiln.store.layer import LayerEntry

ANY_PYTHON = "py3-none"
_MACHINES = ("x86_64", "aarch64")

# No torch with a stable ABI runs on an older glibc, so an older tag would be useless.
_OLDEST = 17

# (minor version of glibc 2, the newest version of each family on systems with that glibc). If
# x86-64 and aarch64 differ, the table has the older version.
_POLICIES: tuple[tuple[int, dict[str, tuple[int, ...]]], ...] = (
    (17, {"GLIBCXX": (3, 4, 19), "CXXABI": (1, 3, 7), "GCC": (4, 8, 0)}),
    (24, {"GLIBCXX": (3, 4, 22), "CXXABI": (1, 3, 10), "GCC": (4, 8, 0)}),
    (27, {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}),
    (31, {"GLIBCXX": (3, 4, 28), "CXXABI": (1, 3, 12), "GCC": (7, 0, 0)}),
    (34, {"GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (7, 0, 0)}),
    (35, {"GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (12, 0, 0)}),
    (39, {"GLIBCXX": (3, 4, 33), "CXXABI": (1, 3, 15), "GCC": (14, 0, 0)}),
)
_NAMED = {"CXXABI_TM_1": 17, "CXXABI_FLOAT128": 24, "GLIBC_ABI_DT_RELR": 36}
_FAMILIES = ("GLIBC", "GLIBCXX", "CXXABI", "GCC")


class Platform(NamedTuple):
    """A tag, and the symbol version that decided it (``GLIBC_2.34``). For ``linux_…``, the reason
    why it is not a manylinux tag."""

    tag: str
    why: str


def platform(elfs: Iterable[Elf]) -> Platform:
    """The oldest platform that has everything these libraries need, and what decided it.

    Only the C and C++ runtimes count; the audit reports other libraries. Raises UsageError for
    libraries of two machines, or of a machine that opkiln does not make wheels for.
    """
    libraries = list(elfs)
    machines = sorted({each.machine for each in libraries})
    if len(machines) != 1 or machines[0] not in _MACHINES:
        raise UsageError(
            f"no platform tag fits libraries for {' and '.join(machines) or 'an unknown machine'}",
            why=f"a wheel is for one of {', '.join(_MACHINES)}",
        )
    glibc, decided = _OLDEST, f"nothing newer than glibc 2.{_OLDEST}"
    for version in sorted({name for each in libraries for name in each.versions}):
        needed = _needed_glibc(version)
        if needed is None:
            return Platform(
                f"linux_{machines[0]}",
                f"no platform up to manylinux_2_{_POLICIES[-1][0]} has {version}",
            )
        if needed > glibc:
            glibc, decided = needed, version
    return Platform(f"manylinux_2_{glibc}_{machines[0]}", decided)


def tag_for(entries: Sequence[LayerEntry]) -> str:
    """The tag of a wheel with these ops. They must be for any Python, or all for the same one.
    Raises UsageError for ops of two machines."""
    pythons = {python_tag(each.manifest["target"]["abi_tag"]) for each in entries} - {""}
    chosen = platform(elf.read(each.payload) for each in entries)
    return f"{next(iter(pythons), ANY_PYTHON)}-{chosen.tag}"


def _needed_glibc(version: str) -> int | None:
    """The minor version of the oldest glibc 2 that has this symbol version; None if unknown."""
    if version in _NAMED:
        return _NAMED[version]
    family, _, text = version.partition("_")
    if family not in _FAMILIES:
        return 0
    try:
        number = tuple(map(int, text.split(".")))
    except ValueError:
        return None  # GLIBC_PRIVATE, or a name that is newer than this table
    if family == "GLIBC":
        return number[1] if number[0] == 2 and len(number) > 1 else None
    return next((glibc for glibc, newest in _POLICIES if number <= newest[family]), None)


# The audit

ERROR, WARNING, NOTE = "error", "warning", "note"

STABLE_TAG, FULL_TAG = "torch-stable-", "torch-"

# Libraries that every system has, and those of torch. The loader's name depends on the machine.
_SYSTEM = frozenset({
    "libc.so.6", "libm.so.6", "libmvec.so.1", "libdl.so.2", "librt.so.1", "libpthread.so.0",
    "libutil.so.1", "libgcc_s.so.1", "libstdc++.so.6", "libatomic.so.1", "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
})  # fmt: skip
_TORCH = frozenset({"libtorch_cpu.so", "libtorch.so", "libc10.so"})
_TORCH_PARTS = ("libtorch", "libc10", "libshm")

# The C symbols of libtorch_cpu that belong to the stable ABI. It also exports symbols of the
# libraries that are linked into it (cblas_sgemm); those may disappear.
_STABLE = ("aoti_torch_", "torch_")
_PYTHON = re.compile(r"_?Py[A-Z_]")
# A mangled name in one of torch's namespaces: also of a vtable, a type or a guard.
_OF_TORCH = re.compile(
    r"_Z(?:T[VTISC]|T[hvc][nv0-9_]*_|G[VR]|Z)*N[rVKRO]*(?:3c10|2at|5torch|6caffe2)[0-9A-Z]"
)
_SHOWN = 4


class Finding(NamedTuple):
    """One finding of the audit.

    ``level``: error (the library does not match its tag), warning (it works only if something else
    is installed), note.
    """

    level: str
    what: str
    why: str = ""


def torch_library() -> str | None:
    """The libtorch_cpu.so to audit with; None if no torch is found."""
    from opkiln.machine.toolchain import torch_sdk

    sdk = torch_sdk.find()
    return None if sdk is None else os.path.join(sdk.path, "lib", "libtorch_cpu.so")


def audit(path: str, manifest: Mapping[str, Any], torch_lib: str | None) -> list[Finding]:
    """Compare one payload with the target in its manifest.

    ``torch_lib`` is the libtorch_cpu.so in which torch's symbols are looked up. It may be for any
    machine: the stable ABI is the same on all. Raises LoadError for a file that is not a library,
    or is damaged.
    """
    found = elf.read(path)
    target = manifest["target"]
    tag = target["abi_tag"]
    findings = []
    if found.machine != target["machine"]:
        findings.append(
            Finding(ERROR, f"it is built for {found.machine}", f"its target is {target['machine']}")
        )
    if not tag.startswith(FULL_TAG) or tag.startswith(STABLE_TAG):  # not one torch's own
        findings += _check_symbols(found, target, torch_lib)
        findings += _check_torch_libraries(found, tag)
    for name in _list_foreign(found.needed):
        findings.append(Finding(WARNING, f"it needs {name}", "it loads only if that is found"))
    try:
        chosen = platform([found])
    except UsageError as error:
        return [*findings, Finding(ERROR, error.what, error.why)]
    level = WARNING if chosen.tag.startswith("linux_") else NOTE
    return [*findings, Finding(level, f"its platform is {chosen.tag}", chosen.why)]


def require(path: str, manifest: Mapping[str, Any], torch_lib: str | None) -> list[Finding]:
    """As ``audit``; raises a BuildError that lists all errors, if there are any."""
    findings = audit(path, manifest, torch_lib)
    errors = [each for each in findings if each.level == ERROR]
    if errors:
        op, tag = manifest["op"], manifest["target"]["abi_tag"]
        raise BuildError(
            f"op {op}: {os.path.basename(path)} does not match its tag {tag}",
            why="\n".join(f"{each.what}: {each.why}" if each.why else each.what for each in errors),
            hint=f"nm -D --undefined-only {shlex.quote(path)}",
        )
    return findings


def _check_symbols(
    found: elf.Elf, target: Mapping[str, Any], torch_lib: str | None
) -> Iterator[Finding]:
    tag = target["abi_tag"]
    # The system's symbols have versions; those of torch and Python have none.
    unversioned = [name for soname, name, _ in found.symbols if not soname]
    python = [name for name in unversioned if _PYTHON.match(name)]
    if not python_tag(tag):
        why = "its wheel is for every Python, and for processes without Python"
        yield from _report_misuse("it uses Python's symbols:", python, why)
    has = frozenset() if torch_lib is None else _exports(torch_lib, os.stat(torch_lib).st_mtime_ns)
    others = [name for name in unversioned if not _PYTHON.match(name)]
    mangled = [name for name in others if name.startswith("_Z")]
    of_torch = [name for name in mangled if _OF_TORCH.match(name) or name in has]
    why = "they change with every release; the stable ABI has C symbols only"
    yield from _report_misuse("it uses torch's C++ symbols:", of_torch, why)
    if not tag.startswith(STABLE_TAG):
        return
    plain = [name for name in others if not name.startswith("_Z")]
    stable = [name for name in plain if name.startswith(_STABLE)]
    if torch_lib is not None:
        missing = [name for name in stable if name not in has]
        yield from _report_misuse("torch does not have", missing, f"looked in {torch_lib}")
    elif stable:
        yield Finding(NOTE, "torch's symbols were not checked", "no libtorch_cpu.so was found")
    unstable = [name for name in plain if name in has and name not in stable]
    what = "it uses C symbols of torch that are not part of its stable ABI:"
    why = "they belong to libraries that are linked into torch, and may disappear"
    yield from _report_misuse(what, unstable, why)
    if target["backend"] != XPU and not _list_foreign(found.needed):
        unknown = [name for name in plain if name not in has and name not in stable]
        unknown += [name for name in mangled if name not in of_torch]
        why = f"it needs {', '.join(found.needed) or 'no library'}"
        yield from _report_misuse("none of the libraries that it needs defines", unknown, why)


def _report_misuse(what: str, names: list[str], why: str) -> Iterator[Finding]:
    """The error that a library uses these symbols, if there are any."""
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        yield Finding(ERROR, f"{what} {', '.join(names[:_SHOWN])}{more}", why)


def _check_torch_libraries(found: elf.Elf, tag: str) -> Iterator[Finding]:
    stable = tag.startswith(STABLE_TAG)
    for name in found.needed:
        if not name.startswith(_TORCH_PARTS) or (stable and name in _TORCH):
            continue
        why = f"its tag is {tag}, so it must not use torch"
        if stable:
            bound = "it is bound to one Python" if "python" in name else "not every torch has it"
            why = f"{bound}; the whole stable ABI is in libtorch_cpu.so"
        yield Finding(ERROR, f"it needs {name}", why)


def python_tag(abi_tag: str) -> str:
    """``cp311-cp311`` for an ABI tag that names an interpreter; "" for one that fits all."""
    found = re.search(r"(?:^|-)cpython-([0-9]+)(t?)t?(d?)(?:-|$)", abi_tag)
    if found is None:
        return ""
    number, threads, debug = found.groups()
    return f"cp{number}-cp{number}{threads}{debug}"


def _list_foreign(needed: Iterable[str]) -> list[str]:
    return [name for name in needed if name not in _SYSTEM and not name.startswith(_TORCH_PARTS)]


@lru_cache(maxsize=2)
def _exports(path: str, stamp: int) -> frozenset[str]:  # noqa: ARG001 (keys the cache)
    return elf.defined_symbols(path)
