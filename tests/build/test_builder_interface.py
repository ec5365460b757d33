"""OpBuilder: each method that authors and users of builders know."""

from __future__ import annotations

import ctypes
import glob
import os
from typing import TYPE_CHECKING

import pytest
from sample import child
from sample.installed import require
from sample.levels import ARM_LEVELS, IS_X86, X86_V2, X86_V3, X86_V4
from sample.package import settle

from opkiln.base.model import ABI_NONE, PLAIN
from opkiln.builder import OpBuilder
from opkiln.building.asking import plan_here
from opkiln.decision.terms import BUILD, Request
from opkiln.errors import LoadError, UsageError
from opkiln.plan import plan as plans
from opkiln.settings import override

if TYPE_CHECKING:
    from pathlib import Path

    from sample.package import Package, Steps


def test_the_names_of_an_op(plain: Package) -> None:
    builder = plain.builder()
    assert builder.NAME == builder.name == "plain"
    assert builder.absolute_name() == f"{plain.name}.ops.plain.plain_op"
    assert builder.distribution == plain.name
    assert builder.root == str(plain.path)
    assert type(builder)("renamed").name == "renamed"


def test_what_an_author_declares_becomes_one_frozen_spec(plain: Package) -> None:
    class Full(type(plain.builder())):  # type: ignore[misc]
        def include_paths(self) -> list[str]:
            return ["", "csrc/include"]

        def cxx_args(self) -> list[str]:
            return ["-DX", ""]

        def extra_ldflags(self) -> list[str]:
            return ["-Wl,-z,now", ""]

        def libraries_args(self) -> list[str]:
            return ["m", ""]

    spec = Full().spec()
    assert spec.sources == ("csrc/add.cpp", "csrc/scale.cpp", "csrc/where.cpp")
    assert (spec.include_dirs, spec.cxx_args) == (("csrc/include",), ("-DX",))
    assert (spec.ldflags, spec.libraries) == (("-Wl,-z,now",), ("m",))
    assert (spec.kind, spec.abi) == (PLAIN, ABI_NONE)
    assert hash(spec) == hash(Full().spec())
    with pytest.raises(AttributeError):
        spec.name = "other"


@pytest.mark.first_use
def test_making_a_builder_does_no_work(plain: Package, cache: Path) -> None:
    builder = plain.builder()
    builder.spec()
    assert builder.error_log is None
    assert not cache.exists()


def test_strip_empty_entries_keeps_what_says_something() -> None:
    assert OpBuilder("x").strip_empty_entries(["", "a", "", "b"]) == ["a", "b"]


def test_a_function_is_looked_for_by_linking_it() -> None:
    builder = OpBuilder("x")
    assert builder.has_function("cos", ("m",))
    assert builder.error_log is None
    assert not builder.has_function("no_such_function", ("m",))
    assert builder.error_log == "no_such_function cannot be linked from m"
    assert not builder.has_function("cos", ("no_such_library",))
    with pytest.raises(UsageError, match="not the name of a C function"):
        builder.has_function("f(); int x", ())


def test_a_function_is_found_in_a_directory_that_is_named(tmp_path: Path) -> None:
    import opkiln

    (tmp_path / "a.cpp").write_text('extern "C" int opkiln_test_function() { return 1; }\n')
    opkiln.load("hidden", [str(tmp_path / "a.cpp")], abi="none", is_python_module=False,
                build_directory=str(tmp_path))  # fmt: skip
    os.rename(tmp_path / "hidden.so", tmp_path / "libhidden.so")
    builder = OpBuilder("x")
    assert not builder.has_function("opkiln_test_function", ("hidden",))
    assert builder.has_function("opkiln_test_function", ("hidden",), (str(tmp_path),))


def test_the_answer_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    OpBuilder("x").has_function("no_such_function", (), verbose=True)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == "x: no_such_function cannot be linked from libc\n"


def test_a_command_exists_if_any_of_its_names_is_on_path() -> None:
    builder = OpBuilder("x")
    assert builder.command_exists("sh")
    assert builder.command_exists(["no-such-command", "sh"])
    assert not builder.command_exists(["no-such-command", "nor-this"])
    assert builder.error_log == "no-such-command or nor-this is not on PATH"


