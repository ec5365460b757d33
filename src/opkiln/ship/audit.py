"""The ABI audit: whether a library keeps to the interface that its tag promises.

A library on torch's stable ABI is shipped once, as ``py3-none-…``, for every Python and every torch
from the floor on. That is true only while it uses nothing else of either. One symbol of torch's C++
interface is enough to make it fail, or misbehave, with the next release; this is seen here, where
it is built, and not there, where it is loaded.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from typing import Any, NamedTuple

from opkiln.binary import elf
from opkiln.errors import BuildError, UsageError
from opkiln.model import XPU
from opkiln.ship.platform_tag import platform

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

ERROR, WARNING, NOTE = "error", "warning", "note"

STABLE_TAG, FULL_TAG = "torch-stable-", "torch-"

# What every system has, and what torch brings. The loader's name differs by machine.
_SYSTEM = frozenset({
    "libc.so.6", "libm.so.6", "libmvec.so.1", "libdl.so.2", "librt.so.1", "libpthread.so.0",
    "libutil.so.1", "libgcc_s.so.1", "libstdc++.so.6", "libatomic.so.1", "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
})  # fmt: skip
_TORCH = frozenset({"libtorch_cpu.so", "libtorch.so", "libc10.so"})
_TORCH_PARTS = ("libtorch", "libc10", "libshm")

# Of the C symbols that libtorch_cpu has, those of the stable ABI's headers; it also exports those
# of the libraries that are linked into it (cblas_sgemm), which come and go.
_STABLE = ("aoti_torch_", "torch_")
_PYTHON = re.compile(r"_?Py[A-Z_]")
# A mangled name whose outermost namespace is torch's, also of a vtable, a type or a guard.
_OF_TORCH = re.compile(
    r"_Z(?:T[VTISC]|T[hvc][nv0-9_]*_|G[VR]|Z)*N[rVKRO]*(?:3c10|2at|5torch|6caffe2)[0-9A-Z]"
)
_SHOWN = 4


class Finding(NamedTuple):
    """One thing that the audit saw. ``level``: error (the tag's promise is broken), warning (it
    holds only where something more is installed), note."""

    level: str
    what: str
    why: str = ""


def audit(path: str, manifest: Mapping[str, Any], torch_lib: str | None) -> list[Finding]:
    """What there is to say of one payload, by what its manifest's target promises.

    ``torch_lib`` is a libtorch_cpu.so to ask for torch's symbols: of any machine, since the stable
    ABI is the same on all. Raises LoadError for a file that is no library, or is damaged.
    """
    found = elf.read(path)
    target = manifest["target"]
    tag = target["abi_tag"]
    findings = []
    if found.machine != target["machine"]:
        findings.append(
            Finding(ERROR, f"it is made for {found.machine}", f"its target is {target['machine']}")
        )
    if not tag.startswith(FULL_TAG) or tag.startswith(STABLE_TAG):
        findings += _symbols(found, target, torch_lib)
    findings += _sonames(found, tag)
    findings += _platform(found)
    return findings


def require(path: str, manifest: Mapping[str, Any], torch_lib: str | None) -> list[Finding]:
    """As ``audit``, and a BuildError that lists every error where there are any."""
    findings = audit(path, manifest, torch_lib)
    errors = [each for each in findings if each.level == ERROR]
    if errors:
        op, tag = manifest["op"], manifest["target"]["abi_tag"]
        raise BuildError(
            f"op {op}: {os.path.basename(path)} breaks what its tag {tag} promises",
            why="\n".join(f"{each.what}: {each.why}" if each.why else each.what for each in errors),
            hint=f"nm -D --undefined-only {path}",
        )
    return findings


def _symbols(found: elf.Elf, target: Mapping[str, Any], torch_lib: str | None) -> Iterator[Finding]:
    tag = target["abi_tag"]
    # Versions tell the system's symbols; torch's and Python's libraries give theirs none.
    unversioned = [name for soname, name, _ in found.symbols if not soname]
    python = [name for name in unversioned if _PYTHON.match(name)]
    if python and not python_tag(tag):
        yield Finding(
            ERROR,
            f"it uses Python's symbols: {_some(python)}",
            "its wheel is for every Python, and a process may have loaded it without any",
        )
    has = frozenset() if torch_lib is None else _defined(torch_lib, os.stat(torch_lib).st_mtime_ns)
    others = [name for name in unversioned if not _PYTHON.match(name)]
    mangled = [name for name in others if name.startswith("_Z")]
    of_torch = [name for name in mangled if _OF_TORCH.match(name) or name in has]
    if of_torch:
        yield Finding(
            ERROR,
            f"it uses torch's C++ symbols: {_some(of_torch)}",
            "they change with every release; the stable ABI has C symbols alone",
        )
    if not tag.startswith(STABLE_TAG):
        return
    plain = [name for name in others if not name.startswith("_Z")]
    stable = [name for name in plain if name.startswith(_STABLE)]
    if torch_lib is None:
        if stable:
            yield Finding(NOTE, "torch's symbols were not looked up", "no libtorch_cpu.so is here")
    elif missing := [name for name in stable if name not in has]:
        yield Finding(ERROR, f"torch does not have {_some(missing)}", f"asked of {torch_lib}")
    if unstable := [name for name in plain if name in has and name not in stable]:
        yield Finding(
            ERROR,
            f"it uses C symbols of torch's that are not of its stable ABI: {_some(unstable)}",
            "torch exports those of the libraries that are linked into it, until it does not",
        )
    strangers = [name for name in plain if name not in has and name not in stable]
    strangers += [name for name in mangled if name not in of_torch]
    if strangers and target["backend"] != XPU and not _foreign(found.needed):
        yield Finding(
            ERROR,
            f"nothing that it needs defines {_some(strangers)}",
            f"it needs {', '.join(found.needed) or 'no library'}",
        )


def _sonames(found: elf.Elf, tag: str) -> Iterator[Finding]:
    full = tag.startswith(FULL_TAG) and not tag.startswith(STABLE_TAG)
    parts = [name for name in found.needed if name.startswith(_TORCH_PARTS)]
    if not full:
        allowed = _TORCH if tag.startswith(STABLE_TAG) else frozenset()
        for name in parts:
            if name not in allowed:
                yield Finding(ERROR, f"it needs {name}", _why_not(name, tag))
    for name in _foreign(found.needed):
        yield Finding(WARNING, f"it needs {name}", "it loads only where that is found")


def _why_not(name: str, tag: str) -> str:
    if not tag.startswith(STABLE_TAG):
        return f"its tag is {tag}: no torch at all"
    if "python" in name:
        return "it is bound to one Python; the stable ABI is all in libtorch_cpu.so"
    return "not every torch has it; the stable ABI is all in libtorch_cpu.so"


def _platform(found: elf.Elf) -> Iterator[Finding]:
    try:
        chosen = platform([found])
    except UsageError as error:
        yield Finding(ERROR, error.what, error.why)
        return
    level = WARNING if chosen.tag.startswith("linux_") else NOTE
    yield Finding(level, f"its platform is {chosen.tag}", chosen.why)


def python_tag(abi_tag: str) -> str:
    """``cp311-cp311`` of a target's ABI tag that names an interpreter; "" of one for all."""
    found = re.search(r"(?:^|-)cpython-([0-9]+)(t?)t?(d?)(?:-|$)", abi_tag)
    if found is None:
        return ""
    number, threads, debug = found.groups()
    return f"cp{number}-cp{number}{threads}{debug}"


def _foreign(needed: Iterable[str]) -> list[str]:
    return [name for name in needed if name not in _SYSTEM and not name.startswith(_TORCH_PARTS)]


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


@lru_cache(maxsize=2)
def _defined(path: str, stamp: int) -> frozenset[str]:  # noqa: ARG001 (keys the cache)
    return elf.defined(path)
