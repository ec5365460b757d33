"""What breaks the promise of a tag is an error of the audit, with the symbols named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sample.levels import AARCH64, X86_64
from sample.prebuilt import ARM, FULL, STABLE, SYSTEM, TORCH, linked, target

from opkiln.errors import BuildError, LoadError
from opkiln.ship.audit import ERROR, NOTE, WARNING, Finding, audit, python_tag, require

if TYPE_CHECKING:
    from pathlib import Path

OF_C10 = ("", "_ZN3c106detail14torchCheckFailEPKcS2_jRKSs", "")


@pytest.fixture
def torch_lib(tmp_path: Path) -> str:
    """A libtorch_cpu: the stable ABI's symbols, C++ ones, and a C one of what is linked into it."""
    path = tmp_path / "libtorch_cpu.so"
    names = [name for _, name, _ in TORCH]
    names += ["_ZN6google8protobuf5ArenaD1Ev", "cblas_sgemm"]
    path.write_bytes(linked(defined=names, needed=()))
    return str(path)


class Audited:
    """Audits libraries that are made of symbols."""

    def __init__(self, directory: Path, torch_lib: str | None) -> None:
        self.path = directory / "op.so"
        self.torch_lib = torch_lib

    def __call__(self, *symbols: tuple[str, str, str], **made: Any) -> list[Finding]:
        changes = {name: made.pop(name) for name in ("abi_tag", "backend") if name in made}
        self.path.write_bytes(linked(*symbols, **made))
        self.manifest = {"op": "op", "target": target(**changes)}
        return audit(str(self.path), self.manifest, self.torch_lib)

    def errors(self, *symbols: tuple[str, str, str], **made: Any) -> str:
        found = self(*symbols, **made)
        return "\n".join(f"{each.what}: {each.why}" for each in found if each.level == ERROR)


@pytest.fixture
def audited(tmp_path: Path, torch_lib: str) -> Audited:
    return Audited(tmp_path, torch_lib)


def test_a_library_on_the_stable_abi_is_clean_and_told_its_platform(audited: Audited) -> None:
    assert audited(*SYSTEM, *TORCH) == [
        Finding(NOTE, f"its platform is manylinux_2_17_{X86_64}", "nothing newer than glibc 2.17")
    ]
    assert require(str(audited.path), audited.manifest, audited.torch_lib) == audited(
        *SYSTEM, *TORCH
    )


@pytest.mark.parametrize("name", ["PyObject_Call", "_Py_Dealloc", "Py_Initialize", "_PyObject_New"])
def test_python_symbols_are_an_error_in_a_wheel_for_every_python(
    audited: Audited, name: str
) -> None:
    assert f"it uses Python's symbols: {name}" in audited.errors(*TORCH, ("", name, ""))
    assert f"Python's symbols: {name}" in audited.errors(("", name, ""), needed=(), abi_tag="none")


def test_python_symbols_are_fine_where_the_tag_names_a_python(audited: Audited) -> None:
    symbol = ("", "PyModule_Create2", "")
    assert not audited.errors(symbol, needed=(), abi_tag="cpython-311-3.11.7")
    assert not audited.errors(*TORCH, symbol, abi_tag=f"{STABLE}-cpython-311-3.11.7")


def test_a_name_that_only_looks_like_pythons_is_not_taken_for_it(audited: Audited) -> None:
    said = audited.errors(*TORCH, ("", "Pythagoras", ""))
    assert "Python" not in said
    assert "none of the libraries that it needs defines Pythagoras" in said


@pytest.mark.parametrize(
    "name",
    [
        OF_C10[1],
        "_ZNK2at6Tensor4sizeEl",
        "_ZTVN5torch8autograd4NodeE",
        "_ZTIN3c105ErrorE",
        "_ZThn16_N5torch4NodeD1Ev",
        "_ZGVZN3c104typeIlEEvvE5value",
        "_ZN6caffe28TypeMeta4MakeEv",
        "_ZN6google8protobuf5ArenaD1Ev",  # by no namespace of torch's, but torch's library has it
    ],
)
def test_torchs_cpp_symbols_are_an_error(audited: Audited, name: str) -> None:
    assert f"it uses torch's C++ symbols: {name}" in audited.errors(*TORCH, ("", name, ""))


def test_long_lists_of_symbols_are_cut(audited: Audited) -> None:
    names = [("", f"_ZN3c10{len(name)}{name}Ev", "") for name in ("a", "b", "c", "d", "e", "f")]
    assert "_ZN3c101dEv and 2 more: they change" in audited.errors(*TORCH, *names)


def test_cpp_symbols_of_the_standard_library_are_fine(audited: Audited) -> None:
    takes_c10 = ("libstdc++.so.6", "_ZNSt6vectorIN3c106DeviceESaIS1_EE4dataEv", "GLIBCXX_3.4")
    assert not audited.errors(*TORCH, takes_c10)


