"""Two ops with equal bytes: each has a library of its own, also where both are one file."""

from __future__ import annotations

import os
import shutil
import threading
from typing import TYPE_CHECKING

import pytest
from sample import child, known
from sample.package import settle

import opkiln
from opkiln.base.digest import sha256_file
from opkiln.base.model import Artifact
from opkiln.decision.terms import Request
from opkiln.loading import loader, native
from opkiln.machine.toolchain import host
from opkiln.settings import override
from opkiln.store import layer
from opkiln.store.bundle import write_bundle

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sample.package import Package

pytestmark = pytest.mark.skipif(not host.available(), reason="no C++ compiler is installed")

SOURCE = 'static int count; int visible; extern "C" int bump() { return 10 * ++count + ++visible; }'
LOAD = """
import sys
import opkiln
from opkiln.loading import loader

source, *names = sys.argv[1:]
ops = [opkiln.load(name, [source], is_python_module=False, abi="none") for name in names]
print(*[op.bump() for op in ops])
print(*[loaded.artifact.path for loaded, _ in loader.loaded_here().values()])
"""


def one_file(paths: list[str]) -> None:
    """Make hard links of files with equal bytes, as `hardlink` does."""
    assert len({sha256_file(path) for path in paths}) == 1
    for path in paths[1:]:
        os.unlink(path)
        os.link(paths[0], path)


def counted(source: Path, *names: str) -> tuple[list[str], list[str]]:
    counts, paths = child.run(LOAD, str(source), *names).splitlines()
    return counts.split(), paths.split()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "op.cpp"
    path.write_text(SOURCE)
    return path


def test_ops_with_equal_bytes_share_no_state(source: Path) -> None:
    for _ in ("built", "found"):
        counts, _paths = counted(source, "one", "two")
        assert counts == ["11", "11"]


def test_ops_whose_libraries_are_one_file_share_no_state(source: Path) -> None:
    one_file(counted(source, "one", "two", "three")[1])
    assert counted(source, "one", "two", "three")[0] == ["11"] * 3


def test_nothing_is_written_for_a_copy(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_file(counted(source, "one", "two")[1])
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("OPKILN_TMPDIR", str(scratch))
    before = sorted(tmp_path.rglob("*"))
    assert counted(source, "one", "two")[0] == ["11", "11"]
    assert sorted(tmp_path.rglob("*")) == before


def test_threads_that_open_one_file_at_once_get_a_file_each(source: Path, tmp_path: Path) -> None:
    opkiln.load("shared", [str(source)], is_python_module=False, abi="none")
    loaded, _ = loader.loaded_here()["jit", "shared", "cpu"]
    assert loaded.artifact is not None
    file = tmp_path / "file.so"
    shutil.copy(loaded.artifact.path, file)
    artifact = Artifact(str(file), loaded.artifact.sha256, "store")
    together, got = threading.Barrier(4), []

    def take(op: int) -> None:
        together.wait()
        got.append(native.ensure_own_file(op, artifact).path)

    threads = [threading.Thread(target=take, args=(op,)) for op in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({(os.stat(path).st_dev, os.stat(path).st_ino) for path in got}) == 4


def test_ops_of_a_bundle_with_equal_bytes_share_no_state(
    package: Callable[..., Package], tmp_path: Path
) -> None:
    packages = [package("plain"), package("plain")]
    stage, bundle = tmp_path / "stage", tmp_path / "ops.bundle"
    payloads = []
    with override(cache_dir=str(known.make_store(tmp_path / "elsewhere"))):
        for each in packages:
            each.edit("csrc/add.cpp", "return a + b", "static int count; return ++count + a + b")
            settle(*each.files())
            payloads.append(loader.obtain(Request(each.builder().op()))[0].path)
    assert len({sha256_file(path) for path in payloads}) == 1
    layer.export(payloads, str(stage))
    write_bundle(str(stage), str(bundle))
    with override(cache_dir=str(tmp_path / "here"), store_layers=(str(bundle),)):
        first, second = (each.load() for each in packages)
    assert [each.loaded().trace.candidates[-1].resort for each in packages] == ["layer", "layer"]
    assert first.add(1, 2) == second.add(1, 2)
