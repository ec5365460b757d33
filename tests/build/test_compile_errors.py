"""A build that fails: what it says, what it leaves, and what the others hear."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from sample import child, forks, known
from sample.compiler import Compiler
from sample.package import rest
from sample.quiet import within

import opkiln
from opkiln.base.digest import sha256_file
from opkiln.base.model import OpSpec
from opkiln.building.failure import first_error
from opkiln.building.wording import missing_kernels
from opkiln.errors import BuildTimeout, CompileError, LoadTestError, OpkilnError, SpecError
from opkiln.machine.toolchain import nvcc

if TYPE_CHECKING:
    from pathlib import Path

    from sample.package import Package, Steps

BROKEN = "int good;\nint bad = no_such_name;\nint worse = nor_this;\n"


def broken(package: Package) -> Package:
    (package / "csrc/scale.cpp").write_text(BROKEN)
    rest()
    return package


def entries(cache: Path) -> list[Path]:
    return list(cache.glob("v1/ops/*/*/*/*/*"))


def test_compile_error_shows_the_first_error_and_its_log_has_the_command_and_the_rest(
    plain: Package, cache: Path
) -> None:
    with pytest.raises(CompileError) as caught:
        broken(plain).load()
    error = caught.value
    assert error.what == "op plain: csrc/scale.cpp does not compile"
    first, *_ = error.why.splitlines()
    assert first.startswith(f"{plain.path}/csrc/scale.cpp:2:")
    assert "'no_such_name' was not declared" in first or "undeclared identifier" in first
    assert "nor_this" not in error.why
    assert error.why.splitlines()[-1] == f"log: {error.log}"
    assert error.log.startswith(str(cache))
    with open(error.log) as file:
        text = file.read()
    assert "nor_this" in text
    assert f"-c {plain.path}/csrc/scale.cpp" in text  # the command
    assert "opkiln build plain" in error.hint
    assert error.exit_code == 4


@pytest.mark.parametrize(
    ("compiler", "file"), [("g++", "a.cpp"), ("clang++", "a.cpp"), ("nvcc", "a.cu")]
)
def test_error_in_a_template_of_a_header_names_the_line_that_uses_it(
    compiler: str, file: str, tmp_path: Path
) -> None:
    program = shutil.which(compiler, path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if program is None:
        pytest.skip(f"there is no {compiler}")
    (tmp_path / "a.h").write_text(
        'template <class T> struct Inner { static_assert(sizeof(T) == 0, "not this type"); };\n'
        "template <class T> struct Outer { Inner<T> inner; };\n"
    )
    (tmp_path / file).write_text('#include "a.h"\n\nOuter<int> made;\n')
    argv = [program, "-c", file, "-o", os.devnull]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    first, *_, last = first_error(done.stdout + done.stderr).splitlines()
    assert "a.h" in first
    assert "not this type" in first
    assert re.fullmatch(rf"used at {file}:3(:\d+)?", last)


def test_error_without_a_template_names_no_use() -> None:
    warned = "a.cpp:1:1:   required from here\na.h:2:2: warning: odd\n"
    assert first_error(f"{warned}b.h:3:3: error: bad\n   3 | x\n").endswith("error: bad\n   3 | x")


def test_library_of_op_h_that_lists_nothing_is_told_of_the_macro() -> None:
    spec = OpSpec(
        name="f", distribution="d", root="/", sources=("source.cpp",), kernels=("d::f",),
        schemas=("f(Tensor x) -> Tensor",), inline=(("source.cpp", "#include <opkiln/op.h>"),),
    )  # fmt: skip
    what, why, hint = missing_kernels(spec, ["d::f"])
    assert what == "op f: its library has no cpu function f"
    assert why == "OPKILN_OP is missing"
    assert hint == "OPKILN_OP(f, cpu);    // after the function"


def test_a_compile_error_publishes_nothing_but_the_good_objects(
    plain: Package, cache: Path, steps: Steps
) -> None:
    with pytest.raises(CompileError):
        broken(plain).load()
    assert entries(cache) == []
    (plain / "csrc/scale.cpp").write_text('extern "C" int scale(int a) { return a; }\n')
    rest()
    assert plain.load().scale(5) == 5
    assert steps.linked == 1


def test_a_mended_source_builds_in_the_same_process(plain: Package) -> None:
    with pytest.raises(CompileError):
        broken(plain).load()
    (plain / "csrc/scale.cpp").write_text('extern "C" int scale(int a) { return a + 1; }\n')
    assert plain.load().scale(1) == 2


@pytest.mark.timed
def test_eight_processes_show_the_same_error_after_one_compile(
    plain: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for source in ("add", "where"):
        (plain / f"csrc/{source}.cpp").write_text("")
    broken(plain)
    compiler = Compiler(tmp_path)
    monkeypatch.setenv("CXX", str(compiler.path))
    # The failure comes when all are waiting for it.
    gate = f"while [ ! -e '{tmp_path}/go' ]; do sleep 0.05; done"
    compiler.write(before=f"case \"$*\" in *' -c '*scale.cpp*) {gate};; esac")
    children = [
        child.start(f"""
            from opkiln.run import events
            from {plain.name}.op import PlainBuilder
            told = []
            def tell(event):
                if event.kind == "waiting" and not told and (
                    event.data["pid"] and event.data["what"] == events.BUILD
                ):
                    told.append(1)
                    open({str(tmp_path)!r} + "/waiting-" + str(__import__("os").getpid()), "w")
            with events.listen(tell):
                PlainBuilder().load(verbose=False)
        """, path=[plain.where])
        for _ in range(8)
    ]  # fmt: skip
    within(60, lambda: len(list(tmp_path.glob("waiting-*"))) == 7)
    (tmp_path / "go").touch()
    messages = set()
    for each in children:
        done = child.finish(each)
        assert done.returncode != 0
        _, _, message = done.stderr.partition("opkiln.errors.CompileError: ")
        assert "scale.cpp:2:" in message
        messages.add(re.sub(r"opkiln-plain-\w+", "", message))
    assert len(messages) == 1
    assert compiler.compiles().count("scale.cpp") == 1


def test_a_missing_header_and_a_missing_library_have_hints_to_copy(tmp_path: Path) -> None:
    source = tmp_path / "a.cpp"
    source.write_text("#include <no/such.h>\n")
    with pytest.raises(CompileError) as caught:
        opkiln.load("hinted", [str(source)], abi="none", is_python_module=False)
    assert caught.value.hint == (
        "add the directory of no/such.h to extra_include_paths, or set CPATH"
    )
    source.write_text("int x;\n")
    with pytest.raises(CompileError) as caught:
        opkiln.load("hinted", [str(source)], abi="none", is_python_module=False,
                    extra_ldflags=["-lno_such_lib"])  # fmt: skip
    assert caught.value.what == "op hinted: link failed"
    assert "cannot find -lno_such_lib" in caught.value.why
    assert "extra_ldflags=['-L<directory of libno_such_lib.so>']" in caught.value.hint


def test_hints_name_the_methods_of_a_builder(plain: Package) -> None:
    (plain / "csrc/scale.cpp").write_text("#include <no/such.h>\n")
    rest()
    with pytest.raises(CompileError) as caught:
        plain.load()
    assert caught.value.hint == "add the directory of no/such.h to include_paths(), or set CPATH"


def test_hints_name_the_arguments_of_a_setuptools_extension(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.cpp").write_text("#include <no/such.h>\n")
    (tmp_path / "setup.py").write_text(
        "from setuptools import setup\n"
        "from opkiln.compat.torch import BuildExtension, CppExtension\n"
        "setup(name='hinted', version='1', ext_modules=[CppExtension('hinted', ['a.cpp'])],\n"
        "      cmdclass={'build_ext': BuildExtension})\n"
    )
    setup = forks.Fork(["setup.py", "build_ext", "--inplace"], stdout=subprocess.PIPE,
                       stderr=subprocess.PIPE, text=True)  # fmt: skip
    done = child.finish(setup)
    assert done.returncode != 0
    assert "add the directory of no/such.h to include_dirs, or set CPATH" in done.stderr


def test_hint_for_torchs_full_headers_in_a_stable_call_names_the_argument(tmp_path: Path) -> None:
    source = tmp_path / "a.cpp"
    source.write_text("#include <torch/extension.h>\n")
    with pytest.raises(CompileError) as caught:
        opkiln.load("hinted", [str(source)], abi="torch-stable", is_python_module=False)
    assert caught.value.hint.startswith("abi='torch'")


def test_a_source_that_was_not_shipped_is_said_to_be_missing(plain: Package) -> None:
    (plain.path / "csrc" / "add.cpp").unlink()
    with pytest.raises(SpecError, match=r"the source csrc/add.cpp does not exist") as caught:
        plain.load()
    assert str(plain.path) in caught.value.why


def test_an_error_in_inline_text_names_a_line_of_the_text(cache: Path) -> None:
    with pytest.raises(CompileError) as caught:
        opkiln.load_inline("inlined", "int ok;\nint bad = nothing;\n", abi="none",
                           is_python_module=False)  # fmt: skip
    assert caught.value.why.startswith("cpp_sources[0]:2:")
    assert "int bad = nothing;" in caught.value.why  # the line itself is shown, too
    assert caught.value.hint == ""  # no command knows an op that was never named in a package
    (log,) = cache.glob("v1/logs/*")
    assert "int bad = nothing;" in log.read_text()


def without_torchs_headers(tmp_path: Path) -> list[str]:
    """An include path whose `torch` headers are empty: the real ones take half a minute."""
    (tmp_path / "include/torch").mkdir(parents=True)
    for header in ("extension.h", "types.h"):
        (tmp_path / "include/torch" / header).write_text("")
    return [str(tmp_path / "include")]


def test_inline_line_numbers_are_the_users_behind_generated_includes(tmp_path: Path) -> None:
    include = without_torchs_headers(tmp_path)
    with pytest.raises(CompileError) as caught:
        opkiln.load_inline("inlined", ["int ok;", "int f() { return 1; }\n\nint bad = nothing;"],
                           functions=["f"], extra_include_paths=include)  # fmt: skip
    assert caught.value.why.startswith("cpp_sources[1]:3:11: error:")
    assert "    3 | int bad = nothing;" in caught.value.why


def test_inline_error_in_the_bindings_names_the_functions_argument(tmp_path: Path) -> None:
    include = without_torchs_headers(tmp_path)
    with pytest.raises(CompileError) as caught:
        opkiln.load_inline("inlined", "int f() { return 1; }", functions=["f"],
                           extra_include_paths=include)  # fmt: skip
    assert caught.value.why.startswith("functions:1:")


@pytest.mark.skipif(not nvcc.available(), reason="no nvcc on this machine")
def test_inline_line_numbers_of_cuda_sources_are_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    include = without_torchs_headers(tmp_path)
    with pytest.raises(CompileError) as caught:
        opkiln.load_inline(
            "inlined", "", cuda_sources="__global__ void k() {}\nint bad = nothing;\n",
            extra_include_paths=include, is_python_module=False,
        )  # fmt: skip
    assert caught.value.why.startswith("cuda_sources[0](2): error")
    assert "int bad = nothing;" in caught.value.why


def test_inline_library_has_the_same_bytes_from_every_build_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'extern "C" const char* where() { return __FILE__; }\n'
    digests = set()
    for turn in ("a", "b"):
        (tmp_path / turn).mkdir()
        monkeypatch.setenv("OPKILN_TMPDIR", str(tmp_path / turn))
        monkeypatch.setenv("OPKILN_CACHE_DIR", str(known.make_store(tmp_path / turn / "cache")))
        library = opkiln.load_inline("reproduced", text, abi="none", extra_cflags=["-g"],
                                     is_python_module=False)  # fmt: skip
        library.where.restype = ctypes.c_char_p
        assert library.where() == b"cpp_sources[0]"
        digests.add(sha256_file(library._name))
    assert len(digests) == 1


def test_a_library_with_a_missing_symbol_fails_its_load_test_and_is_not_published(
    tmp_path: Path, cache: Path
) -> None:
    source = tmp_path / "a.cpp"
    source.write_text('extern "C" int nowhere();\nextern "C" int f() { return nowhere(); }\n')
    with pytest.raises(LoadTestError) as caught:
        opkiln.load("lacking", [str(source)], abi="none", is_python_module=False)
    assert "undefined symbol: nowhere" in caught.value.why
    assert entries(cache) == []


def test_undefined_symbol_is_demangled_and_the_hint_asks_for_a_missing_source_first(
    tmp_path: Path,
) -> None:
    source = tmp_path / "a.cpp"
    source.write_text(
        "#include <string>\n"
        "namespace kernels { int launch(const std::string& name, int* data); }\n"
        'extern "C" int f() { return kernels::launch("a", nullptr); }\n'
    )
    with pytest.raises(LoadTestError) as caught:
        opkiln.load("lacking", [str(source)], abi="none", is_python_module=False)
    assert "undefined symbol: kernels::launch(" in caught.value.why
    assert "_ZN7kernels6launch" in caught.value.why  # by which one finds it in a library
    asked, linked = (caught.value.hint.index(each) for each in ("is a source missing", "link"))
    assert asked < linked
    assert "sources" in caught.value.hint
    assert "extra_ldflags" in caught.value.hint


def test_undefined_reference_of_a_program_asks_for_a_missing_source(tmp_path: Path) -> None:
    source = tmp_path / "a.cpp"
    source.write_text("int nowhere();\nint main() { return nowhere(); }\n")
    with pytest.raises(CompileError) as caught:
        opkiln.load("program", [str(source)], abi="none", is_standalone=True)
    assert "undefined reference to `nowhere()'" in caught.value.why
    assert caught.value.hint.startswith("is a source missing from sources?")


def test_a_library_that_crashes_when_it_is_loaded_ends_a_child_and_not_this_process(
    tmp_path: Path, cache: Path
) -> None:
    source = tmp_path / "a.cpp"
    source.write_text("struct Bomb { Bomb() { __builtin_trap(); } } bomb;\n")
    with pytest.raises(LoadTestError) as caught:
        opkiln.load("bomb", [str(source)], abi="none", is_python_module=False)
    assert re.search(r"died of SIG(ILL|TRAP)", caught.value.why)
    assert entries(cache) == []


@pytest.mark.timed
def test_a_step_that_takes_too_long_is_ended_and_named(
    plain: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    compiler = Compiler(tmp_path)
    compiler.write(before="case \"$*\" in *' -c '*) sleep 60;; esac")
    monkeypatch.setenv("CXX", str(compiler.path))
    monkeypatch.setenv("OPKILN_BUILD_TIMEOUT", "3")
    with pytest.raises(BuildTimeout) as caught:
        plain.load()
    assert " 3 s" in caught.value.what
    assert "OPKILN_BUILD_TIMEOUT=" in caught.value.hint
    assert entries(cache) == []


@pytest.mark.first_use
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"name": "../evil"}, "cannot be the name"),
        ({"sources": []}, "declares no sources"),
        ({"sources": ["absent.cpp"]}, "does not exist"),
        ({"extra_cflags": ["-fplugin=x.so"]}, "is not allowed"),
        ({"extra_cflags": "-O2"}, "must be a list of flags"),
        ({"abi": "c++"}, "expected 'torch', 'torch-stable' or 'none'"),
        ({"with_cuda": True, "with_sycl": True}, "cannot hold both CUDA and SYCL"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_runs(
    tmp_path: Path, cache: Path, arguments: dict[str, object], expected: str
) -> None:
    source = tmp_path / "a.cpp"
    source.write_text("int x;\n")
    wrong = {"name": "ok", "sources": [str(source)], "abi": "none", **arguments}
    with pytest.raises(OpkilnError, match=re.escape(expected)) as caught:
        opkiln.load(**wrong, is_python_module=False)  # type: ignore[arg-type]
    assert caught.value.exit_code == 2
    assert not cache.exists()


def test_a_builder_whose_sources_are_gone_says_so(plain: Package) -> None:
    (plain / "csrc/add.cpp").unlink()
    builder = plain.builder()
    assert not builder.is_compatible()
    assert builder.error_log is not None
    assert "the source csrc/add.cpp does not exist" in builder.error_log
    with pytest.raises((CompileError, SpecError)) as caught:
        builder.load()
    assert "csrc/add.cpp" in str(caught.value)
    assert builder.error_log == str(caught.value)


# As a notebook and a terminal show it

_SHOWN = """
    import sys, traceback
    def user():
        {call}
    try:
        user()
    except Exception as error:
        plain = "".join(traceback.format_exception(error))
        print(plain, file=sys.stderr)
        # What IPython asks an exception for, before it formats one itself.
        print("\\n".join(error._render_traceback_()))
