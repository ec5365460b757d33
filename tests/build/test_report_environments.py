"""What `opkiln report` says on machines of many kinds, read as a user and as a program reads it.

Every report here runs in a process of its own that sees one torch (a stand-in whose version.py says
what it is, and which fails when it is imported), a PATH with chosen programs, and no toolkit of the
machine's own unless a test asks for it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest
from sample import child
from sample.rocm import Rocm

from opkiln import settings
from opkiln.machine.toolchain import nvcc
from opkiln.report import commands

if TYPE_CHECKING:
    from collections.abc import Iterator

# Nothing that lies where installers put toolkits is found, unless the test says so.
_RUN = """
import sys
started = []
sys.addaudithook(lambda event, args: started.append(args[1]) if event == "subprocess.Popen" else 0)
from opkiln.machine.toolchain import hipcc, libsycl, toolkits
if {hide}:
    toolkits.DIRECTORIES, hipcc.PARENT, libsycl.ONEAPI = (), "/nonexistent", "/nonexistent"
{before}
from opkiln.cli.main import _run
code = _run(sys.argv[1:])
assert {imports} or "torch" not in sys.modules, "torch was imported"
if started:
    print(f"started {{len(started)}} processes", file=sys.stderr)
sys.exit(code)
"""


class World:
    """A machine with chosen packages and programs."""

    def __init__(self, root: Path, compilers: Path) -> None:
        self.compilers = compilers
        self.path = [root / "bin"]
        self.site = root / "site"
        self.site.mkdir()
        (self.site / "click").symlink_to(Path(click.__file__).parent)
        self.bin = root / "bin"
        self.bin.mkdir()
        self.hide = True
        self.home = root / "home"
        self.home.mkdir()
        self.variables: dict[str, str] = {}
        self.before = ""  # lines that run first; with them, torch may be imported

    @property
    def code(self) -> str:
        return _RUN.format(hide=self.hide, before=self.before, imports=bool(self.before))

    def program(self, *names: str) -> None:
        """Put programs of this machine on PATH."""
        link(self.bin, *names)
        self.path = list(dict.fromkeys([*self.path, self.bin]))

    def compiler(self) -> None:
        """Put this machine's C++ compiler on PATH, where all tests have it."""
        self.path = [self.compilers, *(each for each in self.path if any(each.iterdir()))]

    def torch(self, version: str, *, cuda: str | None = None, hip: str | None = None) -> Path:
        """Install a torch that is only looked at: importing it is an error."""
        made = self.site / "torch"
        made.mkdir()
        (made / "__init__.py").write_text("raise ImportError('nobody was to import torch')\n")
        lines = ["from typing import Optional", f"__version__ = {version!r}", "debug = False",
                 f"cuda: Optional[str] = {cuda!r}", f"hip: Optional[str] = {hip!r}"]  # fmt: skip
        (made / "version.py").write_text("\n".join(lines) + "\n")
        return made

    def package(self, name: str, text: str = "") -> Path:
        """Install a module."""
        made = self.site / name
        made.mkdir()
        (made / "__init__.py").write_text(text)
        return made

    def run(self, *arguments: str) -> tuple[str, str]:
        """(standard output, standard error) of `opkiln report`."""
        path = os.pathsep.join(map(str, self.path))
        variables = {"PATH": path, "HOME": str(self.home), **self.variables}
        started = child.start(self.code, "report", *arguments, path=[self.site], env=variables)
        done = child.finish(started)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout, done.stderr

    def text(self, *arguments: str) -> str:
        return self.run(*arguments)[0]

    def json(self, *arguments: str) -> dict[str, Any]:
        return dict(json.loads(self.run("--json", *arguments)[0]))


def link(where: Path, *names: str) -> None:
    """Make links to programs of this machine."""
    for name in names:
        real = shutil.which(name)
        if real is None:
            pytest.skip(f"no {name} on this machine")
        (where / name).symlink_to(real)


@pytest.fixture(scope="module")
def compilers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("compilers")
    link(made, "g++", "as", "ld")
    return made


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory")


@pytest.fixture
def world(tmp_path: Path, compilers: Path, cache: Path, memory: Path) -> Iterator[World]:
    """Its compiler is asked once for all tests."""
    known = cache / settings.LAYOUT / "toolchains"
    shutil.copytree(memory, known, dirs_exist_ok=True)
    yield World(tmp_path, compilers)
    if not any(memory.iterdir()):
        shutil.copytree(known, memory, dirs_exist_ok=True)


