"""The choice among ROCm installations, what is remembered of them, and the steps for hipcc."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest
from sample import at_rest
from sample.evidence_of import broken, recalled
from sample.levels import X86_64, X86_V3
from sample.rocm import Rocm, a_host

from opkiln.base.build_model import DeviceCompiler, Target, TorchSDK
from opkiln.base.model import ABI_TORCH, ROCM, OpSpec
from opkiln.errors import SpecError, ToolchainError
from opkiln.machine.toolchain import find, hipcc, torch_sdk
from opkiln.machine.uname import architecture
from opkiln.plan import hipcc as steps
from opkiln.plan import plan
from opkiln.plan.host import PlanInputs
from opkiln.settings import override

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timed


@pytest.fixture(autouse=True)
def opt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty /opt, and no hipcc on PATH."""
    directory = tmp_path / "opt"
    directory.mkdir()
    monkeypatch.setattr(hipcc, "PARENT", str(directory))
    with override(path=(str(tmp_path / "bin"),)):
        yield directory


@pytest.fixture
def memory(tmp_path: Path) -> tuple[str, ...]:
    return (str(tmp_path / "memory"),)


@pytest.fixture(autouse=True)
def at_rest_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    at_rest.shorten(monkeypatch)


# Where it is looked for


def test_a_named_rocm_is_the_only_candidate(opt: Path, tmp_path: Path) -> None:
    Rocm(opt / "rocm")
    named = Rocm(tmp_path / "mine")
    with override(rocm_home=str(named.home)):
        (only,) = hipcc.hipcc_candidates()
    assert (only.path, only.refused) == (str(named.hipcc), "")


def test_a_named_rocm_without_hipcc_is_not_replaced_by_another(
    opt: Path, tmp_path: Path, memory: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    Rocm(opt / "rocm")
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "empty"))
    assert not hipcc.available()
    with pytest.raises(ToolchainError) as caught:
        find.choose(hipcc, memory, None, a_host())
    assert caught.value.what == f"ROCM_PATH={tmp_path}/empty cannot be used"
    assert caught.value.why == f"{tmp_path}/empty/bin/hipcc (ROCM_PATH): no such program"
    assert caught.value.hint == "unset ROCM_PATH"


def test_installations_are_tried_from_path_then_the_default_one_then_the_newest(
    opt: Path, tmp_path: Path
) -> None:
    for name in ("rocm-6.2.0", "rocm-6.10.1", "rocm-5.7.0"):
        Rocm(opt / name)
    (opt / "rocm").symlink_to(opt / "rocm-6.2.0")
    (opt / "rocm-6.3.0").mkdir()  # what an uninstallation leaves
    Rocm(tmp_path / "usr")
    with override(path=(str(tmp_path / "usr" / "bin"),)):
        found = [(each.path, each.refused) for each in hipcc.hipcc_candidates()]
    assert found == [
        (f"{tmp_path}/usr/bin/hipcc", ""),
        (f"{opt}/rocm/bin/hipcc", ""),
        (f"{opt}/rocm-6.10.1/bin/hipcc", ""),
        (f"{opt}/rocm-6.3.0/bin/hipcc", "no such program"),
        (f"{opt}/rocm-5.7.0/bin/hipcc", ""),
    ]


def test_without_any_rocm_each_place_is_listed_and_the_hint_installs_one(
    opt: Path, memory: tuple[str, ...]
) -> None:
    assert not hipcc.available()
    with pytest.raises(ToolchainError) as caught:
        find.choose(hipcc, memory, "6.2.0", a_host())
    assert str(caught.value).splitlines() == [
        "no hipcc can be used here",
        "  hipcc (PATH): not on PATH",
        f"  {opt}/rocm*/bin/hipcc ({opt}): no such program",
        "hint: apt-get install hipcc",
    ]


# What it says


def test_a_hipcc_is_asked_for_everything_once(opt: Path, memory: tuple[str, ...]) -> None:
    rocm = Rocm(opt / "rocm")
    chosen = find.choose(hipcc, memory, None, a_host())
    assert chosen == DeviceCompiler(
        family="hipcc",
        path=str(rocm.hipcc),
        home=str(rocm.home),
        version="6.2.41133",
        identity=chosen.identity,
        archs=("gfx90a", "gfx942", "gfx1100"),
        accepts=frozenset({"-std=c++20"}),
        include_dirs=(f"{rocm.home}/include",),
        library_dirs=(f"{rocm.home}/lib",),
    )
    assert len(rocm.runs()) == 3


