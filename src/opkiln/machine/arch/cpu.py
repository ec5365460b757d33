"""CPU targets: psABI levels, explicit features, coverage and compiler flags. Pure functions.

A CPU is a *level* (``x86-64-v3``, ``armv8.2-a``) and the features beyond it that kernels use. The
psABI defines the levels. ``native`` becomes the highest level that this CPU has, plus its further
features by name. So a key says what the binary needs, two machines of the same CPU family share it,
and there is no table of microarchitecture names to maintain. Features have the compiler's names
(``-m<feature>``). Where the kernel's names differ, they are mapped here.

Whether a compiler knows a feature is not assumed: ``toolchain.host`` asks the compiler.
"""

from __future__ import annotations

from functools import lru_cache

from opkiln.base.lazy import Record
from opkiln.errors import ArchError


class CPU(Record):
    """A level and the features beyond it, sorted."""

    level: str
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "+".join((self.level, *self.features))


# The psABI's micro-architecture levels, lowest first, with all features that each has.
_V2 = frozenset({"cx16", "sahf", "popcnt", "sse3", "sse4.1", "sse4.2", "ssse3"})
_V3 = _V2 | {"avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_LEVELS: dict[str, dict[str, frozenset[str]]] = {
    "x86_64": {"x86-64": frozenset(), "x86-64-v2": _V2, "x86-64-v3": _V3, "x86-64-v4": _V4},
    "aarch64": {"armv8-a": frozenset(), "armv8.2-a": frozenset({"lse", "rdma", "dcpop"})},
}

# ``common``: servers have had these levels for years (2013, 2018), and vector units come with them.
_COMMON = {"x86_64": "x86-64-v3", "aarch64": "armv8.2-a"}

# Features beyond a level that are worth a separate binary.
_EXTRAS: dict[str, tuple[str, ...]] = {
    "x86_64": (
        "avx", "avx2", "fma", "f16c", "bmi2",
        "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl",
        "avx512vnni", "avx512bf16", "avx512fp16", "avx512vbmi", "avxvnni",
        "amx-tile", "amx-int8", "amx-bf16",
    ),
    "aarch64": ("fp16", "dotprod", "bf16", "i8mm", "sve", "sve2"),
}  # fmt: skip

_KERNEL_NAMES = {
    "pni": "sse3", "sse4_1": "sse4.1", "sse4_2": "sse4.2", "lahf_lm": "sahf", "abm": "lzcnt",
    "bmi1": "bmi", "avx512_vnni": "avx512vnni", "avx512_bf16": "avx512bf16",
    "avx512_fp16": "avx512fp16", "avx_vnni": "avxvnni", "amx_tile": "amx-tile",
    "amx_int8": "amx-int8", "amx_bf16": "amx-bf16",
    "atomics": "lse", "asimdrdm": "rdma", "asimdhp": "fp16", "asimddp": "dotprod",
}  # fmt: skip


def _levels(machine: str) -> dict[str, frozenset[str]]:
    return _LEVELS.get(machine, {machine: frozenset()})


def machine_of(text: str, here: str) -> str:
    """The machine (``x86_64``, ``aarch64``) of a requested CPU. Returns ``here`` for ``native``
    and ``common``."""
    head = text.strip().partition("+")[0]
    return next((name for name, levels in _LEVELS.items() if head in levels), here)


@lru_cache(maxsize=4)
def features_of(flags: str) -> frozenset[str]:
    """The features in the kernel's list of CPU flags, under the compiler's names."""
    return frozenset(_KERNEL_NAMES.get(name, name) for name in flags.split())


def kernel_names(features: frozenset[str]) -> frozenset[str]:
    """The inverse of ``features_of``: features under the kernel's names."""
    theirs = {ours: kernels for kernels, ours in _KERNEL_NAMES.items()}
    return frozenset(theirs.get(name, name) for name in features)


def native(machine: str, features: frozenset[str]) -> CPU:
    """The CPU that has these features: its highest complete level, and the features beyond."""
    level, needed = [each for each in _levels(machine).items() if each[1] <= features][-1]
    beyond = features - needed
    return CPU(level, tuple(sorted(f for f in _EXTRAS.get(machine, ()) if f in beyond)))


def parse(text: str, machine: str, features: frozenset[str]) -> CPU:
    """The CPU that ``native``, ``common`` or a level, and ``+FEATURE…``, name. Raises ArchError."""
    head, *tokens = text.strip().split("+")
    known = list(_levels(machine))
    if head == "native":
        base = native(machine, features)
    elif head in known:
        base = CPU(head)
    elif head == "common":
        base = CPU(_COMMON.get(machine, known[0]))
    else:
        raise ArchError(
            f"{head!r} is not a CPU for {machine}",
            why="known: native, common, " + ", ".join(known) + ", each with +FEATURE",
            hint="OPKILN_CPU=native",
        )
    allowed = _EXTRAS.get(machine, ())
    for token in tokens:
        if token not in allowed:
            raise ArchError(
                f"{token!r} is not a CPU feature for {machine}", why="known: " + ", ".join(allowed)
            )
    implied = requires(base.level, ())
    wanted = {*base.features, *(token for token in tokens if token not in implied)}
    return CPU(base.level, tuple(sorted(wanted)))


def requires(level: str, features: tuple[str, ...]) -> frozenset[str]:
    """Every feature that a binary for this level and these features may use."""
    of_level = (levels[level] for levels in _LEVELS.values() if level in levels)
    return frozenset(features).union(*of_level)


def missing_features(
    level: str, features: tuple[str, ...], have: frozenset[str]
) -> tuple[str, ...]:
    """The features that a CPU with ``have`` lacks to run such a binary; empty if it can run it."""
    return tuple(sorted(requires(level, features) - have))


def compatible_cpus(machine: str, have: frozenset[str]) -> tuple[CPU, ...]:
    """The CPUs whose binaries run on one with ``have``, best first: itself, then each complete
    level that it has."""
    exact = native(machine, have)
    levels = [CPU(name) for name, needed in _levels(machine).items() if needed <= have]
    return tuple(dict.fromkeys((exact, *reversed(levels))))


def flags(cpu: CPU, machine: str, accepts: frozenset[str]) -> tuple[str, ...]:
    """The flags for a CPU that the compiler accepts. Only this function makes such flags."""
    if machine == "aarch64":
        known = [f for f in cpu.features if f"+{f}" in accepts]
        return ("-march=" + "+".join((cpu.level, *known)),)
    if machine != "x86_64":
        return ()
    march = (f"-march={cpu.level}",) if f"-march={cpu.level}" in accepts else ()
    return march + tuple(f"-m{f}" for f in cpu.features if f"-m{f}" in accepts)


def probes(machine: str) -> tuple[str, ...]:
    """The flags that ``flags`` may return. Each needs a compile probe: a compiler may not know
    it."""
    extras = _EXTRAS.get(machine, ())
    if machine == "aarch64":
        return tuple(f"+{f}" for f in extras)
    levels = _LEVELS.get(machine, ())
    return (*(f"-march={name}" for name in levels), *(f"-m{f}" for f in extras))


def simd(machine: str, cpu: CPU) -> str:
    """The widest vector unit of a CPU: avx512, avx2, neon or scalar."""
    have = requires(cpu.level, cpu.features)
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= have:
        return "avx512"
    if {"avx2", "fma"} <= have:
        return "avx2"
    return "neon" if machine == "aarch64" else "scalar"
