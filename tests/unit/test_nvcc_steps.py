"""The command lines of CUDA builds: what of an nvcc's options and a user's flags is in them."""

from __future__ import annotations

import pytest
from sample.levels import X86_64, X86_V3

from opkiln.base.build_model import DeviceCompiler, Target, Toolchain
from opkiln.base.model import ABI_NONE, CUDA, PLAIN, OpSpec
from opkiln.errors import SpecError
from opkiln.plan import plan as plans
from opkiln.store import key

SPEC = OpSpec(
    name="op",
    distribution="pkg",
    root="/pkg",
    sources=("op.cu",),
    device_args=("-DMINE",),
    kind=PLAIN,
    abi=ABI_NONE,
    backend=CUDA,
)
TARGET = Target(CUDA, "linux", X86_64, X86_V3, (), "none", archs=("9.0",))


def toolchain(*accepts: str) -> Toolchain:
    device = DeviceCompiler(
        family="nvcc",
        path="/cuda/bin/nvcc",
        home="/cuda",
        version="13.0",
        identity="n",
        archs=("9.0",),
        accepts=frozenset(accepts),
        include_dirs=("/cuda/include",),
        library_dirs=("/cuda/lib64",),
    )
    return Toolchain(
        family="gcc",
        cxx="/usr/bin/g++",
        version="g++ 12",
        machine=f"{X86_64}-linux-gnu",
        identity="h",
        accepts=frozenset(),
        include_dirs=("/usr/include",),
        device=device,
    )


def command(chain: Toolchain, **flags: tuple[str, ...]) -> list[str]:
    plan = plans.make(SPEC, TARGET._replace(flags=tuple(flags.items())), chain)
    return list(plans.command(plan.steps[0], plans.anchors(plan, "/stage")).argv)


@pytest.mark.parametrize("option", ["--objdir-as-tempdir", "--compress-mode=size"])
def test_an_option_is_passed_to_an_nvcc_that_takes_it_alone(option: str) -> None:
    assert option in command(toolchain(option))
    assert option not in command(toolchain())


def test_cppflags_are_part_of_the_command_and_of_the_key() -> None:
    words = (
        "-DA=1", "-D", "B", "-UC", "-I/i", "-isystem", "/s", "-isystem/t", "-include", "pre.h",
        "-Wdate-time", "-iquote", "/q", "-D_FORTIFY_SOURCE=2",
    )  # fmt: skip
    given = command(toolchain(), cppflags=words)
    first = given.index("-DA=1")
    added = [
        "-DA=1", "-DB", "-UC", "-I/i", "-isystem=/s", "-isystem=/t", "-include=pre.h",
        "-Xcompiler=-Wdate-time", "-Xcompiler=-iquote", "-Xcompiler=/q",
        "-D_FORTIFY_SOURCE=2",
    ]  # fmt: skip
    assert given[first : first + len(added)] == added
    assert given[first + len(added)] == "-DMINE"  # the author's have the last word
    with_flags = TARGET._replace(flags=(("cppflags", words),))
    assert key.build_key(plans.make(SPEC, with_flags, toolchain())) != key.build_key(
        plans.make(SPEC, TARGET, toolchain())
    )


def test_directories_from_variables_are_part_of_the_command() -> None:
    given = command(toolchain(), cpath=("/first",), cplus_include_path=("/last of all",))
    assert "-I/first" in given
    assert "-isystem=/last of all" in given
    assert given.index("-I/first") < given.index("-isystem=/last of all")


@pytest.mark.parametrize("flag", ["-DX=$(id)", "-DX=a b", "-DX=1,2", "-Wp,-DX"])
def test_cppflags_that_nvcc_must_not_get_are_refused_by_name(flag: str) -> None:
    with pytest.raises(SpecError) as caught:
        command(toolchain(), cppflags=(flag,))
    assert flag in caught.value.what
    assert caught.value.hint == "unset CPPFLAGS"


@pytest.mark.parametrize(
    ("setting", "variable"), [("cpath", "CPATH"), ("cplus_include_path", "CPLUS_INCLUDE_PATH")]
)
@pytest.mark.parametrize("directory", ["/a,b", '/a"b', "/a`b"])
def test_a_directory_that_nvcc_cannot_be_given_is_one_clear_error(
    setting: str, variable: str, directory: str
) -> None:
    with pytest.raises(SpecError, match="cannot be passed to nvcc") as caught:
        command(toolchain(), **{setting: (directory,)})
    assert caught.value.hint == f"unset {variable}"
