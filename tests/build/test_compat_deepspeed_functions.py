"""Who serves each function of DeepSpeed's modules: opkiln's op, or DeepSpeed's own source, which is
compiled here for a small package that has DeepSpeed's names."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deepspeed_given import warm  # noqa: F401 (a fixture)

from opkiln.compat.deepspeed import engine, patch
from opkiln.compat.deepspeed.modules import OpModule
from opkiln.compat.deepspeed.table import MODULES
from opkiln.errors import UnservedFunction

if TYPE_CHECKING:
    from collections.abc import Iterator

_SOURCE = """\
#include <pybind11/pybind11.h>
#define EACH(type, name) m.def("half_" #name, [](type x) { return x / 2; })
struct Handle { int size = 3; };
// m.def("removed", ...)
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("lamb", [] { return "DeepSpeed's"; });
    m.def("twice",
          [](int x) { return 2 * x; }, "a comment: https://example.org");
    EACH(float, fp32);
    pybind11::class_<Handle>(m, "lamb_handle")
        .def(pybind11::init<>()).def_readonly("size", &Handle::size);
}
"""
_BUILDER = """\
import os

class Builder:
    name, jit_mode, enable_bf16, error_log, source = "fused_lamb", False, False, None, "lamb.cpp"
    def sources(self): return [f"csrc/{self.source}"]
    def include_paths(self): return []
    def cxx_args(self): return ["-O0"]
    def nvcc_args(self): return []
    def extra_ldflags(self): return []
    def is_rocm_pytorch(self): return False
    def is_compatible(self, verbose=False): return True
    def strip_empty_entries(self, entries): return [each for each in entries if each]
    def deepspeed_src_path(self, path): return os.path.join(os.path.dirname(__file__), path)
"""
_INSTALLED = "installed_ops, accelerator_name = {}, 'cpu'\n"
_ACCELERATOR = "class Cpu: _name = 'cpu'\ndef get_accelerator(): return Cpu\n"


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A builder of a package ``deepspeed`` with two sources; one does not compile."""
    package = tmp_path / "deepspeed"
    (package / "accelerator").mkdir(parents=True)
    (package / "csrc").mkdir()
    (package / "__init__.py").touch()
    (package / "lamb.py").write_text(_BUILDER)
    (package / "git_version_info.py").write_text(_INSTALLED)
    (package / "accelerator" / "__init__.py").write_text(_ACCELERATOR)
    (package / "csrc" / "lamb.cpp").write_text(_SOURCE)
    (package / "csrc" / "broken.cpp").write_text(_SOURCE.replace("return 2 * x", "return no_such"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(patch, "_served", {})
    yield import_module("deepspeed.lamb").Builder()
    for name in [each for each in sys.modules if each.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]


def _load(builder: Any) -> Any:
    return patch.load_module(builder, lambda: pytest.fail("DeepSpeed was asked to load it"))


@pytest.mark.usefixtures("warm")
def test_a_function_that_opkiln_lacks_is_deepspeeds_own_built_when_it_is_first_used(
    builder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    load = engine.load
    monkeypatch.setattr(engine, "load", lambda each: built.append(each.name) or load(each))
    module = _load(builder)
    assert isinstance(module, OpModule)
    assert {"lamb", "twice", "lamb_handle"} <= {*dir(module)}
    assert not any(hasattr(module, each) for each in ("nothing", "removed", "size", "CUDA_IMPL"))
    with pytest.raises(AttributeError, match="module 'fused_lamb' has no attribute 'nothing'"):
        module.nothing  # noqa: B018 (asking is what is tested)
    lamb = module.lamb
    assert built == []
    assert module.twice(21) == 42
    assert module.half_fp32(3.0) == 1.5
    assert module.lamb_handle().size == 3
    assert built == ["fused_lamb"]
    assert module.lamb is lamb, "opkiln's own stays opkiln's"
    assert not hasattr(module, "half_fp64"), "the macro could have made it, and did not"


@pytest.mark.usefixtures("warm")
def test_a_function_whose_source_cannot_be_built_is_missing_and_says_why(
    builder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder.source = "broken.cpp"
    built: list[str] = []
    load = engine.load
    monkeypatch.setattr(engine, "load", lambda each: built.append(each.name) or load(each))
    module = _load(builder)
    with pytest.raises(
        UnservedFunction, match=r"fused_lamb\.twice: .* which has it, cannot be loaded"
    ) as no:
        module.twice(1)
    assert "no_such" in no.value.why
    assert isinstance(no.value, AttributeError)
    assert not hasattr(module, "twice")
    assert built == ["fused_lamb"], "it is not tried again"


@pytest.mark.usefixtures("warm")
def test_a_function_is_missing_if_the_settings_leave_the_engine_out(
    builder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPKILN_DEEPSPEED", "ops")
    with pytest.raises(UnservedFunction, match=r"(?s)does not include `engine`.*hint: unset"):
        _load(builder).twice(1)


def test_who_serves_each_function_is_known_without_a_build(
    builder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = ("half_*", "lamb_handle", "twice")
    assert engine.functions(builder) == ("half_*", "lamb", "lamb_handle", "twice")
    assert patch._functions(builder) == ("fused_lamb", ("lamb",), theirs, (), (), "")
    monkeypatch.setenv("OPKILN_DEEPSPEED", "ops")
    assert patch._functions(builder) == ("fused_lamb", ("lamb",), (), (), theirs, "")
    monkeypatch.setenv("OPKILN_DEEPSPEED", "engine")
    every = engine.functions(builder)
    assert patch._functions(builder) == ("fused_lamb", (), every, (), (), "")
    monkeypatch.setenv("OPKILN_DEEPSPEED", "off")
    assert patch._functions(builder) == ("fused_lamb", (), (), every, (), "")
    builder.sources = lambda: 1 / 0
    assert patch._functions(builder).error == "ZeroDivisionError: division by zero"


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("op", MODULES)
def test_a_module_has_the_functions_of_the_table(op: str) -> None:
    module = OpModule(op)
    assert [each for each in MODULES[op].functions if each not in dir(module)] == []
