"""What a finished library needs of the machine that loads it, as its own tables say."""

from __future__ import annotations

from typing import Any

from opkiln.binary import elf
from opkiln.model import CUDA, ROCM, Plan


def of(path: str, plan: Plan) -> dict[str, Any]:
    """For a manifest: ``loading.fit`` holds it against the machine. Raises LoadError.

    ``symbols`` are those that others must define, by the library and the version they were linked
    to; ``images`` the device code that is really in the file.
    """
    found = elf.read(path)
    return {
        "sonames": list(found.needed),
        "symbols": [list(each) for each in found.symbols],
        "images": list(_images(path, plan.target.backend)),
    }


def _images(path: str, backend: str) -> tuple[str, ...]:
    if backend == CUDA:
        from opkiln.binary import fatbin

        return fatbin.images(path)
    if backend == ROCM:
        from opkiln.binary import bundle

        return bundle.hip_images(path)
    return ()
