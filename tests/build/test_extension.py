"""``opkiln.load`` and ``load_inline``: every kind of extension, reloads, parity with torch."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sample import child, known, pool
from sample.package import rest

import opkiln
from opkiln.errors import ReloadError, UsageError
from opkiln.settings import override

if TYPE_CHECKING:
    from sample.package import Steps

MODULE = """
#include <Python.h>
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(ANSWER); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "by_hand", "", -1, methods};
PyMODINIT_FUNC PyInit_by_hand() { return PyModule_Create(&definition); }
"""
STABLE = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
int64_t answer(const torch::stable::Tensor&) { return ANSWER; }
STABLE_TORCH_LIBRARY(NAMESPACE, m) { m.def("answer(Tensor x) -> int"); }
STABLE_TORCH_LIBRARY_IMPL(NAMESPACE, CPU, m) { m.impl("answer", TORCH_BOX(&answer)); }
"""
PYBIND = """
#include <pybind11/pybind11.h>
#include "shared.h"
int add(int a, int b) { return a + b + kShared; }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("add", &add); }
"""
TENSORS = """
torch::Tensor twice(const torch::Tensor& x) { return x * 2; }
torch::Tensor refuse(const torch::Tensor& x) { TORCH_CHECK(x.numel() == 0, "not empty"); return x; }
"""


def write(path: Path, text: str) -> str:
    path.write_text(text)
    rest()
    return str(path)


def plain(path: Path, name: str, **arguments: Any) -> Any:
    return opkiln.load(name, [str(path)], abi="none", is_python_module=False, **arguments)


# The signature


@pytest.mark.parametrize("name", ["load", "load_inline"])
def test_the_arguments_are_those_of_torch_in_their_order_with_their_defaults(name: str) -> None:
    import torch.utils.cpp_extension as theirs

    ours = inspect.signature(getattr(opkiln, name)).parameters
    expected = inspect.signature(getattr(theirs, name)).parameters
    assert list(ours)[: len(expected)] == list(expected)
    for argument, parameter in expected.items():
        assert ours[argument].default == parameter.default, argument
    assert all(ours[more].kind is inspect.Parameter.KEYWORD_ONLY for more in
               list(ours)[len(expected) :])  # fmt: skip


# Without torch


def test_plain_code_is_a_ctypes_library(tmp_path: Path) -> None:
    source = write(tmp_path / "a.cpp", 'extern "C" int f() { return 7; }\n')
    assert opkiln.load("ctypes_library", source, abi="none", is_python_module=False).f() == 7


def test_a_module_by_hand_needs_no_torch(tmp_path: Path) -> None:
    source = write(tmp_path / "m.cpp", MODULE)
    code = """
        import sys, opkiln
        module = opkiln.load("by_hand", [sys.argv[1]], extra_cflags=["-DANSWER=42"], abi="none")
        print(module.answer(), module.__name__, "torch" in sys.modules)
    """
    assert child.run(code, source, bare=False, forked=False).split() == ["42", "by_hand", "False"]


def test_a_program_is_its_path(tmp_path: Path) -> None:
    source = write(tmp_path / "p.cpp", '#include <cstdio>\nint main() { std::puts("hello"); }\n')
    path = opkiln.load("program", [source], is_standalone=True, abi="none")
    assert subprocess.run([path], capture_output=True, text=True, check=True).stdout == "hello\n"


def test_inline_text_is_built_once_and_leaves_no_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: Steps
) -> None:
    monkeypatch.chdir(tmp_path)
    text = 'extern "C" int f() { return 11; }\n'
    for _ in range(2):
        library = opkiln.load_inline("inline_text", text, abi="none", is_python_module=False)
        assert library.f() == 11
    assert steps.compiled == ["main.cpp"]
    assert list(tmp_path.iterdir()) == []
    other = opkiln.load_inline(
        "inline_text", [text, 'extern "C" int g() { return 12; }'], abi="none",
        is_python_module=False,
    )  # fmt: skip
    assert (other.f(), other.g()) == (11, 12)


def test_inline_text_is_found_by_another_process(cache: Path) -> None:
    code = """
        from opkiln.engine import events
        import opkiln
        seen = []
        with events.listening(seen.append):
            library = opkiln.load_inline("inline_again", 'extern "C" int f() { return 5; }',
                                         abi="none", is_python_module=False)
        print(library.f(), len(seen) > 0)
    """
    assert child.run(code).split() == ["5", "True"]
    assert child.run(code).split() == ["5", "False"]


def test_inline_text_sees_an_edited_header(tmp_path: Path) -> None:
    def load() -> int:
        library = opkiln.load_inline(
            "inline_header", '#include "v.h"\nextern "C" int f() { return V; }', abi="none",
            is_python_module=False, extra_include_paths=[str(tmp_path)],
        )  # fmt: skip
        return int(library.f())

    write(tmp_path / "v.h", "#define V 1\n")
    assert load() == 1
    write(tmp_path / "v.h", "#define V 2\n")
    assert load() == 2


