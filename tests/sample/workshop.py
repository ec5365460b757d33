"""A package of three CUDA ops, and every way to build it under the eyes of a test."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from opkiln.base import digest
from opkiln.base.model import CUDA
from opkiln.machine.toolchain import choice
from opkiln.settings import override
from opkiln.store.layers import Store
from sample import child, pool
from sample.installed import require
from sample.package import Package
from sample.toolkit import Recording

ASKED = "7.5;8.0;8.6;9.0a;10.0f+PTX"
OPS = {"ampere_up": "AmpereUpBuilder", "hopper_up": "HopperUpBuilder",
       "anywhere": "AnywhereBuilder"}  # fmt: skip
_KINDS = ", ".join(OPS.values())
_IMPORT = f"from cuda_ops.op import {_KINDS}"


class Built(NamedTuple):
    """What one way of building the package did."""

    compiles: list[list[str]]  # the arguments of each nvcc
    libraries: dict[str, str]  # by op
    environments: list[tuple[str, str]]  # of each process that built: before, and afterwards


# The environment is looked at from inside, and as a child inherits it.
_HARNESS = """
import os, subprocess, sys
notes = sys.argv[1]
def note(when):
    inherited = subprocess.run(["env", "-0"], check=True, capture_output=True).stdout
    with open(notes + when, "w") as file:
        print(list(os.environb.items()), inherited, file=file)
{prepare}
note("before")
try:
    {body}
finally:
    note("after")