"""
_CALLS = {
    "load_inline": "opkiln.load_inline('shown', TEXT, abi='none', is_python_module=False)",
    "load": "opkiln.load('shown', [FILE], abi='none', is_python_module=False)",
    "builder": "Builder().load(verbose=False)",
    "drop-in": "cpp_extension.load_inline('shown', TEXT, no_implicit_headers=True)",
}


@pytest.mark.parametrize("call", _CALLS)
def test_compile_error_is_shown_within_fifteen_lines(call: str, tmp_path: Path) -> None:
    text = "".join(f"int bad{n} = nothing{n};\n" for n in range(50))
    (tmp_path / "a.cpp").write_text(text)
    prepare = f"""
    import opkiln
    from opkiln.builder import OpBuilder
    import opkiln.compat.torch as cpp_extension
    FILE = {str(tmp_path / "a.cpp")!r}
    TEXT = open(FILE).read()
    class Builder(OpBuilder):
        NAME, ABI, KIND, root = "shown", "none", "plain", {str(tmp_path)!r}
        def sources(self): return ["a.cpp"]
"""
    done = child.finish(child.start(prepare + _SHOWN.format(call=_CALLS[call]), bare=False))
    assert done.returncode == 0, done.stderr
    for shown in (done.stderr, done.stdout):
        lines = shown.strip().splitlines()
        assert len(lines) <= 15, shown
        assert max(map(len, lines)) < 300
        assert any(":1:12: error: 'nothing0' was not declared" in line for line in lines), shown
        assert any("/logs/shown-" in line for line in lines)
        assert "in user" in shown  # where it was called
    log = re.search(r"log: (\S+)", done.stdout)
    assert log is not None
    with open(log[1]) as file:
        assert "nothing49" in file.read()
