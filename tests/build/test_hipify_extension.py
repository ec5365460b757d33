"""``hipify_extension()``: sources for ROCm, made in the build directory."""

from __future__ import annotations

import importlib
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from opkiln.machine.toolchain import torch_sdk
from opkiln.ship import scaffold

if TYPE_CHECKING:
    from collections.abc import Callable

    from opkiln.builder import OpBuilder

pytestmark = pytest.mark.skipif(torch_sdk.locate() is None, reason="torch is not installed")


_numbers = itertools.count(1)


@pytest.fixture
def name(tmp_path: Path) -> str:
    """A package of its own: an imported one stays where it was."""
    made = f"hipified_{next(_numbers)}"
    scaffold.write(made, str(tmp_path), op="scaled_add")
    kernel = tmp_path / made / "src" / made / "ops/scaled_add/scaled_add.cu"
    kernel.write_text(f"#include <cuda_runtime.h>\ncudaStream_t stream;\n{kernel.read_text()}")
    return made


@pytest.fixture
def make(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], OpBuilder]:
    monkeypatch.syspath_prepend(str(tmp_path / name / "src"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    module = importlib.import_module(f"{name}.ops.scaled_add")
    return lambda backend: module.scaled_add.builder(backend=backend)


def test_sources_are_translated_below_the_build_directory_alone(
    make: Callable[[str], OpBuilder], name: str, tmp_path: Path
) -> None:
    builder = make("rocm")
    package = tmp_path / name
    before = {path: path.read_bytes() for path in package.rglob("*") if path.is_file()}
    made = builder.hipify_extension()
    assert [os.path.basename(path) for path in made] == ["scaled_add.cu"]
    assert all(path.startswith(str(tmp_path / "work" / "build" / "hip")) for path in made)
    kernel = Path(made[0]).read_text()
    assert "#include <hip/hip_runtime.h>" in kernel
    assert "hipStream_t" in kernel
    assert "cudaStream_t" not in kernel
    after = {path: path.read_bytes() for path in package.rglob("*") if path.is_file()}
    assert after == before


def test_a_second_call_translates_what_the_sources_are_then(
    make: Callable[[str], OpBuilder], name: str, tmp_path: Path
) -> None:
    builder = make("rocm")
    first = builder.hipify_extension("elsewhere")
    source = tmp_path / name / "src" / name / "ops/scaled_add/scaled_add.cu"
    source.write_text(source.read_text().replace("kThreads = 256", "kThreads = 128"))
    assert builder.hipify_extension("elsewhere") == first
    assert "kThreads = 128" in Path(first[0]).read_text()


@pytest.mark.parametrize("backend", ["cuda", "cpu"])
def test_other_backends_have_nothing_to_translate(
    make: Callable[[str], OpBuilder], tmp_path: Path, backend: str
) -> None:
    assert make(backend).hipify_extension() == []
    assert list((tmp_path / "work").iterdir()) == []
