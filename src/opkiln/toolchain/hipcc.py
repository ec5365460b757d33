"""hipcc: identity, the architectures it has libraries for, and the choice among those here.

hipcc is a script in front of clang that hands its arguments to a shell, and that takes an nvcc on
the machine for a reason to compile for NVIDIA. So it always runs with ``ENVIRONMENT``, and only
plain characters may reach it. Its own variables (``HIPCC_COMPILE_FLAGS_APPEND``, ``HIP_PATH``, …)
do not: children get an allow-listed environment.
"""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

from opkiln.digest import Signature
from opkiln.errors import ToolchainError
from opkiln.model import DeviceCompiler, Toolchain
from opkiln.settings import origin_of
from opkiln.toolchain import hipccprobe, memo, rocm_homes, torch_sdk
from opkiln.toolchain import host as hosts
from opkiln.toolchain.find import Candidate

# What every run of hipcc gets besides the allow-listed environment.
ENVIRONMENT = hipccprobe.ENVIRONMENT


class _Search(NamedTuple):
    """What a look at every hipcc came to."""

    taken: DeviceCompiler | None
    candidates: list[Candidate]  # the one taken is not refused
    mismatched: bool  # there are some that work, and every one is of another major version
    signatures: list[list[Any]]  # of the files that the outcome rests on


def recall(
    memory: tuple[str, ...], torch_hip: str | None, host: Toolchain
) -> DeviceCompiler | None:
    """The hipcc that would be chosen, if it is remembered. Starts no process, writes nothing."""
    search = _search(memory, torch_hip, host, ask=False)
    return None if search is None else search.taken


def choose(memory: tuple[str, ...], torch_hip: str | None, host: Toolchain) -> DeviceCompiler:
    """The hipcc that fits torch's HIP best, probed where nothing is remembered of it.

    The same version is best, then the nearest newer minor, then the nearest older one; with no HIP
    in torch, the first that is found. Raises ToolchainError with each candidate and why it was
    refused: another major version than torch's is, since two HIP runtimes do not go together.
    """
    search = _search(memory, torch_hip, host, ask=True)
    assert search is not None
    if search.taken is not None:
        return search.taken
    raise _failure(search, torch_hip)


def candidates(memory: tuple[str, ...], torch_hip: str | None, host: Toolchain) -> list[Candidate]:
    """Every hipcc that was considered, for reports; the one that is taken has no refusal."""
    search = _search(memory, torch_hip, host, ask=True)
    assert search is not None
    return search.candidates


def available() -> bool:
    """Whether any hipcc is to be found, without asking it anything."""
    return any(not candidate.refused for candidate in rocm_homes.hipcc_candidates())


def evidence(memory: tuple[str, ...], compiler: DeviceCompiler) -> dict[str, list[Any]] | None:
    """What the choice of this hipcc rests on, as facts that ``stat`` can check.

    It is the choice for the host compiler and the torch of this machine, which have evidence of
    their own. None where another choice would be made by now.
    """
    host = hosts.recall(memory)
    if host is None:
        return None
    listed, absent = rocm_homes.watched()
    try:
        # Before the choice is made again: what appears from here on is in no signature.
        unchanged = [[path, *Signature.of(path)] for path in listed]
    except OSError:
        return None
    torch_hip = None if host.torch is None else host.torch.hip
    search = _search(memory, torch_hip, host, ask=False)
    if search is None or search.taken != compiler:
        return None
    if any(map(os.path.lexists, absent)):
        return None  # something that is no hipcc is where one may be
    return {"unchanged": unchanged + search.signatures, "absent": absent}


def can_compile(memory: tuple[str, ...], compiler: DeviceCompiler, arch: str) -> str:
    """Why this hipcc cannot compile for an architecture; empty when it can.

    Found out by compiling a kernel (about a second), once for each architecture and compiler.
    Raises ToolchainError where hipcc cannot be run at all.
    """
    subject = f"hipcc {compiler.identity} for {arch}"
    record = memo.recall(memory, subject)
    if record is None:
        refused = hipccprobe.compile_error(compiler.path, arch)
        reason = f"HIP {compiler.version} does not compile for {arch}: {refused}"
        record = {"refused": reason if refused else ""}
        memo.remember(memory, subject, record, [])  # the subject says which files answered
    return str(record["refused"])


# The choice


