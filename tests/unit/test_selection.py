"""Which ops the variables select, for what, and how they mark a version."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sample.levels import AARCH64, ARCHITECTURES, ARM_LEVELS, X86_64, X86_LEVELS, X86_V2, X86_V3

from opkiln.base.build_model import TorchSDK
from opkiln.base.model import CPU, CUDA, ROCM
from opkiln.errors import SettingError
from opkiln.machine import uname
from opkiln.machine.toolchain import choice, torch_sdk
from opkiln.settings import override
from opkiln.ship import selection
from opkiln.ship.selection import DeclaredOp, NamedTarget

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parents[2]
OPS = [DeclaredOp("adam"), DeclaredOp("lion"), DeclaredOp("mine", variables=("MY_OP",))]


def chosen(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> dict[str, str]:
    """The ops that are built: ``named`` or ``swept``."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = selection.choose(OPS)
    return {each.op.name: "named" if each.named else "swept" for each in found if each.wanted}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, {}),
        ({"OPKILN_BUILD_OPS": "0"}, {}),
        ({"OPKILN_BUILD_OPS": "1"}, {"adam": "swept", "lion": "swept", "mine": "swept"}),
        ({"DS_BUILD_OPS": "1"}, {"adam": "swept", "lion": "swept", "mine": "swept"}),
        ({"DS_BUILD_ADAM": "1"}, {"adam": "named"}),
        ({"OPKILN_BUILD_ADAM": "1", "DS_BUILD_LION": "on"}, {"adam": "named", "lion": "named"}),
        ({"DS_BUILD_OPS": "1", "DS_BUILD_LION": "0"}, {"adam": "swept", "mine": "swept"}),
        ({"DS_BUILD_OPS": "1", "OPKILN_BUILD_ADAM": "1", "OPKILN_BUILD_LION": "off", "MY_OP": "0"},
         {"adam": "named"}),
        ({"OPKILN_BUILD_OPS": "0", "DS_BUILD_ADAM": "1"}, {"adam": "named"}),
        ({"OPKILN_BUILD_ADAM": "0", "DS_BUILD_ADAM": "1"}, {}),
        ({"MY_OP": "1"}, {"mine": "named"}),
        ({"OPKILN_BUILD_ADAM": ""}, {}),
    ],
)  # fmt: skip
def test_variables_select_and_exclude_ops(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: dict[str, str]
) -> None:
    assert chosen(monkeypatch, variables) == expected


def test_the_variable_that_decided_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_BUILD_OPS", "1")
    monkeypatch.setenv("DS_BUILD_LION", "0")
    origins = {each.op.name: each.origin for each in selection.choose(OPS)}
    assert origins == {"adam": "DS_BUILD_OPS", "lion": "DS_BUILD_LION", "mine": "DS_BUILD_OPS"}


def test_a_switch_that_is_neither_on_nor_off_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_BUILD_LION", "maybe")
    with pytest.raises(SettingError, match="DS_BUILD_LION='maybe'"):
        selection.choose(OPS)


def test_a_setting_is_no_switch_of_an_op_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPKILN_BUILD_TIMEOUT", "600")
    monkeypatch.setenv("DS_BUILD_STRING", "cu130")
    ops = [DeclaredOp("timeout"), DeclaredOp("string")]
    assert [each.wanted for each in selection.choose(ops)] == [False, False]
    assert selection.unknown_variables(ops) == []


def test_variables_that_name_no_op_of_the_package_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPKILN_BUILD_ADDAM", "OPKILN_BUILD_ADAM", "OPKILN_BUILD_OPS"):
        monkeypatch.setenv(name, "1")
    assert selection.unknown_variables(OPS) == ["OPKILN_BUILD_ADDAM"]


