"""torch's version.py and CMake file, and what ROCm installations say of themselves."""

from __future__ import annotations

from pathlib import Path

from fuzz.scratch import directory

from opkiln.machine.toolchain import hipcc, torch_sdk

FILES = (
    "version.py",
    "share/cmake/Torch/TorchConfig.cmake",
    *hipcc._TEXTS[:1],
    hipcc._HEADERS[0][0],
)


def one(data: bytes) -> None:
    home = Path(directory(), "versions")
    parts = data.split(b"\n--\n", len(FILES) - 1)
    for name, part in zip(FILES, parts + parts[-1:] * len(FILES), strict=False):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(part)
    torch_sdk._read.cache_clear()
    found = torch_sdk._read(str(home), (0, 0))
    for version in (found.version, found.cuda or "", found.hip or ""):
        torch_sdk.release(version)
    hipcc._release_of(str(home))
