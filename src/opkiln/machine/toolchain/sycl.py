"""SYCL: a compiler (icpx, dpcpp), or the runtime compiler of ``intel-sycl-rt``.

There are two families. ``icpx`` compiles kernels ahead of time. ``sycl-rt`` is what ``pip install
intel-sycl-rt`` installs: headers, and libsycl with a compiler inside that compiles kernels from
source text when the op first runs; the host compiler compiles the C++ around them.

The runtime compiler is tested for real (``make test-sycl``). No package index has icpx, so its part
is tested with a stand-in program that answers as icpx does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from opkiln.base.build_model import ICPX, SYCL_RUNTIME, DeviceCompiler, Toolchain
from opkiln.base.digest import key
from opkiln.errors import ToolchainError
from opkiln.machine import uname as this
from opkiln.machine.facts import digest_of
from opkiln.machine.toolchain import find, libsycl, probing
from opkiln.machine.toolchain import host as hosts
from opkiln.machine.toolchain.find import Compiler, Search
from opkiln.settings import origin_of

# The programs that decide icpx's output, by the names that it uses.
_PARTS = ("clang", "ld", "llvm-spirv", "sycl-post-link", "clang-linker-wrapper", "ocloc")
# A flag is listed in `accepts` if the compiler accepts it. By default icpx computes as with
# -ffast-math, but no reference does.
_FLAGS = ("-ffp-model=precise",)

_PROBE = """\
#include <sycl/kernel_bundle_enums.hpp>
auto language = sycl::ext::oneapi::experimental::source_language::sycl;
"""


def available() -> bool:
    """Whether any compiler is found. Starts no process."""
    return any(not candidate.refused for candidate in _list_candidates())


def search(
    memory: tuple[str, ...],
    wanted: str | None,  # noqa: ARG001 (the choice does not depend on it)
    host: Toolchain,
    *,
    ask: bool,
) -> Search | None:
    """Every compiler and runtime. The first that can be used is taken."""
    taken = None
    listed = []
    for candidate in _list_candidates():
        if candidate.refused:
            listed.append(candidate)
            continue
        path = candidate.path
        is_library = libsycl.is_library(path)
        # A runtime's record is for one host compiler, which compiles its headers.
        subject = probing.make_subject(f"sycl {path} {host.identity if is_library else ''}")
        probe = partial(_probe_runtime, path, host) if is_library else partial(_probe_program, path)
        record = probing.recall_or_ask(memory, subject, probe if ask else None)
        if record is None:
            return None
        listed.append(candidate._replace(refused=record["refused"], version=record["version"]))
        if not record["refused"] and taken is None:
            libraries = os.path.join(record["home"], "lib")
            # Neither lists architectures: kernels are compiled for a device, or on it.
            taken = find.make_compiler(record, path=path, archs=(), library_dirs=(libraries,))
            if not ask:
                break
    return Search(taken, listed, lambda: _failure(listed))


def _failure(listed: list[Compiler]) -> ToolchainError:
    origin = origin_of("sycl_cxx")[1]
    return ToolchainError(
        "no SYCL compiler can be used here",
        why=find.list_refusals(listed),
        hint=f"unset {origin}"
        if origin.isupper()
        else f"{libsycl.INSTALL}    (or set OPKILN_SYCL_CXX to icpx)",
    )


def soname(compiler: DeviceCompiler) -> str:
    """The libsycl that this compiler's output needs: ``libsycl.so.9``; empty if it has none."""
    if compiler.family == SYCL_RUNTIME:
        return os.path.basename(compiler.path)
    return os.path.basename(next(libsycl.list_libraries(compiler.home), ""))


def _list_candidates() -> Iterator[Compiler]:
    """Compilers in order of preference: the one the user named, else all that are found."""
    named, origin = origin_of("sycl_cxx")
    if named:
        yield from find.list_programs([(named, origin)])
        return  # an explicit choice is never replaced by another compiler
    yield from find.list_programs(libsycl.programs())
    library = libsycl.find_installed()
    if library is None:
        yield Compiler(libsycl.PACKAGE, "this interpreter", "not installed")
    else:
        yield Compiler(library, libsycl.PACKAGE, libsycl.why_unfit(library))


def _probe_program(path: str) -> tuple[dict[str, Any], list[str]]:
    """Ask a compiler everything at once. Returns (record, the files that the answers depend on)."""
    ask = probing.make_ask(path, timeout=60)
    language = ("-fsycl", hosts.REQUIRED)
    record, _ = hosts.interview(ask, path, language, "-fsyntax-only", this.architecture(), _PARTS)
    banner, machine = record["version"], record.pop("machine", "")
    if number := re.search(r"(?:Compiler|version) (\d+(?:\.\d+)+)", banner):
        record["version"] = number[1]
    files = [target for _, target in record["resolved"]]
    if record["refused"]:
        return record, files
    home = libsycl.home_of(path)
    files += map(os.path.realpath, libsycl.list_libraries(home))
    files = list(dict.fromkeys(files))
    empty = ("-fsyntax-only", "-x", "c++", os.devnull)
    record |= {
        "family": ICPX,
        "home": home,
        "identity": key("sycl", (ICPX, banner, machine, [digest_of(file) for file in files])),
        "accepts": [flag for flag in _FLAGS if ask("-fsycl", flag, *empty)[0] == 0],
    }
    return record, files


def _probe_runtime(library: str, host: Toolchain) -> tuple[dict[str, Any], list[str]]:
    """Compile the headers with the host compiler. Returns (record, files that the result needs)."""
    from opkiln.run.process import run

    home = os.path.dirname(os.path.dirname(library))
    include = os.path.join(home, "include")
    files = [library, os.path.join(include, "sycl", "version.hpp")]
    with open(files[1], encoding="utf-8", errors="replace") as file:
        version = _version(file.read())
    with probing.scratch() as scratch:
        source = os.path.join(scratch, "probe.cpp")
        with open(source, "w", encoding="utf-8") as file:
            file.write(_PROBE)
        argv = (host.cxx, hosts.REQUIRED, "-fsyntax-only", f"-isystem{include}", source)
        done = run(argv, tmpdir=scratch, timeout=60)
    if done.returncode != 0:
        error = next((line for line in done.output.splitlines() if "error:" in line), "")
        said = error.partition("error:")[2].strip() or f"exit {done.returncode}"
        reason = f"its headers have no runtime compiler that {host.cxx} can use: {said}"
        return probing.refusal(reason, version), files
    record = {
        "refused": "",
        "family": SYCL_RUNTIME,
        "home": home,
        "version": version,
        # libsycl-jit is not part of the identity, because it compiles kernels on the machine that
        # runs the op.
        "identity": key("sycl", (SYCL_RUNTIME, version, [digest_of(file) for file in files])),
        "accepts": [],
        "include_dirs": [include],
    }
    return record, files


def _version(header: str) -> str:
    """``9.0.0 (20260930)``: the versions of libsycl and its compiler in version.hpp."""
    defined = dict(re.findall(r"^#define __(\w+)_VERSION (\d+)", header, re.MULTILINE))
    names = ("LIBSYCL_MAJOR", "LIBSYCL_MINOR", "LIBSYCL_PATCH")
    number = ".".join(defined.get(name, "0") for name in names)
    return f"{number} ({defined.get('SYCL_COMPILER', 'unknown')})"
