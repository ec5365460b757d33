"""Where a ROCm may be installed."""

from __future__ import annotations

import os

from opkiln.settings import origin_of
from opkiln.toolchain import find, torch_sdk
from opkiln.toolchain.find import Candidate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# Where AMD's packages put it: `rocm`, and `rocm-6.2.0` for several beside each other.
PARENT = "/opt"


def hipcc_candidates() -> Iterator[Candidate]:
    """Every hipcc, in the order of preference: the one that was named, else PATH's, else /opt's.

    A ROCm that was named and has no hipcc is not replaced by another.
    """
    named, origin = origin_of("rocm_home")
    if named:
        home = os.path.abspath(named)
        found = _hipcc_below(home)
        missing = Candidate(os.path.join(home, "bin", "hipcc"), origin, "no such program")
        yield Candidate(found, origin) if found else missing
        return
    seen: set[str] = set()
    on_path = find.first("hipcc")
    if on_path is None:
        yield Candidate("hipcc", "PATH", "not on PATH")
    else:
        seen.add(os.path.realpath(on_path))
        yield Candidate(on_path, "PATH")
    homes = _installed()
    if not homes:
        yield Candidate(os.path.join(PARENT, "rocm*", "bin", "hipcc"), PARENT, "no such program")
    for home in homes:
        path = _hipcc_below(home)
        if path is None:
            yield Candidate(os.path.join(home, "bin", "hipcc"), PARENT, "no such program")
        elif (real := os.path.realpath(path)) not in seen:
            seen.add(real)
            yield Candidate(path, PARENT)


def homes() -> list[str]:
    """The roots of those installations, in the same order."""
    found = (each.path for each in hipcc_candidates() if not each.refused)
    return list(dict.fromkeys(home_of(os.path.realpath(path)) for path in found))


def home_of(hipcc: str) -> str:
    """The root of the ROCm that a hipcc belongs to: two levels up, or three in older ones."""
    home = os.path.dirname(os.path.dirname(hipcc))
    return os.path.dirname(home) if os.path.basename(home) == "hip" else home


def watched() -> tuple[list[str], list[str]]:
    """(directories whose listings, and paths whose absence, decide which candidates there are)."""
    named, _ = origin_of("rocm_home")
    if named:
        home = os.path.abspath(named)
        return [], [path for path in _places(home)[:1] if not _executable(path)]
    places = [_places(home) for home in _installed()]
    absent = [path for each in places if not any(map(_executable, each)) for path in each]
    absent += find.passed_over("hipcc")
    if not os.path.isdir(PARENT):
        return [], [*absent, PARENT]
    return [PARENT], absent


def _installed() -> list[str]:
    """``/opt/rocm``, then ``/opt/rocm-*``, the newest first."""
    try:
        names = [name for name in os.listdir(PARENT) if name.startswith("rocm-")]
    except OSError:
        return []  # no such directory, or none that we may look into
    names.sort(key=lambda name: (torch_sdk.release(name[5:]), name), reverse=True)
    homes = [os.path.join(PARENT, name) for name in ("rocm", *names)]
    return [home for home in homes if os.path.isdir(home)]


def _places(home: str) -> list[str]:
    return [os.path.join(home, *parts, "bin", "hipcc") for parts in ((), ("hip",))]


def _hipcc_below(home: str) -> str | None:
    return next(filter(_executable, _places(home)), None)


def _executable(path: str) -> bool:
    return os.access(path, os.X_OK) and not os.path.isdir(path)
