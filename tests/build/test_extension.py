"""``opkiln.load`` and ``load_inline``: every kind of extension, reloads, parity with torch."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sample import child, known, pool
from sample.package import rest

import opkiln
from opkiln.errors import ReloadError, UsageError
from opkiln.extension import bindings
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
int64_t value();
int64_t answer(const torch::stable::Tensor&) { return value(); }
STABLE_TORCH_LIBRARY(defines_schema, m) { m.def("answer(Tensor x) -> int"); }
STABLE_TORCH_LIBRARY_IMPL(defines_schema, CPU, m) { m.impl("answer", TORCH_BOX(&answer)); }
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
        from opkiln.run import events
        import opkiln
        seen = []
        with events.listen(seen.append):
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
import sys
from pathlib import Path
import torch, opkiln
for answer in (1, 2):
    Path(sys.argv[2]).write_text(f"long value() {{ return {answer}; }}")
    try:
        opkiln.load("defines", sys.argv[1:], is_python_module=False, abi="torch-stable")
    except opkiln.errors.ReloadError as error:
        sys.exit(f"refused: {error.hint}")
"""


def test_a_library_that_defines_its_schema_loads_once_and_its_edit_is_refused_not_a_crash(
    tmp_path: Path,
) -> None:
    import torch

    sources = [write(tmp_path / "s.cpp", STABLE), str(tmp_path / "value.cpp")]

    def load(answer: int) -> str:
        write(tmp_path / "value.cpp", f"long value() {{ return {answer}; }}")
        return str(opkiln.load("defines", sources, is_python_module=False, abi="torch-stable"))

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
    both = child.finish(child.start(_LOADS_BOTH, *sources, bare=False, env=cached))
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


def test_functions_may_be_a_name_names_or_names_with_docstrings() -> None:
    one, many, documented = (bindings(each, False) for each in ("f", ["f"], {"f": "f"}))
    assert one == many == documented


# torch's own ABI


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