def _search(
    memory: tuple[str, ...], torch_hip: str | None, host: Toolchain, *, ask: bool
) -> _Search | None:
    """Look at every hipcc; None where something is not remembered and may not be asked."""
    found: list[tuple[Candidate, dict[str, Any]]] = []
    listed = list(rocm_homes.hipcc_candidates())
    for candidate in listed:
        if candidate.refused:
            continue
        record = _recall(memory, candidate.path)
        if record is None:
            if not ask:
                return None
            asked_at = time.time_ns()
            record, files = hipccprobe.probe(candidate.path)
            memo.remember(memory, _subject(candidate.path), record, files, asked_at)
            record = {**record, "signatures": []}
        found.append((candidate, record))

    works = [pair for pair in found if not pair[1]["refused"]]
    fitting = [pair for pair in works if not _misfit(pair[1], torch_hip, host)]
    best = min(fitting, key=lambda pair: _fit(pair[1], torch_hip), default=None)
    taken = None if best is None else _compiler(best[1], host)
    for candidate, record in found:
        reason = record["refused"] or _misfit(record, torch_hip, host)
        if not reason and taken is not None and record["program"] != taken.path:
            reason = _outranked(record, taken, torch_hip)
        seen = candidate._replace(refused=reason, version=record["version"])
        listed[listed.index(candidate)] = seen
    signatures = [each for candidate, record in found for each in _signed(candidate, record)]
    return _Search(taken, listed, bool(works) and not fitting, signatures)


def _outranked(record: dict[str, Any], taken: DeviceCompiler, torch_hip: str | None) -> str:
    if torch_hip is None or record["version"] == taken.version:
        return f"found after {taken.path}"
    return f"HIP {taken.version} in {taken.home} is nearer to torch's {torch_hip}"


def _signed(candidate: Candidate, record: dict[str, Any]) -> list[list[Any]]:
    """A record's signatures, by the names that files go by and not by those these lead to: a link
    that is turned elsewhere then shows as a file with another inode."""
    names = {real: name for name, real in record.get("resolved", ())}
    names[os.path.realpath(candidate.path)] = candidate.path
    return [[names.get(path, path), *rest] for path, *rest in record["signatures"]]


def _misfit(record: dict[str, Any], torch_hip: str | None, host: Toolchain) -> str:
    """Why a hipcc that works cannot build for this torch and host; empty when it can."""
    architecture = host.machine.partition("-")[0]
    if not record["machine"].startswith(architecture):
        return f"compiles for {record['machine']}, and {host.cxx} for {host.machine}"
    if torch_hip is None or _major(record["version"]) == _major(torch_hip):
        return ""
    return f"HIP {record['version']}; torch was built with {torch_hip}, another major"


def _fit(record: dict[str, Any], torch_hip: str | None) -> tuple[int, int]:
    """The smaller, the better. Those that are alike stay in the order they were found in."""
    if torch_hip is None:
        return 0, 0
    minor, wanted = (torch_sdk.release(each)[1] for each in (record["version"], torch_hip))
    # A newer minor knows all that torch's does; an older one may lack something.
    return int(minor < wanted), abs(minor - wanted)


def _major(version: str) -> int:
    return torch_sdk.release(version)[0]


def _failure(search: _Search, torch_hip: str | None) -> ToolchainError:
    named, origin = origin_of("rocm_home")
    if named:
        what, hint = f"{origin}={named} cannot be used", f"unset {origin}"
    elif search.mismatched and torch_hip is not None:
        major, minor = torch_sdk.release(torch_hip)
        what = f"no ROCm here fits torch, which was built with HIP {torch_hip}"
        hint = f"OPKILN_ROCM_HOME=/opt/rocm-{major}.{minor}.0    (ROCm {major}, where it is)"
    else:
        what, hint = "no hipcc can be used here", "apt-get install hipcc"
    why = "\n".join(f"{each.path} ({each.origin}): {each.refused}" for each in search.candidates)
    return ToolchainError(what, why=why, hint=hint)


def _compiler(record: dict[str, Any], host: Toolchain) -> DeviceCompiler:
    return DeviceCompiler(
        family="hipcc",
        path=record["program"],
        home=record["home"],
        version=record["version"],
        identity=record["identity"],
        archs=tuple(record["archs"]),
        accepts=frozenset(record["accepts"]),
        # Those that a host compiler needs to be told of. Told of one that it searches anyway, g++
        # no longer finds what libstdc++ includes behind it.
        include_dirs=tuple(d for d in record["include_dirs"] if d not in host.include_dirs),
        library_dirs=tuple(record["library_dirs"]),
    )


def _subject(path: str) -> str:
    return f"hipcc {path} {os.path.realpath(path)}"


def _recall(memory: tuple[str, ...], path: str) -> dict[str, Any] | None:
    record = memo.recall(memory, _subject(path))
    if record is None or record["refused"]:
        return record
    # The files are unchanged, but the names that hipcc calls may lead elsewhere now.
    led = ((name, os.path.realpath(name)) for name, _ in record["resolved"])
    return record if [list(pair) for pair in led] == record["resolved"] else None