def section(text: str, title: str) -> str:
    """One section of a report, with single blanks, and each number in place of its note."""
    body = f"\n\n{text}".partition(f"\n\n{title}\n")[2].partition("\n\n")[0]
    said = "\n".join(" ".join(line.split()) for line in body.splitlines())
    notes = dict(re.findall(r"^(\(\d+\)) (.*)$", said, re.MULTILINE))
    return re.sub(r"\(\d+\)$", lambda number: notes[number[0]], said, flags=re.MULTILINE)


def row(found: dict[str, Any], op: str) -> dict[str, Any]:
    (match,) = [each for each in found["ops"] if each["op"] == op]
    unknown = {"reason": match["error"], "compatible": False}
    return {**match, **next(iter(match["backends"]), unknown)}


def test_this_machine_as_it_is(world: World) -> None:
    world.compiler()
    world.torch("2.13.0+cpu")
    text = world.text()
    assert "cpu_adam cpu no no yes not built yet: its first use builds it" in section(text, "ops")
    assert "torch 2.13.0+cpu, no CUDA, no HIP, C++11 ABI" in section(text, "environment")
    assert f"C++ {world.compilers}/g++, " in section(text, "compilers")
    assert "CUDA none was found" in section(text, "compilers")
    assert "0 B of 20.0 GiB" not in section(text, "cache")  # what the compiler said is kept there
    assert section(text, "problems") == ""
    found = world.json()
    assert row(found, "cpu_adam")["serves"] == "cpu"
    assert found["problems"] == []
    (taken,) = [each for each in found["environment"]["compilers"] if each["taken"]]
    assert (taken["path"], taken["refused"], taken["asked"]) == (
        f"{world.compilers}/g++", "", True,
    )  # fmt: skip


def test_no_compiler(world: World) -> None:
    world.torch("2.13.0+cpu")
    text = world.text()
    assert "cpu_adam cpu no no no no C++ compiler can be used here" in section(text, "ops")
    assert "C++ g++, refused: not on PATH (PATH)" in section(text, "compilers")
    assert "C++ compiler none can be used: g++: not on PATH" in section(text, "problems")
    assert f"hint: {commands.install_command('g++')}" in section(text, "problems")
    found = world.json()
    assert not row(found, "cpu_adam")["compatible"]
    assert {each["taken"] for each in found["environment"]["compilers"]} == {False}


def test_a_compiler_that_cannot_be_used_is_not_taken_for_one(world: World) -> None:
    world.torch("2.13.0+cpu")
    broken = world.bin / "g++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    here = row(world.json(), "cpu_adam")
    assert (here["status"], here["compatible"]) == ("would fall back", False)
    assert "--version exits with 1" in here["reason"]
    assert "--version exits with 1" in section(world.text(), "problems")


def test_no_torch(world: World) -> None:
    world.compiler()
    text = world.text()
    assert "torch not installed" in section(text, "environment")
    assert "cpu_adam cpu no no no needs torch: torch is not installed" in section(text, "ops")
    pip = f"{shlex.quote(sys.executable)} -m pip install torch"
    assert f"torch it is not installed\nhint: {pip}" in section(text, "problems")
    found = world.json()
    assert found["environment"]["torch"] is None
    assert "torch is not installed" in row(found, "cpu_adam")["reason"]


def test_a_torch_that_cannot_be_read_is_a_problem_and_no_end(world: World) -> None:
    world.compiler()
    (world.torch("2.13.0+cpu") / "version.py").unlink()
    text = world.text()
    assert "torch cannot be read: [Errno 2] No such file or directory" in section(
        text, "environment"
    )
    assert "-m pip install --force-reinstall torch" in section(text, "problems")
    assert "version.py" in row(world.json(), "cpu_adam")["reason"]
    assert "version.py" in world.json()["environment"]["torch_error"]


