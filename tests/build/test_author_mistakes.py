"""Mistakes that authors of ops make, and what they are told."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

import opkiln
from opkiln.builder import CUDAOpBuilder, OpBuilder
from opkiln.builder.registry import get_builder
from opkiln.errors import LoadTestError, SpecError, UnknownBackend, UsageError
from opkiln.settings import override

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sample.package import Package

_BINDING = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;
Tensor same(Tensor x) { return x; }
STABLE_TORCH_LIBRARY_IMPL(%s, CPU, m) { m.impl("same", TORCH_BOX(&same)); }
"""


def builder(tmp_path: Path, name: str, source: str) -> Any:
    (tmp_path / "binding.cpp").write_text(source)

    class Builder(OpBuilder):
        NAME = name
        NAMESPACE = name
        DISTRIBUTION = name
        root = str(tmp_path)

        def sources(self) -> list[str]:
            return ["binding.cpp"]

    @opkiln.library(Builder).op()
    def same(x: torch.Tensor) -> torch.Tensor:
        return x

    return Builder()


def test_a_builder_of_a_module_has_no_functions_for_torch() -> None:
    class Builder(OpBuilder):
        NAME, KIND = "mistaken_kind", "python"

    with pytest.raises(SpecError, match="op mistaken_kind is of kind python") as caught:
        opkiln.library(Builder)
    assert caught.value.hint == "Builder().load()"


def test_a_library_that_registers_under_another_namespace_is_named(tmp_path: Path) -> None:
    made = builder(tmp_path, "mistaken_ns", _BINDING % "another_ns")
    with pytest.raises(LoadTestError, match="no CPU kernel for mistaken_ns::same") as caught:
        made.jit_load()
    assert "there is a kernel for another_ns::same" in caught.value.why
    assert "STABLE_TORCH_LIBRARY_IMPL(mistaken_ns, CPU, m)" in caught.value.hint


def test_a_schema_that_is_defined_twice_is_refused_before_it_can_end_a_process(
    tmp_path: Path,
) -> None:
    twice = _BINDING % "mistaken_def"
    twice += (
        'STABLE_TORCH_LIBRARY_FRAGMENT(mistaken_def, m) { m.def("same(Tensor x) -> Tensor"); }\n'
    )
    made = builder(tmp_path, "mistaken_def", twice)
    with pytest.raises(LoadTestError, match="defines a schema in C"):
        made.jit_load()


def test_a_string_where_a_list_is_wanted_is_told_so(device: Package) -> None:
    made = device.builder(_asked_backend="cuda", FLAGS="-O3 --use_fast_math")
    with override(cuda_arch_list="9.0"), pytest.raises(SpecError, match="is a string where a list"):
        made.op()


def test_a_backend_that_is_none_is_refused() -> None:
    with pytest.raises(SpecError, match="BACKENDS names CUDA"):
        type("Wrong", (CUDAOpBuilder,), {"NAME": "wrong", "BACKENDS": ("CUDA",)})()
    with pytest.raises(UnknownBackend, match="has no version for 'cuda'"):
        get_builder("cpu_adam", backend="cuda")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc on PATH")
def test_a_filter_in_deepspeeds_manner_prunes_and_decides_nothing_else(device: Package) -> None:
    class Builder(type(device.builder())):  # type: ignore[misc]
        root = device.builder().root

        def __init__(self) -> None:
            super().__init__(name=self.NAME)

        def filter_ccs(self, ccs: list[str]) -> list[list[str]]:
            kept = [cc.split(".") for cc in ccs if int(cc.split(".")[0]) >= 8]
            pruned = [cc for cc in ccs if int(cc.split(".")[0]) < 8]
            if pruned:
                self.warning(f"Filtered compute capabilities {pruned}")
            return kept

        def nvcc_args(self) -> list[str]:
            return ["-O3", "--use_fast_math", *self.version_dependent_macros(),
                    *self.compute_capability_args()]  # fmt: skip

        def libraries_args(self) -> list[str]:
            return ["cudart"]

    made = Builder()
    made.ask_for("cuda", None)
    with override(cuda_arch_list="7.5;9.0"):
        assert made.is_compatible(), made.error_log
        assert made.remarks == ["Filtered compute capabilities ['7.5']"]
        assert made.spec().libraries == ()
        assert made.jit_load().answer() == 42


