"""The host: Python, the system, environment variables and the C++ compiler."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile

from opkiln import machine
from opkiln.errors import SettingError, ToolchainError
from opkiln.report.commands import install
from opkiln.report.doctor.finding import Outcome, failed, joined, passed, skipped, warned
from opkiln.report.doctor.here import Here
from opkiln.settings import (
    dropped,
    misspelt,
    on_path,
    origin_of,
    override,
    table,
    whole_environment,
)
from opkiln.toolchain import find, torch_sdk
from opkiln.toolchain import host as hosts

_PROCESSORS = ("x86_64", "aarch64")
_CONTAINERS = ("/.dockerenv", "/run/.containerenv", "/run/systemd/container")


def python(here: Here) -> Outcome:  # noqa: ARG001 (the form of a check)
    """This interpreter, and whether it can start another one, for load tests."""
    version = ".".join(map(str, sys.version_info[:3]))
    # On Linux, abiflags has a t in a build without the GIL.
    kind = "free-threaded" if "t" in getattr(sys, "abiflags", "") else "with the GIL"
    if not sys.executable:
        return warned(f"{version}, {kind}, is embedded in a program: sys.executable is empty")
    return passed(f"{version}, {kind}, {sys.executable}")


def python_headers(here: Here) -> Outcome:  # noqa: ARG001
    """Python.h, which extension modules need. The bundled ops do not."""
    directory = torch_sdk.python_include()
    if os.path.exists(os.path.join(directory, "Python.h")):
        return passed(directory)
    return warned(
        f"there is no {directory}/Python.h: ops that are Python modules (pybind11) do not compile",
        install("python3-dev"),
    )


def system(here: Here) -> Outcome:  # noqa: ARG001
    """The kernel and the processor."""
    release = os.uname().release
    family = machine.architecture()
    facts = f"{machine.system()} {release}, {family}"
    if machine.system() != "linux" or family not in _PROCESSORS:
        return failed(f"{facts}: native ops need Linux on x86-64 or aarch64")
    if not os.path.exists("/proc/self/environ"):
        return warned(
            f"{facts}: /proc is not mounted, so compilers keep running if a build is killed",
            "mount -t proc proc /proc",
        )
    contained = "in a container" if any(map(os.path.exists, _CONTAINERS)) else ""
    # A sandbox is fine: builds need no ptrace, no mount and no capability.
    seccomp = "seccomp on, which is fine" if _status("Seccomp") not in ("", "0") else ""
    return passed(joined(facts, contained, seccomp))


def _status(field: str) -> str:
    with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name == field:
                return value.strip()
    return ""


# Environment variables

# The setting to use instead of a variable that compilers do not get.
_INSTEAD = {
    "NVCC_PREPEND_FLAGS": "OPKILN_CUDAFLAGS",
    "NVCC_APPEND_FLAGS": "OPKILN_CUDAFLAGS",
    "HIPCC_COMPILE_FLAGS_APPEND": "OPKILN_CUDAFLAGS",
    "HIPCC_LINK_FLAGS_APPEND": "OPKILN_LDFLAGS",
    "CFLAGS": "OPKILN_CXXFLAGS",
    "C_INCLUDE_PATH": "CPLUS_INCLUDE_PATH",
}


def settings_values(here: Here) -> Outcome:  # noqa: ARG001 (the form of a check)
    """Every variable that opkiln reads has a valid value."""
    wrong: dict[str, str] = {}
    given = 0
    for setting in table():
        try:
            given += setting.resolve()[1] != "default"
        except SettingError as error:
            wrong[error.hint.removeprefix("unset ")] = error.what
    if wrong:
        return failed(joined(*wrong.values()), f"unset {' '.join(wrong)}")
    return passed(f"{given} of {len(table())} are set")


def misspelt_variables(here: Here) -> Outcome:  # noqa: ARG001
    """There are no variables that look like settings but are not."""
    from opkiln.registry import ALL_OPS

    environment = whole_environment()
    known = {name for setting in table() for name in (setting.variable, *setting.aliases)}
    texts, commands = [], []
    for name, meant in misspelt().items():
        texts.append(f"unknown setting {name}" + (f"; did you mean {meant}?" if meant else ""))
        if meant and meant not in environment:
            commands.append(f'export {meant}="${name}"; unset {name}')
        else:
            commands.append(f"unset {name}")
    ops = {name.rpartition(":")[2].upper() for name in ALL_OPS}
    for prefix in ("OPKILN_BUILD_", "DS_BUILD_"):
        for name in sorted(environment):
            op = name.removeprefix(prefix)
            if name.startswith(prefix) and name not in known and op not in (*ops, "TOKEN"):
                texts.append(f"{name}: there is no op {op.lower()}")
                commands.append(f"unset {name}")
    for name, meant in _near_aliases(environment, known):
        texts.append(f"{name} is not read; did you mean {meant}?")
        commands.append(f'export {meant}="${name}"; unset {name}')
    if texts:
        return warned(joined(*texts), "; ".join(commands))
    return passed("every OPKILN_ variable is a known setting")


def _near_aliases(environment: dict[str, str], known: set[str]) -> list[tuple[str, str]]:
    """DS_ variables that are close to one of ours. DeepSpeed has many others."""
    from difflib import get_close_matches

    aliases = [name for name in known if name.startswith("DS_")]
    found = []
    for name in sorted(environment):
        if name.startswith("DS_") and not name.startswith("DS_BUILD_") and name not in known:
            close = get_close_matches(name, aliases, 1, 0.85)
            if close and close[0] not in environment:
                found.append((name, close[0]))
    return found


def kept_away_variables(here: Here) -> Outcome:  # noqa: ARG001
    """No variable is set that would change a compiler's result behind its command line."""
    names = dropped()
    if not names:
        return passed("none is set that would change a compiler's result")
    instead = [f"{name}: set {_INSTEAD[name]}" for name in names if name in _INSTEAD]
    return warned(
        joined(f"opkiln does not pass {', '.join(names)} to compilers", *instead),
        f"unset {' '.join(names)}",
    )