# Reloading


def test_an_edit_is_picked_up_and_the_old_library_still_works(tmp_path: Path) -> None:
    source = tmp_path / "a.cpp"
    write(source, 'extern "C" int f() { return 1; }\n')
    old = plain(source, "edited")
    assert plain(source, "edited") is old, "unchanged: what is loaded"
    write(source, 'extern "C" int f() { return 2; }\n')
    new = plain(source, "edited")
    assert (old.f(), new.f()) == (1, 2)
    write(source, 'extern "C" int f() { return 1; }\n')
    assert plain(source, "edited") is old


def test_one_name_with_other_flags_is_another_library(tmp_path: Path) -> None:
    source = tmp_path / "who.cpp"
    write(source, 'extern "C" int who() { return WHO; }\n')
    libraries = [plain(source, "who", extra_cflags=[f"-DWHO={i}"]) for i in range(3)]
    assert [library.who() for library in libraries] == [0, 1, 2]


def test_two_libraries_with_the_same_bytes_have_a_state_each() -> None:
    text = 'static int n; extern "C" int count() { return ++n; }'
    one, two = (
        opkiln.load_inline(name, text, abi="none", is_python_module=False)
        for name in ("counts_one", "counts_two")
    )
    assert Path(one._name).read_bytes() == Path(two._name).read_bytes()
    assert (one.count(), one.count(), two.count()) == (1, 2, 1)


def test_two_modules_with_the_same_bytes_have_a_state_each(tmp_path: Path) -> None:
    source = write(tmp_path / "m.cpp", MODULE.replace("static PyObject*", "static int n;\n"
                   "static PyObject*", 1).replace("ANSWER", "++n"))  # fmt: skip

    class Owned(opkiln.OpBuilder):
        NAME, KIND, ABI = "by_hand", "python", "none"

        def sources(self) -> list[str]:
            return [source]

    class Others(Owned):
        DISTRIBUTION = "somebody"

    one, two = Owned().load(), Others().load()
    assert Path(one.__file__).read_bytes() == Path(two.__file__).read_bytes()
    assert (one.answer(), one.answer(), two.answer()) == (1, 2, 1)
    assert Others().load() is two
    assert sys.modules[two.__name__] is two


def test_a_python_module_is_reloaded_after_an_edit(tmp_path: Path) -> None:
    source = write(tmp_path / "m.cpp", MODULE)

    def load(answer: int) -> Any:
        return opkiln.load("by_hand", [source], extra_cflags=[f"-DANSWER={answer}"], abi="none")

    first, edited = load(1), load(2)
    assert (first.answer(), edited.answer(), load(1).answer()) == (1, 2, 1)
    assert load(1) is first
    # CPython puts a module with single-phase initialization into sys.modules, as with torch.
    assert sys.modules[first.__name__] is first
    assert sys.modules[edited.__name__] is edited
    assert edited.__spec__.name == edited.__name__ != first.__name__


_LOADS_BOTH = """
import sys, torch, opkiln
for answer in (1, 2):
    try:
        flags = ["-DNAMESPACE=defines_schema", f"-DANSWER={answer}"]
        opkiln.load("defines", [sys.argv[1]], extra_cflags=flags, is_python_module=False,
                    abi="torch-stable")
    except opkiln.errors.ReloadError as error:
        sys.exit(f"refused: {error.hint}")
"""


def test_a_library_that_defines_its_schema_loads_once_and_its_edit_is_refused_not_a_crash(
    tmp_path: Path,
) -> None:
    import torch

    source = write(tmp_path / "s.cpp", STABLE)

    def load(answer: int) -> str:
        flags = ["-DNAMESPACE=defines_schema", f"-DANSWER={answer}"]
        return str(opkiln.load("defines", [source], extra_cflags=flags, is_python_module=False,
                               abi="torch-stable"))  # fmt: skip

    path = load(1)
    assert path.endswith("/defines.so")
    assert torch.ops.defines_schema.answer(torch.ones(1)) == 1
    assert load(1) == path
    with pytest.raises(ReloadError) as caught:
        load(2)
    assert "cannot be loaded beside the old one" in caught.value.what
    assert caught.value.hint == "restart the process"
    assert torch.ops.defines_schema.answer(torch.ones(1)) == 1
    # Also where both are cached, as in a process that starts now.
    cached = {"OPKILN_MODE": "cached"}
    both = child.finish(child.start(_LOADS_BOTH, source, bare=False, env=cached))
    assert both.returncode == 1, both.stderr
    assert "refused: restart the process" in both.stderr


