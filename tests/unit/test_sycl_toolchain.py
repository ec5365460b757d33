"""Finding SYCL compilers and runtimes. icpx is a stand-in: a program that answers as it does."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from sample.evidence_of import broken, recalled

from opkiln.base import digest
from opkiln.base.build_model import Toolchain
from opkiln.errors import ToolchainError
from opkiln.machine import uname
from opkiln.machine.toolchain import find, libsycl, probing, sycl
from opkiln.settings import override

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timed

ICPX = """\
case "$*" in
  *--version*) echo "Intel(R) oneAPI DPC++/C++ Compiler {version} ({version}.20250605)" ;;
  *-print-prog-name=clang) echo {home}/bin/compiler/clang ;;
  *-print-prog-name=*) echo not-there ;;
  *-ffp-model=precise*) exit {precise} ;;
  *) echo "Target: {machine}-unknown-linux-gnu"
     echo "#include <...> search starts here:"
     echo " {home}/include"
     echo "End of search list."
     echo "#include <...> search starts here:"
     echo " {home}/include"
     echo " /usr/include"
     echo "End of search list." ;;
esac
"""
VERSION_HEADER = """\
#define __SYCL_COMPILER_VERSION 20260724
#define __LIBSYCL_MAJOR_VERSION 9
#define __LIBSYCL_MINOR_VERSION 0
#define __LIBSYCL_PATCH_VERSION 1
"""


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without SYCL, whatever the one that runs the tests has."""
    monkeypatch.setattr(libsycl, "ONEAPI", str(tmp_path / "oneapi"))
    monkeypatch.setattr(libsycl, "PACKAGE", "intel-sycl-rt-as-tests-have-it")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


@pytest.fixture
def memory(tmp_path: Path) -> tuple[str, ...]:
    return (str(tmp_path / "memory"),)


