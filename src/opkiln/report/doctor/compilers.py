"""The host compiler: that it works, which C++ runtime it links, what runs before it."""

from __future__ import annotations

import os
import shlex
import tempfile

from opkiln.errors import ToolchainError
from opkiln.report.doctor.finding import Outcome, failed, joined, passed, skipped, warned
from opkiln.report.doctor.here import Here
from opkiln.report.doctor.packages import install
from opkiln.settings import on_path, origin_of, override
from opkiln.toolchain import find
from opkiln.toolchain import host as hosts

# A concept, and what an op needs of the library: a compiler may be there without its headers.
_SOURCE = """\
#include <concepts>
#include <stdexcept>
#include <string>
template <std::integral T> std::string shown(T value) { return std::to_string(value); }
extern "C" int opkiln_doctor(int value) {
  if (value < 0) throw std::invalid_argument(shown(value));
  return static_cast<int>(shown(value).size());
}
"""


def compiler(here: Here) -> Outcome:
    """A C++ compiler is there, takes C++20, and compiles and links with its library."""
    if isinstance(here.host, ToolchainError):
        missing = _missing_launcher()
        if missing:
            return skipped(f"the launcher {missing} is not there: see launcher")
        why = joined(*here.host.why.splitlines())
        return failed(joined(here.host.what, why), _another())
    from opkiln.process import run

    with tempfile.TemporaryDirectory(prefix="opkiln-doctor-", dir=here.scratch) as scratch:
        source, output = os.path.join(scratch, "doctor.cpp"), os.path.join(scratch, "doctor.so")
        with open(source, "w") as file:
            file.write(_SOURCE)
        argv = (here.host.cxx, hosts.REQUIRED, "-shared", "-fPIC", source, "-o", output)
        done = run(argv, cwd=scratch, tmpdir=scratch, timeout=60, supervised=False)
    if done.returncode != 0:
        said = next((line for line in done.output.splitlines() if "error" in line), done.output)
        return failed(f"{here.host.cxx} does not compile C++20: {said.strip()[:300]}", _another())
    others = [each for each in hosts.candidates(here.store.memory) if each.refused]
    refused = [f"{each.path} refused: {each.refused}" for each in others if "/" in each.path]
    return passed(joined(f"{here.host.cxx}, {here.host.version}", *refused))


def _another() -> str:
    """The command that leaves the choice to opkiln, or brings a compiler."""
    origin = origin_of("cxx")[1]
    if origin.isupper():
        return f"unset {origin}"
    path, set_by = origin_of("path")
    # It was found in the usual places; without a PATH it does not find its own assembler there.
    return f"export PATH={os.pathsep.join(path)}" if set_by == "default" else install("g++")


def runtime(here: Here) -> Outcome:
    """What it makes shares the libstdc++ of the process, and brings none of its own."""
    host = here.compiler
    if host is None:
        return skipped("there is no compiler to ask")
    if not host.shared_runtime:
        return passed(f"{host.cxx} links the C++ runtime that the process has")
    sharing = _sharing(here, host.cxx)
    origin = origin_of("cxx")[1]
    command = f"unset {origin}" if origin.isupper() and sharing else ""
    if sharing and not command:
        command = f"export OPKILN_CXX={shlex.quote(sharing)}"
    return warned(
        f"{host.cxx} would link a static libstdc++ into every op; they are linked to "
        f"{host.shared_runtime} instead",
        command,
    )


def _sharing(here: Here, unlike: str) -> str:
    """Another compiler on PATH that links the shared one; empty where there is none."""
    for name in ("g++", "clang++", "c++"):
        for path in on_path(name):
            if os.path.realpath(path) == os.path.realpath(unlike):
                continue
            with here.probing(), override(cxx=(path,)):
                try:
                    if not hosts.choose(here.store.memory).shared_runtime:
                        return path
                except ToolchainError:
                    continue
    return ""


def launcher(here: Here) -> Outcome:  # noqa: ARG001 (the form of a check)
    """ccache or sccache: the one that was asked for is there."""
    if missing := _missing_launcher():
        name = origin_of("cxx")[1]
        return failed(f"{name} asks for {missing}, which is not on PATH", f"unset {name}")
    wanted = find.launcher()
    if wanted is not None:
        return passed(f"{find.first(wanted)} runs before each compile")
    there = [path for name in ("ccache", "sccache") if (path := find.first(name))]
    found = f"{', '.join(there)} is there" if there else "none is on PATH, and none is needed"
    return passed(f"none is asked for (CXX='ccache g++'); {found}")


def _missing_launcher() -> str:
    wanted = find.launcher()
    return wanted if wanted is not None and find.first(wanted) is None else ""


def ninja(here: Here) -> Outcome:  # noqa: ARG001
    """Nothing to install: builds are scheduled by opkiln itself."""
    found = find.first("ninja")
    return passed(f"not needed ({f'{found} is not used' if found else 'and not installed'})")