def test_ops_and_libraries_of_a_module_are_read_without_importing_it(tmp_path: Path) -> None:
    (tmp_path / "pack.py").write_text(
        'raise SystemExit("imported")\n'
        'kit = opkiln.library("both", "both.cpp")\n'
        "@opkiln.op('one.cpp')\ndef one(x): ...\n"
        "@kit.op()\ndef part(x): ...\n"
        "@kit.op(mutates='x')\ndef other(x): ...\n"
        "@op('two.cpp', variants={'SIZE': (4,)})\ndef two(x): ...\n"
        "@two.variant\ndef _(x): ...\n"
    )
    found = selection.declared_ops({"pack": "pack"}, str(tmp_path))
    assert found == [
        DeclaredOp("one", "pack:one"),
        DeclaredOp("two", "pack:two"),
        DeclaredOp("both", "pack:kit"),
    ]


def test_a_builders_own_variable_is_read_without_importing_it(tmp_path: Path) -> None:
    (tmp_path / "pack" / "ops").mkdir(parents=True)
    (tmp_path / "pack" / "ops" / "a.py").write_text(
        'raise SystemExit("imported")\n'
        'class A:\n    BUILD_VAR: str = "PACK_A"  # its own\n'
        "class B(A):\n    NAME = 'b'\n"
        "class C(B):\n    BUILD_VAR = 'PACK_C'\n"
        "class D(Elsewhere):\n    BUILD_VAR = computed()\n"
    )
    (tmp_path / "pack" / "__init__.py").write_text("class E:\n    BUILD_VAR = 'PACK_E'\n")
    (tmp_path / "broken.py").write_text("class F(:\n")
    values = {name: f"pack.ops.a:{name}" for name in "ABCD"}
    values |= {"E": "pack:E", "F": "broken:F", "G": "gone:G", "H": "pack:Other"}
    found = selection.declared_ops(values, str(tmp_path))
    assert [op.variables for op in found] == [
        ("PACK_A",), ("PACK_A",), ("PACK_C",), (), ("PACK_E",), (), (), (),
    ]  # fmt: skip


def test_every_bundled_op_is_among_what_uv_looks_at() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    seen = {each["env"] for each in project["tool"]["uv"]["cache-keys"] if "env" in each}
    ops = selection.bundled_ops()
    expected = {f"{prefix}_BUILD_{op.name.upper()}" for op in ops for prefix in ("OPKILN", "DS")}
    expected |= {name for op in ops for name in op.variables}
    missing = "\n".join(f'    {{ env = "{name}" }},' for name in sorted(expected - seen))
    assert not missing, f"add to [tool.uv] in pyproject.toml:\n{missing}"


# What is built


def torch_with(monkeypatch: pytest.MonkeyPatch, *, cuda: str | None, hip: str | None) -> None:
    sdk = TorchSDK("/torch", "2.13.0", "0", cuda, hip, True)
    monkeypatch.setattr(torch_sdk, "find", lambda: sdk)


def tools_for(monkeypatch: pytest.MonkeyPatch, *backends: str) -> None:
    monkeypatch.setattr(choice, "available", lambda backend: backend in backends)


@pytest.mark.parametrize(
    ("cuda", "hip", "tools", "expected"),
    [
        (None, None, (), {CPU}),
        (None, None, (CUDA,), {CPU, CUDA}),
        (None, None, (CUDA, ROCM), {CPU, CUDA}),
        ("13.0", None, (), {CPU, CUDA}),  # and its build will say that there is no toolkit
        (None, "7.0", (CUDA, ROCM), {CPU, ROCM}),
    ],
)
def test_an_op_is_built_for_what_this_machine_and_its_torch_are_for(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, hip: str | None, tools: tuple[str, ...],
    expected: set[str],
) -> None:  # fmt: skip
    torch_with(monkeypatch, cuda=cuda, hip=hip)
    tools_for(monkeypatch, *tools)
    assert {each.backend for each in selection.targets((CUDA, ROCM, CPU))} == expected


