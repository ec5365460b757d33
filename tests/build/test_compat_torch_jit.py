"""``load`` and ``load_inline``: each shape of extension by opkiln, and in full by torch, too."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from sample import child
from sample.compat import both, described, module

import opkiln.compat.torch as ours
from opkiln.base.model import CUDA
from opkiln.machine.toolchain import choice, host
from opkiln.store.layers import Store

theirs = pytest.importorskip("torch.utils.cpp_extension")
pytestmark = pytest.mark.skipif(
    not host.available() or not theirs.is_ninja_available(),
    reason="torch builds with a C++ compiler and ninja",
)

if TYPE_CHECKING:
    from collections.abc import Callable

STABLE = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
int64_t sized(const torch::stable::Tensor& x) { return x.numel() * 10; }
STABLE_TORCH_LIBRARY(NAMESPACE, m) { m.def("sized(Tensor x) -> int"); }
STABLE_TORCH_LIBRARY_IMPL(NAMESPACE, CPU, m) { m.impl("sized", TORCH_BOX(&sized)); }
"""
FULL = """
#include <torch/library.h>
static at::Tensor square(const at::Tensor& x) { return x.mul(x); }
TORCH_LIBRARY(NAMESPACE, m) { m.def("square(Tensor x) -> Tensor", &square); }
"""
PROGRAM = """
#include <c10/core/DeviceType.h>
#include <cstdio>
int main(int n, char**) {
  std::puts(c10::DeviceTypeName(c10::DeviceType::CPU).c_str());
  return n;
}
"""
PYBIND = """
#include <pybind11/pybind11.h>
int add(int a, int b) { return a + b; }
namespace inner {
int sub(int a, int b) { return a < b ? throw std::invalid_argument("a < b") : a - b; }
}
"""
TENSORS = """
at::Tensor twice(const at::Tensor& x) { return x * 2; }
at::Tensor refuse(const at::Tensor& x) { TORCH_CHECK(x.numel() == 0, "not empty"); return x; }
at::Tensor no_index(const at::Tensor& x) { TORCH_CHECK_INDEX(false, "no index"); return x; }
"""
KERNEL = """
#include <cuda_runtime.h>
__global__ void fill(float* x) { x[threadIdx.x] = SCALE; }
int launched() { fill<<<1, 1>>>(nullptr); return cudaGetLastError() != cudaSuccess; }
"""
CALLS_KERNEL = """
#include <Python.h>
int launched();
static PyObject* run(PyObject*, PyObject*) { return Py_BuildValue("i", launched()); }
static PyMethodDef methods[] = {{"run", run, METH_NOARGS, "Runs."}, {}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "mixed", "", -1, methods};
PyMODINIT_FUNC PyInit_mixed() { return PyModule_Create(&definition); }
"""


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """torch's builds of a test lie in its own directory, too."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "torchs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(params=["opkiln", pytest.param("torch", marks=pytest.mark.full)])
def system(request: pytest.FixtureRequest) -> Any:
    """The module with ``load``. Both give the same; torch takes a second or more for each."""
    return ours if request.param == "opkiln" else theirs


def write(path: str, text: str) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
    return path


# A module


def test_a_module_has_nothing_that_was_not_asked_for(system: Any) -> None:
    """No optimization, assertions, no instructions beyond the CPU family's, no other standard."""
    predefined = ["NDEBUG", "__OPTIMIZE__", "__AVX2__", "__FMA__", "TORCH_API_INCLUDE_EXTENSION_H"]
    bits = " + ".join(f"HAS_{name} * {1 << i}" for i, name in enumerate(predefined))
    text = "".join(
        f"#ifdef {name}\n#define HAS_{name} 1\n#else\n#define HAS_{name} 0\n#endif\n"
        for name in predefined
    )
    write("src/m.cpp", f"{text}#define ANSWER {bits}\n{module('defaults')}")
    found = system.load("defaults", ["src/m.cpp"])
    answer = (BuiltinFunctionType, "What the answer is.")
    assert described(found) == {"type": ModuleType, "doc": "By hand.", "names": {"answer": answer}}
    assert found.answer() == 1 << predefined.index("TORCH_API_INCLUDE_EXTENSION_H")


