"""``opkiln.compat.torch`` beside torch's own module: names, signatures, extensions, paths."""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any

import pytest
from sample import child

import opkiln.compat.torch as ours
from opkiln.errors import OpkilnError
from opkiln.machine.toolchain import toolkits, torch_sdk

theirs = pytest.importorskip("torch.utils.cpp_extension")

if TYPE_CHECKING:
    from collections.abc import Callable

OWN = (
    "load", "load_inline", "CppExtension", "CUDAExtension", "SyclExtension", "include_paths",
    "library_paths", "is_ninja_available", "verify_ninja_availability",
)  # fmt: skip
BUILT_WITHOUT_CUDA = torch_sdk.find().cuda is None  # type: ignore[union-attr]


def test_every_name_of_torchs_module_is_there() -> None:
    assert set(theirs.__all__) <= set(ours.__all__)
    missing = [name for name in vars(theirs) if not hasattr(ours, name)]
    assert missing == []


@pytest.mark.parametrize("name", [*theirs.__all__, "_get_cuda_arch_flags", "COMMON_NVCC_FLAGS"])
def test_a_name_of_torchs_is_the_same_kind_of_thing(name: str) -> None:
    assert callable(getattr(ours, name)) == callable(getattr(theirs, name))


@pytest.mark.parametrize("name", [*OWN, "BuildExtension.with_options", "BuildExtension.__init__"])
def test_signatures_are_those_of_torch_keyword_by_keyword(name: str) -> None:
    def parameters(module: Any) -> list[tuple[str, Any, Any]]:
        found = module
        for part in name.split("."):
            found = getattr(found, part)
        return [
            (each.name if each.kind < inspect.Parameter.VAR_POSITIONAL else "", each.kind,
             each.default)
            for each in inspect.signature(found).parameters.values()
        ]  # fmt: skip

    # A torch with a keyword that is new is to be noticed here.
    assert parameters(ours) == parameters(theirs)


def test_importing_it_imports_neither_torch_nor_setuptools() -> None:
    code = """
        import sys, opkiln.compat.torch as cpp_extension
        print(sorted({"torch", "setuptools", "distutils"} & set(sys.modules)))
        from opkiln.compat.torch import flags, paths
        cpp_extension.load, cpp_extension.CppExtension, cpp_extension.is_ninja_available()
        print(sorted({"torch", "setuptools", "distutils"} & set(sys.modules)))
    """
    assert child.run(code, bare=False, forked=False).split("\n")[:2] == ["[]", "[]"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ours.no_such_name


def test_what_only_asks_is_torchs_own() -> None:
    for name in ("get_default_build_root", "get_cxx_compiler", "check_compiler_ok_for_platform",
                 "get_compiler_abi_compatibility_and_version", "COMMON_NVCC_FLAGS"):  # fmt: skip
        assert getattr(ours, name) is getattr(theirs, name)


def test_ninja_is_never_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert theirs.is_ninja_available() is False
    assert ours.is_ninja_available() is True
    assert ours.verify_ninja_availability() is None


# The objects that setup scripts make


def fields(extension: Any) -> dict[str, Any]:
    return {**vars(extension), "type": type(extension)}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"include_dirs": ["inc"], "libraries": ["m"], "library_dirs": ["lib"]},
        {"py_limited_api": True, "define_macros": [("A", "1"), ("B", None)]},
        {"extra_compile_args": {"cxx": ["-g"], "nvcc": ["-O2"]}, "extra_link_args": ["-s"]},
        {"extra_objects": ["a.o"], "runtime_library_dirs": ["/opt"], "undef_macros": ["C"]},
        {"extra_compile_args": ["-O1"], "depends": ["x.h"], "optional": True, "language": "c"},
    ],
)
def test_a_cpp_extension_is_the_same_object(arguments: dict[str, Any]) -> None:
    def made(module: Any) -> dict[str, Any]:
        given = {
            name: value.copy() if isinstance(value, list | dict) else value
            for name, value in arguments.items()
        }
        return fields(module.CppExtension("pkg.ext", ["a.cpp", "b.cc"], **given))

    assert made(ours) == made(theirs)


