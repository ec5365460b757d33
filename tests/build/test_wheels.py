"""Ops that were really built, in a wheel that is really installed."""

from __future__ import annotations

import csv
import json
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename
from sample import child
from sample.installed import require
from sample.levels import ARCHITECTURES, LOW
from sample.shipped import build

from opkiln.base.digest import sha256_file
from opkiln.base.model import SHARED
from opkiln.errors import BuildError
from opkiln.machine.binary import elf
from opkiln.machine.toolchain import choice, nvcc, torch_sdk
from opkiln.settings import override
from opkiln.ship import audit
from opkiln.ship.audit import platform
from opkiln.ship.wheel import write_wheel
from opkiln.ship.wheel_check import verify_wheel
from opkiln.store import layer
from opkiln.store.layers import Store


def cpu_layer(base: Path, *, pooled: bool) -> Path:
    if not choice.available("cpu"):
        pytest.skip("no C++ compiler on this machine")
    words = ("cpu_adam", "--target", f"cpu:{LOW}", "--out", str(base / "layer"))
    build(base / "store", *words, pooled=pooled)
    return base / "layer"


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer of the CPU's Adam and, where there is nvcc, of the GPU's."""
    pytest.importorskip("torch")
    base = tmp_path_factory.mktemp("shipped")
    made = cpu_layer(base, pooled=True)
    if nvcc.available():
        build(base / "store", "fused_adam", "--target", "cuda:9.0a", "--out", str(made))
    return made


@pytest.fixture(scope="module")
def wheel(shipped: Path) -> Path:
    asked = {"name": "opkiln-ops", "version": "0.1.0"}
    (path,) = write_wheel(str(shipped), str(shipped.parent / "dist"), requires=["opkiln"], **asked)
    return Path(path)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has put it."""
    require("pip")
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index",
               "--disable-pip-version-check", "--target", str(target), str(wheel)]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return target


def test_the_tag_is_one_that_this_system_takes_and_no_python_is_in_it(
    wheel: Path, shipped: Path
) -> None:
    _, _, _, tags = parse_wheel_filename(wheel.name)
    assert tags & set(sys_tags())
    (tag,) = tags
    assert (tag.interpreter, tag.abi) == ("py3", "none")
    libraries = [elf.read(each.payload) for each in layer.entries(str(shipped))]
    assert tag.platform == platform(libraries).tag
    assert tag.platform.startswith("manylinux_2_")


def test_pip_installs_the_layer_as_it_is(installed: Path, shipped: Path, wheel: Path) -> None:
    home = installed / SHARED / "opkiln_ops"
    for each in layer.entries(str(shipped)):
        for file in each.files:
            put = home / each.place / file
            assert put.read_bytes() == Path(each.directory, file).read_bytes()
            assert not put.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    assert [each.place for each in layer.entries(str(home))] == [
        each.place for each in layer.entries(str(shipped))
    ]
    info = installed / "opkiln_ops-0.1.0.dist-info"
    assert json.loads((info / "sboms" / "opkiln.cdx.json").read_text())["specVersion"] == "1.6"
    recorded = {row[0] for row in csv.reader((info / "RECORD").read_text().splitlines())}
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) <= recorded


def test_the_installed_layer_serves_without_compiling(installed: Path, tmp_path: Path) -> None:
    code = (
        "import opkiln, torch\n"
        "from opkiln.builder.registry import get_builder\n"
        "builder = get_builder('cpu_adam')\n"
        "print(builder.load() is not None)\n"
        "print(opkiln.explain('cpu_adam'))\n"
    )
    env = {"OPKILN_CACHE_DIR": str(tmp_path / "store"), "OPKILN_STORE_LAYERS": None,
           "OPKILN_MODE": "sealed"}  # fmt: skip
    said = child.run(code, path=[installed], env=env, bare=False)
    assert said.startswith("True\n")
    assert str(installed / SHARED / "opkiln_ops") in said


