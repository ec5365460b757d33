"""The keys of an entry: what is part of them, what is not, and that they stay what they are."""

from __future__ import annotations

from typing import Any

import pytest
from sample.levels import X86_64, X86_V3, X86_V4

from opkiln.base import model
from opkiln.base.build_model import Anchored, DeviceCompiler, Plan, Step, Target, Toolchain
from opkiln.base.model import ABI_NONE, CUDA, PACKAGE, PLAIN, ROCM, OpSpec
from opkiln.machine.toolchain import staged_copy, torch_sdk
from opkiln.store import key

SPEC = OpSpec(
    "op", "dist", "/pkg", ("a.cpp",), ("include",), ("-I/pkg/more", "-DX"), kind=PLAIN, abi=ABI_NONE
)
TARGET = Target("cpu", "linux", X86_64, X86_V3, ("avx512f",), "none")
GCC = Toolchain(
    "gcc", "/usr/bin/g++", "12", f"{X86_64}-linux-gnu", "gcc's", frozenset(), ("/usr/include",)
)
NVCC = DeviceCompiler(
    "nvcc", "/cuda/bin/nvcc", "/cuda", "13.0", "nvcc's", ("9.0",), frozenset(), (), ()
)
COMPILE = Step(
    "compile", "a.o", ("/usr/bin/g++", "-c", Anchored("", "src", "a.cpp")), source="a.cpp"
)


def a_plan(**changes: Any) -> Plan:
    plan = Plan(SPEC, TARGET, GCC, (COMPILE,), (("LC_ALL", "C"),), "op.so")
    return plan._replace(**changes)


def test_keys_are_those_of_the_stores_that_exist() -> None:
    """Other keys for the same inputs would lose every cache and refuse every shipped library. If
    that is meant, PLAN_VERSION or the encoding's version says so, and these change with it."""
    plan = a_plan()
    assert key.intent_key(SPEC, TARGET) == "e695e9fdcb07fe6747392b4d4d9958392d53292d"
    assert key.spec_key(SPEC) == "20c665f5038b12cd7144e4e084cca0c0b9b3707d"
    assert key.build_key(plan) == "4a14640cd3adc56a9c86f924b42ed76d0734e183"
    assert key.step_key(plan, COMPILE) == "daecc9af13a82eeb74cac0d44b3abfd2bf7f7d6a"


def test_a_declaration_does_not_say_where_its_package_or_opkiln_lies_nor_who_declares_it() -> None:
    args = ("-I/pkg/more", f"-I{PACKAGE}/include", "-DX")
    here = SPEC._replace(cxx_args=args)
    assert "-I{src}/more" in key.declaration_fields(here)[4]
    assert "-I{opkiln}/include" in key.declaration_fields(here)[4]
    there = here._replace(
        root="/elseX/", cxx_args=("-I/elseX/more", *args[1:]), declared_by=model.CALL
    )
    assert key.spec_key(here) == key.spec_key(there)
    assert key.intent_key(here, TARGET) == key.intent_key(there, TARGET)


def test_a_declaration_keeps_the_paths_that_lie_elsewhere() -> None:
    args = ("-I/pkg2/more", "-I/usr/pkg", "-Dpkg", "-I/pkg")
    assert key.declaration_fields(SPEC._replace(cxx_args=args))[4] == args


def test_the_intent_has_the_target_and_the_declaration_alone_has_not() -> None:
    other = TARGET._replace(cpu=X86_V4)
    assert key.intent_key(SPEC, TARGET) != key.intent_key(SPEC, other)
    assert key.spec_key(SPEC) not in (key.intent_key(SPEC, TARGET), key.intent_key(SPEC, other))


def test_the_paths_of_the_compilers_and_their_launcher_are_in_no_key() -> None:
    tools = GCC._replace(launcher="/usr/bin/ccache", device=NVCC._replace(host="/usr/bin/g++-12"))
    argv = ("/usr/bin/ccache", "/cuda/bin/nvcc", "-ccbin", "/usr/bin/g++-12", "-c", "/usr/bin/g++")
    step = COMPILE._replace(words=argv)
    assert key.step_inputs(a_plan(toolchain=tools), step) == ("compile", "a.o", ("-ccbin", "-c"))