def test_a_header_directory_that_the_host_compiler_searches_anyway_is_left_out(
    opt: Path, memory: tuple[str, ...]
) -> None:
    searching = a_host(include_dirs=(str(opt / "rocm" / "include"),))
    Rocm(opt / "rocm")
    assert find.choose(hipcc, memory, None, searching).include_dirs == ()


def test_hipcc_compiles_for_amd_whatever_else_is_set(
    opt: Path, memory: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("HIP_PLATFORM", "nvidia"),
        ("HIPCC_COMPILE_FLAGS_APPEND", "-DSECRET"),
        ("HIP_CLANG_PATH", "/elsewhere"),
        ("DEVICE_LIB_PATH", "/elsewhere"),
    ):
        monkeypatch.setenv(name, value)
    rocm = Rocm(opt / "rocm")
    find.choose(hipcc, memory, None, a_host())
    given = rocm.log.with_suffix(".log.env").read_text().splitlines()
    assert {line for line in given if "HIP" in line or "DEVICE_LIB" in line} == {"HIP_PLATFORM=amd"}


@pytest.mark.parametrize(
    ("version", "compiling", "refusal"),
    [
        ("none", "exit 0", f"--version exits with 0: Target: {architecture()}-unknown-linux-gnu"),
        ("6.2.1", "echo 'probe.hip:1:10: fatal error: hip/hip_runtime.h file not found'; exit 1",
         "does not compile for gfx90a: hip/hip_runtime.h file not found"),
    ],
)  # fmt: skip
def test_a_hipcc_that_does_not_work_is_refused_with_what_it_says(
    opt: Path, memory: tuple[str, ...], version: str, compiling: str, refusal: str
) -> None:
    Rocm(opt / "rocm", version, compiling=compiling)
    with pytest.raises(ToolchainError) as caught:
        find.choose(hipcc, memory, None, a_host())
    assert f"{opt}/rocm/bin/hipcc ({opt}): {refusal}" in caught.value.why


def test_a_hipcc_that_cannot_be_started_is_refused(opt: Path, memory: tuple[str, ...]) -> None:
    rocm = Rocm(opt / "rocm")
    rocm.hipcc.write_text("#!/no/such/perl\n")
    (_, refused) = find.candidates(hipcc, memory, None, a_host())
    assert "could not be started" in refused.refused


def test_a_rocm_without_its_runtime_is_refused(opt: Path, memory: tuple[str, ...]) -> None:
    rocm = Rocm(opt / "rocm")
    (rocm.home / "lib" / "libamdhip64.so").unlink()
    (_, refused) = find.candidates(hipcc, memory, None, a_host())
    assert refused.refused == "finds no libamdhip64.so to link with"


def test_a_rocm_for_another_machine_is_refused(opt: Path, memory: tuple[str, ...]) -> None:
    Rocm(opt / "rocm", machine="riscv64-unknown-linux-gnu")
    (_, refused) = find.candidates(hipcc, memory, None, a_host())
    assert refused.refused == (
        "compiles for riscv64-unknown-linux-gnu, "
        f"but /usr/bin/g++ compiles for {architecture()}-linux-gnu"
    )


@pytest.mark.parametrize(
    "part",
    ["llvm/bin/clang-18", "llvm/bin/lld", "llvm/lib/libLLVM-18.so", "amdgcn/bitcode/hip.bc",
     "amdgcn/bitcode/oclc_isa_version_1100.bc"],
)  # fmt: skip
def test_each_file_that_decides_the_output_is_in_the_identity(opt: Path, part: str) -> None:
    rocm = Rocm(opt / "rocm")
    before = find.choose(hipcc, (), None, a_host())
    (rocm.home / part).write_text("another")
    assert find.choose(hipcc, (), None, a_host()).identity != before.identity


def test_a_new_device_library_is_a_new_architecture(opt: Path) -> None:
    rocm = Rocm(opt / "rocm")
    before = find.choose(hipcc, (), None, a_host())
    (rocm.home / "amdgcn" / "bitcode" / "oclc_isa_version_1030.bc").write_text("")
    after = find.choose(hipcc, (), None, a_host())
    assert set(after.archs) - set(before.archs) == {"gfx1030"}


# Which is taken


