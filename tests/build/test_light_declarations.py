"""What op.h declares by hand is what torch's own headers declare."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from opkiln.base.model import PACKAGE
from opkiln.machine.binary import elf
from opkiln.machine.toolchain import torch_sdk

CSRC = Path(PACKAGE, "csrc")
SHIM = CSRC / "opkiln" / "op" / "shim.h"
_OURS = "#include <opkiln/op.h>"
_THEIRS = "#include <torch/csrc/stable/library.h>\n#include <torch/csrc/stable/tensor.h>"
YOUNGER = {"torch_exception_get_what_without_backtrace"}  # than 2.10

# op.h's names on the left, torch's on the right
_DTYPES = {
    "uint8": "Byte", "int8": "Char", "int16": "Short", "int32": "Int", "int64": "Long",
    "float16": "Half", "float32": "Float", "float64": "Double", "complex32": "ComplexHalf",
    "complex64": "ComplexFloat", "complex128": "ComplexDouble", "bool_": "Bool",
    "bfloat16": "BFloat16", "float8_e5m2": "Float8_e5m2", "float8_e4m3fn": "Float8_e4m3fn",
    "float8_e5m2fnuz": "Float8_e5m2fnuz", "float8_e4m3fnuz": "Float8_e4m3fnuz",
    "uint16": "UInt16", "uint32": "UInt32", "uint64": "UInt64",
    "float8_e8m0fnu": "Float8_e8m0fnu", "float4_e2m1fn_x2": "Float4_e2m1fn_x2",
}  # fmt: skip
_DEVICES = {
    "cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS", "meta": "Meta",
    "privateuse1": "PrivateUse1",
}  # fmt: skip


def _declared() -> set[str]:
    return set(
        re.findall(r"^(?:__attribute__\(\(weak\)\) )?[\w *]+?[ *](\w+)\(", SHIM.read_text(), re.M)
    )


def _checked(tmp_path: Path, text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    source = tmp_path / "both.cpp"
    source.write_text(text)
    torch = torch_sdk.find()
    assert torch is not None
    command = [
        "g++", "-std=c++20", "-fsyntax-only", f"-I{CSRC}", "-isystem", f"{torch.path}/include",
        *flags, str(source),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_declarations_and_numbers_are_torchs(tmp_path: Path) -> None:
    """In one file with torch's headers, where a declaration with other types would be an error:
    these are C functions. Functions with other results or fewer arguments are compared by type."""
    checks = [
        f"static_assert(int(opk::DType::{ours}) == int(torch::headeronly::ScalarType::{theirs}));"
        for ours, theirs in _DTYPES.items()
    ]
    checks += [
        f"static_assert(int(opk::DeviceType::{ours}) == int(c10::DeviceType::{theirs}));"
        for ours, theirs in _DEVICES.items()
    ]
    # Every function is torch's: before op.h its name is known, too.
    names = "\n".join(f"constexpr auto* p_{name} = &{name};" for name in sorted(_declared()))
    for includes in ([_OURS, _THEIRS], [_THEIRS, names, _OURS]):
        done = _checked(tmp_path, "\n".join([*includes, *checks]))
        assert done.returncode == 0, done.stderr


def test_every_enumerator_is_compared() -> None:
    text = (CSRC / "opkiln" / "op" / "types.h").read_text()
    dtypes = re.search(r"enum class DType[^{]*{([^}]*)}", text)
    devices = re.search(r"enum class DeviceType[^{]*{([^}]*)}", text)
    assert dtypes is not None
    assert devices is not None
    assert set(re.findall(r"(\w+) =", dtypes[1])) == set(_DTYPES)
    assert set(re.findall(r"(\w+) =", devices[1])) == set(_DEVICES)


def test_a_declaration_of_another_type_would_be_an_error(tmp_path: Path) -> None:
    """That the comparison above can fail."""
    shim = SHIM.read_text()
    wrong = shim.replace("aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* out)",
                         "aoti_torch_get_dim(AtenTensorHandle tensor, int32_t* out)")  # fmt: skip
    assert wrong != shim
    other = tmp_path / "other.h"
    other.write_text(wrong)
    done = _checked(tmp_path, f'#include <torch/csrc/stable/c/shim.h>\n#include "{other}"')
    assert "conflicting declaration" in done.stderr


def test_all_but_the_weak_functions_are_of_torch_2_10(tmp_path: Path) -> None:
    """With torch's headers limited to the interface of 2.10, only the weak ones are unknown."""
    names = "\n".join(f"constexpr auto* p_{name} = &{name};" for name in sorted(_declared()))
    text = f"#include <torch/csrc/stable/c/shim.h>\n{names}\n"
    done = _checked(tmp_path, text, torch_sdk.STABLE_DEFINE)
    unknown = set(re.findall(r"error: \W(\w+)\W was not declared", done.stderr))
    assert unknown == YOUNGER
    weak = set(re.findall(r"__attribute__\(\(weak\)\).*?(\w+)\(\);", SHIM.read_text()))
    assert weak == YOUNGER


def test_every_function_is_in_libtorch_cpu() -> None:
    torch = torch_sdk.find()
    assert torch is not None
    exported = elf.defined_symbols(f"{torch.path}/lib/libtorch_cpu.so")
    assert len(_declared()) > 40
    assert _declared() - exported <= YOUNGER