def test_a_torch_of_the_cpu_with_nvcc_present_lists_the_toolkit_and_asks_it_nothing(
    world: World, tmp_path: Path
) -> None:
    world.compiler()
    world.torch("2.13.0+cpu")
    toolkit = tmp_path / "cuda-13.0"
    (toolkit / "bin").mkdir(parents=True)
    (toolkit / "bin" / "nvcc.profile").touch()
    asked = tmp_path / "asked"
    (toolkit / "bin" / "nvcc").write_text(f"#!/bin/sh\necho $* >> {asked}\nexit 1\n")
    (toolkit / "bin" / "nvcc").chmod(0o755)
    world.variables["CUDA_HOME"] = str(toolkit)
    text = world.text()
    said = f"CUDA {toolkit}, not asked: torch is not built for CUDA"
    assert f"{said} (CUDA_HOME)" in section(text, "compilers")
    assert "cuda" not in section(text, "problems").lower()
    assert not asked.exists()
    (tool,) = world.json()["environment"]["toolkits"]
    assert (tool["backend"], tool["taken"], tool["asked"]) == ("cuda", False, False)
    assert "refused: --version exits with 1" in section(world.text("--probe"), "compilers")
    assert asked.read_text().startswith("--version")


def test_a_toolkit_that_was_named_and_is_not_there_is_listed_without_asking(
    world: World,
) -> None:
    world.compiler()
    world.torch("2.13.0+cpu")
    world.variables |= {"CUDA_HOME": "/gone", "ROCM_HOME": "/gone", "OPKILN_SYCL_CXX": "/gone/icpx"}
    found = section(world.text(), "compilers").splitlines()
    assert "CUDA /gone/bin/nvcc, refused: no such program (CUDA_HOME)" in found
    assert "ROCm /gone/bin/hipcc, refused: no such program (ROCM_HOME)" in found
    assert "SYCL /gone/icpx, refused: no such program (OPKILN_SYCL_CXX)" in found
    problems = section(world.text(), "problems")
    assert "CUDA_HOME there is no /gone/bin/nvcc\nhint: unset CUDA_HOME" in problems
    assert "ROCM_HOME there is no /gone/bin/hipcc\nhint: unset ROCM_HOME" in problems
    assert "OPKILN_SYCL_CXX there is no /gone/icpx\nhint: unset OPKILN_SYCL_CXX" in problems


def test_a_compiler_that_was_named_and_is_not_there_is_to_be_unset(world: World) -> None:
    world.compiler()
    world.torch("2.13.0+cpu")
    world.variables["CXX"] = "/nope"
    problems = section(world.text(), "problems")
    assert "C++ compiler none can be used: /nope: " in problems
    assert "hint: unset CXX" in problems


def test_the_accelerator_in_force_is_the_first_that_answers_or_the_one_asked_for(
    world: World,
) -> None:
    world.compiler()
    world.torch("2.13.0+cpu")
    assert "in force cpu" in section(world.text(), "accelerators").splitlines()
    world.variables["OPKILN_ACCELERATOR"] = "cpu"
    assert "in force cpu (OPKILN_ACCELERATOR)" in section(world.text(), "accelerators").splitlines()


def test_an_accelerator_that_was_asked_for_and_cannot_serve_is_a_problem(world: World) -> None:
    world.compiler()
    world.torch("2.13.0+cpu")
    world.variables["OPKILN_ACCELERATOR"] = "npu"
    text = world.text()
    why = "OPKILN_ACCELERATOR=npu cannot be used: "
    assert f"in force none: {why}" in section(text, "accelerators")
    assert f"accelerator {why}" in section(text, "problems")
    assert "hint: unset OPKILN_ACCELERATOR" in section(text, "problems")
    assert world.json()["environment"]["accelerator"]["name"] == ""


def test_a_launcher_that_is_not_there_does_not_end_the_report(world: World) -> None:
    world.compiler()
    world.torch("2.13.0+cu130", cuda="13.0")
    world.variables["CXX"] = "no-such-launcher g++"
    assert "'no-such-launcher' is not on PATH" in section(world.text(), "problems")


@pytest.fixture
def real_nvcc(world: World) -> str:
    """The home of this machine's own toolkit."""
    if not nvcc.available():
        pytest.skip("no nvcc on this machine")
    world.compiler()
    world.torch("2.13.0+cpu")
    world.hide = False
    found = world.json("--probe")["environment"]["toolkits"]
    taken = [each["path"] for each in found if each["backend"] == "cuda" and each["taken"]]
    if not taken:
        pytest.skip("no nvcc here can be used")
    return str(taken[0])