def test_the_one_that_is_nearest_to_torch_is_taken(opt: Path, memory: tuple[str, ...]) -> None:
    for version in ("6.0.1", "6.3.1", "6.4.0", "7.0.0"):
        Rocm(opt / f"rocm-{version}", version)
    chosen = {
        torch_hip: find.choose(hipcc, memory, torch_hip, a_host()).version
        for torch_hip in ("6.0.5-x", "6.2.41133-dd7f95766", "6.9.0", "7.1.0", None)
    }
    assert chosen == {
        "6.0.5-x": "6.0.1",
        "6.2.41133-dd7f95766": "6.3.1",
        "6.9.0": "6.4.0",
        "7.1.0": "7.0.0",
        None: "7.0.0",
    }
    reasons = {
        os.path.basename(os.path.dirname(os.path.dirname(each.path))): each.refused
        for each in find.candidates(hipcc, memory, "6.2.41133", a_host())
    }
    assert reasons["rocm-6.3.1"] == ""
    nearer = f"HIP 6.3.1 in {opt}/rocm-6.3.1/bin/hipcc is nearer to torch's 6.2.41133"
    assert reasons["rocm-6.4.0"] == nearer
    other = "torch was built with 6.2.41133, another major version"
    assert reasons["rocm-7.0.0"] == f"HIP 7.0.0; {other}"


def test_another_major_than_torchs_is_refused_with_what_would_fit(
    opt: Path, memory: tuple[str, ...]
) -> None:
    Rocm(opt / "rocm", "5.2.21153-0")
    with pytest.raises(ToolchainError) as caught:
        find.choose(hipcc, memory, "6.2.41133-dd7f95766", a_host())
    assert "no ROCm here fits torch" in caught.value.what
    assert "HIP 5.2.21153; torch was built with 6.2.41133-dd7f95766" in caught.value.why
    assert caught.value.hint.startswith("ROCM_HOME=/opt/rocm-6.2.0")


# What is remembered


def test_a_choice_is_recalled_until_something_it_rests_on_changes(
    opt: Path, tmp_path: Path, memory: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rocm = Rocm(opt / "rocm-6.2.0")
    (opt / "rocm").symlink_to(rocm.home)
    assert find.recall(hipcc, memory, None, a_host()) is None
    at_rest.wait(opt)
    chosen = find.choose(hipcc, memory, None, a_host())
    runs = len(rocm.runs())
    assert find.recall(hipcc, memory, None, a_host()) == chosen
    assert find.choose(hipcc, memory, None, a_host()) == chosen
    assert len(rocm.runs()) == runs

    again, read = recalled(hipcc, memory, None, a_host())
    assert (again, broken(read)) == (chosen, set())
    assert read.programs["hipcc"] == [None]

    # A second installation, to which the default now leads.
    other = shutil.copytree(rocm.home, opt / "rocm-7.0.0")
    (opt / "rocm").unlink()
    (opt / "rocm").symlink_to(other)
    assert {str(opt), f"{opt}/rocm/bin/hipcc"} <= broken(read)
    assert find.recall(hipcc, memory, None, a_host()) is None


def test_a_refusal_is_recalled_until_what_was_missing_appears(
    opt: Path, memory: tuple[str, ...]
) -> None:
    rocm = Rocm(opt / "rocm")
    (rocm.home / "lib" / "libamdhip64.so").unlink()
    at_rest.wait(opt)
    find.candidates(hipcc, memory, None, a_host())
    runs = len(rocm.runs())
    assert find.recall(hipcc, memory, None, a_host()) is None
    find.candidates(hipcc, memory, None, a_host())
    assert len(rocm.runs()) == runs
    (rocm.home / "lib" / "libamdhip64.so").write_text("installed")
    assert find.choose(hipcc, memory, None, a_host()).path == str(rocm.hipcc)


# Versions


def a_torch(hip: str | None) -> TorchSDK:
    return TorchSDK("/torch", "2.10.0", "id", None, hip, True)


@pytest.mark.parametrize(
    ("torch", "rocm"), [(None, False), (a_torch(None), False), (a_torch("6.2.41133-dd"), True)]
)
def test_a_rocm_torch_is_one_that_was_built_with_hip(
    monkeypatch: pytest.MonkeyPatch, torch: TorchSDK | None, rocm: bool
) -> None:
    monkeypatch.setattr(torch_sdk, "find", lambda: torch)
    assert torch_sdk.is_rocm_pytorch() is rocm


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        (".info/version", "6.2.0-66\n", (6, 2)),
        (".info/version-dev", "5.7.1-98", (5, 7)),
        ("include/rocm-core/rocm_version.h",
         "#define ROCM_VERSION_MAJOR   6\n#define ROCM_VERSION_MINOR   10\n", (6, 10)),
        ("include/hip/hip_version.h",
         "#define HIP_VERSION_MAJOR 5\n#define HIP_VERSION_MINOR 2\n", (5, 2)),
    ],
)  # fmt: skip
def test_the_installed_version_is_read_from_what_the_installation_says(
    opt: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str, version: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch_sdk, "find", lambda: a_torch("9.9.1"))
    rocm = Rocm(opt / "rocm")
    (rocm.home / file).parent.mkdir(parents=True, exist_ok=True)
    (rocm.home / file).write_text(text)
    assert hipcc.installed_rocm_version() == version
    assert rocm.runs() == []