def test_a_step_is_known_by_its_kind_its_output_and_its_arguments() -> None:
    plan = a_plan()
    changes: tuple[dict[str, Any], ...] = (
        {"kind": "link"}, {"output": "b.o"}, {"words": (*COMPILE.words, "-O3")},
        {"words": ("/usr/bin/g++", "-c", Anchored("", "abs", "a.cpp"))},
    )  # fmt: skip
    keys = {key.step_key(plan, COMPILE._replace(**each)) for each in changes}
    keys |= {key.build_key(a_plan(steps=(COMPILE._replace(**each),))) for each in changes}
    assert len(keys | {key.step_key(plan, COMPILE), key.build_key(plan)}) == 2 * len(changes) + 2


@pytest.mark.parametrize(
    "changes",
    [
        {"environment": (("LC_ALL", "POSIX"),)},
        {"toolchain": GCC._replace(identity="another")},
        {"toolchain": GCC._replace(device=NVCC)},
        {"toolchain": GCC._replace(device=NVCC._replace(identity="another"))},
    ],
)
def test_environment_and_compilers_are_part_of_the_builds_key_and_of_each_objects(
    changes: dict[str, Any],
) -> None:
    plan, other = a_plan(), a_plan(**changes)
    assert key.build_key(plan) != key.build_key(other)
    assert key.step_key(plan, COMPILE) != key.step_key(other, COMPILE)


def test_another_version_of_the_plan_gives_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key.build_key(a_plan()), key.step_key(a_plan(), COMPILE)
    monkeypatch.setattr(key, "PLAN_VERSION", model.PLAN_VERSION + 1)
    after = key.build_key(a_plan()), key.step_key(a_plan(), COMPILE)
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_two_device_compilers_are_told_apart_by_identity() -> None:
    one, other = (
        a_plan(toolchain=GCC._replace(device=NVCC._replace(identity=each))) for each in "ab"
    )
    assert key.build_key(one) != key.build_key(other)


def test_the_translator_of_sources_is_part_of_the_keys_for_rocm_alone() -> None:
    sdk = torch_sdk.find()
    assert sdk is not None
    tools = GCC._replace(torch=sdk, device=NVCC)
    rocm = a_plan(toolchain=tools, target=TARGET._replace(backend=ROCM))
    cuda = a_plan(toolchain=tools, target=TARGET._replace(backend=CUDA))
    assert key._identity(cuda) == ("gcc's", "nvcc's")
    assert key._identity(rocm) == ("gcc's", "nvcc's", staged_copy.hipify_identity(sdk))
    assert key._identity(a_plan(target=TARGET._replace(backend=ROCM))) == ("gcc's",)


def test_ops_share_an_object_that_they_compile_in_the_same_way() -> None:
    plan, other = a_plan(), a_plan(spec=SPEC._replace(name="op2", distribution="d2"))
    assert key.step_key(plan, COMPILE) == key.step_key(other, COMPILE)
    tagged = a_plan(target=TARGET._replace(abi_tag="torch-stable-2.10"))
    assert key.step_key(plan, COMPILE) != key.step_key(tagged, COMPILE)


def test_the_text_of_an_inline_source_is_part_of_its_own_objects_key() -> None:
    def keys(*inline: tuple[str, str]) -> tuple[str, str]:
        plan = a_plan(spec=SPEC._replace(inline=inline))
        return key.step_key(plan, COMPILE), key.step_key(plan, COMPILE._replace(source="b.cpp"))

    one, other = keys(("a.cpp", "1"), ("b.cpp", "1")), keys(("a.cpp", "2"), ("b.cpp", "1"))
    assert one[0] != other[0]
    assert one[1] == other[1]
    assert one[0] != keys()[0]
