"""Installs of opkiln itself: pure, or with its own ops precompiled."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample import install
from sample.install import NATIVE_ONLY, Environment
from sample.levels import HIGH

from opkiln.machine.toolchain import host, torch_sdk

pytestmark = [
    pytest.mark.skipif(not host.available(), reason="no C++ compiler is installed"),
    pytest.mark.skipif(torch_sdk.locate() is None, reason="torch is not installed"),
]
LEVEL = {"OPKILN_BUILD_TARGETS": f"cpu:{HIGH}"}
ONE = [f"cpu {HIGH}"]
LOAD = """
import sys
from opkiln import get_builder
from opkiln.loading import loader
get_builder("cpu_adam").load()
((loaded, _),) = loader.loaded_here().values()
print(loaded.trace.candidates[-1].resort, loaded.trace.candidates[-1].verdict)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("pip") / "env")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """opkiln with two of its ops: all would take minutes."""
    where = tmp_path_factory.mktemp("source")
    return install.copy_of_opkiln(where, ops=("cpu_adam", "fused_adam"))


@pytest.mark.slow
def test_ops_are_precompiled_by_name_and_all_but_one_and_not_at_all(
    environment: Environment, source: Path, tmp_path: Path
) -> None:
    environment.install(source, DS_BUILD_CPU_ADAM="1", **LEVEL)
    assert environment.prebuilt("opkiln") == {"cpu_adam": ONE}
    assert environment.wheel_file("opkiln").startswith("py3-none-manylinux_2_")
    fresh = {"OPKILN_CACHE_DIR": str(tmp_path / "fresh")}
    if "avx2" in Path("/proc/cpuinfo").read_text().split():
        done = environment.fork("-c", LOAD, cwd=tmp_path, **NATIVE_ONLY, **fresh)
        assert done.stdout == "prebuilt taken\n", done.stderr
    environment.install(source)
    assert environment.wheel_file("opkiln") == "py3-none-any purelib"
    assert environment.prebuilt("opkiln") == {}, "not what the build before it left"
    marked = {"DS_BUILD_STRING": "marked"}
    environment.install(source, DS_BUILD_OPS="1", DS_BUILD_FUSED_ADAM="0", **marked, **LEVEL)
    assert environment.prebuilt("opkiln") == {"cpu_adam": ONE}
    assert environment.version("opkiln").endswith("+marked")


def test_an_op_without_a_toolkit_fails_if_named_and_is_skipped_if_swept_up(
    environment: Environment, source: Path, tmp_path: Path
) -> None:
    nowhere = {
        "OPKILN_BUILD_TARGETS": "cuda:9.0", "OPKILN_CUDA_HOME": str(tmp_path / "no-cuda"),
    }  # fmt: skip
    said = environment.refuses(source, DS_BUILD_FUSED_ADAM="1", **nowhere)
    assert "opkiln cannot be installed with fused_adam precompiled" in said
    assert "no-cuda" in said
    said = environment.install(source, DS_BUILD_OPS="1", **nowhere)
    assert environment.wheel_file("opkiln") == "py3-none-any purelib"
    assert "skipped fused_adam (cuda:9.0): " in said
    assert "skipped cpu_adam: op cpu_adam has no version for cuda:9.0" in said


def test_without_torch_sources_ship_and_a_named_op_fails_with_what_to_do(
    tmp_path_factory: pytest.TempPathFactory, source: Path
) -> None:
    bare = Environment(tmp_path_factory.mktemp("bare") / "env", without=("torch",))
    said = bare.install(source, DS_BUILD_OPS="1", **LEVEL)
    assert bare.wheel_file("opkiln") == "py3-none-any purelib"
    assert f"skipped cpu_adam (cpu:{HIGH}): op cpu_adam needs torch" in said
    assert "hint: pip install --no-build-isolation ." in said
    assert (bare.site / "opkiln" / "ops" / "cpu_adam" / "cpu.cpp").exists()
    said = bare.refuses(source, DS_BUILD_CPU_ADAM="1", **LEVEL)
    assert "op cpu_adam needs torch" in said
    assert "hint: pip install --no-build-isolation ." in said


@pytest.mark.full  # an index; tests/unit/test_torch_elsewhere.py has what is found how
def test_an_isolated_build_takes_the_torch_of_the_environment(
    environment: Environment, source: Path
) -> None:
    done = environment.pip("install", "--no-deps", source, DS_BUILD_CPU_ADAM="1", **LEVEL)
    if "No matching distribution found" in done.stdout + done.stderr:
        pytest.skip("pip has no index to take setuptools from")
    assert done.returncode == 0, done.stdout + done.stderr
    assert environment.prebuilt("opkiln") == {"cpu_adam": ONE}