def test_without_an_installation_the_version_is_torchs_or_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_sdk, "find", lambda: a_torch("6.2.41133-dd7f95766"))
    assert hipcc.installed_rocm_version() == (6, 2)
    monkeypatch.setattr(torch_sdk, "find", lambda: a_torch(None))
    assert hipcc.installed_rocm_version() == (0, 0)


# Steps

_SPEC = OpSpec(
    name="op", distribution="package", root="/pkg/op", sources=("cuda.cu",), backend=ROCM,
    include_dirs=("include",),
)  # fmt: skip
_TARGET = Target(
    backend=ROCM, system="linux", machine=X86_64, cpu=X86_V3, cpu_features=(), abi_tag="",
    archs=("gfx90a", "gfx942:sramecc+"),
)  # fmt: skip
_DEVICE = DeviceCompiler(
    family="hipcc", path="/opt/rocm/bin/hipcc", home="/opt/rocm", version="6.2.0", identity="id",
    archs=(), accepts=frozenset(), include_dirs=(), library_dirs=("/opt/rocm/lib",),
)  # fmt: skip
_PLACES = {"src": "/pkg/op", "stage": "/stage", "torch": "/torch", "toolkit": "/opt/rocm",
           "opkiln": "/opkiln-package"}  # fmt: skip


def command(**changes: object) -> list[str]:
    toolchain = a_host()._replace(device=_DEVICE, launcher="/usr/bin/ccache")
    spec = _SPEC._replace(**changes)
    target = _TARGET._replace(flags=(("cudaflags", ("-DUSER",)),))
    step = steps.compile_hip(PlanInputs(spec, target, toolchain), "cuda.cu")
    assert step.plain_paths  # hipcc has a shell read the path of the output
    return list(plan.command(step, _PLACES).argv)


def test_a_hip_compile_names_each_architecture_once() -> None:
    argv = command(device_args=("-ffast-math",))
    assert argv[:3] == ["/opt/rocm/bin/hipcc", "-x", "hip"]
    assert [each for each in argv if each.startswith("--offload-arch")] == [
        "--offload-arch=gfx90a", "--offload-arch=gfx942:sramecc+",
    ]  # fmt: skip
    assert argv[-4:] == ["-c", "/pkg/op/cuda.cu", "-o", "/stage/cuda.cu-6f199527.o"]
    assert argv.index("-ffast-math") < argv.index("-DUSER")
    assert {"-std=c++20", "-O3", "-fPIC", "-D__HIP_PLATFORM_AMD__=1", "-I/pkg/op/include"} < {*argv}
    assert "-ffile-prefix-map=/pkg/op=/opkiln/src" in argv


def test_an_authors_standard_and_optimisation_replace_the_plans() -> None:
    argv = command(device_args=("-std=c++17", "-O2"))
    assert [each for each in argv if each.startswith(("-std", "-O"))] == ["-std=c++17", "-O2"]


def test_a_link_takes_the_runtime_and_for_the_full_abi_torchs_libraries() -> None:
    toolchain = a_host()._replace(device=_DEVICE)

    def arguments(spec: OpSpec) -> list[str]:
        inputs = PlanInputs(spec, _TARGET, toolchain)
        return [plan.render(each, _PLACES) for each in steps.runtime(inputs)]

    assert arguments(_SPEC) == ["-L/opt/rocm/lib", "-lamdhip64"]
    assert arguments(_SPEC._replace(abi=ABI_TORCH)) == [
        "-lc10_hip", "-ltorch_hip", "-L/opt/rocm/lib", "-lamdhip64",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "flag",
    ["--offload-arch=gfx90a", "--amdgpu-target=gfx90a", "-fgpu-rdc", "--cuda-device-only",
     "--rocm-path=/elsewhere", "-Xarch_device", "-DA=1\n-DB=2", "-o", "-fplugin=x.so"],
)  # fmt: skip
def test_flags_that_have_another_owner_are_not_taken(flag: str) -> None:
    with pytest.raises(SpecError) as caught:
        steps.check("op", (flag,), "CUDAFLAGS")
    assert repr(flag) in caught.value.what
    assert caught.value.hint == "unset CUDAFLAGS"
    steps.check("op", ("-ffast-math", "-DNAME=a b", "-mllvm", "-amdgpu-x=1"))