def test_an_op_that_nothing_here_can_build_is_still_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_with(monkeypatch, cuda=None, hip=None)
    tools_for(monkeypatch)
    assert selection.targets((CUDA, ROCM)) == (NamedTarget(CUDA),)


@pytest.mark.parametrize(
    ("architecture", "levels"),
    [(X86_64, X86_LEVELS[1:]), (AARCH64, ARM_LEVELS)],
)
def test_a_wheel_has_every_level_of_its_cpu_family(
    monkeypatch: pytest.MonkeyPatch, architecture: str, levels: tuple[str, ...]
) -> None:
    monkeypatch.setattr(uname, "architecture", lambda: architecture)
    assert selection.targets((CPU,)) == tuple(NamedTarget(CPU, level) for level in levels)
    with override(cpu="native"):
        assert selection.targets((CPU,)) == (NamedTarget(CPU, "native"),), "as it is asked for"


def test_targets_that_are_named_are_those_that_the_op_has() -> None:
    with override(build_targets=f"cuda:8.0,9.0a+PTX; cpu:{X86_V2},{X86_V3}"):
        assert selection.targets((CUDA, CPU)) == (
            NamedTarget(CUDA, "8.0,9.0a+PTX"),
            NamedTarget(CPU, X86_V2),
            NamedTarget(CPU, X86_V3),
        )
        assert selection.targets((CPU,)) == (
            NamedTarget(CPU, X86_V2),
            NamedTarget(CPU, X86_V3),
        )
        assert selection.targets((ROCM,)) == ()


def test_a_target_that_is_none_is_an_error_that_names_the_variable() -> None:
    with (
        override(build_targets="gpu:9.0"),
        pytest.raises(
            SettingError, match=r"OPKILN_BUILD_TARGETS='gpu:9.0'.*there is no backend 'gpu'"
        ),
    ):
        selection.targets((CPU,))


# The version


@pytest.mark.parametrize(
    ("version", "text", "expected"),
    [
        ("1.0", None, "1.0"),
        ("1.0", "cu130", "1.0+cu130"),
        ("1.0", "+cu130", "1.0+cu130"),
        ("1.0", "CU-130_x", "1.0+cu.130.x"),
        ("1.0+git1", "cu130", "1.0+git1.cu130"),
        ("1.0", ".dev7", "1.0.dev7"),
        ("1.0", ".post2+cu130", "1.0.post2+cu130"),
        ("1.0+git1", ".dev7", "1.0.dev7+git1"),
    ],
)
def test_a_build_string_marks_the_version_once(
    version: str, text: str | None, expected: str
) -> None:
    with override(build_string=text):
        assert selection.tag_version(version) == expected
        assert selection.tag_version(expected) == expected


@pytest.mark.parametrize(
    "text", ["cu 130", "+", "a..b", "1/2", ".dev", ".rc1", "-x", "cu130+b", "ü"]
)
def test_a_build_string_that_no_version_can_have_is_an_error(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("DS_BUILD_STRING", text)
    with pytest.raises(SettingError, match=r"DS_BUILD_STRING=.* cannot be part of a version"):
        selection.tag_version("1.0")


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        (["py3-none-manylinux_2_34"], "py3-none-manylinux_2_34"),
        (["py3-none-manylinux_2_34", "py3-none-manylinux_2_17"], "py3-none-manylinux_2_34"),
        (["py3-none-manylinux_2_34", "cp311-cp311-manylinux_2_17"], "cp311-cp311-manylinux_2_34"),
        (["py3-none-linux", "py3-none-manylinux_2_39"], "py3-none-linux"),
    ],
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_wheel_with_several_packages_asks_for_what_the_strictest_needs(
    tags: list[str], expected: str, architecture: str
) -> None:
    whole = [f"{tag}_{architecture}" for tag in tags]
    assert selection.strictest_tag(whole) == f"{expected}_{architecture}"
    assert selection.strictest_tag(reversed(whole)) == f"{expected}_{architecture}"