FLAGS = {  # how their words are split is tested with shell_words
    "flagged_all": (4 + 201703, ["-O3", "-march=native", "-fopenmp", "-std=c++17",
                                 r"-DQUOTED=sizeof\(\"abc\"\)",
                                 "-DANSWER=QUOTED+__cplusplus+!_OPENMP"]),
    "flagged_one": (7, ["-DANSWER=7"]),
    "flagged_words": (7, ["-DANSWER=7 -O2", "-g"]),
    "flagged_spaced": (2, ["'-DANSWER=(1 + 1)'"]),
    "flagged_warnings": (3, ["-O0", "-Wall", "-DANSWER=3"]),
}  # fmt: skip


@pytest.mark.parametrize("name", [
    pytest.param(each, marks=() if each == "flagged_all" else pytest.mark.full) for each in FLAGS
])  # fmt: skip
def test_flags_mean_the_same(name: str, system: Any) -> None:
    answer, flags = FLAGS[name]
    write("m.cpp", module(name))
    assert system.load(name, "m.cpp", extra_cflags=flags).answer() == answer


def test_sources_of_every_suffix_find_headers_in_relative_and_absolute_directories(
    apart: Path, system: Any
) -> None:
    write("inc/value.h", "#define VALUE 5\n")
    write("far/more.h", "#define MORE VALUE + 1\n")
    write("src/m.cpp", '#include "value.h"\n#include "more.h"\n'
          "extern int a(), b(), c();\n#define ANSWER MORE + a() + b() + c()\n" +
          module("suffixes"))  # fmt: skip
    for name, suffix in (("a", "cc"), ("b", "cxx"), ("c", "c")):
        write(f"{name}.{suffix}", f"int {name}() {{ return 1; }}\n")
    found = system.load(
        "suffixes", ["src/m.cpp", "a.cc", "b.cxx", "c.c"],
        extra_include_paths=["inc", str(apart / "far")],
    )  # fmt: skip
    assert found.answer() == 9


def test_a_changed_source_or_flag_gives_the_new_code(system: Any) -> None:
    write("m.cpp", module("changing"))
    assert system.load("changing", ["m.cpp"]).answer() == 42
    # torch's second version goes by another name, which its module has to know.
    name = "changing_v1" if system is theirs else "changing"
    write("m.cpp", "#define ANSWER 43\n" + module(name))
    assert system.load("changing", ["m.cpp"]).answer() == 43


def test_files_of_one_name_in_two_folders_collide_in_torchs_load_and_not_here() -> None:
    write("one/x.cpp", "int other();\n#define ANSWER other()\n" + module("twins"))
    write("two/x.cpp", "int other() { return 9; }\n")
    sources = ["one/x.cpp", "two/x.cpp"]
    with pytest.raises(RuntimeError, match="multiple rules generate"):
        theirs.load("twins", sources)
    assert ours.load("twins", sources).answer() == 9


# Other kinds


def test_a_program_is_its_path(system: Any) -> None:
    write("p.cpp", PROGRAM)
    os.mkdir("made")
    found = system.load("program", ["p.cpp"], is_python_module=False, is_standalone=True,
                        build_directory="made")  # fmt: skip
    assert found == "made/program"
    command = [os.path.abspath(found), "x"]
    done = subprocess.run(command, capture_output=True, text=True, env={}, check=False)
    assert (done.returncode, done.stdout) == (2, "CPU\n")


def registered(system: Any, text: str, namespace: str) -> str:
    """Loaded under a namespace of its own: one can be defined once in a process."""
    source = write(f"{namespace}.cpp", text.replace("NAMESPACE", namespace))
    os.mkdir(f"{namespace}-dir")
    return str(
        system.load(namespace, [source], is_python_module=False, build_directory=f"{namespace}-dir")
    )


def test_a_library_of_the_stable_abi_registers_its_ops() -> None:
    import torch

    path = registered(ours, STABLE, "matrix_a")
    assert path == "matrix_a-dir/matrix_a.so"
    assert os.path.isfile(path)
    assert torch.ops.matrix_a.sized(torch.ones(2, 3)) == 60


