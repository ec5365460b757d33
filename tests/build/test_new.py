"""``opkiln new``: what it writes is a package that installs, every way, and whose tests pass."""

from __future__ import annotations

import ast
import os
import pty
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from sample import command, install, transcript
from sample.install import NATIVE_ONLY, Environment

from opkiln.errors import StoreError, UsageError
from opkiln.machine.toolchain import host, torch_sdk
from opkiln.ship import scaffold

if TYPE_CHECKING:
    from collections.abc import Callable


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
        text = (tmp_path / name / path).read_text()
        assert not re.search(r"@[A-Z]+@", text), path
    project = tomllib.loads((tmp_path / name / "pyproject.toml").read_text())
    assert project["project"]["name"] == name
    assert project["build-system"]["build-backend"].startswith(backend)
    (value,) = project["project"]["entry-points"]["opkiln.ops"].values()
    op = scaffold.default_op(package)
    assert value == f"{package}.ops.{op}:{op}"
    folder = tmp_path / name / "src" / package / "ops" / op
    assert {each.name for each in folder.iterdir()} == {"__init__.py", f"{op}.cpp", f"{op}.cu"}
    keys = {each.get("env") for each in project["tool"]["uv"]["cache-keys"]}
    variable = f"OPKILN_BUILD_{op.upper()}"
    assert {"OPKILN_BUILD_OPS", "DS_BUILD_OPS", variable} <= keys


def test_every_template_is_written() -> None:
    ci = [template for template, _ in scaffold.CI.values()]
    names = [*scaffold._PACKAGE_FILES, *ci, *scaffold._OP_FILES, "uv.toml"]
    used = {f"{name.format(backend=b)}.in" for name in names for b in scaffold.BACKENDS}
    assert used == set(os.listdir(scaffold._TEMPLATES))


