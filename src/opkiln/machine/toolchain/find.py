"""Finds compilers: programs on PATH, and the common parts of all families of device compilers.

Each candidate is accepted, or refused with a reason. The accepted one that fits torch's runtime
best is chosen.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

from opkiln.base.build_model import DeviceCompiler
from opkiln.base.lazy import Record
from opkiln.machine import facts
from opkiln.machine.toolchain.torch_sdk import release
from opkiln.settings import on_path, origin_of, settings

TYPE_CHECKING = False


class Compiler(Record):
    """A compiler that was considered. ``refused`` is empty for one that may be used."""

    path: str
    origin: str  # how it was found: CXX, PATH
    refused: str = ""
    version: str = ""


def list_refusals(candidates: Iterable[Compiler]) -> str:
    """Each candidate and why it was refused, in a line."""
    return "\n".join(f"{each.path} ({each.origin}): {each.refused}" for each in candidates)


def find_program(name: str) -> str | None:
    """The program that this name runs, or None."""
    found = next(on_path(name), None)
    if "/" in name:
        facts.is_program(name)
    else:
        facts.note_program(name, found)
    return found


# They may hand out an object without compiling anything. opkiln's digests are part of their keys.
LAUNCHERS = frozenset(("ccache", "sccache"))
# They compile on other hosts, where neither the compiler nor what it reads is seen.
REMOTE = frozenset(("distcc", "icecc"))


def has_interpreter(path: str) -> bool:
    """Whether a file is a script that names its interpreter."""
    try:
        with open(path, "rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def is_launcher(path: str) -> bool:
    """Whether a program that stands for a compiler is a launcher under another name."""
    return os.path.basename(os.path.realpath(path)) in LAUNCHERS


def launcher() -> str | None:
    """The program that starts the compiler: the first word of ``CXX="ccache g++"``."""
    command = settings.cxx
    return command[0] if command and len(command) > 1 else None


def list_programs(places: Iterable[tuple[str, str]]) -> Iterator[Compiler]:
    """The programs at these places, each once; a place is (a path, or a name on PATH; origin)."""
    seen: set[str] = set()
    for place, origin in places:
        path = find_program(place)
        if path is None:
            by_name = "/" not in place and origin == "PATH"
            yield Compiler(place, origin, "not on PATH" if by_name else "no such program")
        elif (real := os.path.realpath(path)) not in seen:
            seen.add(real)
            yield Compiler(path, origin)


def list_directories(pattern: str) -> list[str]:
    """The directories that match a pattern, the highest version first."""
    if not pattern.endswith("*"):
        return [pattern]
    parent, stem = os.path.split(pattern[:-1])
    return [
        os.path.join(parent, name) for name in sort_by_version(facts.list_directory(parent), stem)
    ]


def sort_by_version(names: Iterable[str], stem: str) -> list[str]:
    """The names that are this stem and a version, the highest version first."""
    found = (name for name in names if name.startswith(stem))
    return sorted(found, key=lambda name: (release(name.removeprefix(stem)), name), reverse=True)


def cxx_candidates(machine: str = "") -> Iterator[Compiler]:
    """Host C++ compilers in order of preference: the one the user named, else those on PATH. An
    explicit choice is never replaced by another compiler. A compiler for another ``machine`` has
    its usual name."""
    command, origin = origin_of("cxx")
    if machine:
        places = [(f"{machine}-linux-gnu-g++", "PATH")]
    elif command:
        places = [(command[-1], origin)]
    else:
        places = [(name, "PATH") for name in ("g++", "clang++", "c++")]
    return map(_refuse_remote, list_programs(places))


def _refuse_remote(candidate: Compiler) -> Compiler:
    """A compiler is refused if it, or the launcher, compiles on other hosts."""
    if candidate.refused:
        return candidate
    started = find_program(name) if (name := launcher()) else None
    for each in filter(None, (started, candidate.path)):
        if (program := os.path.basename(os.path.realpath(each))) in REMOTE:
            why = f"{program} compiles on other hosts, where opkiln cannot see what is read"
            return candidate._replace(refused=why)
    return candidate


if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from opkiln.base.build_model import Toolchain
    from opkiln.errors import ToolchainError

    class Family(Protocol):
        """A family is a module: ``nvcc``, ``nvrtc``, ``hipcc`` or ``sycl``."""

        def available(self) -> bool:
            """Whether any compiler of the family is found. Starts no process."""

        def search(
            self, memory: tuple[str, ...], wanted: str | None, host: Toolchain, *, ask: bool
        ) -> Search | None:
            """Look at every compiler of the family. Those that are not remembered are probed.
            ``wanted`` is the version of the runtime that torch was built with. If ``ask`` is false
            and a probe is not remembered, the result is None: no process is started."""


class Search(Record):
    """The compilers of a family that are here."""

    taken: DeviceCompiler | None
    candidates: list[Compiler]  # in order of preference; the one that is taken is not refused
    failure: Callable[[], ToolchainError]  # why none is taken; may probe others, to name one


def recall(
    family: Family, memory: tuple[str, ...], wanted: str | None, host: Toolchain
) -> DeviceCompiler | None:
    """The compiler that ``choose`` would take, if every probe is remembered. Starts no process,
    writes nothing."""
    search = family.search(memory, wanted, host, ask=False)
    return None if search is None else search.taken


def choose(
    family: Family, memory: tuple[str, ...], wanted: str | None, host: Toolchain
) -> DeviceCompiler:
    """The compiler that fits torch best. Raises ToolchainError with each and why it is refused."""
    search = family.search(memory, wanted, host, ask=True)
    assert search is not None
    if search.taken is None:
        raise search.failure()
    return search.taken


def candidates(
    family: Family, memory: tuple[str, ...], wanted: str | None, host: Toolchain
) -> list[Compiler]:
    """Every compiler that was considered, for reports."""
    search = family.search(memory, wanted, host, ask=True)
    assert search is not None
    return search.candidates


def rank(
    candidates: list[Compiler],
    records: list[dict[str, Any]],
    wanted: str | None,
    misfit: Callable[[dict[str, Any]], str],
) -> tuple[list[Compiler], list[int]]:
    """(the candidates, as their records judge them; the places of those that may be taken, the best
    first). ``misfit`` says why one that works does not fit. Equal ones keep their order."""
    judged = [
        candidate._replace(refused=record["refused"] or misfit(record), version=record["version"])
        for candidate, record in zip(candidates, records, strict=True)
    ]
    places = (place for place, candidate in enumerate(judged) if not candidate.refused)
    return judged, sorted(places, key=lambda place: distance(judged[place].version, wanted))


def make_compiler(record: dict[str, Any], **others: Any) -> DeviceCompiler:
    """A compiler, from the record of its probe and what the record does not say."""
    values = {**record, **others}
    lists = ("archs", "include_dirs", "library_dirs")
    values |= {name: tuple(values[name]) for name in lists}
    values["accepts"] = frozenset(values["accepts"])
    return DeviceCompiler(
        **{name: values[name] for name in DeviceCompiler._fields if name in values}
    )


def misfit(runtime: str, version: str, wanted: str | None) -> str:
    """Why a compiler for this version of a runtime (CUDA, HIP) cannot build for torch's; empty when
    it can. Versions of one major are compatible, others are not."""
    if wanted is None or release(version)[0] == release(wanted)[0]:
        return ""
    return f"{runtime} {version}; torch was built with {wanted}, another major version"


def distance(version: str, wanted: str | None) -> tuple[int, int, int]:
    """A sort key: the smaller, the better a version fits torch's. The same version is best. Then
    comes the nearest newer minor, which has all that torch uses, then the nearest older one, then
    the nearest other major. If torch has none, all are equal."""
    if wanted is None:
        return 0, 0, 0
    (major, minor), (torchs, torchs_minor) = release(version), release(wanted)
    if major != torchs:
        return abs(major - torchs), int(major < torchs), -minor
    return 0, int(minor < torchs_minor), abs(minor - torchs_minor)


def demote(candidate: Compiler, taken: Compiler, runtime: str, wanted: str | None) -> Compiler:
    """The candidate, refused because another one is taken."""
    reason = f"{runtime} {taken.version} in {taken.path} is nearer to torch's {wanted}"
    if wanted is None or candidate.version == taken.version:
        reason = f"found after {taken.path}"
    return candidate._replace(refused=reason)
