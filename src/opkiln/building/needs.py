"""What a finished library needs of the machine that loads it, as its own tables say."""

from __future__ import annotations

from typing import Any

from opkiln.arch import cpu
from opkiln.binary import elf
from opkiln.model import CUDA, ROCM, Plan


def of(path: str, plan: Plan) -> dict[str, Any]:
    """For a manifest: ``decision.fit`` compares it with the machine. Raises LoadError.

    ``cpu`` are the CPU's features by the kernel's names, ``images`` the device code that is really
    in the file. ``symbols`` are those that others must define, by the library and the version they
    were linked to: one for each version, since a library that has it has all of it.
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
    if backend == CUDA:
        from opkiln.binary import fatbin

        return fatbin.images(path)
    if backend == ROCM:
        from opkiln.binary import bundle

        return bundle.hip_images(path)
    return ()
