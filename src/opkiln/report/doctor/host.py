"""The host: Python, the system, environment variables, the C++ compiler and the build budget."""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile

from opkiln.errors import SettingError, ToolchainError
from opkiln.machine import uname
from opkiln.machine.binary import elf
from opkiln.machine.toolchain import find, torch_sdk
from opkiln.machine.toolchain import host as hosts
from opkiln.report.commands import install_command, unset_command
from opkiln.report.doctor.terms import Diagnosis, Facts, failed, join, passed, skipped, warned
from opkiln.report.layout import count, size
from opkiln.run import budget
from opkiln.run.process import run
from opkiln.settings import (
    dropped_variables,
    misspelt,
    on_path,
    origin_of,
    override,
    settings,
    table,
    whole_environment,
)

_PROCESSORS = ("x86_64", "aarch64")
_CONTAINERS = ("/.dockerenv", "/run/.containerenv", "/run/systemd/container")


def python(_: Facts) -> Diagnosis:
    """This interpreter can start another one, which load tests need."""
    version = ".".join(map(str, sys.version_info[:3]))
    # On Linux, abiflags has a t in a build without the GIL.
    kind = "free-threaded" if "t" in getattr(sys, "abiflags", "") else "with the GIL"
    if not sys.executable:
        return warned(f"{version}, {kind}, is embedded in a program: sys.executable is empty")
    return passed(f"{version}, {kind}, {sys.executable}")


def python_headers(_: Facts) -> Diagnosis:
    """Python.h is there. Extension modules need it; the bundled ops do not."""
    directory = torch_sdk.python_include()
    if os.path.exists(os.path.join(directory, "Python.h")):
        return passed(directory)
    return warned(
        f"there is no {directory}/Python.h: ops that are Python modules (pybind11) do not compile",
        install_command("python3-dev"),
    )


def system(_: Facts) -> Diagnosis:
    """opkiln supports the kernel and the processor."""
    release = os.uname().release
    family = uname.architecture()
    facts = f"{uname.system()} {release}, {family}"
    if uname.system() != "linux" or family not in _PROCESSORS:
        return failed(f"{facts}: native ops need Linux on x86-64 or aarch64")
    if not os.path.exists("/proc/self/environ"):
        return warned(
            f"{facts}: /proc is not mounted, so compilers keep running if a build is killed",
            "mount -t proc proc /proc",
        )
    contained = "in a container" if any(map(os.path.exists, _CONTAINERS)) else ""
    # A sandbox is fine: builds need no ptrace, no mount and no capability.
    filtered = re.search(r"^Seccomp:\s*[1-9]", uname.read_text("/proc/self/status"), re.MULTILINE)
    seccomp = "seccomp on, which is fine" if filtered else ""
    return passed(join(facts, contained, seccomp))


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


def settings_values(_: Facts) -> Diagnosis:
    """Every variable that opkiln reads has a valid value."""
    wrong: dict[str, str] = {}
    given = 0
    for setting in table():
        try:
            given += setting.resolve()[1] != "default"
        except SettingError as error:
            wrong[error.hint.removeprefix("unset ")] = error.what
    if wrong:
        return failed(join(*wrong.values()), f"unset {' '.join(wrong)}")
    return passed(f"{given} of {len(table())} are set")


def misspelt_variables(_: Facts) -> Diagnosis:
    """There are no variables that look like settings but are not."""
    from difflib import get_close_matches

    from opkiln.builder.registry import ALL_OPS

    environment = whole_environment()
    known = {name for setting in table() for name in setting.names}
    found: dict[str, str] = {}  # what is wrong -> the command
    for name, meant, words in misspelt():
        found[words] = _rename_command(name, "" if meant in environment else meant)
    ops = {name.rpartition(":")[2].upper() for name in ALL_OPS}
    strange = sorted(environment.keys() - known)
    for prefix in ("OPKILN_BUILD_", "DS_BUILD_"):
        for name in strange:
            op = name.removeprefix(prefix)
            if name.startswith(prefix) and op not in (*ops, "TOKEN"):
                found[f"{name}: there is no op {op.lower()}"] = _rename_command(name)
    # Only what is close to one of ours: DeepSpeed has many others.
    aliases = [name for name in known if name.startswith("DS_")]
    for name in strange:
        if name.startswith("DS_") and not name.startswith("DS_BUILD_"):
            for meant in get_close_matches(name, aliases, 1, 0.85):
                if meant not in environment:
                    found[f"{name} is not read; did you mean {meant}?"] = _rename_command(
                        name, meant
                    )
    if found:
        return warned(join(*found), "; ".join(found.values()))
    return passed("every OPKILN_ variable is a known setting")


def _rename_command(name: str, meant: str = "") -> str:
    """The command that unsets a variable; its value goes to the one that was meant."""
    return f'export {meant}="${name}"; unset {name}' if meant else f"unset {name}"


