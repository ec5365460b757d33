"""Row 12: a torch that was upgraded in place is another torch for full-ABI ops alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from loaders import Compiler, Loader, let_rest, returning, with_torch_in, write
from sample.compiler import rename, torch_like

if TYPE_CHECKING:
    from pathlib import Path

    from fault_rows import Cases

pytestmark = pytest.mark.row(12)

BEFORE, AFTER = "2.13.0+cpu", "2.14.1+cpu"


def loaded(environment: dict[str, str | None], source: Path, abi: str) -> str:
    """Where a new process had the op from."""
    with Loader(environment, bare=False) as process:
        answer = process.load("op", source, abi=abi, without_torch=abi != "torch-stable")
        assert answer.value == 12, answer
        return answer.origin


@pytest.mark.parametrize(
    ("abi", "rebuilds"),
    [("torch", 1), ("torch-stable", 0), pytest.param("none", 0, marks=pytest.mark.full)],
)
def test_an_upgrade_in_place_rebuilds_what_depends_on_torchs_version(
    abi: str, rebuilds: int, tmp_path: Path, compiler: Compiler, cases: Cases
) -> None:
    torch = torch_like(tmp_path / "env", BEFORE)
    environment = with_torch_in(tmp_path / "env")
    source = write(tmp_path / "op.cpp", returning(12))
    let_rest()  # signatures are believed from here on
    assert loaded(environment, source, abi) == "built"
    assert loaded(environment, source, abi) == "store"
    times = (torch / "version.py").stat()
    rename(torch, AFTER)
    # As installers do that unpack with the times of the archive.
    os.utime(torch / "version.py", ns=(times.st_atime_ns, times.st_mtime_ns))
    before = compiler.compiles
    for number in cases(3, least=2):
        first = "built" if rebuilds and number == 0 else "store"
        assert loaded(environment, source, abi) == first
    assert compiler.compiles - before == rebuilds
    rename(torch, BEFORE)  # the old one is back: what was built for it still is
    assert loaded(environment, source, abi) == "store"
    assert compiler.compiles - before == rebuilds
