"""The plan: the exact commands, as a pure function, and the declarations it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample.levels import X86_64, X86_V3

from opkiln.base.build_model import DeviceCompiler, Plan, Target, Toolchain, TorchSDK
from opkiln.base.model import (
    ABI_NONE,
    ABI_STABLE,
    ABI_TORCH,
    EXECUTABLE,
    LIBRARY,
    PLAIN,
    PYTHON,
    OpSpec,
)
from opkiln.errors import SpecError
from opkiln.plan import plan as plans
from opkiln.store import key

TORCH = TorchSDK("/env/torch", "2.13.0", "abc", None, None, True)
GCC = Toolchain(
    family="gcc",
    cxx="/usr/bin/g++",
    version="g++ 12",
    machine=f"{X86_64}-linux-gnu",
    identity="id",
    accepts=frozenset({f"-march={X86_V3}", "-mavx512f"}),
    include_dirs=("/usr/include",),
    torch=TORCH,
    python_include="/env/include/python",
)
TARGET = Target("cpu", "linux", X86_64, X86_V3, ("avx512f",), "none")


def a_spec(**changes: Any) -> OpSpec:
    spec = OpSpec(
        "op", "dist", "/pkg", ("a.cpp", "b/a.cpp"), ("include",), kind=PLAIN, abi=ABI_NONE
    )
    return spec._replace(**changes)


def commands(plan: Plan, stage: str = "/stage") -> list[str]:
    places = plans.anchors(plan, stage)
    return [" ".join(plans.command(step, places).argv) for step in plan.steps]


def command(spec: OpSpec, target: Target = TARGET, toolchain: Toolchain = GCC) -> str:
    return commands(plans.make(spec, target, toolchain))[0]


def test_the_same_inputs_give_the_same_plan() -> None:
    assert plans.make(a_spec(), TARGET, GCC) == plans.make(a_spec(), TARGET, GCC)


def test_each_source_is_compiled_apart_and_all_are_linked_last() -> None:
    plan = plans.make(a_spec(), TARGET, GCC)
    assert [step.kind for step in plan.steps] == ["compile", "compile", "link"]
    objects = [step.output for step in plan.steps[:-1]]
    assert len(set(objects)) == 2, "two sources of one name share an object"
    assert plan.steps[-1].inputs == tuple(objects)
    assert plan.output == "op.so"


def test_the_cpu_flags_are_those_of_the_target() -> None:
    assert f"-march={X86_V3} -mavx512f" in command(a_spec())
    assert "-march" not in command(a_spec(vectorize=False))


def test_paths_below_the_source_root_are_anchored_so_a_moved_package_has_the_same_keys() -> None:
    here = a_spec(include_dirs=("/pkg/include", "other"), cxx_args=("-I/pkg/more",))
    there = here._replace(
        root="/else where", include_dirs=("/else where/include", "other"),
        cxx_args=("-I/else where/more",),
    )  # fmt: skip
    one, other = plans.make(here, TARGET, GCC), plans.make(there, TARGET, GCC)
    assert key.build_key(one) == key.build_key(other)
    assert key.intent_key(here, TARGET) == key.intent_key(there, TARGET)
    assert "-I/else where/include" in commands(other)[0]


def test_a_compiler_elsewhere_with_the_same_identity_gives_the_same_key() -> None:
    moved = GCC._replace(cxx="/opt/bin/g++", launcher="/usr/bin/ccache")
    one, other = plans.make(a_spec(), TARGET, GCC), plans.make(a_spec(), TARGET, moved)
    assert commands(other)[0].startswith("/usr/bin/ccache /opt/bin/g++ ")
    assert commands(other)[-1].startswith("/opt/bin/g++ ")
    assert key.build_key(one) == key.build_key(other)


@pytest.mark.parametrize(
    "changes",
    [
        {"cxx_args": ("-DX",)},
        {"ldflags": ("-Wl,-z,now",)},
        {"libraries": ("m",)},
        {"std": "c++23"},
        {"include_dirs": ("include", "more")},
        {"sources": ("a.cpp",)},
        {"name": "op2"},
        {"kind": EXECUTABLE},
        {"vectorize": False},
    ],
)
def test_whatever_is_declared_is_part_of_both_keys(changes: dict[str, Any]) -> None:
    one, other = plans.make(a_spec(), TARGET, GCC), plans.make(a_spec(**changes), TARGET, GCC)
    assert key.build_key(one) != key.build_key(other)
    assert key.intent_key(one.spec, TARGET) != key.intent_key(other.spec, TARGET)


def test_the_compilers_identity_is_part_of_the_build_key_and_not_of_the_intent() -> None:
    one = plans.make(a_spec(), TARGET, GCC)
    other = plans.make(a_spec(), TARGET, GCC._replace(identity="other"))
    assert key.build_key(one) != key.build_key(other)
    assert key.step_key(one, one.steps[0]) != key.step_key(other, other.steps[0])
    assert key.intent_key(one.spec, one.target) == key.intent_key(other.spec, other.target)


def test_the_owner_is_part_of_the_intent() -> None:
    assert key.intent_key(a_spec(), TARGET) != key.intent_key(a_spec(distribution="d2"), TARGET)


def test_the_users_flags_come_around_the_authors() -> None:
    flags = (("cppflags", ("-DBEFORE",)), ("cxxflags", ("-O1",)), ("ldflags", ("-Lx",)))
    plan = plans.make(a_spec(cxx_args=("-DAUTHOR",)), TARGET._replace(flags=flags), GCC)
    compiling, *_, linking = commands(plan)
    order = [compiling.index(flag) for flag in ("-O3", "-DBEFORE", "-DAUTHOR", "-O1")]
    assert order == sorted(order)
    assert "-Lx" in linking


def test_variables_that_add_directories_enter_the_command_line() -> None:
    flags = (("cpath", ("/inc",)), ("cplus_include_path", ("/sys",)), ("library_path", ("/lib1",)))
    compiling, *_, linking = commands(plans.make(a_spec(), TARGET._replace(flags=flags), GCC))
    assert "-I/inc" in compiling
    assert "-isystem/sys" in compiling
    assert "-L/lib1" in linking


def test_a_debug_build_has_no_optimization() -> None:
    assert "-O0 -g3" in command(a_spec(), TARGET._replace(debug=True))


def test_no_torch_reaches_an_op_that_knows_none() -> None:
    assert not any("torch" in each for each in commands(plans.make(a_spec(), TARGET, GCC)))


def test_a_stable_op_is_linked_to_libtorch_cpu_alone_and_without_an_rpath() -> None:
    plan = plans.make(a_spec(abi=ABI_STABLE, kind=LIBRARY), TARGET, GCC)
    compiling, *_, linking = commands(plan)
    assert "-DTORCH_TARGET_VERSION=0x020a000000000000" in compiling
    assert "-isystem/env/torch/include " in compiling
    assert "python" not in compiling
    assert [word for word in linking.split() if word.startswith("-l")] == []
    assert "stub-libtorch_cpu.so" in linking
    assert "rpath" not in linking


def test_a_python_module_gets_its_name_and_pythons_headers() -> None:
    compiling, *_, linking = commands(plans.make(a_spec(abi=ABI_TORCH, kind=PYTHON), TARGET, GCC))
    assert "-DTORCH_EXTENSION_NAME=op" in compiling
    assert "-isystem/env/include/python" in compiling
    assert "-D_GLIBCXX_USE_CXX11_ABI=1" in compiling
    assert "-ltorch_python" in linking


def test_an_extension_of_a_cuda_torch_needs_torch_cuda_whatever_it_takes_from_it() -> None:
    """Through it, it finds the cuBLAS that torch has."""
    nvcc = DeviceCompiler(
        "nvcc", "/cuda/bin/nvcc", "/cuda", "13.0", "id", ("9.0",), frozenset(), (), ("/cuda/lib64",)
    )
    toolchain = GCC._replace(torch=TORCH._replace(cuda="13.0"), device=nvcc)
    target = TARGET._replace(backend="cuda", archs=("9.0",))
    spec = a_spec(abi=ABI_TORCH, kind=PYTHON, backend="cuda")
    linking = commands(plans.make(spec, target, toolchain))[-1]
    assert "--push-state,--no-as-needed -lc10_cuda -ltorch_cuda -Wl,--pop-state" in linking
    assert "-l:libcudart.so.13" in linking


def test_a_program_is_no_shared_library_and_finds_torch_by_rpath() -> None:
    plan = plans.make(a_spec(kind=EXECUTABLE, abi=ABI_TORCH), TARGET, GCC)
    compiling, *_, linking = commands(plan)
    assert plan.output == "op"
    assert "-fPIC" not in compiling
    assert "-shared" not in linking
    assert "-Wl,-rpath,/env/torch/lib" in linking


def test_the_staging_directory_leaves_no_trace_in_the_key() -> None:
    plan = plans.make(a_spec(), TARGET, GCC)
    assert commands(plan, "/one")[0] != commands(plan, "/two")[0]
    assert "/one" not in repr(plan.steps)


def test_both_prefix_maps_are_there() -> None:
    compiling = command(a_spec())
    assert "-ffile-prefix-map=/pkg=/opkiln/src" in compiling
    assert "-ffile-prefix-map=/stage=/opkiln/build" in compiling


@pytest.mark.parametrize(
    "name",
    ["", "../../x", "a;touch b", "$(x)", "a b", "a\n", "1a", "a-b", "x" * 101, "é", "a/b", "."],
)
def test_a_hostile_name_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match="cannot be the name"):
        plans.make(a_spec(name=name), TARGET, GCC)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=120))
def test_a_name_is_a_c_identifier_or_an_error(name: str) -> None:
    try:
        plans.check(a_spec(name=name))
    except SpecError:
        return
    assert name.isascii()
    assert name.isidentifier()


@pytest.mark.parametrize("flag", ["-wrapper", "", "a\0b"])  # test_flags.py has all kinds
@pytest.mark.parametrize("where", ["cxx_args", "ldflags"])
def test_a_flag_that_reaches_past_the_plan_is_refused(flag: str, where: str) -> None:
    with pytest.raises(SpecError):
        plans.make(a_spec(**{where: (flag,)}), TARGET, GCC)


def test_a_shells_words_stay_one_argument() -> None:
    flag = "-DX=$(touch x)`touch y`;z"
    plan = plans.make(a_spec(cxx_args=(flag,)), TARGET, GCC)
    assert flag in plans.command(plan.steps[0], plans.anchors(plan, "/stage")).argv


@pytest.mark.parametrize("root", ["/a\nb", "/a=b", "/a\0b"])
def test_a_path_that_depfiles_or_prefix_maps_cannot_express_is_refused(root: str) -> None:
    with pytest.raises(SpecError, match="cannot be built from"):
        plans.check(a_spec(root=root))


def test_no_sources_and_unknown_languages_are_refused() -> None:
    with pytest.raises(SpecError, match="declares no sources"):
        plans.check(a_spec(sources=()))
    with pytest.raises(SpecError, match=r"no compiler is known for the source 'a\.f90'"):
        plans.check(a_spec(sources=("a.f90",)))


def test_every_step_is_told_the_locale_the_date_and_what_reaches_its_compiler() -> None:
    tools = GCC._replace(environment=(("LD_LIBRARY_PATH", "/opt/lib"),))
    environment = dict(plans.make(a_spec(), TARGET, tools).environment)
    assert environment == {
        "LC_ALL": "C", "SOURCE_DATE_EPOCH": "0", "LD_LIBRARY_PATH": "/opt/lib",
    }  # fmt: skip
