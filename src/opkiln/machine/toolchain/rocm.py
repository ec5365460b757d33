"""ROCm: where it may be installed, and which version it is. Read from files; starts no process."""

from __future__ import annotations

import os
import re

from opkiln.machine import facts
from opkiln.machine.toolchain import find, torch_sdk
from opkiln.machine.toolchain.find import Compiler
from opkiln.machine.uname import read_text
from opkiln.settings import origin_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# Where AMD's packages install it: as `rocm`, or as `rocm-6.2.0` if there are several.
PARENT = "/opt"
# The files with an installation's version, the best first: ROCm's own version, then HIP's, whose
# major and minor are the same.
_TEXTS = (".info/version", ".info/version-dev")
_HEADERS = (
    ("include/rocm-core/rocm_version.h", "ROCM_VERSION_"),
    ("include/rocm_version.h", "ROCM_VERSION_"),
    ("include/hip/hip_version.h", "HIP_VERSION_"),
)


def hipcc_candidates() -> Iterator[Compiler]:
    """Every hipcc, in order of preference: the one the user named, else those on PATH and in /opt.

    If the user named a ROCm without a hipcc, no other one is used instead.
    """
    return find.list_programs(_places())


def _places() -> Iterator[tuple[str, str]]:
    named, origin = origin_of("rocm_home")
    if named:
        yield _hipcc_below(os.path.abspath(named)), origin
        return
    yield "hipcc", "PATH"
    found = facts.list_directory(PARENT)
    names = [name for name in ("rocm", *find.sort_by_version(found, "rocm-")) if name in found]
    for name in names or ["rocm*"]:
        yield _hipcc_below(os.path.join(PARENT, name)), PARENT


def homes() -> list[str]:
    """The roots of those installations, in the same order."""
    found = (each.path for each in hipcc_candidates() if not each.refused)
    return list(dict.fromkeys(home_of(os.path.realpath(path)) for path in found))


def home_of(hipcc: str) -> str:
    """The root of the ROCm that a hipcc belongs to: two levels up, or three in older ones."""
    home = os.path.dirname(os.path.dirname(hipcc))
    return os.path.dirname(home) if os.path.basename(home) == "hip" else home


def _hipcc_below(home: str) -> str:
    """The hipcc of an installation, or where it would be."""
    usual = os.path.join(home, "bin", "hipcc")
    older = os.path.join(home, "hip", "bin", "hipcc")
    return next(filter(facts.runs, (usual, older)), usual)


def is_rocm_pytorch() -> bool:
    """Whether the torch that is installed was built for ROCm. Imports nothing."""
    torch = torch_sdk.find()
    return torch is not None and torch.hip is not None


def installed_rocm_version() -> tuple[int, int]:
    """(major, minor) of the ROCm installation that builds use. Its compiler is not run.

    If there is none, it is the ROCm that torch was built with and ships. (0, 0) without either.
    """
    for home in homes():
        found = _release_of(home)
        if found != (0, 0):
            return found
    torch = torch_sdk.find()
    return (0, 0) if torch is None or torch.hip is None else torch_sdk.release(torch.hip)


def _release_of(home: str) -> tuple[int, int]:
    for name in _TEXTS:
        found = torch_sdk.release(read_text(os.path.join(home, name)).strip())
        if found != (0, 0):
            return found
    for name, prefix in _HEADERS:
        defined = rf"#define\s+{prefix}(MAJOR|MINOR)\s+(\d{{1,9}})\b"
        numbers = dict(re.findall(defined, read_text(os.path.join(home, name))))
        if len(numbers) == 2:
            return int(numbers["MAJOR"]), int(numbers["MINOR"])
    return 0, 0
