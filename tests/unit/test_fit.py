"""Whether a library that was built elsewhere fits, judged by its manifest alone."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
from sample.decisions import World
from sample.levels import HERE, IS_X86, LEVELS, LOADERS
from sample.prebuilt import linked

from opkiln.base.build_model import TorchSDK
from opkiln.base.model import (
    ABI_NONE,
    ABI_STABLE,
    ABI_TORCH,
    CUDA,
    LIBRARY,
    PYTHON,
    ROCM,
    STABLE_TAG,
    Op,
)
from opkiln.decision import archs, prebuilt
from opkiln.machine import uname
from opkiln.machine.arch import cpu
from opkiln.machine.toolchain import libsycl, torch_sdk
from opkiln.settings import override

if TYPE_CHECKING:
    from pathlib import Path

MEMCPY, COS, TLS = ("GLIBC_2.14", "GLIBC_2.2.5", "GLIBC_2.3") if IS_X86 else ("GLIBC_2.17",) * 3
LINKER = LOADERS[HERE]


@pytest.fixture
def world(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, cache, monkeypatch)


def judged(
    world: World, *, listed: bool = True, op: Op | None = None, **changes: Any
) -> prebuilt.Fit:
    request = world.request()
    if op is not None:
        request.op = op
    return prebuilt.judge(
        request, world.manifest(**changes), prebuilt.measure(request, listed=listed)
    )


def test_library_for_this_machine_fits(world: World) -> None:
    assert judged(world) == prebuilt.Fit("", (0, 0))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"spec": "0" * 40}, "it was built from another declaration of this op"),
        ({"target": {"system": "plan9"}}, f"it is for plan9 on {uname.architecture()}"),
        ({"target": {"machine": "riscv64"}}, f"it is for {uname.system()} on riscv64"),
        ({"target": {"debug": True}}, "it was built for debugging"),
        ({"target": {"abi_tag": "cpython-311-3.11.7"}},
         "it is built for cpython-311-3.11.7, and here is none"),
        ({"needs": {"cpu": ["no_such_feature", "another"]}},
         "it needs another, no_such_feature, which this CPU lacks"),
    ],
)  # fmt: skip
def test_library_that_does_not_fit_is_told_why(
    world: World, changes: dict[str, Any], told: str
) -> None:
    assert judged(world, **changes) == prebuilt.Fit(told)


def test_library_for_debugging_is_wanted_where_debugging_is(world: World) -> None:
    with override(debug=True):
        assert judged(world).misfit == "OPKILN_DEBUG is set, and it was built without"
        assert judged(world, target={"debug": True}).misfit == ""


# Flags


def test_flags_of_a_listed_layer_must_be_those_that_are_asked_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "it was built with other flags than {} asks for"
    built: dict[str, Any] = {"target": {"flags": [["cxxflags", ["-O1", "-g"]]]}}
    assert judged(world, **built).misfit == told.format("CXXFLAGS")
    monkeypatch.setenv("CXXFLAGS", "-O1 -g")
    assert judged(world, **built).misfit == ""
    assert judged(world).misfit == told.format("CXXFLAGS")
    monkeypatch.setenv("OPKILN_CXXFLAGS", "-g -O1")
    assert judged(world, **built).misfit == told.format("OPKILN_CXXFLAGS")


def test_flags_of_what_a_package_ships_count_only_by_opkilns_own_variables(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped: dict[str, Any] = {"target": {"flags": [["cxxflags", ["-O1"]]]}}
    assert judged(world, listed=False, **shipped).misfit == ""
    monkeypatch.setenv("CXXFLAGS", "-O3")
    assert judged(world, listed=False, **shipped).misfit == ""
    monkeypatch.setenv("OPKILN_CXXFLAGS", "-O3")
    assert "OPKILN_CXXFLAGS" in judged(world, listed=False, **shipped).misfit


def test_measure_has_the_declaration_the_flags_and_the_cpu(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uname, "cpu_flags", lambda: "one two")
    monkeypatch.setenv("LDFLAGS", "-lx")
    found = prebuilt.measure(world.request(), listed=True)
    assert found.cpu == {"one", "two"}
    assert ("ldflags", ("-lx",), "LDFLAGS") in found.flags
    assert ("cxxflags", (), "CXXFLAGS") in found.flags
    assert "cudaflags" not in [name for name, _, _ in found.flags]
    world.spec = world.spec._replace(backend=CUDA)
    wider = prebuilt.measure(world.request(), listed=True)
    assert "cudaflags" in [name for name, _, _ in wider.flags]
    assert wider.spec_key != found.spec_key


# The ABI


def test_library_without_torch_is_judged_without_a_look_at_torch(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_sdk, "find", lambda: pytest.fail("torch was looked for"))
    assert judged(world).misfit == ""


def test_stable_library_fits_every_torch_and_needs_none_to_be_judged(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_sdk, "find", lambda: pytest.fail("torch was looked for"))
    world.spec = world.spec._replace(abi=ABI_STABLE, kind=LIBRARY)
    assert judged(world, target={"abi_tag": f"{STABLE_TAG}-cuda13"}).misfit == ""
    told = f"it is built for torch-stable-2.9, and here is {STABLE_TAG}"
    assert judged(world, target={"abi_tag": "torch-stable-2.9"}).misfit == told


def test_library_of_one_torch_or_one_python_fits_these_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdk = TorchSDK("/torch", "2.13.0", "abc", None, None, True)
    monkeypatch.setattr(torch_sdk, "find", lambda: sdk)
    world.spec = world.spec._replace(abi=ABI_TORCH)
    assert judged(world, target={"abi_tag": torch_sdk.full_abi_tag(sdk)}).misfit == ""
    other = torch_sdk.full_abi_tag(sdk._replace(version="2.14.0"))
    assert "it is built for torch-2.14.0-abc" in judged(world, target={"abi_tag": other}).misfit
    world.spec = world.spec._replace(abi=ABI_STABLE, kind=PYTHON)
    tag = f"{STABLE_TAG}-{torch_sdk.python_tag()}"
    assert judged(world, target={"abi_tag": tag}).misfit == ""
    assert judged(world, target={"abi_tag": STABLE_TAG}).misfit != ""
    monkeypatch.setattr(torch_sdk, "find", lambda: None)
    assert judged(world, target={"abi_tag": tag}).misfit == "torch is not installed"


# The CPU


def test_library_for_another_cpu_than_was_asked_for_does_not_fit(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.spec = world.spec._replace(vectorize=True)
    low, high = LEVELS[1], LEVELS[2]
    built: dict[str, Any] = {"target": {"cpu": high, "cpu_features": []}}
    assert judged(world, **built).misfit == ""
    monkeypatch.setenv("OPKILN_CPU", low)
    assert judged(world, **built).misfit == f"it is for {high}, and OPKILN_CPU asks for {low}"
    assert judged(world, target={"cpu": low}).misfit == ""
    extra = "avx2" if IS_X86 else "sve"
    assert judged(world, target={"cpu": low, "cpu_features": [extra]}).misfit.startswith(
        f"it is for {low}+{extra}, "
    )
    world.spec = world.spec._replace(vectorize=False)
    assert judged(world, **built).misfit == ""


def test_features_are_compared_by_the_kernels_names_and_told_by_the_compilers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uname, "cpu_flags", lambda: "pni asimddp")
    assert judged(world, needs={"cpu": ["pni", "asimddp"]}) == prebuilt.Fit("", (0, -2))
    monkeypatch.setattr(uname, "cpu_flags", lambda: "")
    assert cpu.features_of("pni") == {"sse3"}
    assert judged(world, needs={"cpu": ["pni"]}).misfit == "it needs sse3, which this CPU lacks"


def test_library_that_uses_more_of_the_cpu_goes_first(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uname, "cpu_flags", lambda: "one two")
    fits = [judged(world, needs={"cpu": names}) for names in ([], ["one"], ["one", "two"])]
    assert sorted(fits, key=lambda each: each.rank) == fits[::-1]


# The GPU


def gpu(world: World, *built: str, images: tuple[str, ...] = (), nvcc: str = "13.0",
        asked: str = "", rule: Any = None, by: str = "nvcc") -> prebuilt.Fit:  # fmt: skip
    op = Op(world.spec, None, rule, asked)
    return judged(world, op=op, target={"archs": list(built)}, needs={"images": list(images)},
                  toolchain={by: nvcc} if nvcc else {})  # fmt: skip


@pytest.fixture
def hopper(world: World) -> World:
    world.spec = world.spec._replace(backend=CUDA)
    world.gpus("9.0")
    return world


def test_gpu_library_fits_by_its_images_the_nearest_first(hopper: World) -> None:
    assert gpu(hopper, "9.0", images=("sm_90",)) == prebuilt.Fit("", (0, 1, 0))
    assert gpu(hopper, "8.0", "9.0", images=("sm_80", "sm_90")) == prebuilt.Fit("", (0, 2, 0))
    assert gpu(hopper, "8.0+PTX", images=("sm_80", "compute_80")).rank[0] == 3
    told = "its code is for 8.0, which does not run on 9.0"
    assert gpu(hopper, "8.0", images=("sm_80",)).misfit == told


def test_gpu_library_that_uses_more_of_the_cpu_goes_first_among_equals(hopper: World) -> None:
    flags = uname.cpu_flags().split()
    plain, more = (
        judged(hopper, target={"archs": ["9.0"]}, needs={"images": ["sm_90"], "cpu": names})
        for names in ([], flags[:2])
    )
    assert plain.misfit == more.misfit == ""
    assert more.rank < plain.rank


def test_gpu_library_that_cannot_be_understood_or_is_filtered_out_does_not_fit(
    hopper: World,
) -> None:
    told = "its code is for 9.0z, which this opkiln does not know"
    assert gpu(hopper, "9.0z", images=("sm_90z",)).misfit == told
    told = "it is for 8.0;9.0, of which the op's filter keeps less"
    assert gpu(hopper, "8.0", "9.0", images=("sm_80", "sm_90"), rule=lambda ccs: [
        each for each in ccs if not str(each[0]).startswith("8")]).misfit == told  # fmt: skip


PTX_TOO_NEW = (
    "only its PTX fits the GPU, which is of CUDA 13.2, and the driver here takes PTX up to CUDA "
    "13.0"
)


@pytest.mark.parametrize(
    ("driver", "nvcc", "ptx", "told"),
    [
        ("13.0", "13.0", False, ""),
        ("13.0", "13.2", False, ""),
        ("12.8", "13.0", False,
         "it is built with CUDA 13.0, and the driver here takes CUDA up to 12.8"),
        ("13.2", "13.0", True, ""),
        ("13.0", "13.0", True, ""),
        ("13.0", "13.2", True, PTX_TOO_NEW),
        ("", "13.2", True, ""),
        ("13.0", "", True, ""),
    ],
)  # fmt: skip
def test_driver_must_know_the_runtime_and_be_as_new_as_ptx(
    hopper: World, driver: str, nvcc: str, ptx: bool, told: str
) -> None:
    hopper.gpus("9.0", driver=driver)
    built, images = ("8.0+PTX", ("compute_80",)) if ptx else ("9.0", ("sm_90",))
    for by in ("nvcc", "nvrtc"):
        assert gpu(hopper, built, images=images, nvcc=nvcc, by=by).misfit == told


def test_rocm_library_needs_no_nvidia_driver(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.spec = world.spec._replace(backend=ROCM)
    monkeypatch.setattr(archs, "_list_visible", lambda backend: ["gfx90a"])
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", "gfx90a")
    assert gpu(world, "gfx90a", nvcc="99.0") == prebuilt.Fit("", (0, 1, 0))
    assert gpu(world, "gfx942").misfit == "its code is for gfx942, which does not run on gfx90a"


# The libraries


def lacks(*sonames: str, symbols: tuple[tuple[str, str, str], ...] = (),
          abi: str = ABI_NONE) -> str:  # fmt: skip
    return prebuilt.missing_needs(
        {"sonames": list(sonames), "symbols": [list(s) for s in symbols]}, abi
    )


def test_library_needs_what_the_system_has() -> None:
    assert lacks() == ""
    assert lacks(LINKER, "libc.so.6", "libm.so.6", symbols=(
        ("libc.so.6", "memcpy", MEMCPY), ("", "malloc", ""), ("", "PyObject_Str", ""),
        (LINKER, "__tls_get_addr", TLS),
    )) == ""  # fmt: skip
    assert lacks(LINKER, "libnowhere.so.1") == "it needs libnowhere.so.1, which is not here"


def test_library_that_names_a_path_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    path = str(tmp_path / "evil.so")
    told = f"it needs {path}, which is a path, not a library's name"
    assert lacks("libnowhere.so.1", path) == told


def test_library_that_lacks_a_soname_a_version_or_a_symbol_is_told_which() -> None:
    assert lacks("libc.so.6", "libnowhere.so.1") == "it needs libnowhere.so.1, which is not here"
    told = "it needs memcpy of GLIBC_9.99, which this libc.so.6 lacks"
    assert lacks("libc.so.6", symbols=(("libc.so.6", "memcpy", "GLIBC_9.99"),)) == told
    told = f"it needs cos of {COS}, which this libc.so.6 lacks"
    assert lacks("libc.so.6", "libm.so.6", symbols=(("libc.so.6", "cos", COS),)) == told
    told = "it needs no_such_symbol, which every library here lacks"
    assert lacks("libc.so.6", symbols=(("", "malloc", ""), ("", "no_such_symbol", ""))) == told
    # Another library's version is for the dynamic linker to judge.
    assert lacks("libc.so.6", symbols=(("libm.so.6", "cos", "GLIBC_9.99"),)) == ""


class Torch:
    """A torch that nobody has imported, with one library of its own and one of a package's."""

    def __init__(self, base: Path, patch: pytest.MonkeyPatch) -> None:
        self.sdk = TorchSDK(str(base / "torch"), "2.99.0", "abc", "13.0", None, True)
        for name, defined in (
            ("torch/lib/libtorch_of_tests.so", "of_torch"),
            ("torch/lib/libc10_of_tests.so", "of_c10"),
            ("torch/lib/libc.so.6", "none"),
            ("torch/lib/libanl.so.1", "of_torch"),
            ("nvidia/cublas/lib/libcublas_of_tests.so", "of_cublas"),
        ):
            (base / name).parent.mkdir(parents=True, exist_ok=True)
            (base / name).write_bytes(linked(defined=(defined,)))
        patch.setattr(torch_sdk, "find", lambda: self.sdk)
        patch.delitem(sys.modules, "torch", raising=False)


