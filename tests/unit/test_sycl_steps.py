"""The command lines of SYCL builds, by icpx and by the host compiler for the runtime compiler."""

from __future__ import annotations

import pytest
from sample.levels import X86_64, X86_V3

from opkiln.base.build_model import DeviceCompiler, Step, Target, Toolchain, TorchSDK
from opkiln.base.model import ABI_STABLE, LIBRARY, XPU, OpSpec
from opkiln.errors import ToolchainError
from opkiln.plan import sycl
from opkiln.plan.host import PlanInputs
from opkiln.plan.plan import anchors_of, command, render

SPEC = OpSpec(
    name="op",
    distribution="pkg",
    root="/root of/pkg",
    sources=("op.cpp", "kernels.sycl"),
    include_dirs=("include",),
    cxx_args=("-DMINE",),
    device_args=("-fsycl-id-queries-fit-in-int",),
    kind=LIBRARY,
    abi=ABI_STABLE,
    backend=XPU,
)
TARGET = Target(XPU, "linux", X86_64, X86_V3, (), "torch-stable-2.10")


def toolchain(device: DeviceCompiler) -> Toolchain:
    return Toolchain(
        family="gcc",
        cxx="/usr/bin/g++",
        version="g++ 12",
        machine=f"{X86_64}-linux-gnu",
        identity="h",
        accepts=frozenset((f"-march={X86_V3}",)),
        include_dirs=("/usr/include",),
        torch=TorchSDK("/torch", "2.13.0", "t", None, None, True),
        device=device,
    )


def icpx(*accepts: str) -> Toolchain:
    compiler = DeviceCompiler(
        family="icpx",
        path="/oneapi/bin/icpx",
        home="/oneapi",
        version="2025.3",
        identity="i",
        archs=(),
        accepts=frozenset(accepts),
        include_dirs=("/oneapi/include",),
        library_dirs=("/oneapi/lib",),
    )
    return toolchain(compiler)


def runtime(home: str = "/env") -> Toolchain:
    compiler = DeviceCompiler(
        family="sycl-rt",
        path=f"{home}/lib/libsycl.so.9",
        home=home,
        version="9.0.0",
        identity="r",
        archs=(),
        accepts=frozenset(),
        include_dirs=(f"{home}/include",),
        library_dirs=(f"{home}/lib",),
    )
    return toolchain(compiler)


def line(step: Step, tools: Toolchain) -> list[str]:
    return list(command(step, anchors_of(SPEC, tools) | {"stage": "/stage"}).argv)


@pytest.mark.parametrize("source", SPEC.sources)
def test_icpx_compiles_every_source_as_sycl(source: str) -> None:
    tools = icpx("-ffp-model=precise")
    target = TARGET._replace(flags=(("cxxflags", ("-DUSER",)),))
    step = sycl.compile_sycl(PlanInputs(SPEC, target, tools), source)
    words = line(step, tools)
    assert words[:2] == ["/oneapi/bin/icpx", "-fsycl"]
    assert words[-6:-2] == ["-x", "c++", "-c", f"/root of/pkg/{source}"]
    assert words[-1] == f"/stage/{step.output}"
    assert "-isystem/torch/include" in words
    assert "-I/root of/pkg/include" in words
    # opkiln's own, the author's for C++, the author's for SYCL, the user's: the last one wins.
    order = ["-ffp-model=precise", "-DMINE", "-fsycl-id-queries-fit-in-int", "-DUSER"]
    assert [word for word in words if word in order] == order
    assert not [word for word in words if word.startswith("-march")]


def test_a_flag_that_icpx_does_not_accept_is_left_out() -> None:
    words = line(sycl.compile_sycl(PlanInputs(SPEC, TARGET, icpx()), "op.cpp"), icpx())
    assert "-ffp-model=precise" not in words


def test_without_a_list_of_devices_icpx_is_given_no_targets() -> None:
    words = line(sycl.compile_sycl(PlanInputs(SPEC, TARGET, icpx()), "op.cpp"), icpx())
    assert not [word for word in words if "target" in word]
    assert sycl.linker_words(PlanInputs(SPEC, TARGET, icpx())) == ["/oneapi/bin/icpx", "-fsycl"]


def test_named_devices_get_machine_code_and_every_other_one_gets_spirv() -> None:
    target = TARGET._replace(archs=("bmg", "pvc"))
    words = line(sycl.compile_sycl(PlanInputs(SPEC, target, icpx()), "op.cpp"), icpx())
    assert words.count("-fsycl-targets=spir64_gen,spir64") == 1
    assert sycl.linker_words(PlanInputs(SPEC, target, icpx())) == [
        "/oneapi/bin/icpx",
        "-fsycl",
        "-fsycl-targets=spir64_gen,spir64",
        "-Xsycl-target-backend=spir64_gen",
        "-device bmg,pvc",
    ]


def test_icpx_brings_its_own_runtime_to_the_link() -> None:
    assert sycl.libraries(PlanInputs(SPEC, TARGET, icpx())) == []


def test_a_debug_build_is_not_optimised() -> None:
    words = line(
        sycl.compile_sycl(PlanInputs(SPEC, TARGET._replace(debug=True), icpx()), "op.cpp"), icpx()
    )
    assert [word for word in words if word.startswith(("-O", "-g"))] == ["-O0", "-g3"]


def test_for_the_runtime_compiler_the_host_compiler_is_given_its_headers() -> None:
    words = line(sycl.compile_sycl(PlanInputs(SPEC, TARGET, runtime()), "op.cpp"), runtime())
    assert words[0] == "/usr/bin/g++"
    assert "-isystem/env/include" in words
    assert not [word for word in words if "fsycl" in word]


def test_for_the_runtime_compiler_libsycl_is_linked_by_its_soname_without_an_rpath() -> None:
    places = anchors_of(SPEC, runtime())
    assert sycl.linker_words(PlanInputs(SPEC, TARGET, runtime())) == ["/usr/bin/g++"]
    words = [render(each, places) for each in sycl.libraries(PlanInputs(SPEC, TARGET, runtime()))]
    assert words == ["-L/env/lib", "-l:libsycl.so.9"]


def test_where_the_runtime_lies_is_not_in_the_plan() -> None:
    here, moved = runtime(), runtime("/other")
    assert sycl.libraries(PlanInputs(SPEC, TARGET, here)) == sycl.libraries(
        PlanInputs(SPEC, TARGET, moved)
    )
    steps = [sycl.compile_sycl(PlanInputs(SPEC, TARGET, each), "op.cpp") for each in (here, moved)]
    assert steps[0] == steps[1]


def test_kernels_in_a_sycl_source_need_a_compiler_and_the_error_says_what_else_would_do() -> None:
    with pytest.raises(ToolchainError) as caught:
        sycl.compile_sycl(PlanInputs(SPEC, TARGET, runtime()), "kernels.sycl")
    assert "kernels.sycl" in caught.value.what
    assert "/env/lib/libsycl.so.9" in caught.value.why
    assert "source text" in caught.value.hint
