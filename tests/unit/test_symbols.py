"""Which symbols a library has, asked of its hash table."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from opkiln.errors import LoadError
from opkiln.machine.binary import elf
from opkiln.machine.binary.elf import missing_symbols

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")

NAMES = [f"symbol_{number}" for number in range(200)]


@pytest.fixture(params=["gnu", "sysv", "both"])
def library(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A library that defines every other name, and uses one that it does not define."""
    source, made = tmp_path / "many.c", tmp_path / "libmany.so"
    lines = [f"int {name}(void) {{ return 1; }}" for name in NAMES[::2]]
    lines.append("int from_elsewhere(void); int used(void) { return from_elsewhere(); }")
    source.write_text("\n".join(lines))
    style = f"-Wl,--hash-style={request.param}"
    subprocess.run(["cc", "-shared", "-fPIC", style, str(source), "-o", str(made)], check=True)
    return str(made)


def test_what_is_defined_is_found_and_nothing_else(library: str) -> None:
    assert missing_symbols(library, NAMES) == tuple(NAMES[1::2])
    assert missing_symbols(library, [*NAMES[::2], "used"]) == ()


def test_what_it_only_uses_is_missing(library: str) -> None:
    assert missing_symbols(library, ["from_elsewhere", ""]) == ("from_elsewhere", "")


def test_it_says_what_reading_every_name_says(library: str) -> None:
    names = sorted(elf.defined_symbols(library))
    assert names
    assert missing_symbols(library, [*names, *(name + "x" for name in names)]) == tuple(
        name + "x" for name in names
    )


def test_a_damaged_table_is_an_error_and_no_answer(tmp_path: Path, library: str) -> None:
    data = Path(library).read_bytes()
    short = tmp_path / "short.so"
    short.write_bytes(data[: len(data) // 2])
    with pytest.raises(LoadError):
        missing_symbols(str(short), NAMES)
    with pytest.raises(LoadError):
        missing_symbols(str(tmp_path / "none.so"), NAMES)