def test_symbols_of_a_torch_that_is_not_imported_are_looked_up_in_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Torch(tmp_path, monkeypatch)
    own, package = "libtorch_of_tests.so", "libcublas_of_tests.so"
    of_torch, of_cublas = ("", "of_torch", ""), ("", "of_cublas", "")
    assert lacks(own, package, symbols=(of_torch, of_cublas), abi=ABI_STABLE) == ""
    assert lacks(package, own, symbols=(of_cublas, of_torch), abi=ABI_STABLE) == ""
    told = "it needs of_cublas, which torch 2.99.0 lacks"
    assert lacks(own, symbols=(of_torch, of_cublas), abi=ABI_STABLE) == told
    assert lacks("libc10_of_tests.so", symbols=(of_cublas,), abi=ABI_STABLE) == told
    told = "it needs of_torch, which every library here lacks"
    assert lacks(package, symbols=(of_torch, of_cublas), abi=ABI_STABLE) == told
    # A library of one torch alone is told from others by its tag.
    assert lacks(own, symbols=(of_cublas,), abi=ABI_TORCH) == ""
    # A library that the system has not either.
    assert lacks("libnowhere.so.1", own, abi=ABI_STABLE) == (
        "it needs libnowhere.so.1, which is not here"
    )


def test_library_that_is_loaded_already_is_the_one_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Torch(tmp_path, monkeypatch)
    told = "it needs memcpy of GLIBC_9.99, which this libc.so.6 lacks"
    wanted = (("libc.so.6", "memcpy", "GLIBC_9.99"),)
    assert lacks("libc.so.6", symbols=wanted, abi=ABI_STABLE) == told


