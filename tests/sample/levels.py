"""The CPU architectures, their levels, and which of them this machine has.

Every test draws them from here, so that no test is for one architecture. Only this file and the
product name them; ``unit/test_architectures.py`` looks for others.
"""

from __future__ import annotations

import shutil

from opkiln.machine import uname
from opkiln.machine.arch import cpu

X86_64, AARCH64 = ARCHITECTURES = ("x86_64", "aarch64")  # as uname, ELF readers and wheels say
X86_V1, X86_V2, X86_V3, X86_V4 = X86_LEVELS = ("x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4")
ARM_V8, ARM_V8_2 = ARM_LEVELS = ("armv8-a", "armv8.2-a")
UNKNOWN_LEVEL = "x86-64-v9"
WORDS = (X86_64, X86_V1, "amd64", AARCH64, "arm64", "armv8")  # every name begins with one of them
LOADERS = {X86_64: "ld-linux-x86-64.so.2", AARCH64: "ld-linux-aarch64.so.1"}

# This machine, and the other architecture.
HERE = uname.architecture()
IS_X86 = HERE == X86_64
OTHER = AARCH64 if IS_X86 else X86_64
LEVELS = dict(enumerate(X86_LEVELS if IS_X86 else ARM_LEVELS, start=1))  # lowest first, from 1
OTHER_LEVELS = ARM_LEVELS if IS_X86 else X86_LEVELS
LOW, HIGH = (X86_V2, X86_V3) if IS_X86 else ARM_LEVELS  # two levels that a release would ship
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

# What builds for the other architecture, and runs it.
OTHER_CXX, OTHER_EMULATOR = f"{OTHER}-linux-gnu-g++", f"qemu-{OTHER}"
OTHER_CXX_PACKAGE = f"g++-{OTHER.replace('_', '-')}-linux-gnu"  # Debian's


def report() -> str:
    """For pytest's header: the architectures that a run covers."""
    missing = [name for name in (OTHER_CXX, OTHER_EMULATOR) if shutil.which(name) is None]
    how = f"not covered, for lack of {' and '.join(missing)}" if missing else "emulated"
    here = cpu.native(HERE, cpu.features_of(uname.cpu_flags()))
    return f"architectures: {HERE} ({here}); {OTHER}: {how}"


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
