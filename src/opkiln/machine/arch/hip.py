"""HIP architectures: the grammar of ``gfx…`` lists, filters, coverage and flags. Pure functions.

A target is a processor (``gfx90a``, ``gfx1100``, ``gfx11-generic``) and, optionally, settings of
its features: ``gfx942:sramecc+:xnack-``. Code without a setting runs with the feature on or off.
``native`` means this machine's GPUs. The separators are the usual ones: ``;``, ``,`` and white
space. A list becomes a sorted tuple without duplicates, by version: gfx942 comes before gfx1030.

The compiler says which processors it knows. Only this file makes ``--offload-arch`` flags.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opkiln.base.lazy import Record
from opkiln.errors import ArchError
from opkiln.machine.arch import lists


class HipArch(Record):
    """A processor and the settings of its features (``xnack-``), sorted by name."""

    processor: str
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ":".join((self.processor, *self.features))


# All features that a target may set, as LLVM defines a target ID.
_FEATURES = ("sramecc", "xnack")

# The processors that run the code of a generic one. A chip that is missing here only costs an
# extra build.
_GENERIC: dict[str, tuple[str, ...]] = {
    "gfx9-generic": ("gfx900", "gfx902", "gfx904", "gfx906", "gfx909", "gfx90c"),
    "gfx9-4-generic": ("gfx940", "gfx941", "gfx942", "gfx950"),
    "gfx10-1-generic": ("gfx1010", "gfx1011", "gfx1012", "gfx1013"),
    "gfx10-3-generic": (
        "gfx1030", "gfx1031", "gfx1032", "gfx1033", "gfx1034", "gfx1035", "gfx1036",
    ),
    "gfx11-generic": (
        "gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153",
    ),
    "gfx12-generic": ("gfx1200", "gfx1201"),
}  # fmt: skip

_HEX = frozenset("0123456789abcdef")

_GRAMMAR = (
    "write gfx and a version, optionally with features (gfx90a, gfx1100, "
    "gfx942:sramecc+:xnack-);\nor native"
)
_EXAMPLE = 'PYTORCH_ROCM_ARCH="gfx90a;gfx942"'


def parse(
    text: str,
    *,
    native: Sequence[HipArch] | None = None,
    listed: Sequence[HipArch] | None = None,  # noqa: ARG001 (CUDA's grammar has words for them)
) -> tuple[HipArch, ...]:
    """The targets that a list names, sorted and without duplicates. Raises ArchError.

    ``native`` is this machine's GPUs; without them, the word is an error. The error quotes the
    first word that is not valid. The compiler requires that all targets of one processor set the
    same features: ``gfx90a;gfx90a:xnack+`` is an error.
    """
    found: list[HipArch] = []
    for word in lists.require_words(text, "HIP", _GRAMMAR, _EXAMPLE):
        if word.lower() == "native":
            found += lists.native(word, native, "AMD", _EXAMPLE)
        else:
            found.append(_parse_single(word))
    return merge(found)


show = lists.show


def merge(archs: Iterable[HipArch]) -> tuple[HipArch, ...]:
    """Sorted, without duplicates. Raises ArchError if two targets of one processor set different
    features."""
    found = tuple(sorted(set(archs), key=lambda arch: (_version(arch.processor), *arch)))
    first: dict[str, HipArch] = {}
    for arch in found:
        other = first.setdefault(arch.processor, arch)
        if _names(other) != _names(arch):
            raise ArchError(
                f"{str(arch)!r} and {str(other)!r} exclude each other",
                why="the targets of one processor must all set the same features",
                hint=f"PYTORCH_ROCM_ARCH={arch.processor}",
            )
    return found


def is_hip(text: str) -> bool:
    """Whether a list is meant for HIP: its first word begins with gfx."""
    return "".join(lists.split(text)[:1]).lower().startswith("gfx")


def _parse_single(word: str) -> HipArch:
    processor, *settings = word.lower().split(":")
    if not _version(processor):
        raise ArchError(
            f"{lists.quote(word)} is not a HIP architecture", why=_GRAMMAR, hint=_EXAMPLE
        )
    names = [setting[:-1] for setting in settings]
    well_formed = all(setting.endswith(("+", "-")) for setting in settings)
    if not well_formed or not set(names) <= set(_FEATURES) or len(set(names)) < len(names):
        raise ArchError(
            f"{lists.quote(word)} is not a HIP architecture",
            why=f"features are {' and '.join(_FEATURES)}, each once, with + or - after it",
            hint=f"PYTORCH_ROCM_ARCH={processor}",
        )
    return HipArch(processor, tuple(sorted(settings)))


def _version(processor: str) -> tuple[int, ...]:
    """(major, minor, stepping), for sorting; empty if it is not a processor. The last two digits
    are minor and stepping, in hexadecimal. The rest is decimal. A generic processor comes before
    those that it covers."""
    digits = processor.removeprefix("gfx")
    if digits == processor or not digits.isascii():
        return ()
    generic = digits.endswith("-generic")
    if generic:
        major, dash, minor = digits.removesuffix("-generic").partition("-")
        last = [minor if dash else "0"]
    else:
        major, last = digits[:-2], [*digits[-2:]]
    if not (major.isdigit() and len(major) <= 2 and major[0] != "0" and _HEX.issuperset(last)):
        return ()
    return int(major), int(last[0], 16), -1 if generic else int(last[1], 16)


def _names(arch: HipArch) -> tuple[str, ...]:
    return tuple(setting[:-1] for setting in arch.features)


def images(archs: Iterable[HipArch]) -> tuple[str, ...]:
    """The images of a library for these: one for each."""
    return tuple(map(str, merge(archs)))


def flags(archs: Iterable[HipArch]) -> tuple[str, ...]:
    """hipcc's ``--offload-arch`` flags for these, without duplicates. Only this function makes
    them."""
    return tuple(f"--offload-arch={arch}" for arch in merge(archs))


def apply_filter(archs: Iterable[HipArch], rule: lists.Rule) -> lists.Filtered:
    """Apply an op's filter to these. Raises SpecError. The rule gets plain processors ("gfx90a"),
    each once, and returns those to keep, in any order. Its decision applies to a processor with any
    features. A rule can only remove."""

    def find_named(item: str, have: Iterable[HipArch]) -> list[HipArch]:
        return [arch for arch in have if arch.processor == item.lower()]

    return lists.apply_filter(merge(archs), rule, lambda arch: arch.processor, find_named)


def usable(
    archs: Iterable[HipArch],
    listed: Iterable[HipArch],
    accepts: frozenset[str] = frozenset(),  # noqa: ARG001 (it is about CUDA's variants)
) -> lists.Usable:
    """Which of these a compiler knows, and why it does not know the others. Ignores features.
    ``listed`` is what it has device libraries for. If it does not say, it may know all."""
    known = tuple(arch.processor for arch in merge(listed))

    def refusal(arch: HipArch) -> str:
        if arch.processor in known or not known:
            return ""
        # Those of the same major version say more than a long list.
        near = [each for each in known if _version(each)[:1] == _version(arch.processor)[:1]]
        return f"the compiler has no {arch.processor}; it has {', '.join(near or known)}"

    return lists.usable(merge(archs), refusal)


def covers(archs: Iterable[HipArch], device: HipArch) -> str:
    """How code for these runs on a device: "exact", "generic", or "" if it does not. Code that sets
    a feature runs only on a device with the same setting. If a device does not report a feature, it
    runs only code that does not set it."""
    ways = {_runs(arch, device) for arch in archs}
    return next((way for way in ("exact", "generic") if way in ways), "")


def _runs(code: HipArch, device: HipArch) -> str:
    if not set(code.features) <= set(device.features):
        return ""
    if code.processor == device.processor:
        return "exact"
    return "generic" if device.processor in _GENERIC.get(code.processor, ()) else ""
