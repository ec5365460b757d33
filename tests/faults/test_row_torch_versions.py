"""Row 2: two versions of torch that share a cache never wait for, or load, each other's builds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from loaders import Compiler, Loader, leaves, returning, with_torch_in, write
from sample.compiler import torch_like

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fault_rows import Cases

pytestmark = [pytest.mark.row(2), pytest.mark.timed]

VERSIONS = ("2.12.7+cpu", "2.14.3+cpu")
# The version reaches the library as torch's own headers do: by the include path of its install.
SOURCE_TEXT = returning("VERSION", '#include "torch/version_of_this_one.h"')


@pytest.fixture
def environments(tmp_path: Path) -> list[dict[str, str | None]]:
    """Two installs, each with a header that says which one it is."""
    made = []
    for number, version in enumerate(VERSIONS):
        place = tmp_path / f"env{number}"
        torch = torch_like(place, version)
        include = torch / "include"
        real = include.resolve()
        include.unlink()
        (include / "torch").mkdir(parents=True)
        for entry in real.iterdir():
            if entry.name != "torch":
                (include / entry.name).symlink_to(entry)
        for entry in (real / "torch").iterdir():
            (include / "torch" / entry.name).symlink_to(entry)
        write(include / "torch" / "version_of_this_one.h", f"#define VERSION {number + 1}\n")
        # A stable op is linked to torch's libraries, which open sooner than torch is imported.
        made.append(with_torch_in(place) | {"LD_LIBRARY_PATH": str((torch / "lib").resolve())})
    return made


def test_two_versions_that_alternate_build_once_each_and_a_stable_op_once(
    tmp_path: Path,
    cache: Path,
    compiler: Compiler,
    environments: list[dict[str, str | None]],
    cases: Cases,
) -> None:
    source = write(tmp_path / "op.cpp", SOURCE_TEXT)
    stable = write(tmp_path / "stable.cpp", returning(7))
    origins = []
    for number in cases(20, least=3):
        with Loader(environments[number % 2]) as process:
            answer = process.load("op", source, abi="torch", without_torch=True)
            other = process.load("stable", stable, abi="torch-stable", without_torch=True)
            assert (answer.value, other.value) == (number % 2 + 1, 7), (answer, other)
            origins.append((answer.origin, other.origin))
    found = [("store", "store")] * (len(origins) - 2)
    assert origins == [("built", "built"), ("built", "store"), *found]
    assert compiler.compiles == 3
    assert len(leaves(cache)) == 3


def test_two_versions_at_the_same_time_do_not_wait_for_each_other(
    tmp_path: Path,
    compiler: Compiler,
    environments: list[dict[str, str | None]],
    processes: Callable[..., list[Loader]],
) -> None:
    source = write(tmp_path / "op.cpp", SOURCE_TEXT)
    warm = write(tmp_path / "warm.cpp", returning(0))
    running = [processes(1, each)[0] for each in environments]
    for each in running:
        # Warm: both have asked the compiler who it is.
        assert each.load("warm", warm, abi="torch", without_torch=True).value == 0
    before = compiler.compiles
    compiler.take(1)
    for each in running:
        each.ask("op", source, abi="torch", without_torch=True)
    assert [each.answer().value for each in running] == [1, 2]
    assert compiler.compiles - before == 2
