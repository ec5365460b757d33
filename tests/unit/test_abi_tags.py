"""What of an ABI tag must be the same for a library that was built elsewhere."""

from __future__ import annotations

import pytest

from opkiln.decision.prebuilt import _comparable_tag

FULL = "torch-2.13.0+cpu-0123456789abcdef-cxx11-cpython-311-3.11.7"


@pytest.mark.parametrize(
    ("built", "here"),
    [
        (FULL, FULL.replace("3.11.7", "3.11.14")),
        ("cpython-311-3.11.7", "cpython-311-3.11.14"),
        ("torch-stable-2.10-cpython-311-3.11.7", "torch-stable-2.10-cpython-311-3.11.2"),
        ("torch-stable-2.10-cuda13-cpython-311-3.11.7", "torch-stable-2.10-cpython-311-3.11.2"),
        ("torch-stable-2.10-cuda12", "torch-stable-2.10-rocm7"),
        ("torch-stable-2.10", "torch-stable-2.10"),
        ("none", "none"),
    ],
)
def test_pythons_patch_release_and_torchs_runtime_may_differ(built: str, here: str) -> None:
    assert _comparable_tag(built) == _comparable_tag(here)


@pytest.mark.parametrize(
    ("built", "here"),
    [
        (FULL, FULL.replace("311-3.11.7", "312-3.12.7")),
        (FULL, FULL.replace("2.13.0", "2.13.1")),
        (FULL, FULL.replace("0123", "3210")),
        (FULL, FULL.replace("cxx11", "precxx11")),
        ("cpython-311-3.11.7", "cpython-312-3.12.7"),
        ("cpython-313-3.13.0", "cpython-313t-3.13.0"),
        ("cpython-311-3.11.7", "cpython-311d-3.11.7"),
        ("cpython-311-3.11.7", "none"),
        ("cpython-311", "cpython-312"),
        ("torch-stable-2.10-cpython-311-3.11.7", "torch-stable-2.10"),
        ("torch-stable-2.10", "torch-stable-2.11"),
    ],
)
def test_another_minor_release_another_torch_or_another_kind_is_another_abi(
    built: str, here: str
) -> None:
    assert _comparable_tag(built) != _comparable_tag(here)