# The C++ compiler

# Uses a concept and the standard library: a compiler may be installed without its headers.
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
    """There is a C++ compiler that compiles C++20 and links with its library."""
    if isinstance(here.host, ToolchainError):
        missing = _missing_launcher()
        if missing:
            return skipped(f"the launcher {missing} does not exist: see launcher")
        why = joined(*here.host.why.splitlines())
        return failed(joined(here.host.what, why), _another())
    from opkiln.process import run

    with tempfile.TemporaryDirectory(prefix="opkiln-doctor-", dir=here.scratch) as scratch:
        source, output = os.path.join(scratch, "doctor.cpp"), os.path.join(scratch, "doctor.so")
        with open(source, "w") as file:
            file.write(_SOURCE)
        argv = (here.host.cxx, hosts.REQUIRED, "-shared", "-fPIC", source, "-o", output)
        done = run(argv, cwd=scratch, tmpdir=scratch, timeout=60)
    if done.returncode != 0:
        said = next((line for line in done.output.splitlines() if "error" in line), done.output)
        return failed(f"{here.host.cxx} does not compile C++20: {said.strip()[:300]}", _another())
    others = [each for each in hosts.candidates(here.store.memory) if each.refused]
    refused = [f"{each.path} refused: {each.refused}" for each in others if "/" in each.path]
    return passed(joined(f"{here.host.cxx}, {here.host.version}", *refused))


def _another() -> str:
    """The command that lets opkiln choose a compiler, or installs one."""
    origin = origin_of("cxx")[1]
    if origin.isupper():
        return f"unset {origin}"
    path, set_by = origin_of("path")
    # Without PATH, compilers are looked for in the usual places alone.
    return (
        f"export PATH={shlex.quote(os.pathsep.join(path))}"
        if set_by == "default"
        else install("g++")
    )


def runtime(here: Here) -> Outcome:
    """Libraries that it links share the libstdc++ of the process."""
    host = here.compiler
    if host is None:
        return skipped("there is no compiler")
    if not host.shared_runtime:
        return passed(f"{host.cxx} links the shared C++ runtime")
    sharing = _sharing(here, host.cxx)
    origin = origin_of("cxx")[1]
    command = f"unset {origin}" if origin.isupper() and sharing else ""
    if sharing and not command:
        command = f"export CXX={shlex.quote(sharing)}"
    return warned(
        f"{host.cxx} would link a static libstdc++ into every op; they are linked to "
        f"{host.shared_runtime} instead",
        command,
    )


def _sharing(here: Here, unlike: str) -> str:
    """Another compiler on PATH that links the shared runtime; empty if there is none."""
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
    """The launcher that was asked for (ccache, sccache) exists."""
    if missing := _missing_launcher():
        name = origin_of("cxx")[1]
        return failed(f"{name} asks for {missing}, which is not on PATH", f"unset {name}")
    wanted = find.launcher()
    if wanted is not None:
        return passed(f"{find.first(wanted)} runs before each compile")
    there = [path for name in ("ccache", "sccache") if (path := find.first(name))]
    found = f"{', '.join(there)} is installed" if there else "none is on PATH, and none is needed"
    return passed(f"none is set (CXX='ccache g++'); {found}")


def _missing_launcher() -> str:
    wanted = find.launcher()
    return wanted if wanted is not None and find.first(wanted) is None else ""


def ninja(here: Here) -> Outcome:  # noqa: ARG001
    """ninja is not needed: opkiln schedules builds itself."""
    found = find.first("ninja")
    return passed(f"not needed ({f'{found} is not used' if found else 'and not installed'})")
