"""The CPU levels of the machine that runs the tests, so that no test is for one architecture."""

from __future__ import annotations

from opkiln import machine
from opkiln.arch import cpu

_X86 = ("x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4")
_ARM = ("armv8-a", "armv8.2-a")
IS_X86 = machine.architecture() == "x86_64"

LEVELS = dict(enumerate(_X86 if IS_X86 else _ARM, start=1))  # lowest first, from 1
LOW, HIGH = (_X86[1], _X86[2]) if IS_X86 else _ARM  # two levels that a release would ship
BEYOND_LOW = cpu.requires(HIGH, ()) - cpu.requires(LOW, ())  # what HIGH has and LOW lacks
# C: which of LEVELS the compiler was told of.
LEVEL_IN_C = """
#if defined(__AVX512F__)
  return 4;
#elif defined(__AVX2__)
  return 3;
#elif defined(__SSE4_2__) || defined(__ARM_FEATURE_ATOMICS)
  return 2;
#else
  return 1;
#endif
"""


def lacks(level: str, than: str) -> str:
    """What a CPU of one level lacks to run code for another, as a refusal lists it."""
    return ", ".join(sorted(cpu.requires(than, ()) - cpu.requires(level, ())))


def kernel_flags(level: str) -> str:
    """The kernel's list of the features of a CPU that has a level and no more."""
    basic = "fpu sse2" if IS_X86 else "fp asimd"
    return " ".join((basic, *sorted(cpu.kernel_names(cpu.requires(level, ())))))


def cpuinfo(level: str) -> str:
    """A /proc/cpuinfo of a CPU that has a level and no more."""
    name = "flags" if IS_X86 else "Features"
    return f"processor\t: 0\nmodel name\t: masked\n{name}\t\t: {kernel_flags(level)}\n\n"
