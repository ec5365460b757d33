"""Which ROCm there is: torch's and the machine's, read from files."""

from __future__ import annotations

import os
import re

from opkiln.toolchain import rocm_homes, torch_sdk

# Where an installation says its version, the best first: that of ROCm as a whole, then HIP's, whose
# major and minor are the same.
_TEXTS = (".info/version", ".info/version-dev")
_HEADERS = (
    ("include/rocm-core/rocm_version.h", "ROCM_VERSION_"),
    ("include/rocm_version.h", "ROCM_VERSION_"),
    ("include/hip/hip_version.h", "HIP_VERSION_"),
)


def is_rocm_pytorch() -> bool:
    """Whether the torch that is installed was built for ROCm. Imports nothing."""
    torch = torch_sdk.find()
    return torch is not None and torch.hip is not None


def installed_rocm_version() -> tuple[int, int]:
    """(major, minor) of the ROCm installation that builds use, without asking its compiler.

    Where there is none, the one that torch was built with and brings along; (0, 0) without either.
    """
    for home in rocm_homes.homes():
        found = _release_of(home)
        if found != (0, 0):
            return found
    torch = torch_sdk.find()
    return (0, 0) if torch is None or torch.hip is None else torch_sdk.release(torch.hip)


def _release_of(home: str) -> tuple[int, int]:
    for name in _TEXTS:
        found = torch_sdk.release(_read(os.path.join(home, name)).strip())
        if found != (0, 0):
            return found
    for name, prefix in _HEADERS:
        text = _read(os.path.join(home, name))
        numbers = [
            re.search(rf"#define\s+{prefix}{part}\s+(\d{{1,9}})\b", text)
            for part in ("MAJOR", "MINOR")
        ]
        if all(numbers):
            major, minor = (int(number[1]) for number in numbers if number)
            return major, minor
    return 0, 0


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""  # not every installation has every one of these