def kept_away_variables(_: Facts) -> Diagnosis:
    """No variable is set that would change a compiler's result behind its command line."""
    names = dropped_variables()
    if not names:
        return passed("none is set that would change a compiler's result")
    instead = [f"{name}: set {_INSTEAD[name]}" for name in names if name in _INSTEAD]
    return warned(
        join(f"opkiln does not pass {', '.join(names)} to compilers", *instead),
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


def compiler(here: Facts) -> Diagnosis:
    """There is a C++ compiler that compiles C++20 and links with its library."""
    if isinstance(here.host, ToolchainError):
        if missing := _missing_launcher():
            return skipped(f"the launcher {missing} does not exist: see launcher")
        return failed(join(here.host), _repair_command())
    with tempfile.TemporaryDirectory(prefix="opkiln-doctor-", dir=here.scratch) as scratch:
        source, output = os.path.join(scratch, "doctor.cpp"), os.path.join(scratch, "doctor.so")
        with open(source, "w") as file:
            file.write(_SOURCE)
        argv = (here.host.cxx, hosts.REQUIRED, "-shared", "-fPIC", source, "-o", output)
        done = run(argv, cwd=scratch, tmpdir=scratch, timeout=60)
    if done.returncode != 0:
        said = next((line for line in done.output.splitlines() if "error" in line), done.output)
        return failed(
            f"{here.host.cxx} does not compile C++20: {said.strip()[:300]}", _repair_command()
        )
    others = [each for each in hosts.candidates(here.store.memory) if each.refused]
    refused = [f"{each.path} refused: {each.refused}" for each in others if "/" in each.path]
    return passed(join(f"{here.host.cxx}, {here.host.version}", *refused))


def _repair_command() -> str:
    """The command that lets opkiln choose a compiler, or installs one."""
    path, set_by = origin_of("path")
    # Without PATH, compilers are looked for in the usual places alone.
    places = f"export PATH={shlex.quote(os.pathsep.join(path))}" if set_by == "default" else ""
    return unset_command(origin_of("cxx")[1]) or places or install_command("g++")


def runtime(here: Facts) -> Diagnosis:
    """Libraries that the compiler links share the libstdc++ of the process."""
    host = here.need_compiler("there is no compiler")
    if not host.shared_runtime:
        return passed(f"{host.cxx} links the shared C++ runtime")
    command = ""
    if sharing := _sharing_compiler(here, host.cxx):
        command = unset_command(origin_of("cxx")[1]) or f"export CXX={shlex.quote(sharing)}"
    return warned(
        f"{host.cxx} would link a static libstdc++ into every op; they are linked to "
        f"{host.shared_runtime} instead",
        command,
    )


def _sharing_compiler(here: Facts, unlike: str) -> str:
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


def launcher(_: Facts) -> Diagnosis:
    """The launcher that was asked for (ccache, sccache) exists."""
    if missing := _missing_launcher():
        name = origin_of("cxx")[1]
        return failed(f"{name} asks for {missing}, which is not on PATH", f"unset {name}")
    wanted = find.launcher()
    if wanted is not None:
        return passed(f"{find.find_program(wanted)} runs before each compile")
    there = [path for name in ("ccache", "sccache") if (path := find.find_program(name))]
    found = f"{', '.join(there)} is installed" if there else "none is on PATH, and none is needed"
    return passed(f"none is set (CXX='ccache g++'); {found}")


def _missing_launcher() -> str:
    wanted = find.launcher()
    return wanted if wanted is not None and find.find_program(wanted) is None else ""


def ninja(_: Facts) -> Diagnosis:
    """opkiln needs no ninja; `opkiln ninja` puts one in front of the store if it can."""
    found = find.find_program("ninja")
    if found is None:
        return passed("not needed (and not installed)")
    fault = elf.find_ninja_fault(found)
    can = f"cannot use the store: {fault}" if fault else "can use the store (`opkiln ninja`)"
    return passed(f"not needed; {found} {can}")


# The budget of all builds of this user

# Bytes that one compile needs at most: of a plain C++ source, and of one with torch's headers.
# Below the first, a build may be killed.
_LEAST, _ENOUGH = 512 << 20, 2 << 30


def budget_cpus(_: Facts) -> Diagnosis:
    """The number of jobs that run at once, and what limits it."""
    limits = budget.measure()
    facts = [f"{count(len(limits.slots), 'CPU')} by {limits.cpus_from}"]
    if (quota := budget.cpu_quota()) is not None:
        facts.append(f"a cgroup quota of {quota:g}")
    if settings.max_jobs:
        facts.append(f"at most {settings.max_jobs} jobs, set by {origin_of('max_jobs')[1]}")
    return passed(join(*facts))


def budget_memory(_: Facts) -> Diagnosis:
    """There is enough memory for one job."""
    limits = budget.measure()
    facts = f"{size(limits.memory)} ({limits.memory_from}), {size(limits.share)} for each CPU"
    if (limit := budget.memory_limit()) is not None:
        facts = f"{facts}; the cgroup's limit is {size(limit)}"
    command = "unset OPKILN_MEMORY" if limits.memory_from == "OPKILN_MEMORY" else ""
    if limits.memory < _LEAST:
        text = f"{facts}: less than one job needs ({size(_LEAST)}), so a job may be killed"
        return failed(text, command)
    if limits.memory < _ENOUGH:
        return warned(f"{facts}: one compile with torch's headers needs {size(_ENOUGH)}", command)
    return passed(facts)


def budget_sharing(_: Facts) -> Diagnosis:
    """All processes of this user share one budget."""
    found = budget.shared_budget().describe()
    refused = join(*found.refused)
    command = "unset OPKILN_RUNTIME_DIR" if settings.runtime_dir else ""
    if found.where is None:
        return warned(f"each process has a budget of its own: {refused}", command)
    facts = join(f"through {found.where}", f"not through {refused}" if refused else "")
    return warned(facts, command) if refused and command else passed(facts)
