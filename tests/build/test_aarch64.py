"""Ops for aarch64 on another machine: a cross compiler builds them, inspection is their load test.

Under qemu-user the libraries also run; kernels that need torch do not, as torch is not there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sample import wanted

import opkiln
from opkiln import machine
from opkiln import plan as plans
from opkiln.binary import elf
from opkiln.build_model import Target, Toolchain
from opkiln.building import loadtest
from opkiln.decision.search import planned
from opkiln.decision.terms import BUILD, Request
from opkiln.errors import LoadError, LoadTestError, SpecError, ToolchainError
from opkiln.model import (
    ABI_NONE,
    ABI_STABLE,
    ABI_TORCH,
    CUDA,
    EXECUTABLE,
    LIBRARY,
    PYTHON,
    Op,
    OpSpec,
)
from opkiln.registry import get_builder
from opkiln.settings import override
from opkiln.store.layers import Store
from opkiln.toolchain import choice

if TYPE_CHECKING:
    from collections.abc import Callable

    from sample.package import Package, Steps

SOURCE = Path(opkiln.__file__).parent.parent
VEC_CHECK = Path(__file__).resolve().parents[1] / "ops" / "vec_check.cpp"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"

cross = pytest.mark.skipif(
    machine.architecture() == "aarch64" or shutil.which(COMPILER) is None,
    reason="no cross compiler: apt-get install g++-aarch64-linux-gnu",
)
emulated = pytest.mark.skipif(
    shutil.which(EMULATOR) is None, reason="no emulator: apt-get install qemu-user"
)


def artifact(op: Op, cpu: str = "armv8-a") -> Path:
    with override(cpu=cpu):
        return Path(wanted.artifact(op).path)


def emulate(program: Path, *arguments: Path) -> subprocess.CompletedProcess[str]:
    libraries = f"/usr/{COMPILER.removesuffix('-g++')}"
    return subprocess.run(
        [EMULATOR, "-L", libraries, str(program), *map(str, arguments)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


# The plan


def toolchain(**changes: Any) -> Toolchain:
    return Toolchain(
        family="gcc", cxx="/usr/bin/aarch64-linux-gnu-g++", version="g++ 12",
        machine="aarch64-linux-gnu", identity="x", accepts=frozenset(), include_dirs=(),
        cross=True,
    )._replace(**changes)  # fmt: skip


def target(**changes: Any) -> Target:
    made = Target("cpu", "linux", "aarch64", "armv8-a", (), "torch-stable-2.10")
    return made._replace(**changes)


def spec(**changes: Any) -> OpSpec:
    made = OpSpec("op", "somebody", "/src", ("op.cpp",))
    return made._replace(**changes)


def test_a_link_for_another_machine_takes_torchs_soname_from_a_stub() -> None:
    plan = plans.make(spec(), target(), toolchain())
    assert [step.kind for step in plan.steps] == ["compile", "stub", "link"]
    places = {"src": "/src", "stage": "/stage", "torch": "/torch", "opkiln": "/o", "abs": ""}
    compiling, stub, linking = (plans.argv(step, places) for step in plan.steps)
    assert "-march=armv8-a" in compiling
    assert "-Wl,-soname,libtorch_cpu.so" in stub
    assert stub[-1] in linking
    assert not any(argument.startswith(("-L/torch", "-ltorch")) for argument in linking)


def test_a_link_for_this_machine_takes_the_stub_for_the_stable_abi_alone() -> None:
    def kinds(**changes: Any) -> list[str]:
        plan = plans.make(spec(**changes), target(), toolchain(cross=False))
        return [step.kind for step in plan.steps]

    assert kinds() == ["compile", "stub", "link"]
    assert kinds(abi=ABI_TORCH) == ["compile", "link"]
    assert kinds(kind=EXECUTABLE) == ["compile", "link"]


@pytest.mark.parametrize("flag", ["-Wl,-z,defs", "-Wl,--no-undefined", "-Wl,-O1,-no-undefined"])
def test_a_link_that_must_find_every_symbol_takes_torchs_own_library(flag: str) -> None:
    plan = plans.make(spec(ldflags=(flag,)), target(), toolchain(cross=False))
    assert [step.kind for step in plan.steps] == ["compile", "link"]
    assert "-ltorch_cpu" in plan.steps[-1].argv


def test_an_op_without_torch_needs_no_stub() -> None:
    plan = plans.make(spec(abi=ABI_NONE), target(abi_tag="none"), toolchain())
    assert [step.kind for step in plan.steps] == ["compile", "link"]


@pytest.mark.parametrize(
    ("op", "for_", "needs"),
    [
        ({"abi": ABI_TORCH}, {}, "torch's and Python's own headers"),
        ({"kind": PYTHON}, {}, "torch's and Python's own headers"),
        ({"kind": EXECUTABLE}, {}, "torch's libraries"),
        ({"backend": CUDA, "vectorize": False}, {"backend": CUDA}, "a cuda toolkit"),
    ],
)
def test_what_needs_more_of_the_other_machine_is_refused(
    op: dict[str, Any], for_: dict[str, Any], needs: str
) -> None:
    with pytest.raises(SpecError, match="cannot be built for aarch64 here") as caught:
        plans.make(spec(**op), target(**for_), toolchain())
    assert needs in caught.value.why


# The target


def test_the_machine_follows_from_the_name_of_the_cpu() -> None:
    op = Op(spec(abi=ABI_NONE))
    with override(cpu="armv8.2-a+dotprod"):
        made = wanted.target_of(op)
    assert (made.machine, made.cpu, made.cpu_features) == ("aarch64", "armv8.2-a", ("dotprod",))
    with override(cpu="x86-64-v2"):
        assert wanted.target_of(op).machine == "x86_64"
    assert wanted.target_of(op).machine == machine.architecture()
    with override(cpu="armv8-a"):  # not vectorized: the baseline of that machine
        plain = wanted.target_of(Op(spec(abi=ABI_NONE, vectorize=False)))
    assert (plain.machine, plain.cpu) == ("aarch64", "armv8-a")


@pytest.mark.skipif(machine.architecture() == "aarch64", reason="it runs here")
def test_a_library_for_another_machine_is_not_loaded(plain: Package) -> None:
    with override(cpu="armv8-a"), pytest.raises(LoadError, match="cannot run here") as caught:
        plain.load()
    assert "aarch64" in caught.value.why


@pytest.mark.skipif(machine.architecture() == "aarch64", reason="it runs here")
def test_without_a_cross_compiler_the_error_says_what_to_install(
    plain: Package, tmp_path: Path
) -> None:
    op = plain.builder().op()
    with (
        override(path=(str(tmp_path),)),
        pytest.raises(ToolchainError, match="no C\\+\\+ compiler for aarch64") as caught,
    ):
        artifact(op)
    assert "apt-get install g++-aarch64-linux-gnu" in caught.value.hint
    with (
        override(cxx_aarch64="/no/such/g++"),
        pytest.raises(ToolchainError) as caught,
    ):
        artifact(op)
    assert "/no/such/g++ (call): no such program" in caught.value.why


def test_a_compiler_for_this_machine_is_refused_for_the_other(tmp_path: Path) -> None:
    if machine.architecture() == "aarch64" or shutil.which("g++") is None:
        pytest.skip("needs g++ for another machine than aarch64")
    with override(cxx_aarch64="g++"), pytest.raises(ToolchainError) as caught:
        choice.choose(Store().memory, "cpu", "aarch64")
    assert "not for aarch64" in caught.value.why
    # And is still the one for this machine: what is remembered of it is not mixed up.
    assert choice.choose(Store().memory, "cpu").machine.startswith(machine.architecture())


# Building


@cross
def test_an_op_without_torch_is_built_for_aarch64_and_found_again(
    plain: Package, steps: Steps
) -> None:
    op = plain.builder().op()
    path = artifact(op)
    assert elf.read(str(path)).machine == "aarch64"
    done = len(steps.seen)
    assert artifact(op) == path
    assert len(steps.seen) == done
    assert plain.load().add(1, 2) == 103  # for this machine, beside it


@cross
def test_a_bundled_op_is_built_for_aarch64_and_inspected(tmp_path: Path) -> None:
    arguments = ("--target", "cpu:armv8-a", "--bundle", str(tmp_path / "b"), "--verify", "--json")
    done = subprocess.run(
        [sys.executable, "-m", "opkiln", "build", "cpu_adam", *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["ops"]
    found = elf.read(row["path"])
    assert found.machine == "aarch64"
    assert "libtorch_cpu.so" in found.needed
    assert any(symbol.startswith("torch_") for symbol in found.undefined)
    assert (tmp_path / "b").exists()
    # What it was built for is no load of this machine's, which compiles its own.
    explained = subprocess.run(
        [sys.executable, "-m", "opkiln", "explain", "cpu_adam"],
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "would compile" in explained.stdout


@cross
def test_an_op_for_aarch64_is_planned_with_the_cross_compiler() -> None:
    with override(cpu="armv8-a"):
        op = get_builder("cpu_adam").op()
        made = planned(Request(op, BUILD))
    assert made.toolchain.cross
    assert made.toolchain.machine.startswith("aarch64")
    assert made.target.abi_tag == "torch-stable-2.10"


def test_a_link_against_the_stub_needs_what_one_against_torch_needs(
    package: Callable[..., Package], tmp_path: Path
) -> None:
    """Seen on this machine, which has both."""
    op = package("stable").builder().op()
    made = planned(Request(op, BUILD))
    whole = plans.make(
        made.spec._replace(ldflags=("-Wl,--no-undefined",)), made.target, made.toolchain
    )
    places = plans.anchors(made, str(tmp_path))
    linked = []
    for plan in (made, whole):
        for step in plan.steps:
            subprocess.run(plans.argv(step, places), check=True)
        linked.append(elf.read(str(tmp_path / plan.output)))
    assert linked[0] == linked[1]
    assert "libtorch_cpu.so" in linked[0].needed


@cross
def test_a_symbol_that_torch_lacks_is_found_by_inspection(tmp_path: Path) -> None:
    source = tmp_path / "op.cpp"
    source.write_text(
        'extern "C" int no_such_function(); int call() { return no_such_function(); }'
    )
    made = OpSpec("op", "somebody", str(tmp_path), ("op.cpp",), abi=ABI_STABLE, kind=LIBRARY)
    with pytest.raises(LoadTestError, match="could not be loaded on aarch64") as caught:
        artifact(Op(made))
    assert "undefined symbol: no_such_function" in caught.value.why


@cross
def test_a_schema_in_cpp_is_found_by_inspection(tmp_path: Path) -> None:
    source = tmp_path / "op.cpp"
    source.write_text(
        "#include <torch/csrc/stable/library.h>\n"
        'STABLE_TORCH_LIBRARY_FRAGMENT(mine, m) { m.def("f(Tensor x) -> Tensor"); }\n'
    )
    made = OpSpec("op", "somebody", str(tmp_path), ("op.cpp",), kernels=("somebody::op",))
    with pytest.raises(LoadTestError, match="defines a schema in C\\+\\+"):
        artifact(Op(made))


def test_a_library_for_the_wrong_machine_is_found_by_inspection(plain: Package) -> None:
    plain.load()
    found = plain.loaded().artifact
    assert found is not None
    other = "x86_64" if machine.architecture() == "aarch64" else "aarch64"
    with pytest.raises(LoadTestError, match=f"is for {machine.architecture()}"):
        loadtest.inspect(plain.builder().spec(), target(machine=other), None, found.path)


# Running, under an emulator


@cross
@emulated
@pytest.mark.parametrize("cpu", ["armv8-a", "armv8.2-a+dotprod"])
def test_vector_kernels_run_on_aarch64(cpu: str) -> None:
    headers = str(Path(opkiln.__file__).parent / "csrc")
    program = artifact(
        Op(
            OpSpec(
                "vec_check", "somebody", str(VEC_CHECK.parent), (VEC_CHECK.name,), (headers,),
                kind=EXECUTABLE, abi=ABI_NONE,
            )
        ),
        cpu,
    )  # fmt: skip
    done = emulate(program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 lanes" in done.stdout


@cross
@emulated
def test_a_library_is_loaded_and_called_on_aarch64(plain: Package, tmp_path: Path) -> None:
    library = artifact(plain.builder().op())
    (tmp_path / "call.cpp").write_text(
        "#include <cstdio>\n#include <dlfcn.h>\n"
        "int main(int, char** argv) {\n"
        "  void* library = dlopen(argv[1], RTLD_NOW);\n"
        "  if (!library) { std::puts(dlerror()); return 1; }\n"
        '  auto add = reinterpret_cast<int (*)(int, int)>(dlsym(library, "add"));\n'
        '  std::printf("%d\\n", add(1, 2));\n'
        "}\n"
    )
    made = OpSpec("call", "somebody", str(tmp_path), ("call.cpp",), kind=EXECUTABLE, abi=ABI_NONE)
    done = emulate(artifact(Op(made)), library)
    assert (done.returncode, done.stdout) == (0, "103\n"), done.stderr