# Where it goes


def test_the_build_directory_gets_a_copy(tmp_path: Path) -> None:
    write(tmp_path / "a.cpp", 'extern "C" int f() { return 3; }\n')
    plain(tmp_path / "a.cpp", "copied", build_directory=str(tmp_path / "out"))
    assert (tmp_path / "out" / "copied.so").exists()


def test_sources_of_several_directories_are_one_extension(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "x.cpp", f'extern "C" int {name}() {{ return 1; }}\n')
    library = opkiln.load("several", [str(tmp_path / "a/x.cpp"), str(tmp_path / "b/x.cpp")],
                          abi="none", is_python_module=False)  # fmt: skip
    assert library.a() + library.b() == 2


def test_functions_need_a_module_to_be_bound_into() -> None:
    with pytest.raises(UsageError, match="functions= needs a Python module"):
        opkiln.load_inline("x", "", functions=["f"], abi="none")
    with pytest.raises(UsageError, match="not the name of a C\\+\\+ function"):
        opkiln.load_inline("x", "", functions=["f()"])


# torch's own ABI


@pytest.mark.slow
def test_a_pybind_module_is_found_by_another_process_without_a_compiler(tmp_path: Path) -> None:
    write(tmp_path / "shared.h", "constexpr int kShared = 100;\n")
    write(tmp_path / "other.cpp", "int unrelated() { return 0; }\n")
    source = write(tmp_path / "bound.cpp", PYBIND)

    def load() -> Any:
        return opkiln.load("bound", [source, str(tmp_path / "other.cpp")], ["-O0"])

    module = load()
    assert module.add(1, 2) == 103
    assert load() is module
    out = child.run("""
        import sys, opkiln
        print(opkiln.load("bound", sys.argv[1:], ["-O0"]).add(1, 2))
    """, source, str(tmp_path / "other.cpp"), bare=False,
        env={"PATH": os.path.dirname(sys.executable)})  # fmt: skip
    assert out.strip() == "103"


@pytest.mark.slow
def test_a_list_of_functions_is_bound(tmp_path: Path) -> None:
    module = opkiln.load_inline(
        "listed", "#include <pybind11/pybind11.h>\nint add(int a, int b) { return a + b; }",
        functions=["add"], no_implicit_headers=True, with_pytorch_error_handling=False,
        extra_cflags=["-O0"],
    )  # fmt: skip
    assert module.add(2, 3) == 5


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A module over torch/extension.h: built once, it takes half a minute."""
    cache = known.make_store(tmp_path_factory.mktemp("tensors") / "cache")
    with (
        pytest.MonkeyPatch.context() as patch,
        override(cache_dir=str(cache), progress="off"),
    ):
        patch.setenv("OPKILN_STORE_LAYERS", str(pool.LAYER))
        made = opkiln.load_inline(
            "tensors", TENSORS, functions={"twice": "Twice the input.", "refuse": "Refuses."},
            extra_cflags=["-O0"],
        )  # fmt: skip
    pool.add(cache)
    return made


@pytest.mark.slow
def test_a_dict_of_functions_is_bound_with_its_docstrings(tensors: Any) -> None:
    import torch

    assert torch.equal(tensors.twice(torch.ones(3)), torch.full((3,), 2.0))
    assert "Twice the input." in tensors.twice.__doc__


@pytest.mark.slow
def test_an_error_of_torch_arrives_as_torchs_own(tensors: Any) -> None:
    import torch

    with pytest.raises(RuntimeError, match="not empty"):
        tensors.refuse(torch.ones(1))


@pytest.mark.slow
def test_a_torch_library_on_the_full_abi_registers_its_ops(tmp_path: Path) -> None:
    import torch

    source = write(
        tmp_path / "lib.cpp",
        "#include <torch/library.h>\n"
        "static int64_t answer(const at::Tensor& x) { return 42; }\n"
        "TORCH_LIBRARY(full_abi, m) { m.def(\"answer(Tensor x) -> int\", &answer); }\n",
    )  # fmt: skip
    path = opkiln.load("full_abi", [source], is_python_module=False, extra_cflags=["-O0"])
    assert os.path.exists(path)
    assert torch.ops.full_abi.answer(torch.ones(1)) == 42


def test_a_program_that_uses_torch_finds_its_libraries(tmp_path: Path) -> None:
    source = write(
        tmp_path / "p.cpp",
        "#include <c10/core/DeviceType.h>\n#include <cstdio>\n"
        "int main() { std::puts(c10::DeviceTypeName(c10::DeviceType::CPU).c_str()); }\n",
    )
    path = opkiln.load("torch_program", [source], is_standalone=True)
    done = subprocess.run([path], capture_output=True, text=True, check=True, env={})
    assert done.stdout == "CPU\n"