def test_the_sbom_tells_of_the_compilers_that_built_and_what_they_linked(
    wheel: Path, shipped: Path
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = "opkiln_ops-0.1.0.dist-info/sboms/opkiln.cdx.json"
        found = json.loads(archive.read(name))
        digests = {each["hashes"][0]["content"] for each in found["components"] if "hashes" in each}
        libraries = [name for name in archive.namelist() if name.endswith(".so")]
        assert {each["bom-ref"] for each in found["components"]} >= set(libraries)
    assert digests == {sha256_file(each.payload) for each in layer.entries(str(shipped))}
    names = {each["name"]: each.get("version", "") for each in found["components"]}
    assert {"cpu_adam", "torch"} <= set(names)
    assert {"gcc", "clang"} & set(names)
    if nvcc.available():
        assert names["nvcc"] == names["cudart_static"] != ""


def test_another_build_elsewhere_gives_the_same_wheel(shipped: Path, tmp_path: Path) -> None:
    wheels = []
    for number, made in enumerate((shipped, cpu_layer(tmp_path, pooled=False))):
        alone = tmp_path / f"alone{number}"
        ops = "v1/ops/opkiln/cpu_adam"
        shutil.copytree(made / ops, alone / ops)
        out = tmp_path / f"dist{number}"
        wheels += write_wheel(str(alone), str(out), name="opkiln-ops", version="0.1.0")
    first, second = (Path(path) for path in wheels)
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()


def test_a_wheel_of_real_ops_verifies(wheel: Path) -> None:
    verify_wheel(str(wheel))


def test_bundled_ops_keep_to_the_stable_abi(shipped: Path) -> None:
    torch = torch_sdk.locate()
    assert torch is not None
    for each in layer.entries(str(shipped)):
        found = audit.require(each.payload, each.manifest, f"{torch}/lib/libtorch_cpu.so")
        assert [finding.level for finding in found] == [audit.NOTE]


BREAKS = """
namespace c10 { struct Allocator; Allocator* GetAllocator(int); }
extern "C" int PyGILState_Check();
extern "C" int torch_abi_of_next_year();
extern "C" void* op() {
    return PyGILState_Check() + torch_abi_of_next_year() ? c10::GetAllocator(0) : nullptr;
}
"""


def compiled(directory: Path, source: str, compiler: str) -> str:
    (directory / "op.cpp").write_text(source)
    output = str(directory / "op.so")
    command = [compiler, "-shared", "-fPIC", "-O1", str(directory / "op.cpp"), "-o", output]
    subprocess.run(command, check=True, capture_output=True)
    return output


def test_a_library_that_breaks_the_promise_is_refused_with_each_symbol(
    shipped: Path, tmp_path: Path
) -> None:
    with override(cache_dir=str(tmp_path / "store")):
        path = compiled(tmp_path, BREAKS, choice.choose(Store().memory, "cpu").cxx)
    manifest = layer.entries(str(shipped))[0].manifest
    torch = torch_sdk.locate()
    with pytest.raises(BuildError) as raised:
        audit.require(path, manifest, f"{torch}/lib/libtorch_cpu.so")
    for name in ("PyGILState_Check", "_ZN3c1012GetAllocatorEi", "torch_abi_of_next_year"):
        assert name in raised.value.why


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_tag_of_a_cross_compiled_library_is_its_machines(
    architecture: str, tmp_path: Path
) -> None:
    compiler = shutil.which(f"{architecture}-linux-gnu-g++")
    if compiler is None:
        pytest.skip(f"no g++ for {architecture}")
    source = '#include <string>\nextern "C" int op(int n) { return std::to_string(n).size(); }\n'
    found = platform([elf.read(compiled(tmp_path, source, compiler))])
    assert found.tag.startswith("manylinux_2_")
    assert found.tag.endswith(f"_{architecture}")
