"""Headers of CUDA's libraries that a toolkit lacks but the wheels next to torch have.

ATen's CUDA headers include ``cublas_v2.h``, ``cusparse.h`` and others. A toolkit of a few packages
does not have them, but torch from PyPI depends on wheels that do: ``nvidia/cu13/include`` beside
torch, and for CUDA 12 one directory for each library. They are used if the wheels have the
toolkit's release, and are searched after it, so that they only add what it lacks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from opkiln.base.build_model import TorchSDK
from opkiln.base.lazy import Record
from opkiln.machine import facts

# The headers that torch's headers include, and the part of `cuda-toolkit` that has each.
LIBRARIES = {
    "cublas_v2.h": "cublas",
    "cublasLt.h": "cublas",
    "cufft.h": "cufft",
    "cufftXt.h": "cufft",
    "curand.h": "curand",
    "curand_kernel.h": "curand",
    "curand_philox4x32_x.h": "curand",
    "cusolverDn.h": "cusolver",
    "cusolver_common.h": "cusolver",
    "cusparse.h": "cusparse",
    "nvrtc.h": "nvrtc",
}
IN_EXTRA = ("cublas", "curand", "cusolver", "cusparse")  # those that `opkiln[cuda]` installs
_RUNTIME = "cuda_runtime_api.h"
_PARTS = ("cublas", "cuda_nvrtc", "cufft", "curand", "cusolver", "cusparse")


class Wheels(Record):
    """The headers that wheels have for a toolkit."""

    directories: tuple[str, ...]  # in "nvidia", next to torch; empty if none is used
    release: tuple[int, int]  # of the wheels; (0, 0) if there are none


_NONE = Wheels((), (0, 0))


def find_wheels(
    torch: TorchSDK | None, include_dirs: Iterable[str], release: tuple[int, int]
) -> Wheels:
    """The headers that the wheels have for a toolkit of this release with these directories."""
    directories = list(include_dirs)
    if torch is None or not any(_lacks(directories, header) for header in LIBRARIES):
        return _NONE
    shared = (f"cu{release[0]}/include",)
    split = ("cuda_runtime/include", *(f"{part}/include" for part in _PARTS))
    for layout in (shared, split):
        marker = os.path.join(torch.wheels, layout[0], _RUNTIME)
        if facts.exists(marker):
            break
    else:
        return _NONE
    own = tuple(each for each in layout if facts.exists(os.path.join(torch.wheels, each)))
    try:
        found = _release(marker)
    except OSError:
        return _NONE  # the files were just removed
    return Wheels(own if found == release else (), found)


def _lacks(directories: list[str], header: str) -> bool:
    return not any(os.path.exists(os.path.join(each, header)) for each in directories)


def _release(header: str) -> tuple[int, int]:
    """(13, 0) from a runtime's header with ``#define CUDART_VERSION 13000``."""
    with open(header, encoding="utf-8", errors="replace") as file:
        for line in file:
            words = line.split()
            if words[:2] == ["#define", "CUDART_VERSION"] and words[2:3] and words[2].isdigit():
                number = int(words[2])
                return number // 1000, number % 1000 // 10
    return 0, 0