@pytest.mark.parametrize(
    ("name", "why"),
    [("", "a name has"), ("../up", "a name has"), ("a/b", "a name has"), ("9ops", "a name has"),
     ("ops-", "a name has"), ("öps", "a name has"), ("a b", "a name has"), ("-rf", "a name has"),
     ("x" * 70, "more than 60"), ("class", "a keyword of Python"),
     ("json", "Python's standard library"),
     ("torch", "another package"), ("aten", "one of torch's namespaces"), ("OpKiln", "another")],
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
    monkeypatch.setitem(scaffold._OP_FILES, "op.cu", "x" * 300)
    with pytest.raises(StoreError, match="demo_ops cannot be written: File name too long"):
        scaffold.write("demo_ops", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", scaffold.BACKENDS)
def test_the_command_says_what_it_wrote_and_what_is_next(tmp_path: Path, backend: str) -> None:
    done = command.run("new", "demo_ops", "--backend", backend, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said, why = done.stderr.splitlines()
    place, *steps = said.split(" && ")
    assert place == "next: cd demo_ops"
    assert steps == [
        f"pip install -U pip {backend}",
        "pip install --no-build-isolation --group test .",
        "pytest",
    ]
    assert why == "Without isolation, the build uses the installed opkiln."
    assert "\n".join(steps) in (tmp_path / "demo_ops" / "README.md").read_text()
    assert "demo_ops/src/demo_ops/ops/demo_add/demo_add.cu" in done.stdout.splitlines()
    again = command.run("new", "demo_ops", "--backend", backend, cwd=tmp_path)
    assert again.returncode == 2
    assert "demo_ops exists already" in again.stderr


# The op's name


@pytest.mark.parametrize(
    ("package", "op"),
    [("demo_ops", "demo_add"), ("fast_kernels", "fast_add"), ("norms", "norms_add")],
)
def test_an_op_that_is_not_named_is_named_after_its_package(package: str, op: str) -> None:
    assert scaffold.default_op(package) == op
    assert scaffold.op_of(op) == op


@pytest.mark.parametrize(
    ("name", "why"),
    [("", "a name has"), ("9x", "a name has"), ("_x", "a name has"), ("a__b", "a name has"),
     ("a b", "a name has"), ("x/y", "a name has"), ("ünorm", "a name has"), ("n" * 61, "60"),
     ("lambda", "a keyword of Python"), ("double", "a keyword of C++"), ("cpu_adam", "opkiln has"),
     ("kernel", "something else"), ("test_norm", "pytest"),
     ("OPS", "something else"), ("targets", "OPKILN_BUILD_TARGETS")],
)  # fmt: skip
def test_a_name_that_no_op_can_have_is_refused(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(UsageError, match="cannot be the name of an op") as raised:
        scaffold.op_of(name)
    assert why in raised.value.why
    if name:
        with pytest.raises(UsageError, match="cannot be the name of an op"):
            scaffold.write("demo_ops", str(tmp_path), op=name)
    assert list(tmp_path.iterdir()) == []


def test_no_op_can_be_named_as_something_in_its_own_files() -> None:
    texts = scaffold.op_texts("demo_ops", "zzz", "demo_ops")
    bound = set()
    for text in (text for name, text in texts.items() if name.endswith(".py")):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.arg):
                bound.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound.add(node.id)
            elif isinstance(node, ast.alias):
                bound.add(node.asname or node.name)
            elif isinstance(node, ast.FunctionDef):
                bound.add(node.name)
    own = {name for name in bound if name.startswith(("zzz", "test_", "_")) or not name.islower()}
    # An argument of the op: nothing in its body is called by that name.
    assert bound - own - {"scale"} <= scaffold._OCCUPIED


def test_the_command_takes_the_ops_name(tmp_path: Path) -> None:
    done = command.run("new", "demo_ops", "--op", "RMS-norm", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "demo_ops/src/demo_ops/ops/rms_norm/rms_norm.cpp" in done.stdout.splitlines()
    project = tomllib.loads((tmp_path / "demo_ops" / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["opkiln.ops"] == {
        "rms_norm": "demo_ops.ops.rms_norm:rms_norm"
    }
    texts = [each.read_text() for each in (tmp_path / "demo_ops").rglob("*") if each.is_file()]
    assert not any("scaled_add" in text.lower() for text in texts)


@pytest.mark.parametrize(
    ("typed", "op"), [("\n", "demo_add"), ("rms-norm\n", "rms_norm"), ("9\nfine\n", "fine")]
)
def test_the_command_asks_for_the_ops_name_on_a_terminal(
    tmp_path: Path, typed: str, op: str
) -> None:
    main, other = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "opkiln", "new", "demo_ops"], cwd=tmp_path,
        stdin=other, stderr=other, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(other)
    os.write(main, typed.encode())
    written, _ = child.communicate(timeout=60)
    said = os.read(main, 4096).decode()
    os.close(main)
    assert child.returncode == 0, said
    assert "Name of its op [demo_add]: " in said
    assert f"demo_ops/src/demo_ops/ops/{op}/__init__.py" in written.splitlines()
    assert ("'9' cannot be the name of an op" in said) == typed.startswith("9")


# One more op


def _tree(where: Path) -> dict[str, str]:
    return {str(p.relative_to(where)): p.read_text() for p in where.rglob("*") if p.is_file()}


@pytest.mark.parametrize("backend", scaffold.BACKENDS)
def test_an_op_is_added_and_only_lines_are_inserted(tmp_path: Path, backend: str) -> None:
    scaffold.write("Demo-Ops", str(tmp_path), backend)
    where = tmp_path / "Demo-Ops"
    before = _tree(where)
    added = scaffold.add(str(where), "layer-norm")
    after = _tree(where)
    assert sorted(set(after) - set(before)) == sorted(added.new)
    changed = [path for path in before if before[path] != after[path]]
    assert sorted(changed) == sorted(added.changed)
    assert sorted(changed) == ["pyproject.toml", "src/demo_ops/__init__.py"]
    for path in changed:
        lines = iter(after[path].splitlines())
        assert all(line in lines for line in before[path].splitlines()), "in order, all there"
    project = tomllib.loads(after["pyproject.toml"])
    assert project["project"]["entry-points"]["opkiln.ops"] == {
        "demo_add": "demo_ops.ops.demo_add:demo_add",
        "layer_norm": "demo_ops.ops.layer_norm:layer_norm",
    }
    keys = [each.get("env") for each in project["tool"]["uv"]["cache-keys"]]
    assert keys[-2:] == ["OPKILN_BUILD_LAYER_NORM", "DS_BUILD_LAYER_NORM"]
    # What a package with this op alone would have, file by file.
    scaffold.write("other", str(tmp_path), op="layer_norm")
    fresh = _tree(tmp_path / "other")
    for path in added.new:
        assert after[path] == fresh[path.replace("demo_ops", "other")].replace("other", "demo_ops")


def test_an_op_is_added_to_a_package_that_had_none(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "mine"\nversion = "1"')
    added = scaffold.add(str(tmp_path), "norm")
    assert "mine/ops/__init__.py" in added.new
    assert (
        tmp_path / "mine" / "__init__.py"
    ).read_text() == "from mine.ops.norm import norm as norm\n"
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["opkiln.ops"] == {"norm": "mine.ops.norm:norm"}


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda p: (p / "src/demo_ops/ops/norm").mkdir(), "ops/norm exists already"),
        (lambda p: (p / "tests/test_norm.py").write_text("mine"), "test_norm.py exists already"),
        (lambda p: _append(p / "src/demo_ops/__init__.py", "norm = 1\n"), "has a name norm"),
        (lambda p: _append(p / "src/demo_ops/__init__.py", "def (\n"), "does not parse"),
        (lambda p: _append(p / "pyproject.toml", "[[[\n"), "does not describe a package"),
        (lambda p: (p / "src/demo_ops").rename(p / "src/other"), "is not found in"),
        (lambda p: _inline(p / "pyproject.toml"), "cannot be added to"),
    ],
)
def test_an_op_that_cannot_be_added_changes_nothing(
    tmp_path: Path, break_it: Callable[[Path], object], message: str
) -> None:
    scaffold.write("demo_ops", str(tmp_path))
    where = tmp_path / "demo_ops"
    break_it(where)
    before = _tree(where)
    with pytest.raises(UsageError) as raised:
        scaffold.add(str(where), "norm")
    assert message in str(raised.value)
    assert _tree(where) == before


def _append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def _inline(path: Path) -> None:
    text = path.read_text()
    table = text[text.index("[project.entry-points") : text.index("[dependency-groups]")]
    inline = 'entry-points = { "opkiln.ops" = { demo_add = "demo_ops.ops.demo_add:a" } }\n\n'
    path.write_text(text.replace(table, inline))


def test_an_op_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaffold.write("demo_ops", str(tmp_path))
    before = _tree(tmp_path)
    monkeypatch.setitem(scaffold._OP_FILES, "op.cu", "x" * 300)
    with pytest.raises(StoreError, match="cannot be written: File name too long"):
        scaffold.add(str(tmp_path / "demo_ops"), "norm")
    assert _tree(tmp_path) == before
    assert not (tmp_path / "demo_ops/src/demo_ops/ops/norm").exists()


@pytest.mark.parametrize(
    ("start", "arguments", "place"),
    [
        ("demo_ops", [], ""),
        ("demo_ops/src/demo_ops", [], "../../"),
        (".", ["demo_ops"], "demo_ops/"),
    ],
)
def test_the_command_adds_an_op_from_inside_a_package_or_by_its_path(
    tmp_path: Path, start: str, arguments: list[str], place: str
) -> None:
    scaffold.write("demo_ops", str(tmp_path))
    done = command.run("new", *arguments, "--op", "norm", cwd=tmp_path / start)
    assert done.returncode == 0, done.stderr
    assert f"{place}tests/test_norm.py" in done.stdout.splitlines()
    changed, following = done.stderr.splitlines()
    assert changed == f"changed {place}pyproject.toml and {place}src/demo_ops/__init__.py"
    assert following.startswith(f"next: {f'cd {place[:-1]} && ' if place else ''}pip install ")
    assert (tmp_path / "demo_ops/src/demo_ops/ops/norm/norm.cu").exists()
    again = command.run("new", *arguments, "--op", "norm", cwd=tmp_path / start)
    assert again.returncode == 2
    assert "ops/norm exists already" in again.stderr


def test_the_command_without_a_package_says_what_to_type(tmp_path: Path) -> None:
    for arguments, message in (
        ([], "the package needs a name"),
        (["--op", "norm"], "no package was found in"),
    ):
        done = command.run("new", *arguments, cwd=tmp_path)
        assert done.returncode == 2
        assert message in done.stderr
        assert "hint: opkiln new my_ops" in done.stderr


# Installed


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return install.with_opkiln(tmp_path_factory, "new")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    scaffold.write("demo_ops", str(tmp_path))
    return tmp_path / "demo_ops"


QUICK = "not compiled and not registration"  # those that ask torch.compile take seconds


def assert_tests_pass(
    environment: Environment, project: Path, *options: str, **variables: str
) -> None:
    # Run from another directory: what is installed is tested, and not what lies in src.
    argv = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *options, project / "tests")
    done = environment.fork(*argv, cwd=project.parent, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@needs_compiler
@needs_torch
@pytest.mark.full
def test_its_tests_and_an_added_ops_pass_compiled_at_first_use_and_precompiled(
    environment: Environment, project: Path, tmp_path: Path
) -> None:
    scaffold.add(str(project), "demo_norm")
    environment.install(project)
    assert environment.prebuilt("demo_ops") == {}
    assert_tests_pass(environment, project, "--opkiln=native")
    # With pip's own check of what it requires: opkiln and torch are there.
    done = environment.pip(
        "install", "--no-build-isolation", "--no-index", project,
        OPKILN_BUILD_OPS="1", OPKILN_BUILD_TARGETS="cpu:native",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(environment.prebuilt("demo_ops")) == ["demo_add", "demo_norm"]
    fresh = str(tmp_path / "fresh")
    assert_tests_pass(environment, project, "-k", QUICK, OPKILN_CACHE_DIR=fresh, **NATIVE_ONLY)


@needs_compiler
@needs_torch
@pytest.mark.slow
def test_the_steps_of_its_workflow_run_in_order_and_a_kept_store_leaves_nothing_to_compile(
    environment: Environment, project: Path, tmp_path: Path
) -> None:
    workflow = yaml.safe_load((project / ".github/workflows/test.yml").read_text())
    job = workflow["jobs"]["test"]
    kept: dict[str, Path] = {}  # what the service keeps, by key
    said = _run_steps(environment, project, job["env"], job["steps"], tmp_path / "first", kept)
    build = "opkiln build --package demo_ops"
    assert re.findall(r"demo_add +cpu +(\w+)", said[build]) == ["built"]
    assert said["opkiln check --package demo_ops"].split()[:2] == ["demo_add", "cached"]
    assert " passed" in said["python -m pytest --opkiln=both"]
    # A new machine, from the question for the key to the build.
    again = job["steps"][[step.get("id") for step in job["steps"]].index("ops") :][:3]
    said = _run_steps(environment, project, job["env"], again, tmp_path / "second", kept)
    assert re.findall(r"demo_add +cpu +(\w+)", said[build]) == ["cached"]
    assert len(kept) == 1, "both runs have one key"
    # GitLab's job has the same commands.
    scaffold.write("other_ops", str(tmp_path), ci=scaffold.GITLAB)
    script = yaml.safe_load((tmp_path / "other_ops/.gitlab-ci.yml").read_text())["test"]["script"]
    steps = [step["run"] for step in job["steps"] if "run" in step and "id" not in step]
    assert [each.replace("other_ops", "demo_ops") for each in script] == steps


def _run_steps(
    environment: Environment, project: Path, env: dict[str, str], steps: list[dict[str, Any]],
    home: Path, kept: dict[str, Path],
) -> dict[str, str]:  # fmt: skip
    """Run a job's steps as GitHub does. What each command has printed."""
    home.mkdir()
    path = f"{transcript.programs(home / 'bin')}{os.pathsep}{os.environ['PATH']}"
    outputs = home / "outputs"
    variables = {"HOME": str(home), "XDG_CACHE_HOME": "", "OPKILN_CACHE_DIR": "", "PATH": path,
                 "PYTHONPATH": str(environment.site),
                 "PYTEST_ADDOPTS": f"-k '{QUICK}'",
                 "GITHUB_OUTPUT": str(outputs), **env}  # fmt: skip
    said: dict[str, str] = {}
    for step in steps:
        if step.get("uses", "").startswith("actions/cache@"):
            values = dict(line.split("=", 1) for line in outputs.read_text().splitlines())
            assert step["with"]["path"] == "${{ steps.ops.outputs.path }}"
            assert values["key"].startswith(step["with"]["restore-keys"])
            if values["key"] in kept:
                shutil.copytree(kept[values["key"]], values["path"], dirs_exist_ok=True)
            saved = values
        elif (command := step.get("run", "")).startswith("python -m pip"):
            # An index has no opkiln for this test, and pip is new enough.
            if "--upgrade pip" not in command:
                words = command.split()[3:]
                done = environment.pip(
                    *words, cwd=project, PIP_NO_INDEX="1", PIP_NO_BUILD_ISOLATION="0"
                )
                assert done.returncode == 0, done.stdout + done.stderr
        elif command:
            done = install.run(
                ["bash", "-e", "-o", "pipefail", "-c", command], project, **variables
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            said[command] = done.stdout
    if saved["key"] not in kept:
        kept[saved["key"]] = home / "kept"
        shutil.move(saved["path"], home / "kept")
    return said


MISTAKES = {
    "a wrong sign": ("a[i] + s * b[i]", "a[i] - s * b[i]", r"reference differ: the result is "),
    "no C++": ("b[i];", "b[i]", r"demo_add\.cpp:\d+:\d+: error: expected ';'"),
    "a type of no op": ("double scale", "float scale", r"used at .*/demo_add\.cpp:\d+"),
    "another type": (
        "double scale",
        "int64_t scale",
        r"scale is float in the schema, int in",
    ),
    "no binding": ("OPKILN_OP(demo_add, cpu);", "", r"hint: OPKILN_OP\(demo_add, cpu\);"),
}
SHOWN = ("a wrong sign", "no C++")  # the others' messages: tests/build/test_light_header.py


@needs_compiler
@needs_torch
@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake",
    [pytest.param(each, marks=() if each in SHOWN else pytest.mark.full) for each in MISTAKES],
)
def test_its_tests_say_what_is_wrong_with_an_edited_kernel(
    environment: Environment, project: Path, mistake: str
) -> None:
    right, wrong, message = MISTAKES[mistake]
    kernel = project / "src/demo_ops/ops/demo_add/demo_add.cpp"
    assert right in kernel.read_text()
    kernel.write_text(kernel.read_text().replace(right, wrong))
    argv = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "tests")
    done = environment.fork(*argv, cwd=project, PYTHONPATH="src")
    assert done.returncode == 1, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("E ")]
    assert re.search(message, "\n".join(said)), done.stdout
    assert len(said) < 12, done.stdout


@needs_compiler
@needs_torch
@pytest.mark.full
@pytest.mark.parametrize("backend", scaffold.BACKENDS)
def test_its_tests_pass_when_it_is_built_in_isolation(
    environment: Environment, tmp_path: Path, backend: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scaffold.write("demo_ops", str(tmp_path), backend)
    project = tmp_path / "demo_ops"
    links = install.wheel_of_opkiln(tmp_path_factory).parent
    argv = ("install", "--find-links", links, project)
    done = environment.pip(*argv, OPKILN_BUILD_DEMO_ADD="1", OPKILN_BUILD_TARGETS="cpu:native")
    if "No matching distribution found" in done.stdout + done.stderr:
        pytest.skip(f"pip has no index to take {backend} from")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(environment.prebuilt("demo_ops")) == ["demo_add"]
    assert environment.wheel_file("demo_ops").startswith("py3-none-manylinux_2_")
    fresh = str(tmp_path / "fresh")
    assert_tests_pass(environment, project, OPKILN_CACHE_DIR=fresh, **NATIVE_ONLY)
    done = environment.pip(*argv)
    assert done.returncode == 0, done.stdout + done.stderr
    assert environment.prebuilt("demo_ops") == {}
    assert environment.wheel_file("demo_ops") == "py3-none-any purelib"


@needs_compiler
@needs_torch
@pytest.mark.full
def test_uv_serves_no_wheel_that_was_built_for_other_variables(
    environment: Environment, project: Path, tmp_path: Path
) -> None:
    tools = tmp_path / "tools"
    done = install.run([sys.executable, "-m", "pip", "install", "-q", "--target", str(tools), "uv"])
    if done.returncode != 0:
        pytest.skip("pip has no index to take uv from")
    argv = [str(tools / "bin" / "uv"), "pip", "install", "--python", str(environment.python),
            "--offline", "--no-deps", "--no-build-isolation", str(project)]  # fmt: skip
    common = {"UV_CACHE_DIR": str(tmp_path / "uv"), "OPKILN_BUILD_TARGETS": "cpu:native"}
    found = []
    for variables in ({}, {"DS_BUILD_OPS": "1"}, {}, {"OPKILN_BUILD_DEMO_ADD": "1"}):
        done = install.run(argv, **common, **variables)
        assert done.returncode == 0, done.stderr
        found.append(sorted(environment.prebuilt("demo_ops")))
    assert found == [[], ["demo_add"], [], ["demo_add"]]
