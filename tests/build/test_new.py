"""``opkiln new``: what it writes is a package that installs, every way, and whose tests pass."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

import pytest
from sample import install
from sample.install import NATIVE_ONLY, Environment

from opkiln.errors import StoreError, UsageError
from opkiln.ship import scaffold
from opkiln.toolchain import host, torch_sdk

needs_compiler = pytest.mark.skipif(not host.available(), reason="no C++ compiler is installed")
needs_torch = pytest.mark.skipif(torch_sdk.locate() is None, reason="torch is not installed")


@pytest.mark.parametrize(
    ("name", "package"),
    [("demo_ops", "demo_ops"), ("Demo-Ops", "demo_ops"), ("my.ops2", "my_ops2")],
)
@pytest.mark.parametrize("backend", scaffold.BACKENDS)
def test_a_package_is_written_whole_by_the_name_it_is_imported_by(
    tmp_path: Path, name: str, package: str, backend: str
) -> None:
    written = scaffold.write(name, str(tmp_path), backend)
    found = sorted(str(p.relative_to(tmp_path / name)) for p in tmp_path.rglob("*") if p.is_file())
    assert found == written
    assert [each.name for each in tmp_path.iterdir()] == [name], "nothing else is left"
    for path in found:
        assert "@" not in (tmp_path / name / path).read_text().replace("@v", "").replace(
            "@pytest", ""
        ), path
    project = tomllib.loads((tmp_path / name / "pyproject.toml").read_text())
    assert project["project"]["name"] == name
    assert project["build-system"]["build-backend"].startswith(backend)
    (value,) = project["project"]["entry-points"]["opkiln.ops"].values()
    module = value.partition(":")[0]
    assert module.startswith(f"{package}.")
    assert (tmp_path / name / "src" / Path(*module.split("."))).with_suffix(".py").exists()
    keys = {each.get("env") for each in project["tool"]["uv"]["cache-keys"]}
    assert {"OPKILN_BUILD_OPS", "DS_BUILD_OPS", "OPKILN_BUILD_SCALED_ADD"} <= keys


def test_every_template_is_written() -> None:
    used = {f"{name.format(backend=b)}.in" for name in scaffold._FILES for b in scaffold.BACKENDS}
    assert {*used, "uv.toml.in"} == set(os.listdir(scaffold._TEMPLATES))


@pytest.mark.parametrize(
    ("name", "why"),
    [("", "a name is"), ("../up", "a name is"), ("a/b", "a name is"), ("9ops", "a name is"),
     ("ops-", "a name is"), ("öps", "a name is"), ("a b", "a name is"), ("-rf", "a name is"),
     ("x" * 70, "more than 60"), ("class", "a word of Python's"), ("json", "Python's own library"),
     ("torch", "another package"), ("aten", "a namespace that torch has"), ("OpKiln", "another")],
)  # fmt: skip
def test_a_name_that_no_package_can_have_is_refused(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name of a package") as raised:
        scaffold.write(name, str(tmp_path))
    assert why in raised.value.why
    assert raised.value.hint == "opkiln new my_ops"
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("file", "empty", "dangling"):
        with pytest.raises(UsageError, match=f"{name} exists already"):
            scaffold.write(name, str(tmp_path))
    assert (tmp_path / "file").read_text() == "mine"
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_write_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(scaffold._FILES, "test_scaled_add.py", "tests/" + "x" * 300)
    with pytest.raises(StoreError, match="demo_ops cannot be written: File name too long"):
        scaffold.write("demo_ops", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", scaffold.BACKENDS)
def test_the_command_says_what_it_wrote_and_what_is_next(tmp_path: Path, backend: str) -> None:
    argv = [sys.executable, "-m", "opkiln", "new", "demo_ops", "--backend", backend]
    done = install.run(argv, tmp_path)
    assert done.returncode == 0, done.stderr
    said, why = done.stderr.splitlines()
    place, *steps = said.split(" && ")
    assert place == "next: cd demo_ops"
    assert steps == [
        f"pip install -U pip {backend}",
        "pip install --no-build-isolation --group test .",
        "pytest",
    ]
    assert why == "Without isolation it takes the opkiln you have."
    assert "\n".join(steps) in (tmp_path / "demo_ops" / "README.md").read_text()
    assert "demo_ops/src/demo_ops/ops/scaled_add/cuda.cu" in done.stdout.splitlines()
    again = install.run(argv, tmp_path)
    assert again.returncode == 2
    assert "demo_ops exists already" in again.stderr


# Installed


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return install.with_opkiln(tmp_path_factory, "new")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One store for all: what is compiled in one test need not be in the next."""
    return str(tmp_path_factory.mktemp("store") / "cache")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    scaffold.write("demo_ops", str(tmp_path))
    return tmp_path / "demo_ops"


