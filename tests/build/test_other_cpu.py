"""Ops for the other architecture: a cross compiler builds them, inspection is their load test.

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
from sample import command, wanted
from sample.levels import (
    AARCH64,
    ARM_V8_2,
    HERE,
    IS_X86,
    OTHER,
    OTHER_CXX,
    OTHER_CXX_PACKAGE,
    OTHER_EMULATOR,
    OTHER_LEVELS,
    X86_64,
    X86_V2,
    X86_V3,
)

import opkiln
from opkiln.base.build_model import Target, Toolchain
from opkiln.base.model import (
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
from opkiln.builder.registry import get_builder
from opkiln.building import loadtest
from opkiln.building.asking import plan_here
from opkiln.decision.terms import BUILD, Request
from opkiln.errors import LoadError, LoadTestError, SpecError, ToolchainError
from opkiln.machine.binary import elf
from opkiln.machine.toolchain import choice
from opkiln.plan import plan as plans
from opkiln.settings import override
from opkiln.store.layers import Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from sample.package import Package, Steps

SOURCE = Path(opkiln.__file__).parent.parent
VEC_CHECK = Path(__file__).resolve().parents[1] / "ops" / "vec_check.cpp"
BASELINE = OTHER_LEVELS[0]

cross = pytest.mark.skipif(
    shutil.which(OTHER_CXX) is None,
    reason=f"no cross compiler: apt-get install {OTHER_CXX_PACKAGE}",
)
emulated = pytest.mark.skipif(
    shutil.which(OTHER_EMULATOR) is None, reason="no emulator: apt-get install qemu-user"
)


def artifact(op: Op, cpu: str = BASELINE) -> Path:
    with override(cpu=cpu):
        return Path(wanted.artifact(op).path)


def emulate(program: Path, *arguments: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [OTHER_EMULATOR, "-cpu", "max", "-L", f"/usr/{OTHER}-linux-gnu", program, *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


# The plan


def toolchain(**changes: Any) -> Toolchain:
    return Toolchain(
        family="gcc", cxx=f"/usr/bin/{OTHER_CXX}", version="g++ 12",
        machine=f"{OTHER}-linux-gnu", identity="x", accepts=frozenset({f"-march={BASELINE}"}),
        include_dirs=(), cross=True,
    )._replace(**changes)  # fmt: skip


def target(**changes: Any) -> Target:
    made = Target("cpu", "linux", OTHER, BASELINE, (), "torch-stable-2.10")
    return made._replace(**changes)


def spec(**changes: Any) -> OpSpec:
    made = OpSpec("op", "somebody", "/src", ("op.cpp",))
    return made._replace(**changes)


def test_a_link_for_another_machine_takes_torchs_soname_from_a_stub() -> None:
    plan = plans.make(spec(), target(), toolchain())
    assert [step.kind for step in plan.steps] == ["compile", "stub", "link"]
    places = {"src": "/src", "stage": "/stage", "torch": "/torch", "opkiln": "/o", "abs": ""}
    compiling, stub, linking = (plans.command(step, places).argv for step in plan.steps)
    assert f"-march={BASELINE}" in compiling
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
    with pytest.raises(SpecError, match=f"cannot be built for {OTHER} here") as caught:
        plans.make(spec(**op), target(**for_), toolchain())
    assert needs in caught.value.why


# The target


def test_the_machine_follows_from_the_name_of_the_cpu() -> None:
    op = Op(spec(abi=ABI_NONE))
    with override(cpu=f"{ARM_V8_2}+dotprod"):
        made = wanted.target_of(op)
    assert (made.machine, made.cpu, made.cpu_features) == (AARCH64, ARM_V8_2, ("dotprod",))
    with override(cpu=X86_V2):
        assert wanted.target_of(op).machine == X86_64
    assert wanted.target_of(op).machine == HERE
    with override(cpu=OTHER_LEVELS[1]):  # not vectorized: the baseline of that machine
        plain = wanted.target_of(Op(spec(abi=ABI_NONE, vectorize=False)))
    assert (plain.machine, plain.cpu) == (OTHER, BASELINE)


def test_a_library_for_another_machine_is_not_loaded(plain: Package) -> None:
    with override(cpu=BASELINE), pytest.raises(LoadError, match="cannot run here") as caught:
        plain.load()
    assert OTHER in caught.value.why


def test_without_a_cross_compiler_the_error_says_what_to_install(
    plain: Package, tmp_path: Path
) -> None:
    op = plain.builder().op()
    with (
        override(path=(str(tmp_path),)),
        pytest.raises(ToolchainError, match=f"no C\\+\\+ compiler for {OTHER}") as caught,
    ):
        artifact(op)
    assert f"apt-get install {OTHER_CXX_PACKAGE}" in caught.value.hint


def test_a_compiler_for_this_machine_is_refused_for_the_other(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    (tmp_path / OTHER_CXX).symlink_to(compiler)
    with override(path=(str(tmp_path),)), pytest.raises(ToolchainError) as caught:
        choice.choose(Store().memory, "cpu", OTHER)
    assert f"not for {OTHER}" in caught.value.why
    # And is still the one for this machine: what is remembered of it is not mixed up.
    assert choice.choose(Store().memory, "cpu").machine.startswith(HERE)


# Building


@cross
def test_an_op_without_torch_is_built_for_the_other_cpu_and_found_again(
    plain: Package, steps: Steps
) -> None:
    op = plain.builder().op()
    path = artifact(op)
    assert elf.read(str(path)).machine == OTHER
    done = len(steps.seen)
    assert artifact(op) == path
    assert len(steps.seen) == done
    assert plain.load().add(1, 2) == 103  # for this machine, beside it


@cross
def test_a_bundled_op_is_built_for_the_other_cpu_and_inspected(tmp_path: Path) -> None:
    bundle = tmp_path / "b"
    arguments = ("--target", f"cpu:{BASELINE}", "--bundle", str(bundle), "--verify", "--json")
    done = command.run("build", "cpu_adam", *arguments)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["ops"]
    found = elf.read(row["path"])
    assert found.machine == OTHER
    assert "libtorch_cpu.so" in found.needed
    assert any(symbol.startswith("torch_") for _, symbol, _ in found.symbols)
    assert bundle.exists()
    # What it was built for is no load of this machine's, which compiles its own.
    explained = subprocess.run(
        [sys.executable, "-m", "opkiln", "explain", "cpu_adam"],
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "would compile" in explained.stdout


@cross
def test_an_op_for_the_other_cpu_is_planned_with_the_cross_compiler() -> None:
    with override(cpu=BASELINE):
        op = get_builder("cpu_adam").op()
        made = plan_here(Request(op, BUILD))
    assert made.toolchain.cross
    assert made.toolchain.machine.startswith(OTHER)
    assert made.target.abi_tag == "torch-stable-2.10"


def test_a_link_against_the_stub_needs_what_one_against_torch_needs(
    package: Callable[..., Package], tmp_path: Path
) -> None:
    """Seen on this machine, which has both."""
    op = package("light").builder().op()
    made = plan_here(Request(op, BUILD))
    whole = plans.make(
        made.spec._replace(ldflags=("-Wl,--no-undefined",)), made.target, made.toolchain
    )
    places = plans.anchors(made, str(tmp_path))
    linked = []
    for plan in (made, whole):
        for step in plan.steps:
            if plan is made or step.kind != "compile":
                subprocess.run(plans.command(step, places).argv, check=True)
        linked.append(elf.read(str(tmp_path / plan.output)))
    assert linked[0] == linked[1]
    assert "libtorch_cpu.so" in linked[0].needed


@cross
@pytest.mark.parametrize(
    ("abi", "name"), [(ABI_STABLE, "no_such_function"), (ABI_NONE, "aoti_torch_device_type_cpu")]
)
def test_a_symbol_that_nothing_defines_is_found_by_inspection(
    abi: str, name: str, tmp_path: Path
) -> None:
    source = tmp_path / "op.cpp"
    source.write_text(f'extern "C" int {name}(); int call() {{ return {name}(); }}')
    made = OpSpec("op", "somebody", str(tmp_path), ("op.cpp",), abi=abi, kind=LIBRARY)
    with pytest.raises(LoadTestError, match=f"could not be loaded on {OTHER}") as caught:
        artifact(Op(made))
    assert f"undefined symbol: {name}" in caught.value.why


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
    with pytest.raises(LoadTestError, match=f"is for {HERE}"):
        loadtest.inspect(plain.builder().spec(), target(), None, found.path)


# Running, under an emulator

# The CPUs that the emulator has, and the floats in their vectors. It has no AVX-512.
EMULATED = [
    (f"{ARM_V8_2}+dotprod" if IS_X86 else X86_V3, 4 if IS_X86 else 8),
    pytest.param(BASELINE, 4, marks=pytest.mark.full),
]


@cross
@emulated
@pytest.mark.parametrize(("cpu", "lanes"), EMULATED)
def test_vector_kernels_run_on_the_other_cpu(cpu: str, lanes: int) -> None:
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
    assert f"{lanes} lanes" in done.stdout


@cross
@emulated
def test_a_library_is_loaded_and_called_on_the_other_cpu(plain: Package, tmp_path: Path) -> None:
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