def test_what_was_asked_once_is_known_to_the_next_report(world: World, real_nvcc: str) -> None:
    text, words = world.run()
    assert f"CUDA {real_nvcc}, " in section(text, "compilers")
    assert ", taken" in section(text, "compilers").partition("CUDA")[2].partition("\n")[0]
    assert words == ""  # no process was started


def test_a_toolkit_of_another_major_version_than_torch_is_refused_by_name(
    world: World, real_nvcc: str
) -> None:
    shutil.rmtree(world.site / "torch")
    world.torch("2.13.0+cu108", cuda="10.8")
    world.variables["OPKILN_CUDA_HOME"] = real_nvcc
    text = world.text()
    assert "torch was built with 10.8, another major version" in section(text, "compilers")
    assert "CUDA toolkit none can be used" in section(text, "problems")
    assert "2.13.0+cu108, CUDA 10.8" in section(text, "environment")


def test_a_rocm_torch_asks_its_hipcc(world: World, tmp_path: Path) -> None:
    world.compiler()
    world.torch("2.13.0+rocm6.2", hip="6.2.41133")
    world.program("sh", "env")
    rocm = Rocm(tmp_path / "rocm")
    world.variables["ROCM_HOME"] = str(rocm.home)
    text = world.text()
    said = section(text, "compilers")
    assert f"ROCm {rocm.hipcc}, 6.2.41133, taken (ROCM_HOME)" in said
    assert "torch 2.13.0+rocm6.2, HIP 6.2.41133" in section(text, "environment")
    # Its preferred backend has no device here, so the CPU serves, and rocm says why it does not.
    found = world.json()
    assert row(found, "fused_adam")["serves"] == "cpu"
    assert "rocm no: there is no AMD GPU driver here" in section(text, "accelerators")
    backends = {each["backend"]: each for each in row(found, "fused_adam")["backends"]}
    assert not backends["rocm"]["compatible"]
    assert "there is no AMD GPU driver here" in backends["rocm"]["reason"]


def test_a_rocm_torch_without_rocm_is_a_problem(world: World) -> None:
    world.compiler()
    world.torch("2.13.0+rocm6.2", hip="6.2.41133")
    assert "ROCm toolkit none can be used: hipcc: not on PATH" in section(world.text(), "problems")


def test_an_xpu_torch_without_a_sycl_compiler_is_a_problem(world: World) -> None:
    world.compiler()
    library = world.torch("2.13.0+xpu") / "lib" / "libtorch_xpu.so"
    library.parent.mkdir()
    library.touch()
    text = world.text()
    assert "SYCL icpx, refused: not on PATH (PATH)" in section(text, "compilers")
    assert "SYCL toolkit none can be used" in section(text, "problems")
    assert "xpu no: there is no Intel GPU here" in section(text, "accelerators").splitlines()


def test_a_vendors_package_without_its_device_is_no_accelerator(world: World) -> None:
    world.compiler()
    world.torch("2.13.0+cpu")
    vendors = {
        "hpu": ("habana_frameworks", "/dev/accel/accel* or /dev/hl*"),
        "npu": ("torch_npu", "/dev/davinci*"),
        "mlu": ("torch_mlu", "/dev/cambricon_dev*"),
    }
    for package, _ in vendors.values():
        world.package(package, "raise ImportError('nobody was to import this')\n")
    lines = section(world.text(), "accelerators").splitlines()
    found = {each["name"]: each for each in world.json()["environment"]["accelerators"]}
    for name, (package, node) in vendors.items():
        why = f"{package} is installed, but there is no {node} here"
        assert f"{name} no: {why}" in lines
        assert found[name] == {"name": name, "present": False, "why": why}
    assert found["cpu"]["present"]


def test_a_vendors_package_that_counts_devices_is_an_accelerator(
    world: World, tmp_path: Path
) -> None:
    world.compiler()
    torch = world.torch("2.13.0+cpu")
    (torch / "__init__.py").write_text(
        "from types import SimpleNamespace\n"
        "npu = SimpleNamespace(device_count=lambda: 2, is_available=lambda: True)\n"
        "def get_device_module(device): return npu\n"
    )
    world.package("torch_npu")
    (tmp_path / "davinci0").touch()
    world.before = (
        "from opkiln.accelerator import gpus\n"
        f"gpus.VENDORS['npu'].NODES = ({str(tmp_path / 'davinci')!r},)\n"
    )
    text = world.text("--hide-ops")
    assert "npu yes: torch_npu counts 2" in section(text, "accelerators").splitlines()