@pytest.mark.parametrize(
    ("cpu", "width"),
    [(X86_V4, "-D__AVX512__"), (X86_V3, "-D__AVX256__"), (X86_V2, "-D__SCALAR__")]
    if IS_X86 else [(level, "-D__SCALAR__") for level in ARM_LEVELS],
)  # fmt: skip
def test_the_cpu_and_its_vectors_follow_the_target(cpu: str, width: str) -> None:
    with override(cpu=cpu):
        assert OpBuilder("x").cpu_arch() == f"-march={cpu}"
        assert OpBuilder("x").simd_width() == width


def test_an_author_who_repeats_the_cpu_flag_does_not_double_it(plain: Package) -> None:
    builder = plain.builder()
    flag = builder.cpu_arch()
    assert flag.startswith("-m")
    op = plain.builder(FLAGS=(flag, "-DX")).op()
    plan = plan_here(Request(op, BUILD))
    for step in plan.steps[:-1]:
        words = plans.command(step, plans.anchors(plan, "/stage")).argv
        assert words.count(flag) == 1
        assert "-DX" in words
        assert len(words) == len(set(words))


def test_compatible_means_cached_or_buildable(
    plain: Package, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], steps: Steps,
) -> None:  # fmt: skip
    builder = plain.builder()
    assert builder.is_compatible()
    assert steps.seen == [], "asking builds nothing"
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert not builder.is_compatible(verbose=True)
        assert "no C++ compiler" in capsys.readouterr().err
    builder.load(verbose=False)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert builder.is_compatible()
        assert builder.error_log is None


def test_verbose_reports_and_quiet_does_not(
    plain: Package, capsys: pytest.CaptureFixture[str]
) -> None:
    plain.builder().load(verbose=False)
    assert capsys.readouterr().err == ""
    plain.edit("csrc/add.cpp", "a + b", "a - b")
    plain.builder().load(verbose=True, reload=True)
    assert "plain" in capsys.readouterr().err


def test_jit_load_is_native(plain: Package) -> None:
    assert plain.builder().jit_load(verbose=False).add(1, 2) == 103


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [({}, False), ({"OPKILN_BUILD_OPS": "1"}, True), ({"DS_BUILD_OPS": "1"}, True),
     ({"OPKILN_BUILD_PLAIN": "1"}, True), ({"MY_PLAIN": "1"}, True),
     ({"OPKILN_BUILD_OPS": "1", "DS_BUILD_PLAIN": "0"}, False)],
)  # fmt: skip
def test_variables_select_what_is_precompiled(
    plain: Package, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], wanted: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert plain.builder(BUILD_VAR="MY_PLAIN").build_wanted() is wanted


def test_builder_gives_a_setuptools_extension_that_builds_the_same_op(
    plain: Package, tmp_path: Path
) -> None:
    require("setuptools")
    settle(*plain.files())
    setup = f"""
        import sys
        from setuptools import setup
        from {plain.name}.op import PlainBuilder
        extension = PlainBuilder().builder()
        print(extension.name, extension.language)
        sys.argv = ["setup.py", "-q", "build_ext", "--build-lib", "out", "--build-temp", "temp"]
        setup(name="x", version="1", ext_modules=[extension])
    """
    work = tmp_path / "work"
    work.mkdir()
    code = f"import os; os.chdir({str(work)!r})\n" + "\n".join(
        line.removeprefix(" " * 8) for line in setup.splitlines()
    )
    out = child.run(code, path=[plain.where], bare=False)
    assert out.splitlines()[0] == f"{plain.name}.ops.plain.plain_op c++"
    (built,) = glob.glob(str(work / "out" / plain.name / "ops" / "plain" / "plain_op*.so"))
    library = ctypes.CDLL(built)
    assert library.add(1, 2) == 103
    library.where.restype = ctypes.c_char_p
    assert library.where() == b"/opkiln/src/csrc/first/first.h"


def test_a_system_that_is_not_linux_is_served_by_references_only(
    plain: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opkiln.machine import uname

    monkeypatch.setattr(uname, "system", lambda: "darwin")
    with pytest.raises(LoadError, match="has no native version for darwin"):
        plain.builder().load()
    builder = plain.builder()
    assert not builder.is_compatible()
