"""g++ and clang++: which one is used, its identity, and what it accepts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

from opkiln.base.build_model import Toolchain
from opkiln.base.digest import key
from opkiln.errors import BuildTimeout, ToolchainError, UsageError
from opkiln.machine import uname as this
from opkiln.machine.arch import cpu
from opkiln.machine.facts import digest_of
from opkiln.machine.toolchain import find, probing, torch_sdk
from opkiln.machine.toolchain.find import Compiler
from opkiln.settings import compiler_variables, origin_of, settings

REQUIRED = "-std=c++20"


def recall(memory: tuple[str, ...], machine: str = "") -> Toolchain | None:
    """The compiler that ``choose`` would take, if its probe is remembered. Starts no process,
    writes nothing. ``machine`` is the machine to compile for, if not this one."""
    return _first_usable(memory, machine, ask=False)[0]


def choose(memory: tuple[str, ...], machine: str = "") -> Toolchain:
    """The first compiler that can be used. Those that are not remembered are probed. Raises
    ToolchainError with each candidate and why it was refused."""
    taken, refused = _first_usable(memory, machine, ask=True)
    if taken is not None:
        return taken
    origin = origin_of("cxx")[1]
    what = "no C++ compiler can be used here"
    hint = "apt-get install g++    (or set CXX to a compiler)"
    if probing.is_unwritable():
        what = "no C++ compiler can be probed"
        hint = "set OPKILN_TMPDIR to a writable node-local directory"
    elif _is_cross(machine):
        what = f"no C++ compiler for {machine} can be used here"
        hint = f"apt-get install g++-{machine.replace('_', '-')}-linux-gnu"
    elif origin.isupper():
        hint = f"unset {origin}"
    raise ToolchainError(what, why=find.list_refusals(refused), hint=hint)


def _first_usable(
    memory: tuple[str, ...], machine: str, *, ask: bool
) -> tuple[Toolchain | None, list[Compiler]]:
    """(the first compiler that can be used, those before it). None if it is not remembered."""
    refused: list[Compiler] = []
    for candidate, record in _probe_candidates(memory, machine, ask=ask):
        if record is not None and not record["refused"]:
            return _toolchain(candidate.path, record, cross=_is_cross(machine)), refused
        if not candidate.refused:
            break
        refused.append(candidate)
    return None, refused


def _is_cross(machine: str) -> bool:
    return machine not in ("", this.architecture())


def _candidates(machine: str) -> Iterator[Compiler]:
    return find.cxx_candidates(machine if _is_cross(machine) else "")


def candidates(memory: tuple[str, ...]) -> list[Compiler]:
    """Every host compiler that was considered, for reports."""
    return [candidate for candidate, _ in _probe_candidates(memory)]


def available(machine: str = "") -> bool:
    """Whether any compiler is found. Starts no process."""
    return any(not candidate.refused for candidate in _candidates(machine))


def _probe_candidates(
    memory: tuple[str, ...], machine: str = "", *, ask: bool = True
) -> Iterator[tuple[Compiler, dict[str, Any] | None]]:
    """Each candidate with its record; with none if it was not probed."""
    for candidate in _candidates(machine):
        if candidate.refused:
            yield candidate, None
            continue
        path = candidate.path
        # A compiler that is refused for one machine may be usable for another.
        subject = f"host {path} for {machine}" if _is_cross(machine) else f"host {path}"
        subject = probing.make_subject(subject, script=find.has_interpreter(path))
        question = partial(_probe, path, machine or this.architecture()) if ask else None
        try:
            record = probing.recall_or_ask(memory, subject, question)
        except (ToolchainError, BuildTimeout, OSError) as error:
            # Not remembered: the cause (a full disk, a slow machine) may go away.
            record = probing.refusal(f"cannot be probed: {error}")
        known = record or {"refused": "", "version": ""}
        yield candidate._replace(refused=known["refused"], version=known["version"]), record


def _toolchain(path: str, record: dict[str, Any], *, cross: bool) -> Toolchain:
    named = find.launcher()
    launcher = None if named is None else find.find_program(named)
    if named is not None and launcher is None:
        raise ToolchainError(
            f"the compiler launcher {named!r} is not on PATH",
            hint=f"unset {origin_of('cxx')[1]}",
        )
    names = ("family", "version", "machine", "identity", "shared_runtime")
    return Toolchain(
        **{name: record[name] for name in names},
        cxx=path,
        accepts=frozenset(record["accepts"]),
        include_dirs=tuple(record["include_dirs"]),
        launcher=launcher,
        torch=torch_sdk.find(),
        python_include=torch_sdk.python_include(),
        cross=cross,
        tools=tuple(target for _, target in record["resolved"]),
        environment=compiler_variables(script=find.has_interpreter(path)),
    )


def interview(
    ask: probing.Ask,
    path: str,
    language: tuple[str, ...],
    action: str,
    wanted: str,
    parts: tuple[str, ...],
) -> tuple[dict[str, Any], str]:
    """Ask a compiler that is called as gcc is what it is: (a record of it or of a refusal, banner).
    It must take the options ``language`` for an empty file, and compile for the machine ``wanted``.
    ``parts`` are the programs that decide its output."""
    resolved = [[path, os.path.realpath(path)]]
    status, banner = ask("--version")
    version = banner.partition("\n")[0].strip()
    if status != 0 or not version:
        reason = f"--version exits with {status}: {version}"
        return probing.refusal(reason, resolved=resolved), banner
    status, verbose = ask(*language, "-v", action, "-x", "c++", os.devnull)
    machine = probing.field(verbose, "Target:") or "an unknown machine"
    reason = ""
    if status != 0:
        reason = f"does not take {' '.join(language)}: {probing.last_line(verbose)}"
    elif not machine.startswith(wanted):
        reason = f"compiles for {machine}, not for {wanted}"
    else:
        resolved += probing.own_programs(ask, parts)
    record = {
        "refused": reason,
        "resolved": resolved,
        "version": version,
        "machine": machine,
        "include_dirs": probing.search_path(verbose),
    }
    return record, banner


def _probe(path: str, wanted: str) -> tuple[dict[str, Any], list[str]]:
    """Ask a compiler everything at once. Returns (record, the files that the answers depend on)."""
    script = find.has_interpreter(path) or find.is_launcher(path)
    ask = probing.make_ask(path, env=dict(compiler_variables(script=script)), timeout=60)
    record, banner = interview(ask, path, (REQUIRED,), "-E", wanted, ("cc1plus", "as", "ld"))
    files = list(dict.fromkeys(target for _, target in record["resolved"]))
    if record["refused"]:
        return record, files
    # The next three take a tenth of a second each. Two of them are programs, the third is hashing.
    runtime = probing.begin_in_thread(lambda: "" if _is_cross(wanted) else _shared_runtime(path))
    accepts = probing.begin_in_thread(lambda: _accepted_flags(ask, wanted))
    family = "clang" if "clang" in banner.lower() else "gcc"
    # Without the directories: the same binaries in another place are the same compiler.
    digests = [digest_of(file) for file in files]
    identity = key("toolchain", (family, record["version"], record["machine"], digests))
    found = {"identity": identity, "accepts": accepts(), "shared_runtime": runtime()}
    return {**record, **found, "family": family}, files


def _shared_runtime(path: str) -> str:
    """The libstdc++ of this process, for a compiler that would link a static one.

    Some wrappers link it statically, and so do compilers that were copied without their libraries.
    A library with its own libstdc++ crashes in a process that has another one when it formats a
    message, because the two share streams and locales that differ.
    """
    from opkiln.run.process import run

    with probing.scratch() as scratch:
        output = os.path.join(scratch, "probe.so")
        # -t makes the linker print each file that it opens. For an archive, it prints only the
        # members that it uses.
        linking = (path, "-shared", "-x", "assembler", os.devnull, "-o", output, "-Wl,-t")
        done = run(linking, timeout=60, tmpdir=scratch)
    if done.returncode != 0 or "libstdc++.so" in done.output or "libc++" in done.output:
        return ""
    import ctypes

    try:
        ctypes.CDLL("libstdc++.so.6")
        with open("/proc/self/maps") as file:
            mapped = [line.split()[-1] for line in file if "/libstdc++.so.6" in line]
    except OSError:
        return ""  # there is no libstdc++ to share
    return mapped[0] if mapped else ""


def _accepted_flags(ask: Any, machine: str) -> list[str]:
    flags = cpu.probes(machine)

    def works(*chosen: str) -> bool:
        if machine == "aarch64":
            chosen = ("-march=armv8.2-a" + "".join(chosen),)
        status, _ = ask(REQUIRED, "-x", "c++", "-fsyntax-only", *chosen, os.devnull)
        return bool(status == 0)

    return list(flags) if works(*flags) else [flag for flag in flags if works(flag)]


def can_link(
    memory: tuple[str, ...],
    function: str,
    libraries: tuple[str, ...],
    directories: tuple[str, ...] = (),
) -> bool:
    """Whether a program that calls ``function`` links with ``libraries``. Raises ToolchainError."""
    from opkiln.run.process import run

    if not (function.isascii() and function.isidentifier()):
        raise UsageError(f"{function!r} is not the name of a C function")
    toolchain = choose(memory)
    with probing.scratch() as scratch:
        source = os.path.join(scratch, "probe.cpp")
        with open(source, "w") as file:
            file.write(f'extern "C" char {function}();\nint main() {{ return {function}(); }}\n')
        search = [f"-L{path}" for path in (*directories, *settings.library_path)]
        named = [f"-l{name}" for name in libraries]
        output = os.path.join(scratch, "probe")
        argv = (toolchain.cxx, source, "-o", output, *search, *settings.ldflags, *named)
        return run(argv, tmpdir=scratch, timeout=60).returncode == 0