@pytest.mark.full
@pytest.mark.parametrize(("text", "op"), [(STABLE, "sized"), (FULL, "square")])
def test_a_torch_library_is_registered_as_torch_registers_it(text: str, op: str) -> None:
    import torch

    names = f"torchs_{op}", f"opkilns_{op}"
    paths = registered(theirs, text, names[0]), registered(ours, text, names[1])
    assert paths == tuple(f"{name}-dir/{name}.so" for name in names)
    x = torch.arange(2.0)
    found = [torch.as_tensor(getattr(getattr(torch.ops, name), op)(x)) for name in names]
    assert torch.equal(*found)


# Text


INLINE = {
    "inline_dict": {"add": "Adds two numbers.", "inner::sub": "Not below 0."},
    "inline_list": ["add", "inner::sub"],
    "inline_text": "add",
}


def inline(system: Any, name: str) -> Any:
    """pybind11 takes ten seconds to compile, and opkiln's come from the pool."""
    return system.load_inline(
        name, [PYBIND], functions=INLINE[name], no_implicit_headers=True,
        with_pytorch_error_handling=False,
    )  # fmt: skip


def test_inline_functions_are_bound_with_their_texts(apart: Path) -> None:
    found = inline(ours, "inline_dict")
    assert not (apart / "torchs").exists(), "torch's directory for builds stays as it is"
    assert found.add(2, 3) == 5
    assert found.add.__doc__.endswith("\n\nAdds two numbers.\n")
    with pytest.raises(ValueError, match="a < b"):
        getattr(found, "inner::sub")(1, 2)


@pytest.mark.full
@pytest.mark.parametrize("name", INLINE)
def test_inline_functions_are_the_same_to_their_callers(name: str) -> None:
    expected, found = both(lambda system: inline(system, name))
    assert described(found) == described(expected)
    assert found.add(2, 3) == expected.add(2, 3) == 5


def test_inline_text_without_functions_and_where_it_is_written(system: Any) -> None:
    text = module("written")
    os.mkdir("made")
    found = system.load_inline("written", text, build_directory="made", no_implicit_headers=True)
    assert found.answer() == 42
    left = {path.name for path in Path("made").iterdir()}
    assert left == {"main.cpp", "written.so"} or (
        left > {"main.cpp", "written.so"} and system is theirs
    )
    assert Path("made/main.cpp").read_text() == text + ("\n" if system is ours else "")


@pytest.mark.full
def test_inline_functions_on_tensors_raise_torchs_own_errors() -> None:
    import torch

    functions = {"twice": "Twice the input.", "refuse": "Refuses.", "no_index": "An index."}
    expected, found = both(
        lambda system: system.load_inline("tensors", TENSORS, functions=functions)
    )
    assert described(found) == described(expected)
    assert torch.equal(found.twice(torch.ones(3)), expected.twice(torch.ones(3)))
    for name in ("refuse", "no_index"):
        errors = []
        for each in (expected, found):
            with pytest.raises((RuntimeError, IndexError)) as caught:
                getattr(each, name)(torch.ones(1))
            errors.append((caught.type, str(caught.value).split("\n")[0]))
        assert errors[0] == errors[1]


# What goes wrong