def test_library_that_torch_brings_is_not_opened_from_the_system_before_torch_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's of that name would be the one that torch gets."""
    Torch(tmp_path, monkeypatch)
    of_torch = ("", "of_torch", "")
    assert lacks("libanl.so.1", symbols=(of_torch,), abi=ABI_STABLE) == ""
    with open("/proc/self/maps") as maps:
        assert "libanl" not in maps.read()


def test_torchs_files_are_left_alone_where_torch_is_imported_or_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Torch(tmp_path, monkeypatch)
    told = "it needs libtorch_of_tests.so, which is not here"
    assert lacks("libtorch_of_tests.so", abi=ABI_NONE) == told
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert lacks("libtorch_of_tests.so", abi=ABI_STABLE) == told
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(torch_sdk, "find", lambda: None)
    assert lacks("libtorch_of_tests.so", abi=ABI_STABLE) == told


def test_sycls_runtime_is_found_where_pip_has_put_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "libsycl.so.99"
    runtime.write_bytes(linked(defined=("of_sycl",)))
    monkeypatch.setattr(libsycl, "locate", lambda soname: None)
    assert lacks("libsycl.so.99") == "it needs libsycl.so.99, which is not here"
    monkeypatch.setattr(libsycl, "locate", lambda soname: str(runtime))
    of_sycl = ("", "of_sycl", "")
    assert lacks("libsycl.so.99", symbols=(of_sycl,), abi=ABI_STABLE) == ""
    told = "it needs other, which every library here lacks"
    assert lacks("libsycl.so.99", symbols=(of_sycl, ("", "other", "")), abi=ABI_STABLE) == told
    assert lacks("libother.so.99") == "it needs libother.so.99, which is not here"