def program(path: Path, body: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def icpx(home: Path, version: str = "2025.3.1", machine: str = uname.architecture(),
         precise: int = 0, name: str = "icpx") -> Path:  # fmt: skip
    """An installation of the oneAPI compiler, as far as anybody asks."""
    program(home / "bin" / "compiler" / "clang")
    (home / "lib").mkdir(exist_ok=True)
    (home / "lib" / "libsycl.so.8").write_text("the runtime")
    body = ICPX.format(home=home, version=version, machine=machine, precise=precise)
    return program(home / "bin" / name, body)


def runtime(home: Path, number: int = 9) -> Path:
    """What ``pip install intel-sycl-rt`` leaves, as far as anybody asks."""
    (home / "include" / "sycl").mkdir(parents=True)
    (home / "include" / "sycl" / "sycl.hpp").write_text("")
    (home / "include" / "sycl" / "version.hpp").write_text(VERSION_HEADER)
    (home / "lib").mkdir(exist_ok=True)
    (home / "lib" / "libsycl-jit.so").write_text("")
    library = home / "lib" / f"libsycl.so.{number}"
    library.write_text("the runtime")
    return library


def host(tmp_path: Path, body: str = "exit 0", identity: str = "h") -> Toolchain:
    """A host compiler that takes everything, or what ``body`` has it take."""
    return Toolchain(
        family="gcc",
        cxx=str(program(tmp_path / f"g++-{identity}", body)),
        version="g++ 99",
        machine=uname.architecture(),
        identity=identity,
        accepts=frozenset(),
        include_dirs=(),
    )


@pytest.fixture
def at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were just written are believed, as if some seconds had passed since."""
    now = SimpleNamespace(time_ns=lambda: time.time_ns() + 10_000_000_000)
    monkeypatch.setattr(probing, "time", now)
    monkeypatch.setattr(digest, "time", now)


def test_without_any_of_them_each_place_is_listed_with_its_refusal(
    tmp_path: Path, memory: tuple[str, ...]
) -> None:
    with override(cmplr_root=str(tmp_path / "root")), pytest.raises(ToolchainError) as caught:
        find.choose(sycl, memory, None, host(tmp_path))
    assert caught.value.why.splitlines() == [
        "icpx (PATH): not on PATH",
        "dpcpp (PATH): not on PATH",
        f"{tmp_path}/root/bin/icpx (CMPLR_ROOT): no such program",
        f"{tmp_path}/root/bin/dpcpp (CMPLR_ROOT): no such program",
        "intel-sycl-rt-as-tests-have-it (this interpreter): not installed",
    ]
    assert caught.value.hint.startswith("pip install")
    assert not sycl.available()


def test_a_compiler_on_path_comes_before_other_places_and_the_runtime_comes_last(
    tmp_path: Path, memory: tuple[str, ...]
) -> None:
    for release in ("2025.3", "2025.10", "latest"):
        icpx(tmp_path / "oneapi" / release)
    icpx(tmp_path / "root")
    icpx(tmp_path, name="dpcpp")
    library = runtime(tmp_path / "prefix")
    with override(cmplr_root=str(tmp_path / "root")):
        found = [each.path for each in find.candidates(sycl, memory, None, host(tmp_path))]
        chosen = find.choose(sycl, memory, None, host(tmp_path))
    assert found == [
        "icpx",
        str(tmp_path / "bin" / "dpcpp"),
        str(tmp_path / "root" / "bin" / "icpx"),
        str(tmp_path / "root" / "bin" / "dpcpp"),
        str(tmp_path / "oneapi" / "2025.10" / "bin" / "icpx"),  # the newest, by number
        str(tmp_path / "oneapi" / "2025.3" / "bin" / "icpx"),
        str(library),
    ]
    assert chosen.path == str(tmp_path / "bin" / "dpcpp")


def test_icpx_is_asked_for_its_version_its_headers_and_its_libraries(
    tmp_path: Path, memory: tuple[str, ...]
) -> None:
    home = tmp_path / "oneapi" / "2025.3"
    path = icpx(home)
    found = find.choose(sycl, memory, None, host(tmp_path))
    assert (found.family, found.path, found.home) == ("icpx", str(path), str(home))
    assert found.version == "2025.3.1"
    assert found.include_dirs == (str(home / "include"), "/usr/include")
    assert found.library_dirs == (str(home / "lib"),)
    assert found.accepts == {"-ffp-model=precise"}
    assert sycl.soname(found) == "libsycl.so.8"


def test_a_flag_that_icpx_does_not_take_is_not_in_what_it_accepts(
    tmp_path: Path, memory: tuple[str, ...]
) -> None:
    icpx(tmp_path / "oneapi" / "2025.3", precise=1)
    assert find.choose(sycl, memory, None, host(tmp_path)).accepts == frozenset()


@pytest.mark.parametrize("part", ["bin/icpx", "bin/compiler/clang", "lib/libsycl.so.8"])
def test_another_binary_behind_the_same_version_is_another_compiler(
    tmp_path: Path, part: str
) -> None:
    home = tmp_path / "oneapi" / "2025.3"
    icpx(home)
    before = find.choose(sycl, (), None, host(tmp_path))
    with (home / part).open("a") as file:
        file.write("\n# patched\n")
    after = find.choose(sycl, (), None, host(tmp_path))
    assert before.version == after.version
    assert before.identity != after.identity


def test_the_same_compiler_elsewhere_is_the_same_compiler(tmp_path: Path) -> None:
    # The stand-in's text holds its home; what is compared must not.
    body = (
        f'case "$*" in *--version*) echo "DPC++ Compiler 2025.3.1";; '
        f'*-print-prog-name*) ;; *) echo "Target: {uname.architecture()}-linux-gnu";; esac'
    )
    one, two = (program(tmp_path / name / "bin" / "icpx", body) for name in "ab")
    identities = []
    for path in (one, two):
        with override(sycl_cxx=str(path)):
            identities.append(find.choose(sycl, (), None, host(tmp_path)).identity)
    assert identities[0] == identities[1]


def test_a_named_compiler_that_is_absent_is_not_replaced_by_another(
    tmp_path: Path, memory: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    icpx(tmp_path)
    runtime(tmp_path / "prefix")
    monkeypatch.setenv("OPKILN_SYCL_CXX", "no-such-icpx")
    with pytest.raises(ToolchainError) as caught:
        find.choose(sycl, memory, None, host(tmp_path))
    assert caught.value.why == "no-such-icpx (OPKILN_SYCL_CXX): no such program"
    assert caught.value.hint == "unset OPKILN_SYCL_CXX"
    assert not sycl.available()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo broken; exit 3", "--version exits with 3: broken"),
        (
            'case "$*" in --version) echo "g++ 12";; *) echo "what is -fsycl" >&2; exit 1;; esac',
            "does not take -fsycl -std=c++20: what is -fsycl",
        ),
        (
            'case "$*" in --version) echo "icpx 1";; *) echo "Target: sparc64-linux";; esac',
            "compiles for sparc64-linux, not for",
        ),
    ],
)
def test_a_program_that_is_no_sycl_compiler_is_refused_with_what_it_said(
    tmp_path: Path, memory: tuple[str, ...], body: str, reason: str
) -> None:
    named = program(tmp_path / "mine", body)
    with override(sycl_cxx=str(named)), pytest.raises(ToolchainError) as caught:
        find.choose(sycl, memory, None, host(tmp_path))
    assert reason in caught.value.why


@pytest.mark.usefixtures("at_rest")
def test_a_compiler_that_is_refused_leaves_the_turn_to_the_runtime(
    tmp_path: Path, memory: tuple[str, ...]
) -> None:
    refused = program(tmp_path / "bin" / "icpx", "echo broken; exit 3")
    library = runtime(tmp_path / "prefix")
    chosen = find.choose(sycl, memory, None, host(tmp_path))
    assert (chosen.family, chosen.path) == ("sycl-rt", str(library))
    again, read = recalled(sycl, memory, None, host(tmp_path))
    assert again == chosen
    assert broken(read) == set()
    refused.write_text("mended")
    assert broken(read) == {str(refused)}


def test_the_pip_runtime_is_found_beside_the_interpreter(
    tmp_path: Path, memory: tuple[str, ...]
) -> None:
    home = tmp_path / "prefix"
    library = runtime(home)
    found = find.choose(sycl, memory, None, host(tmp_path))
    assert (found.family, found.path, found.home) == ("sycl-rt", str(library), str(home))
    assert found.version == "9.0.1 (20260724)"
    assert found.include_dirs == (str(home / "include"),)
    assert found.library_dirs == (str(home / "lib"),)
    assert sycl.soname(found) == "libsycl.so.9"
    assert sycl.available()


def test_a_pip_runtime_in_another_site_is_found_by_its_metadata(
    tmp_path: Path, memory: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = runtime(tmp_path / "user")
    site = tmp_path / "user" / "lib" / "python3" / "site-packages"
    listing = site / "intel_sycl_rt_as_tests_have_it-2026.1.dist-info"
    listing.mkdir(parents=True)
    (listing / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: intel-sycl-rt-as-tests-have-it\nVersion: 2026.1\n"
    )
    (listing / "RECORD").write_text(
        "../../libsycl.so,,\n../../libsycl-preview.so.9,,\n../../libsycl.so.9,,\n"
    )
    monkeypatch.syspath_prepend(str(site))
    assert find.choose(sycl, memory, None, host(tmp_path)).path == str(library)


def test_of_several_runtimes_the_highest_number_is_taken(
    tmp_path: Path, memory: tuple[str, ...]
) -> None:
    runtime(tmp_path / "prefix", 9)
    (tmp_path / "prefix" / "lib" / "libsycl.so.10").write_text("newer")
    (tmp_path / "prefix" / "lib" / "libsycl.so.10.0.1-gdb.py").write_text("")
    assert sycl.soname(find.choose(sycl, memory, None, host(tmp_path))) == "libsycl.so.10"


def test_a_runtime_that_cannot_compile_by_itself_is_refused(
    tmp_path: Path, memory: tuple[str, ...]
) -> None:
    runtime(tmp_path / "prefix", 8)
    (last,) = find.candidates(sycl, memory, None, host(tmp_path))[-1:]
    assert "libsycl.so.8 cannot compile kernels by itself" in last.refused
    assert ">=2026" in last.refused
    assert not sycl.available()


@pytest.mark.parametrize("part", ["include/sycl/sycl.hpp", "lib/libsycl-jit.so"])
def test_a_runtime_without_headers_or_compiler_is_refused_by_what_is_missing(
    tmp_path: Path, memory: tuple[str, ...], part: str
) -> None:
    runtime(tmp_path / "prefix")
    (tmp_path / "prefix" / part).unlink()
    (last,) = find.candidates(sycl, memory, None, host(tmp_path))[-1:]
    assert last.refused == f"{tmp_path}/prefix/{part} is missing"


def test_headers_that_the_host_compiler_cannot_use_are_a_refusal_with_its_words(
    tmp_path: Path, memory: tuple[str, ...]
) -> None:
    runtime(tmp_path / "prefix")
    failing = host(tmp_path, "echo \"probe.cpp:2:1: error: 'sycl' is not a member\"; exit 1")
    with pytest.raises(ToolchainError) as caught:
        find.choose(sycl, memory, None, failing)
    assert "no runtime compiler that" in caught.value.why
    assert "can use: 'sycl' is not a member" in caught.value.why


@pytest.mark.usefixtures("at_rest")
def test_what_one_host_compiler_made_of_the_headers_is_not_held_against_another(
    tmp_path: Path, memory: tuple[str, ...]
) -> None:
    library = runtime(tmp_path / "prefix")
    failing, working = host(tmp_path, "exit 1", "old"), host(tmp_path, "exit 0", "new")
    with pytest.raises(ToolchainError):
        find.choose(sycl, memory, None, failing)
    assert find.recall(sycl, memory, None, working) is None
    assert find.choose(sycl, memory, None, working).path == str(library)
    assert find.recall(sycl, memory, None, failing) is None


@pytest.mark.usefixtures("at_rest")
def test_what_was_found_out_is_remembered_until_a_file_changes(
    tmp_path: Path, memory: tuple[str, ...]
) -> None:
    home = tmp_path / "oneapi" / "2025.3"
    icpx(home)
    gxx = host(tmp_path)
    assert find.recall(sycl, memory, None, gxx) is None
    chosen = find.choose(sycl, memory, None, gxx)
    assert find.recall(sycl, memory, None, gxx) == chosen
    (home / "lib" / "libsycl.so.8").write_text("another")
    assert find.recall(sycl, memory, None, gxx) is None


@pytest.mark.usefixtures("at_rest")
def test_a_receipt_for_the_runtime_ends_when_a_compiler_appears(
    tmp_path: Path, memory: tuple[str, ...]
) -> None:
    home = tmp_path / "prefix"
    library = runtime(home)
    gxx = host(tmp_path)
    chosen = find.choose(sycl, memory, None, gxx)
    again, read = recalled(sycl, memory, None, gxx)
    assert (again, broken(read)) == (chosen, set())
    assert read.programs == {"icpx": [None], "dpcpp": [None]}
    assert f"{tmp_path}/oneapi" in read.absent
    assert str(home / "lib") in read.files
    library.write_text("another")
    assert broken(read) == {str(library)}


def test_a_libsycl_is_located_by_its_number_in_a_compilers_home_or_a_package(
    tmp_path: Path,
) -> None:
    home = tmp_path / "oneapi" / "2025.3"
    icpx(home)
    library = runtime(tmp_path / "prefix")
    assert libsycl.locate("libsycl.so.8") == str(home / "lib" / "libsycl.so.8")
    assert libsycl.locate("libsycl.so.9") == str(library)
    assert libsycl.locate("libsycl.so.7") is None
    with override(sycl_cxx=str(icpx(tmp_path / "mine"))):
        assert libsycl.locate("libsycl.so.8") == str(tmp_path / "mine" / "lib" / "libsycl.so.8")


class TestDevices:
    """Whether SYCL will find a device: an Intel GPU, or a CPU by a driver that OpenCL knows of."""

    @pytest.fixture(autouse=True)
    def no_devices(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("vendors", "drm", "dri"):
            (tmp_path / name).mkdir()
        monkeypatch.setattr(libsycl, "_VENDORS", str(tmp_path / "vendors"))
        monkeypatch.setattr(libsycl, "_GPUS", str(tmp_path / "drm"))
        monkeypatch.setattr(libsycl, "_NODES", str(tmp_path / "dri"))

    def test_the_command_to_copy_names_the_driver_that_is_there(self, tmp_path: Path) -> None:
        driver = runtime(tmp_path / "prefix").parent / "libintelocl.so"
        driver.write_text("")
        assert libsycl.why_no_device(None) == (
            "there is no Intel GPU, and OpenCL has no driver for a CPU",
            f"export OCL_ICD_FILENAMES={driver}",
        )
        assert libsycl.why_no_device(str(driver)) is None

    def test_what_is_not_installed_is_what_the_command_installs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        missing = libsycl.why_no_device(None)
        assert missing is not None
        assert missing[1] == libsycl.INSTALL
        runtime(tmp_path / "prefix")
        monkeypatch.setattr(libsycl, "_VENDORS", "/no/such/directory")
        without_driver = libsycl.why_no_device(None)
        assert without_driver is not None
        assert without_driver[1] == "pip install intel-opencl-rt"

    def test_a_variable_that_names_no_file_is_quoted(self) -> None:
        missing = libsycl.why_no_device("/gone/libintelocl.so")
        assert missing is not None
        assert "OCL_ICD_FILENAMES='/gone/libintelocl.so' does not name" in missing[0]

    def test_a_bare_name_is_left_to_the_dynamic_linker(self) -> None:
        assert libsycl.why_no_device("libintelocl.so") is None

    def test_a_driver_that_the_system_has_registered_is_enough(self, tmp_path: Path) -> None:
        driver = tmp_path / "libintelocl.so.2026"
        (tmp_path / "vendors" / "nvidia.icd").write_text("libnvidia-opencl.so.1\n")
        (tmp_path / "vendors" / "intel.icd").write_text(f"{driver}\n")
        assert libsycl.why_no_device(None) is not None
        driver.write_text("")
        assert libsycl.why_no_device(None) is None

    @pytest.mark.parametrize(("vendor", "found"), [("0x8086", True), ("0x10de", False)])
    def test_a_gpu_counts_when_it_is_intels(self, tmp_path: Path, vendor: str, found: bool) -> None:
        (tmp_path / "drm" / "renderD128").mkdir()  # of no vendor: on no PCI bus
        device = tmp_path / "drm" / "renderD129" / "device"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (tmp_path / "dri" / "renderD129").touch()
        assert (libsycl.why_no_device(None) is None) is found

    def test_a_gpu_that_cannot_be_opened_does_not_count_and_is_named(self, tmp_path: Path) -> None:
        device = tmp_path / "drm" / "renderD128" / "device"
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x8086\n")
        missing = libsycl.why_no_device(None)
        assert missing is not None
        assert missing[0].startswith("the Intel GPU (renderD128) is not open to this user, and ")
