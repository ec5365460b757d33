"""The platform tag of a wheel, from the symbol versions that its libraries need (PEP 600).

``manylinux_2_34_x86_64`` says: any Linux with glibc 2.34 or later. What glibc's own symbols need
can be read off them. libstdc++ and libgcc have versions of their own; which glibc the systems have
on which a version is sure to be found is a fact of distributions, and the tools that check wheels
agree on it: the table is what auditwheel 6.8 has in its ``manylinux-policy.json``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from opkiln.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from opkiln.binary.elf import Elf

_MACHINES = ("x86_64", "aarch64")

# No torch that has a stable ABI runs on an older glibc, so that an older tag would say no more.
_OLDEST = 17

# (the minor version of glibc 2, the newest version of each family that its systems have). Where
# x86-64 and aarch64 differ, the older one.
_POLICIES: tuple[tuple[int, dict[str, tuple[int, ...]]], ...] = (
    (17, {"GLIBCXX": (3, 4, 19), "CXXABI": (1, 3, 7), "GCC": (4, 8, 0)}),
    (24, {"GLIBCXX": (3, 4, 22), "CXXABI": (1, 3, 10), "GCC": (4, 8, 0)}),
    (27, {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}),
    (31, {"GLIBCXX": (3, 4, 28), "CXXABI": (1, 3, 12), "GCC": (7, 0, 0)}),
    (34, {"GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (7, 0, 0)}),
    (35, {"GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (12, 0, 0)}),
    (39, {"GLIBCXX": (3, 4, 33), "CXXABI": (1, 3, 15), "GCC": (14, 0, 0)}),
)
_NAMED = {"CXXABI_TM_1": 17, "CXXABI_FLOAT128": 24, "GLIBC_ABI_DT_RELR": 36}
_FAMILIES = ("GLIBC", "GLIBCXX", "CXXABI", "GCC")


class Platform(NamedTuple):
    """A tag, and what decided it: ``GLIBC_2.34``; for ``linux_…`` why it is no manylinux tag."""

    tag: str
    why: str


def platform_tag(elfs: Iterable[Elf]) -> str:
    """The tag of a wheel that holds these libraries. Raises UsageError as ``platform``."""
    return platform(elfs).tag


def platform(elfs: Iterable[Elf]) -> Platform:
    """The oldest platform that has all that these libraries need, and what decided it.

    Versions of other libraries than the C and the C++ runtime's are not a platform's matter: the
    audit tells of those. Raises UsageError for libraries of two machines, or of none that wheels
    are made for.
    """
    libraries = list(elfs)
    machines = sorted({each.machine for each in libraries})
    if len(machines) != 1 or machines[0] not in _MACHINES:
        raise UsageError(
            f"no platform tag fits libraries for {' and '.join(machines) or 'no machine at all'}",
            why=f"a wheel is for one of {', '.join(_MACHINES)}",
        )
    glibc, decided = _OLDEST, f"nothing newer than glibc 2.{_OLDEST}"
    for version in sorted({name for each in libraries for name in each.versions}):
        needed = _needed_glibc(version)
        if needed is None:
            return Platform(
                f"linux_{machines[0]}",
                f"{version} is in no manylinux platform up to manylinux_2_{_POLICIES[-1][0]}",
            )
        if needed > glibc:
            glibc, decided = needed, version
    return Platform(f"manylinux_2_{glibc}_{machines[0]}", decided)


def _needed_glibc(version: str) -> int | None:
    """The minor version of the oldest glibc 2 that comes with this; None where none is known."""
    if version in _NAMED:
        return _NAMED[version]
    family, _, text = version.partition("_")
    if family not in _FAMILIES:
        return 0
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)*", text):
        return None  # GLIBC_PRIVATE, or a name that is newer than this table
    number = tuple(int(part) for part in text.split("."))
    if family == "GLIBC":
        return number[1] if number[0] == 2 and len(number) > 1 else None
    return next((glibc for glibc, newest in _POLICIES if number <= newest[family]), None)