def test_a_stable_symbol_that_this_torch_does_not_have_is_an_error(
    audited: Audited, torch_lib: str
) -> None:
    said = audited.errors(*TORCH, ("", "torch_of_next_year", ""))
    assert f"torch does not have torch_of_next_year: looked in {torch_lib}" in said


def test_a_c_symbol_of_torchs_that_is_not_of_its_stable_abi_is_an_error(audited: Audited) -> None:
    said = audited.errors(*TORCH, ("", "cblas_sgemm", ""))
    assert "C symbols of torch that are not part of its stable ABI: cblas_sgemm" in said


def test_without_a_torch_at_hand_its_symbols_are_noted_as_not_looked_up(tmp_path: Path) -> None:
    audited = Audited(tmp_path, None)
    found = audited(*SYSTEM, *TORCH)
    assert (
        Finding(NOTE, "torch's symbols were not checked", "no libtorch_cpu.so was found") in found
    )
    assert OF_C10[1] in audited.errors(*TORCH, OF_C10)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("libtorch_cuda.so", "not every torch has it"),
        ("libc10_cuda.so", "not every torch has it"),
        ("libtorch_python.so", "bound to one Python"),
    ],
)
def test_parts_of_torch_beyond_the_stable_abis_library_are_an_error(
    audited: Audited, name: str, why: str
) -> None:
    said = audited.errors(*TORCH, needed=("libtorch_cpu.so", name))
    assert f"it needs {name}: " in said
    assert why in said
    assert not audited.errors(*TORCH, needed=("libtorch_cpu.so", name), abi_tag=FULL)


def test_a_library_without_torch_may_not_need_it(audited: Audited) -> None:
    assert "it needs libtorch_cpu.so: its tag is none" in audited.errors(abi_tag="none")


@pytest.mark.parametrize("name", ["libcudart.so.13", "libamdhip64.so.7", "libgomp.so.1"])
def test_other_libraries_are_reported(audited: Audited, name: str) -> None:
    found = audited(*TORCH, ("", "of_another_library", ""), needed=("libtorch_cpu.so", name))
    assert Finding(WARNING, f"it needs {name}", "it loads only if that is found") in found
    assert not [each for each in found if each.level == ERROR]


def test_a_full_abi_library_may_use_all_of_torch(audited: Audited) -> None:
    symbols = (*SYSTEM, OF_C10, ("", "PyObject_Call", ""))
    found = audited(*symbols, needed=("libtorch.so", "libtorch_python.so"), abi_tag=FULL)
    assert [each.level for each in found] == [NOTE]


def test_a_library_for_another_machine_is_an_error(audited: Audited) -> None:
    found = audited.errors(*TORCH, machine=ARM)
    assert f"it is built for {AARCH64}: its target is {X86_64}" in found


def test_a_platform_that_is_no_manylinux_is_a_warning_with_the_reason(audited: Audited) -> None:
    found = audited(*TORCH, ("libstdc++.so.6", "of_tomorrow", "GLIBCXX_3.4.99"))
    (said,) = [each for each in found if each.level == WARNING]
    assert said.what == f"its platform is linux_{X86_64}"
    assert said.why.endswith(" has GLIBCXX_3.4.99")


def test_a_violation_fails_the_build_with_all_reasons_and_a_command(audited: Audited) -> None:
    audited(*TORCH, OF_C10, ("", "PyObject_Call", ""))
    with pytest.raises(BuildError) as raised:
        require(str(audited.path), audited.manifest, audited.torch_lib)
    assert raised.value.what == "op op: op.so does not match its tag torch-stable-2.10"
    assert "Python's symbols: PyObject_Call" in raised.value.why
    assert f"C++ symbols: {OF_C10[1]}" in raised.value.why
    assert raised.value.hint == f"nm -D --undefined-only {audited.path}"


def test_what_is_no_library_is_a_load_error(audited: Audited) -> None:
    audited(*TORCH)
    audited.path.write_bytes(b"#!/bin/sh\n")
    with pytest.raises(LoadError):
        audit(str(audited.path), audited.manifest, None)


@pytest.mark.parametrize(
    ("abi", "tag"),
    [
        (STABLE, ""),
        (f"{STABLE}-cuda13", ""),
        ("none", ""),
        (FULL, "cp311-cp311"),
        ("cpython-313t-3.13.1", "cp313-cp313t"),
        ("torch-2.13.0-0123-cxx11-cpython-314td-3.14.0", "cp314-cp314td"),
    ],
)
def test_the_python_of_an_abi_tag(abi: str, tag: str) -> None:
    assert python_tag(abi) == tag