BAD: dict[str, tuple[type[Exception], Callable[[Any], Any]]] = {
    "no C++ at all": (RuntimeError, lambda system: system.load("bad", ["bad.cpp"])),
    "no such source": (FileNotFoundError, lambda system: system.load("gone", ["gone.cpp"])),
    "no source": (AssertionError, lambda system: system.load("none", [])),
    "no module in it": (ImportError, lambda system: system.load("plain", ["plain.cpp"])),
    "an undefined symbol": (ImportError, lambda system: system.load("lacks", ["lacks.cpp"])),
    "a library that lacks a symbol": (
        OSError, lambda system: system.load("lacks_too", ["lacks.cpp"], is_python_module=False)
    ),
    "a module and a program": (
        ValueError, lambda system: system.load("m", ["plain.cpp"], is_standalone=True)
    ),
    "CUDA and SYCL": (
        AssertionError,
        lambda system: system.load("m", ["plain.cpp"], with_cuda=True, with_sycl=True),
    ),
    "functions that are a tuple": (
        ValueError, lambda system: system.load_inline("t", "", functions=("f",))
    ),
    "a flag that is none": (
        RuntimeError, lambda system: system.load("f", ["plain.cpp"], ["--no-such-flag-here"])
    ),
    "a library that is not there": (
        RuntimeError,
        lambda system: system.load("l", ["plain.cpp"], extra_ldflags=["-lno_such_library_here"]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", list(BAD))
def test_what_goes_wrong_is_an_exception_of_the_same_kind(what: str, system: Any) -> None:
    write("bad.cpp", "no C++ at all\n")
    write("plain.cpp", "int nothing() { return 0; }\n")
    write("lacks.cpp", "int missing_function(); int value = missing_function();\n" +
          module("lacks"))  # fmt: skip
    kind, call = BAD[what]
    with pytest.raises(kind):
        call(system)


def test_a_compile_error_says_where_and_is_caught_as_torchs() -> None:
    write("bad.cpp", "int f() { return undeclared; }\n")
    with pytest.raises(RuntimeError, match=r"bad\.cpp:1.*'undeclared' was not declared"):
        ours.load("bad", ["bad.cpp"])


# CUDA, compiled on both sides; there need be no GPU


@pytest.fixture
def cuda(apart: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The linker's flags with which torch's CPU build can build CUDA extensions: it is told of a
    toolkit, and the libraries that it lacks are empty ones."""
    if not choice.available(CUDA):
        pytest.skip("no CUDA toolkit on this machine")
    device = choice.choose(Store().memory, CUDA).device
    assert device is not None
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    monkeypatch.setattr(theirs, "CUDA_HOME", device.home)
    stubs = apart / "stubs"
    stubs.mkdir()
    for name in ("c10_cuda", "torch_cuda"):
        subprocess.run(["g++", "-shared", "-nostdlib", "-x", "c++", os.devnull, "-o",
                        str(stubs / f"lib{name}.so"), f"-Wl,-soname,lib{name}.so"],
                       check=True)  # fmt: skip
    return [f"-L{stubs}", f"-Wl,-rpath,{stubs}"]


def test_cpp_and_cuda_are_one_module(cuda: list[str], system: Any) -> None:
    write("mixed.cpp", CALLS_KERNEL)
    write("mixed.cu", KERNEL)
    found = system.load(
        "mixed", ["mixed.cpp", "mixed.cu"], extra_ldflags=list(cuda),
        extra_cuda_cflags=["-DSCALE=2", "--threads 2", "-Xptxas -v", "-lineinfo",
                           "--use_fast_math", "-Xcompiler -fopenmp"],
        extra_cflags=["-DNOT_FOR_NVCC"],
    )  # fmt: skip
    names = {"run": (BuiltinFunctionType, "Runs.")}
    assert described(found) == {"type": ModuleType, "doc": "", "names": names}
    assert found.run() in (0, 1)  # with a GPU, and without


def test_cpp_with_cuda_gets_the_runtime(cuda: list[str], system: Any) -> None:
    write("m.cpp", "#include <cuda_runtime_api.h>\n#define ANSWER CUDART_VERSION / 1000\n" +
          module("runtime"))  # fmt: skip
    found = system.load("runtime", ["m.cpp"], with_cuda=True, extra_ldflags=list(cuda))
    device = choice.choose(Store().memory, CUDA).device
    assert device is not None
    assert found.answer() == int(device.version.partition(".")[0])


# The store


@pytest.mark.counts_compiles
def test_a_clone_of_a_project_is_a_hit(apart: Path) -> None:
    for clone in ("here", "there"):
        write(f"{clone}/csrc/m.cpp", '#include "value.h"\n' + module("cloned"))
        write(f"{clone}/include/value.h", "#define ANSWER 5\n")
    code = """
        import os, sys
        os.chdir(sys.argv[1])
        from opkiln.run import events
        from opkiln.compat.torch import load
        seen = []
        with events.listen(seen.append):
            found = load("cloned", ["csrc/m.cpp"], extra_include_paths=["include"])
        print(found.answer(), sum(each.kind == "step-start" for each in seen))
    """
    assert child.run(code, str(apart / "here"), bare=False).split() == ["5", "2"]
    assert child.run(code, str(apart / "there"), bare=False).split() == ["5", "0"]
