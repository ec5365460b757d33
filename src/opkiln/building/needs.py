"""The requirements of a finished library on the machine that loads it, read from its ELF tables."""

from __future__ import annotations

from typing import Any

from opkiln.arch import cpu
from opkiln.binary import elf
from opkiln.build_model import Plan
from opkiln.model import CUDA, ROCM


def of(path: str, plan: Plan) -> dict[str, Any]:
    """The requirements, for a manifest. ``decision.fit`` compares them with the machine.

    ``cpu`` lists the CPU features by the kernel's names. ``images`` is the device code that the
    file really contains. ``symbols`` lists symbols that other libraries must define, with the
    library and the version they were linked to. One symbol for each version is enough, because a
    library that has one symbol of a version has all of them. Raises LoadError.
    """
    found, target = elf.read(path), plan.target
    symbols = {(soname, version or name): name for soname, name, version in found.symbols}
    versions = {(soname, name): version for soname, name, version in found.symbols}
    return {
        "cpu": sorted(cpu.kernel_names(cpu.requires(target.cpu, target.cpu_features))),
        "sonames": list(found.needed),
        "symbols": sorted(
            [soname, name, versions[soname, name]] for (soname, _), name in symbols.items()
        ),
        "images": list(_images(path, target.backend)),
    }


def _images(path: str, backend: str) -> tuple[str, ...]:
    if backend not in (CUDA, ROCM):
        return ()
    from opkiln.binary import fatbin

    return fatbin.images(path) if backend == CUDA else fatbin.hip_images(path)