@pytest.fixture
def device(package: Callable[..., Package]) -> Package:
    return package("device")


def test_tuple_without_its_comma_is_refused_with_the_line_to_write() -> None:
    with pytest.raises(SpecError) as caught:
        type("Wrong", (OpBuilder,), {"NAME": "wrong", "BACKENDS": "cpu"})()
    assert caught.value.what == "op wrong: BACKENDS is a string, not a tuple"
    assert "comma" in caught.value.why
    assert caught.value.hint == "BACKENDS = ('cpu',)"


def test_tuple_of_other_things_than_strings_is_refused() -> None:
    for value in (7, (7,), None):
        with pytest.raises(SpecError, match="op wrong: BACKENDS is not a tuple of strings"):
            type("Wrong", (OpBuilder,), {"NAME": "wrong", "BACKENDS": value})()


@pytest.mark.parametrize("value", [None, 7, [7]])
def test_method_that_returns_no_list_of_strings_is_refused(value: object) -> None:
    wrong = type("Wrong", (OpBuilder,), {"NAME": "wrong", "sources": lambda self: value})
    with pytest.raises(SpecError, match=r"op wrong: .* where a list of strings is wanted"):
        wrong().spec()


def test_include_paths_of_a_call_as_one_string_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text("int x;\n")
    with pytest.raises(UsageError, match=r"extra_include_paths must be a list, not the string"):
        opkiln.load("wrong", str(tmp_path / "a.cpp"), abi="none", is_python_module=False,
                    extra_include_paths=str(tmp_path))  # fmt: skip


@pytest.mark.parametrize("said", ["", 'puts("\\nopkiln: loaded");'], ids=["silent", "lying"])
def test_a_constructor_that_ends_the_process_is_told_and_not_published(
    said: str, tmp_path: Path
) -> None:
    source = tmp_path / "op.cpp"
    source.write_text(
        "#include <cstdio>\n#include <cstdlib>\n"
        f"static int ended = [] {{ {said} exit(0); return 0; }}();\n"
        'extern "C" int value() { return ended; }\n'
    )
    with pytest.raises(LoadTestError, match="ended the process with exit status 0"):
        opkiln.load("op", [str(source)], is_python_module=False, abi="none")


@pytest.mark.parametrize(
    ("part", "function", "hint"),
    [
        ("backward", lambda grad, x: grad, "def <lambda>(grad, x, scale):"),
        ("backward", lambda grad, x, scale, output, more: grad, "(grad, x, scale, *, output):"),
        ("fake", lambda x: x, "def <lambda>(x, scale):"),
        ("vmap", lambda info, x, scale: (x, 0), "(info, in_dims, x, scale):"),
        ("variant", lambda x: {"N": 1}, "(x, scale):"),
        ("tune_key", lambda x: 1, "(x, scale):"),
    ],
)
def test_a_function_of_an_op_that_cannot_take_its_arguments_is_told_which(
    part: str, function: Any, hint: str, tmp_path: Path
) -> None:
    values: Any = {"N": (1, 2)}

    @opkiln.op(source="// nothing", variants=values if part == "variant" else None,
               tune=values if part == "tune_key" else None)  # fmt: skip
    def mistaken_parts(x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * scale

    with pytest.raises(SpecError, match="cannot take what it is called with") as wrong:
        getattr(mistaken_parts, part)(function)
    assert hint in wrong.value.hint


def test_hints_for_a_decorated_function_speak_of_its_decorator() -> None:
    @opkiln.op(
        source="""
        #include <opkiln/op.h>
        extern "C" int nowhere(int);
        opk::Tensor undefined_part(const opk::Tensor& x) {
          return opk::empty({nowhere(1)}, x);
        }
        OPKILN_OP(undefined_part, cpu);
        """
    )
    def undefined_part(x: torch.Tensor) -> torch.Tensor:
        return x

    with pytest.raises(LoadTestError, match="undefined symbol") as wrong:
        undefined_part.builder().jit_load()
    assert wrong.value.hint.endswith('needs={"libraries": ["…"]}    # in @opkiln.op')