"""


class Workshop:
    """The package, the toolkit with the recording nvcc, and stores that know both compilers."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.package = Package("cuda", base / "site", "cuda_ops")
        self._announce()
        with pytest.MonkeyPatch.context() as patch:
            for name in child.VARIABLES.intersection(os.environ):
                patch.delenv(name)
            patch.setenv("OPKILN_CACHE_DIR", str(base / "warm"))
            device = choice.choose(Store().memory, CUDA).device
            assert device is not None
            if "100f" not in device.accepts:
                pytest.skip(f"nvcc {device.version} does not know sm_100f")
            self.real = Path(device.home)
            self.recording = Recording(base / "toolkit", self.real)
            # What is remembered of a program that was just made is not believed: ask it later.
            now = time.time_ns
            patch.setattr(digest.time, "time_ns", lambda: now() + 3_000_000_000)
            with override(cuda_home=str(self.recording.home)):
                choice.choose(Store().memory, CUDA)
            patch.delenv("PYTHONPATH", raising=False)
            self.environment = dict(os.environ)
        self.recording.compiles()
        self._stores = itertools.count()
        self._children = itertools.count()
        self._notes: list[Path] = []
        self._built: dict[str, Built] = {}

    def _announce(self) -> None:
        """Let the package provide its ops, as an installed distribution does."""
        metadata = self.package.where / "cuda_ops-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: cuda_ops\nVersion: 1.0\n")
        ops = "".join(f"{name} = cuda_ops.op:{kind}\n" for name, kind in OPS.items())
        (metadata / "entry_points.txt").write_text(f"[opkiln.ops]\n{ops}")

    def store(self) -> Path:
        """An empty store that remembers the compilers."""
        made = self.base / f"store{next(self._stores)}"
        warm = self.base / "warm" / "v1" / "toolchains"
        made.mkdir(0o700)
        shutil.copytree(warm, made / "v1" / "toolchains")
        for directory in (made / "v1", made / "v1" / "toolchains"):
            directory.chmod(0o700)
        return made

    def variables(self, store: Path, toolkit: Path | None = None) -> dict[str, str | None]:
        home = str(toolkit or self.recording.home)
        cleared = dict.fromkeys(os.environ.keys() - self.environment.keys() - {"PYTHONPATH"})
        return cleared | self.environment | {
            "OPKILN_CACHE_DIR": str(store),
            "OPKILN_RUNTIME_DIR": str(self.base / "run"),
            "OPKILN_CUDA_HOME": home,
            "CUDA_HOME": home,
            "TORCH_CUDA_ARCH_LIST": ASKED,
            "OPKILN_PROGRESS": "off",
        }  # fmt: skip

    def start(
        self, body: str, variables: dict[str, str | None], prepare: str = ""
    ) -> subprocess.Popen[str]:
        code = _HARNESS.format(body=textwrap.indent(body, "    ").strip(), prepare=prepare)
        notes = self.base / f"environment{next(self._children)}-"
        self._notes.append(notes)
        return child.start(code, str(notes), path=[self.package.where], env=variables, bare=False)

    def finish(self, started: subprocess.Popen[str]) -> str:
        done = child.finish(started, timeout=300)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return str(done.stdout)

    def environments(self) -> list[tuple[str, str]]:
        """What each process since the last call had in its environment, before and afterwards."""
        noted, self._notes = self._notes, []
        return [
            (Path(f"{each}before").read_text(), Path(f"{each}after").read_text()) for each in noted
        ]

    # The ways to build the package

    def built(self, way: str) -> Built:
        """What the way of this name does; done once."""
        if way not in self._built:
            self._built[way] = getattr(self, way)()
        return self._built[way]

    def jit(self) -> Built:
        body = (
            f"{_IMPORT}\n"
            f"for kind in ({_KINDS}):\n"
            "    library = kind(backend='cuda').jit_load()\n"
            "    assert library.answer() == 42\n"
            "    print(kind.NAME, library._name)\n"
        )
        return self._printed(body)

    def resolved_with_the_machines_own(self) -> Built:
        """By the function that every load and every command comes to, with no stand-in."""
        body = (
            f"{_IMPORT}\n"
            "from opkiln.decision.terms import BUILD, Request\n"
            "from opkiln.loading import loader\n"
            f"for kind in ({_KINDS}):\n"
            "    made, _ = loader.obtain(Request(kind(backend='cuda').op(), BUILD))\n"
            "    assert made.origin == 'built'\n"
            "    print(kind.NAME, made.path)\n"
        )
        return self._printed(body, self.real)

    def _printed(self, body: str, toolkit: Path | None = None) -> Built:
        store = self.store()
        variables = self.variables(store, toolkit)
        if toolkit is not None:  # nobody records what it compiles
            variables["OPKILN_STORE_LAYERS"] = str(pool.LAYER)
        out = self.finish(self.start(body, variables))
        if toolkit is not None:
            pool.add(store)
        libraries = dict(line.split() for line in out.splitlines())
        return Built(self.recording.compiles(), libraries, self.environments())

    def serial(self) -> Built:
        return self._commands([[*OPS, "-j", "1"]])

    def parallel(self) -> Built:
        return self._commands([[*OPS]])

    def processes(self) -> Built:
        return self._commands([[name] for name in OPS])

    def _commands(self, lines: list[list[str]]) -> Built:
        """``opkiln build``, as many at once as there are lines."""
        variables = self.variables(self.store())
        running = []
        for words in lines:
            body = (
                "from opkiln.cli.main import main\n"
                f"sys.argv = {['opkiln', 'build', '--target', 'cuda', '--json', *words]!r}\n"
                "main()\n"
            )
            running.append(self.start(body, variables))
        libraries = {}
        for started in running:
            for row in json.loads(self.finish(started))["ops"]:
                assert row["status"] == "built"
                libraries[row["op"]] = row["path"]
        return Built(self.recording.compiles(), libraries, self.environments())

    def build_extension(self) -> Built:
        return self._setup(ninja=False)

    def build_extension_with_ninja(self) -> Built:
        return self._setup(ninja=True)

    def _setup(self, *, ninja: bool) -> Built:
        """torch's BuildExtension, in a setup.py of the package.

        A torch without CUDA refuses .cu files only because it has looked for no toolkit: all that
        is missing is the module variable that holds where it is. setuptools writes two variables
        of its own into the environment (``check_environ``): it does so before that is looked at.
        """
        pytest.importorskip("torch")
        require("setuptools")
        work = self.base / ("ninja" if ninja else "distutils")
        work.mkdir()
        variables = self.variables(self.store())
        if ninja:
            variables["PATH"] = f"{_ninja()}{os.pathsep}{variables['PATH']}"
        (work / "setup.py").write_text(
            "from setuptools import setup\n"
            "from torch.utils.cpp_extension import BuildExtension\n"
            f"{_IMPORT}\n"
            "setup(\n"
            "    name='cuda_ops', version='1', packages=['cuda_ops'],\n"
            f"    ext_modules=[each().builder() for each in ({_KINDS})],\n"
            f"    cmdclass={{'build_ext': BuildExtension.with_options(use_ninja={ninja})}},\n"
            ")\n"
        )
        prepare = (
            f"os.chdir({str(work)!r})\n"
            "import setuptools\n"
            "from distutils.util import check_environ\n"
            "from torch.utils import cpp_extension\n"
            "check_environ()\n"
            "if cpp_extension.CUDA_HOME is None:\n"
            "    cpp_extension.CUDA_HOME = os.environ['CUDA_HOME']\n"
            f"assert not {ninja} or cpp_extension.is_ninja_available()\n"
        )
        body = (
            "import runpy\n"
            "sys.argv = ['setup.py', 'build_ext', '--build-lib', 'out', '--build-temp', 'temp']\n"
            "runpy.run_path('setup.py', run_name='__main__')\n"
        )
        out = self.finish(self.start(body, variables, prepare))
        assert ("[1/2]" in out) == ninja
        found = {path.parent.name: str(path) for path in (work / "out").rglob("*_op*.so")}
        return Built(self.recording.compiles(), found, self.environments())


def _ninja() -> str:
    """The directory of a ninja, on PATH or of the Python package."""
    if found := shutil.which("ninja"):
        return os.path.dirname(found)
    beside = Path(sys.executable).with_name("ninja")
    if beside.exists():
        return str(beside.parent)
    pytest.skip("no ninja: pip install ninja")
