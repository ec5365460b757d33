"""Row 6: a damaged entry is noticed before it is loaded, replaced, and never served."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from loaders import Loader, leaves, let_rest, returning, write

from opkiln.base.digest import sha256_file

if TYPE_CHECKING:
    from fault_rows import Cases

pytestmark = pytest.mark.row(6)

CHANCE = random.Random(6)


def flip_a_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(CHANCE.randrange(path.stat().st_size))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ (1 << CHANCE.randrange(8))]))


def cut(path: Path) -> None:
    os.truncate(path, CHANCE.randrange(path.stat().st_size))


def harm(path: Path, number: int) -> None:
    (flip_a_bit, cut)[number % 2](path)


def load_in_a_new_process(source: Path) -> tuple[int | None, str]:
    # A fresh one each time: whoever has the file mapped while it is cut is past saving.
    with Loader() as process:
        answer = process.load("op", source)
    assert process.process.returncode == 0
    return answer.value, answer.origin


def test_a_damaged_library_is_noticed_and_replaced(
    cases: Cases, tmp_path: Path, cache: Path
) -> None:
    source = write(tmp_path / "op.cpp", returning(41))
    assert load_in_a_new_process(source) == (41, "built")
    (leaf,) = leaves(cache)
    good = sha256_file(str(leaf / "op.so"))
    for number in cases(400, one_in=100):
        harm(leaf / "op.so", number)
        assert load_in_a_new_process(source) == (41, "built")
        assert leaves(cache) == [leaf]
        assert sha256_file(str(leaf / "op.so")) == good
    assert load_in_a_new_process(source) == (41, "store")


@pytest.mark.parametrize("file", ["manifest.json", "inputs.json"])
def test_damage_beside_the_library_heals_too(
    file: str, cases: Cases, tmp_path: Path, cache: Path
) -> None:
    source = write(tmp_path / "op.cpp", returning(41))
    assert load_in_a_new_process(source) == (41, "built")
    (leaf,) = leaves(cache)
    for number in cases(8, least=2):
        harm(leaf / file, number)
        write(tmp_path / f"unrelated{number}", "")  # in a watched directory: the lists are read
        assert load_in_a_new_process(source)[0] == 41
        assert load_in_a_new_process(source) == (41, "store")


@pytest.mark.timed
def test_a_damaged_receipt_misleads_nobody(cases: Cases, tmp_path: Path, cache: Path) -> None:
    source = write(tmp_path / "op.cpp", returning(41))
    let_rest()  # from here on a receipt serves
    assert load_in_a_new_process(source) == (41, "built")
    (receipt,) = (cache / "v1" / "receipts").rglob("*.json")
    for number in cases(12, least=4):
        harm(receipt, number)
        assert load_in_a_new_process(source) == (41, "store")
    write(source, returning(42))
    assert load_in_a_new_process(source) == (42, "built")


def test_a_damaged_object_is_compiled_again(cases: Cases, tmp_path: Path, cache: Path) -> None:
    source = write(tmp_path / "op.cpp", returning(41))
    assert load_in_a_new_process(source) == (41, "built")
    for number in cases(6, least=2):
        (leaf,), (kept,) = leaves(cache), leaves(cache, "objects")
        harm(kept / "0", number)
        harm(leaf / "op.so", number)
        assert load_in_a_new_process(source) == (41, "built")
    cut(leaf / "op.so")
    with Loader() as process:
        answer = process.load("op", source)
        assert (answer.value, answer.compiled) == (41, 0)  # its object is whole again


def test_a_library_that_is_missing_from_its_entry_is_built_again(
    tmp_path: Path, cache: Path
) -> None:
    source = write(tmp_path / "op.cpp", returning(41))
    assert load_in_a_new_process(source) == (41, "built")
    (leaf,) = leaves(cache)
    (leaf / "op.so").unlink()
    assert load_in_a_new_process(source) == (41, "built")
    assert load_in_a_new_process(source) == (41, "store")