def assert_tests_pass(environment: Environment, project: Path, **variables: str) -> None:
    # Run from another directory: what is installed is tested, and not what lies in src.
    argv = [str(environment.python), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = install.run([*argv, str(project / "tests")], project.parent, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@needs_compiler
@needs_torch
@pytest.mark.slow
def test_its_tests_pass_compiled_at_first_use_and_precompiled(
    environment: Environment, project: Path, store: str, tmp_path: Path
) -> None:
    environment.install(project, OPKILN_CACHE_DIR=store)
    assert environment.prebuilt("demo_ops") == {}
    assert_tests_pass(environment, project, OPKILN_CACHE_DIR=store)
    # With pip's own check of what it requires: opkiln and torch are there.
    done = environment.pip(
        "install", "--no-build-isolation", "--no-index", project,
        OPKILN_CACHE_DIR=store, OPKILN_BUILD_OPS="1", OPKILN_BUILD_TARGETS="cpu:native",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(environment.prebuilt("demo_ops")) == ["scaled_add"]
    fresh = str(tmp_path / "fresh")
    assert_tests_pass(environment, project, OPKILN_CACHE_DIR=fresh, **NATIVE_ONLY)


@needs_compiler
@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("backend", scaffold.BACKENDS)
def test_its_tests_pass_when_it_is_built_in_isolation(
    environment: Environment, tmp_path: Path, store: str, backend: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    scaffold.write("demo_ops", str(tmp_path), backend)
    project = tmp_path / "demo_ops"
    links = install.wheel_of_opkiln(tmp_path_factory).parent
    argv = ("install", "--find-links", links, project)
    done = environment.pip(
        *argv, OPKILN_CACHE_DIR=store, OPKILN_BUILD_SCALED_ADD="1",
        OPKILN_BUILD_TARGETS="cpu:native",
    )  # fmt: skip
    if "No matching distribution found" in done.stdout + done.stderr:
        pytest.skip(f"pip has no index to take {backend} from")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(environment.prebuilt("demo_ops")) == ["scaled_add"]
    assert environment.wheel_file("demo_ops").startswith("py3-none-manylinux_2_")
    fresh = str(tmp_path / "fresh")
    assert_tests_pass(environment, project, OPKILN_CACHE_DIR=fresh, **NATIVE_ONLY)
    done = environment.pip(*argv, OPKILN_CACHE_DIR=store)
    assert done.returncode == 0, done.stdout + done.stderr
    assert environment.prebuilt("demo_ops") == {}
    assert environment.wheel_file("demo_ops") == "py3-none-any purelib"


@needs_compiler
@needs_torch
@pytest.mark.slow
def test_uv_serves_no_wheel_that_was_built_for_other_variables(
    environment: Environment, project: Path, store: str, tmp_path: Path
) -> None:
    tools = tmp_path / "tools"
    done = install.run([sys.executable, "-m", "pip", "install", "-q", "--target", str(tools), "uv"])
    if done.returncode != 0:
        pytest.skip("pip has no index to take uv from")
    argv = [str(tools / "bin" / "uv"), "pip", "install", "--python", str(environment.python),
            "--offline", "--no-deps", "--no-build-isolation", str(project)]  # fmt: skip
    common = {"UV_CACHE_DIR": str(tmp_path / "uv"), "OPKILN_CACHE_DIR": store,
              "OPKILN_BUILD_TARGETS": "cpu:native"}  # fmt: skip
    found = []
    for variables in ({}, {"DS_BUILD_OPS": "1"}, {}, {"OPKILN_BUILD_SCALED_ADD": "1"}):
        done = install.run(argv, **common, **variables)
        assert done.returncode == 0, done.stderr
        found.append(sorted(environment.prebuilt("demo_ops")))
    assert found == [[], ["scaled_add"], [], ["scaled_add"]]
