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

pytestmark = [pytest.mark.row(12), pytest.mark.timed]

BEFORE, AFTER = "2.13.0+cpu", "2.14.1+cpu"
REBUILT = {"torch": True, "torch-stable": False, "none": False}  # by the ABI of an op


def test_an_upgrade_in_place_rebuilds_what_depends_on_torchs_version(
    tmp_path: Path, compiler: Compiler, cases: Cases
) -> None:
    torch = torch_like(tmp_path / "env", BEFORE)
    # A stable op is linked to torch's libraries, which open sooner than torch is imported.
    environment = with_torch_in(tmp_path / "env") | {"LD_LIBRARY_PATH": str(torch / "lib")}
    source = write(tmp_path / "op.cpp", returning(12))
    let_rest()  # signatures are believed from here on

    def load() -> list[str]:
        """Where a new process had the ops from."""
        with Loader(environment) as process:
            answers = [process.load(f"op{number}", source, abi=abi, without_torch=True)
                       for number, abi in enumerate(REBUILT)]  # fmt: skip
        assert [answer.value for answer in answers] == [12, 12, 12], answers
        return [answer.origin for answer in answers]

    found = ["store"] * len(REBUILT)
    assert load() == ["built"] * len(REBUILT)
    assert load() == found
    times = (torch / "version.py").stat()
    rename(torch, AFTER)
    # As installers do that unpack with the times of the archive.
    os.utime(torch / "version.py", ns=(times.st_atime_ns, times.st_mtime_ns))
    before = compiler.compiles
    assert load() == ["built" if rebuilt else "store" for rebuilt in REBUILT.values()]
    for _ in cases(2):
        assert load() == found
    assert compiler.compiles - before == 1
    rename(torch, BEFORE)  # the old one is back: what was built for it still is
    assert load() == found
    assert compiler.compiles - before == 1
