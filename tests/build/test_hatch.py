"""Packages that hatchling builds: into an environment of their own, one with pip itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample import install
from sample.install import CALL, NATIVE_ONLY, Environment
from sample.levels import HIGH, LOW

from opkiln.machine.toolchain import host
from opkiln.ship import scaffold

pytestmark = pytest.mark.skipif(not host.available(), reason="no C++ compiler is installed")
BOTH = [f"cpu {LOW}", f"cpu {HIGH}"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = install.with_opkiln(tmp_path_factory, "hatch")
    done = made.pip("install", "-q", "hatchling", "editables")
    if done.returncode != 0:
        pytest.skip("pip has no index to take hatchling from")
    return made


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPKILN_BUILD_TARGETS", f"cpu:{LOW},{HIGH}")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    return install.quick_project(tmp_path / "project", "hatchling")


def test_the_same_project_installs_precompiled_and_pure_by_turns(
    environment: Environment, project: Path, tmp_path: Path
) -> None:
    environment.pip_install(project, DS_BUILD_OPS="1")
    assert environment.prebuilt("quick") == {"first": BOTH, "second": BOTH}
    tag, where = environment.wheel_file("quick").split()
    assert tag.startswith("py3-none-manylinux_2_")
    assert where == "platlib"
    fresh = {"OPKILN_CACHE_DIR": str(tmp_path / "fresh")}
    assert environment.run("-c", CALL, cwd=tmp_path, **NATIVE_ONLY, **fresh) == "41\n"
    environment.install(project)
    assert environment.prebuilt("quick") == {}
    assert environment.wheel_file("quick") == "py3-none-any purelib"
    assert list((tmp_path / "scratch").iterdir()) == [], "a build cleans up behind it"


def test_an_op_that_does_not_compile_fails_the_install_whether_it_is_named_or_not(
    environment: Environment, project: Path, tmp_path: Path
) -> None:
    environment.uninstall("quick")
    (project / "src" / "quick" / "csrc" / "first.cpp").write_text("no C++ at all\n")
    said = environment.refuses(project, OPKILN_BUILD_FIRST="1")
    assert "quick cannot be installed with first precompiled, as OPKILN_BUILD_FIRST asks" in said
    assert "op first: csrc/first.cpp does not compile" in said
    assert "Traceback" not in said
    assert not (environment.site / "quick").exists()
    said = environment.refuses(project, OPKILN_BUILD_OPS="1", QUICK_SECOND="1")
    assert "op first: csrc/first.cpp does not compile" in said
    environment.install(project, QUICK_SECOND="1")
    assert environment.prebuilt("quick") == {"second": BOTH}
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_pure_wheel_without_the_sources_of_its_ops_is_not_built(
    environment: Environment, project: Path
) -> None:
    environment.uninstall("quick")
    pyproject = project / "pyproject.toml"
    less = '[tool.hatch.build.targets.wheel]\nexclude = ["*.h"]\n'
    pyproject.write_text(pyproject.read_text() + less)
    said = environment.refuses(project)
    assert "quick would be installed without quick/csrc/number.h" in said
    assert "Traceback" not in said
    assert not (environment.site / "quick").exists()


def test_an_editable_install_builds_for_this_machine_and_writes_nothing_to_the_sources(
    environment: Environment, project: Path
) -> None:
    before = sorted(project.rglob("*"))
    environment.install(project, editable=True, OPKILN_BUILD_OPS="1")
    assert sorted(project.rglob("*")) == before
    assert environment.wheel_file("quick") == "py3-none-any purelib"
    assert environment.run("-c", CALL, cwd=project.parent, **NATIVE_ONLY) == "41\n"


def test_a_build_string_marks_the_version_where_the_source_is_opkilns(
    environment: Environment, project: Path
) -> None:
    said = environment.refuses(project, DS_BUILD_STRING="cu130")
    assert "version 1.0 does not include DS_BUILD_STRING=cu130" in said
    pyproject, init = project / "pyproject.toml", project / "src" / "quick" / "__init__.py"
    pyproject.write_text(
        pyproject.read_text().replace('version = "1.0"', 'dynamic = ["version"]')
        + '[tool.hatch.version]\nsource = "opkiln"\npath = "src/quick/__init__.py"\n'
    )
    init.write_text(f'{init.read_text()}\n__version__ = "1.0"\n')
    environment.install(project, DS_BUILD_STRING=".dev3+cu130")
    assert environment.version("quick") == "1.0.dev3+cu130"
    said = environment.refuses(project, DS_BUILD_STRING="cu 130")
    assert "cannot be part of a version" in said


def test_a_package_that_lies_elsewhere_is_found_by_the_hooks_own_word(
    environment: Environment, project: Path
) -> None:
    (project / "src").rename(project / "lib")
    pyproject = project / "pyproject.toml"
    text = pyproject.read_text() + '[tool.hatch.build.targets.wheel]\npackages = ["lib/quick"]\n'
    pyproject.write_text(text)
    said = environment.refuses(project, OPKILN_BUILD_FIRST="1")
    assert "op first: no package of this project has quick:FirstBuilder" in said
    pyproject.write_text(text.replace("hooks.opkiln]\n", 'hooks.opkiln]\nwhere = "lib"\n'))
    environment.install(project, OPKILN_BUILD_FIRST="1")
    assert environment.prebuilt("quick") == {"first": BOTH}


def test_a_new_package_installs_editable_with_nothing_but_hatchling(
    environment: Environment, tmp_path: Path
) -> None:
    environment.uninstall("editables")
    scaffold.write("demo_ops", str(tmp_path), scaffold.HATCHLING)
    environment.install(tmp_path / "demo_ops", editable=True)
    code = "import importlib.util as u; print(u.find_spec('demo_ops').origin)"
    found = environment.run("-c", code, cwd=tmp_path)
    assert found.strip() == str(tmp_path / "demo_ops/src/demo_ops/__init__.py")