def test_the_callers_lists_stay_as_they_are() -> None:
    mine = ["inc"]
    ours.CppExtension("a", ["a.cpp"], include_dirs=mine)
    ours.CppExtension("b", ["b.cpp"], include_dirs=mine)
    assert mine == ["inc"]


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> str:
    """A toolkit that torch takes for its own, as a script may make it do."""
    found = toolkits.list_toolkits((), "", ask=True)
    usable = [each.record["home"] for each in found or () if not each.record["refused"]]
    if not usable:
        pytest.skip("no CUDA toolkit on this machine")
    monkeypatch.setattr(theirs, "CUDA_HOME", usable[0])
    return str(usable[0])


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"extra_compile_args": {"cxx": ["-g"], "nvcc": ["-O2"]}, "py_limited_api": True},
        {"extra_compile_args": {"nvcc": ["-rdc=true"]}, "dlink": True},
        {"extra_compile_args": {"nvcc": []}, "dlink_libraries": ["nvshmem"]},
    ],
)
def test_a_cuda_extension_is_the_same_object(home: str, arguments: dict[str, Any]) -> None:
    def made(module: Any) -> dict[str, Any]:
        given = {
            name: {key: list(value) for key, value in each.items()}
            if isinstance(each, dict)
            else each
            for name, each in arguments.items()
        }
        found = fields(module.CUDAExtension("ext", ["a.cpp", "k.cu"], **given))
        # torch's is linked in another order, which means nothing among shared libraries.
        return {**found, "libraries": sorted(found["libraries"])}

    assert home in "".join(ours.include_paths("cuda"))
    assert made(ours) == made(theirs)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("with_torch", [True, False])
def test_paths_are_the_same(home: str, device: str, with_torch: bool) -> None:
    assert ours.include_paths(device, with_torch) == theirs.include_paths(device, with_torch)
    assert ours.library_paths(device, with_torch) == theirs.library_paths(device, with_torch)


def test_variables_add_the_same_directories(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_INC_PATH", "/opt/more/include")
    monkeypatch.setenv("CUDNN_HOME", "/opt/cudnn")
    monkeypatch.setattr(theirs, "CUDNN_HOME", "/opt/cudnn")  # torch reads it when it is imported
    assert ours.include_paths("cuda") == theirs.include_paths("cuda")
    assert ours.library_paths("cuda") == theirs.library_paths("cuda")


@pytest.mark.skipif(not BUILT_WITHOUT_CUDA, reason="this torch has CUDA")
@pytest.mark.parametrize(
    "call",
    [
        lambda module: module.CUDAExtension("ext", ["a.cu"]),
        lambda module: module.include_paths("cuda"),
        lambda module: module.library_paths("cuda"),
        lambda module: module.SyclExtension("ext", ["a.sycl"]),
        lambda module: module.include_paths("xpu"),
    ],
    ids=["CUDAExtension", "include_paths", "library_paths", "SyclExtension", "SYCL include_paths"],
)
def test_what_this_torch_has_no_toolkit_for_is_an_os_error(call: Callable[[Any], Any]) -> None:
    with pytest.raises(OSError, match=r"."):
        call(theirs)
    with pytest.raises(OSError, match=r"torch|SYCL") as caught:
        call(ours)
    assert isinstance(caught.value, OpkilnError)
    assert caught.value.hint


@pytest.mark.skipif(not BUILT_WITHOUT_CUDA, reason="this torch has CUDA")
def test_cuda_home_is_none_for_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", os.fspath("/opt/cuda"))
    assert theirs.CUDA_HOME is None
    assert ours.CUDA_HOME is None


def test_cuda_home_of_a_torch_with_cuda_is_looked_up_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sdk = torch_sdk.find()
    assert sdk is not None
    monkeypatch.setattr(torch_sdk, "find", lambda: sdk._replace(cuda="13.0"))
    monkeypatch.setattr(theirs, "CUDA_HOME", None)
    monkeypatch.setenv("OPKILN_CUDA_HOME", "/opt/cuda-13.0")
    assert ours.CUDA_HOME == "/opt/cuda-13.0"
    monkeypatch.setenv("OPKILN_CUDA_HOME", "/opt/cuda-13.1")
    assert ours.CUDA_HOME == "/opt/cuda-13.1"
