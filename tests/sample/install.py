"""Real installs: environments of their own, build backends, pip, and projects to install."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from sample import child, forks

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(sysconfig.get_path("purelib"))
_NOT_SHARED = ("opkiln", "__editable__", "pip", "__pycache__", "distutils-precedence")


# What pip runs of a build that is not isolated, without the two processes before it that only ask.
_BUILD = """
import importlib, sys, tomllib
with open("pyproject.toml", "rb") as file:
    asked = tomllib.load(file).get("build-system", {}).get("build-backend")
module, _, part = (asked or "setuptools.build_meta:__legacy__").partition(":")
backend = importlib.import_module(module)
getattr(getattr(backend, part) if part else backend, sys.argv[1])(sys.argv[2])
"""


def build(
    python: object, project: Path, out: Path, *, editable: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a project's build backend, which puts a wheel into ``out``."""
    out.mkdir()
    hook = f"build_{'editable' if editable else 'wheel'}"
    return run([str(python), "-P", "-c", _BUILD, hook, str(out)], project, **variables)


class Environment:
    """A virtual environment that has what this one has, by symbolic links; but no opkiln."""

    def __init__(self, path: Path, *, without: Iterable[str] = ()) -> None:
        self.path = path
        venv.create(path, symlinks=True)
        self.python = path / "bin" / "python"
        self.site = path / SHARED.relative_to(sys.prefix)
        left_out = (*_NOT_SHARED, *without)
        for each in SHARED.iterdir():
            if not each.name.startswith(left_out):
                (self.site / each.name).symlink_to(each)

    def pip(
        self, *arguments: object, cwd: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the pip of this environment on that one, as its ``--python`` does."""
        import pip

        # Not by the name of pip's directory: that would put this environment before that one.
        argv = [str(self.python), f"{pip.__path__[0]}/__pip-runner__.py", *map(str, arguments)]
        return run(argv, cwd, **variables)

    def pip_install(self, project: Path, **variables: str) -> str:
        """Install a project by pip, without its dependencies and not isolated; what it said."""
        options = ("--no-deps", "--no-build-isolation", "--no-compile", "-v")
        done = self.pip("install", *options, project, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def install(self, project: Path, *, editable: bool = False, **variables: str) -> str:
        """Install what a project's backend builds, as pip would; what the build said."""
        with tempfile.TemporaryDirectory(dir=self.path) as out:
            wheels = Path(out) / "wheels"
            done = build(self.python, project, wheels, editable=editable, **variables)
            assert done.returncode == 0, done.stdout + done.stderr
            (wheel,) = wheels.iterdir()
            self.uninstall(wheel.name.partition("-")[0])
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(self.site)
        return done.stdout + done.stderr

    def refuses(self, project: Path, **variables: str) -> str:
        """What the build of a project says that must fail."""
        with tempfile.TemporaryDirectory(dir=self.path) as out:
            done = build(self.python, project, Path(out) / "wheels", **variables)
        assert done.returncode != 0, done.stdout
        return done.stdout + done.stderr

    def uninstall(self, distribution: str) -> None:
        """Remove a distribution, if it is there."""
        for record in self.site.glob(f"{distribution}-*.dist-info/RECORD"):
            files = [line.partition(",")[0] for line in record.read_text().splitlines()]
            for name in {file.partition("/")[0] for file in files} - {".."}:
                if (self.site / name).is_dir():
                    shutil.rmtree(self.site / name)
                else:
                    (self.site / name).unlink(missing_ok=True)

    def run(self, *arguments: object, cwd: Path | None = None, **variables: str) -> str:
        """The standard output of its Python, which must succeed."""
        done = run([str(self.python), *map(str, arguments)], cwd, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def fork(
        self, *arguments: object, cwd: Path, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """What its Python comes to that has torch imported already."""
        path = os.pathsep.join(filter(None, [variables.pop("PYTHONPATH", ""), str(self.site)]))
        environment = {**os.environ, **variables, "PYTHONPATH": path}
        assert forks.suits(environment)
        started = forks.Fork(
            [*map(str, arguments)], cwd=cwd, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        return child.finish(started, timeout=600)

    def wheel_file(self, distribution: str) -> str:
        """The tag that a distribution was installed with, and where to."""
        (info,) = self.site.glob(f"{distribution}-*.dist-info")
        fields = dict(
            line.split(": ") for line in (info / "WHEEL").read_text().splitlines() if line
        )
        return f"{fields['Tag']} {'purelib' if fields['Root-Is-Purelib'] == 'true' else 'platlib'}"

    def version(self, distribution: str) -> str:
        (info,) = self.site.glob(f"{distribution}-*.dist-info")
        return info.name.removesuffix(".dist-info").partition("-")[2]

    def prebuilt(self, package: str) -> dict[str, list[str]]:
        """What a package was installed with: op -> what its libraries are for, sorted."""
        from opkiln.store import layer

        prebuilt = self.site / package / "prebuilt"
        found: dict[str, list[str]] = {}
        for entry in layer.entries(str(prebuilt)) if prebuilt.exists() else ():
            target = entry.manifest["target"]
            made = ";".join(target["archs"]) if target["archs"] else target["cpu"]
            found.setdefault(entry.manifest["op"], []).append(f"{target['backend']} {made}")
        return {op: sorted(made) for op, made in found.items()}


def run(
    argv: list[str], cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables}
    return subprocess.run(
        argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def copy_of_opkiln(where: Path, *, ops: Iterable[str] | None = None) -> Path:
    """opkiln's sources, with some of its ops or all: a build writes beside what it builds."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", where / "src", ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, where)
    if ops is not None:
        for each in (where / "src" / "opkiln" / "ops").iterdir():
            if (each / "op.py").exists() and each.name not in ops:
                shutil.rmtree(each)
    return where


def wheel_of_opkiln(factory: pytest.TempPathFactory) -> Path:
    """A wheel of opkiln as it is here, made once by one of a run's workers."""
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    where = shared / "wheel-of-opkiln"
    with open(shared / "wheel-of-opkiln.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not where.exists():
            source = copy_of_opkiln(factory.mktemp("opkiln"))
            done = build(sys.executable, source, source / "new")
            assert done.returncode == 0, done.stdout + done.stderr
            (source / "new").rename(where)
    (wheel,) = where.iterdir()
    return wheel


def with_opkiln(
    factory: pytest.TempPathFactory, name: str, *, without: Iterable[str] = ()
) -> Environment:
    """An environment with opkiln installed."""
    made = Environment(factory.mktemp(name) / "env", without=without)
    done = made.pip("install", "-q", "--no-deps", wheel_of_opkiln(factory))
    assert done.returncode == 0, done.stdout + done.stderr
    return made


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


_INIT = '''
"""A package with two ops that need no torch."""

from opkiln import OpBuilder


class FirstBuilder(OpBuilder):
    NAME = "first"
    KIND = "plain"
    ABI = "none"

    def sources(self):
        return ["csrc/first.cpp"]


class SecondBuilder(FirstBuilder):
    NAME = "second"
    BUILD_VAR = "QUICK_SECOND"

    def sources(self):
        return ["csrc/second.cpp"]
'''

_SETUPTOOLS = """
[build-system]
requires = ["setuptools>=77", "opkiln"]
build-backend = "setuptools.build_meta"

[project]
name = "quick"
version = "1.0"

[project.entry-points."opkiln.ops"]
first = "quick:FirstBuilder"
second = "quick:SecondBuilder"

[tool.setuptools.package-data]
quick = ["csrc/*"]
"""

_HATCHLING = """
[build-system]
requires = ["hatchling", "opkiln"]
build-backend = "hatchling.build"

[project]
name = "quick"
version = "1.0"

[project.entry-points."opkiln.ops"]
first = "quick:FirstBuilder"
second = "quick:SecondBuilder"

[tool.hatch.build.targets.wheel.hooks.opkiln]
"""


def quick_project(where: Path, backend: str = "setuptools") -> Path:
    """A project whose ops compile in a moment: ``src/quick`` with the ops ``first``, ``second``."""
    package = where / "src" / "quick"
    (package / "csrc").mkdir(parents=True)
    (package / "__init__.py").write_text(_INIT)
    (package / "csrc" / "number.h").write_text("#pragma once\nconstexpr int number = 41;\n")
    for name, more in (("first", 0), ("second", 1)):
        (package / "csrc" / f"{name}.cpp").write_text(
            f'#include "number.h"\nextern "C" int {name}() {{ return number + {more}; }}\n'
        )
    text = _SETUPTOOLS if backend == "setuptools" else _HATCHLING
    (where / "pyproject.toml").write_text(text)
    return where


CALL = "import quick; print(quick.FirstBuilder().load().first())"
NATIVE_ONLY = {"OPKILN_MODE": "sealed"}
