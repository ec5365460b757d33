"""Row 11: a compiler that was replaced under its own name is another compiler: one rebuild."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from loaders import Compiler, Loader, let_rest, returning, write

if TYPE_CHECKING:
    from collections.abc import Callable

    from fault_rows import Cases

pytestmark = [pytest.mark.row(11), pytest.mark.timed]


def replace_in_place(compiler: Path, data: bytes) -> None:
    """Other contents; the path, the inode and the modification time stay."""
    before = compiler.stat()
    with compiler.open("r+b") as file:
        file.write(data)
        file.truncate()
    os.utime(compiler, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_compiler_replaced_in_place_causes_exactly_one_rebuild(
    cases: Cases,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    processes: Callable[..., list[Loader]],
) -> None:
    compiler = Compiler(tmp_path)
    monkeypatch.setenv("CXX", str(compiler.path))
    source = write(tmp_path / "op.cpp", returning(11))
    let_rest()  # what is remembered of the compiler is believed from here on
    for _ in range(cases.count(3, least=2)):
        before = compiler.compiles
        for process in processes(2):
            assert process.load("op", source).value == 11
        assert compiler.compiles - before == 1
        script = compiler.path.read_bytes().replace(b"#!/bin/sh", b"#!/bin/sh ", 1)
        replace_in_place(compiler.path, script)


def test_a_compiler_of_the_same_size_is_still_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: Callable[..., list[Loader]]
) -> None:
    real = shutil.which("g++")
    assert real is not None
    script = tmp_path / "g++"

    def text(number: int) -> bytes:
        return f'#!/bin/sh\nexec {real} -DFROM={number} "$@"\n'.encode()

    script.write_bytes(text(1))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    source = write(tmp_path / "op.cpp", returning("FROM"))
    let_rest()
    for number in (1, 2):
        replace_in_place(script, text(number))
        answers = [process.load("op", source) for process in processes(2)]
        assert [answer.value for answer in answers] == [number, number]
        assert [answer.origin for answer in answers] == ["built", "store"]


def test_a_link_that_leads_to_another_compiler_now_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: Callable[..., list[Loader]]
) -> None:
    real = shutil.which("g++")
    for number in (1, 2):
        script = write(tmp_path / f"g{number}", f'#!/bin/sh\nexec {real} -DFROM={number} "$@"\n')
        script.chmod(0o755)
    link = tmp_path / "g++"
    monkeypatch.setenv("CXX", str(link))
    source = write(tmp_path / "op.cpp", returning("FROM"))
    let_rest()
    (process,) = processes(1)
    for number in (1, 2, 1):
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / f"g{number}")
        assert process.load("op", source).value == number
