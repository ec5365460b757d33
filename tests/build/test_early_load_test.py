"""The load test's child starts before the compile, and goes on when the library is there."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sample import child

import opkiln
from opkiln.building import loadtest
from opkiln.errors import BuildTimeout, CompileError, LoadTestError
from opkiln.machine.toolchain import torch_sdk
from opkiln.run import process
from opkiln.settings import override

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sample.package import Package


pytestmark = pytest.mark.counts_compiles  # a compile is waited for


@pytest.fixture
def started() -> Iterator[list[str]]:
    """The programs that are started, in order, by a word for each."""
    words: list[str] = []

    def note(argv: Sequence[str]) -> None:
        if any("probe_load.py" in word for word in argv):
            words.append("load test")
        elif "-c" in argv and any(word.endswith(".cpp") for word in argv):
            words.append("compile")
        elif "-shared" in argv:
            words.append("link")

    with process.watch_starts(note):
        yield words


def build(name: str, text: str) -> None:
    opkiln.load_inline(name, text, is_python_module=False, abi="none")


def test_child_starts_before_the_compile_of_a_small_op(started: list[str]) -> None:
    with override(max_jobs=4):
        build("early", "int early() { return 1; }")
    assert started == ["load test", "compile", "link"]


def test_child_starts_after_the_link_where_there_is_one_cpu(started: list[str]) -> None:
    with override(max_jobs=1):
        build("late", "int late() { return 1; }")
    assert started == ["compile", "link", "load test"]


def test_few_children_wait_when_many_ops_are_built_at_once(started: list[str]) -> None:
    def built(number: int) -> None:
        build(f"one_of_many_{number}", f"int one_of_many_{number}() {{ return 1; }}")

    with override(max_jobs=2), ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(copy_context().run, built, number) for number in range(4)]
    assert all(each.exception() is None for each in calls)
    assert started.count("load test") == 4
    assert started[: started.index("link")].count("load test") == 1


def test_child_ends_with_a_build_that_fails(started: list[str], cache: Path) -> None:
    with override(max_jobs=4), pytest.raises(CompileError):
        build("broken", "this is not C++")
    assert "load test" in started
    assert not any(b"broken.so" in line for line in _commands())


@pytest.mark.timed
def test_library_that_appears_late_is_loaded_when_it_is_told(
    tmp_path: Path, plain: Package
) -> None:
    spec = plain.builder().spec()._replace(kernels=(), abi="none")
    library = tmp_path / "late.so"
    with loadtest.start(spec, None, str(library), tmpdir=str(tmp_path)) as test:
        time.sleep(0.3)  # the child has time to look too early
        _compile("int late() { return 1; }", library)
        test.check()
    with loadtest.start(spec, None, str(tmp_path / "none.so"), tmpdir=str(tmp_path)) as test:
        (tmp_path / "none.so").write_bytes(b"not a library")
        with pytest.raises(LoadTestError, match="was built but cannot be loaded"):
            test.check()


@pytest.mark.timed
def test_time_limit_counts_from_the_library(tmp_path: Path, plain: Package) -> None:
    spec = plain.builder().spec()._replace(kernels=(), abi="none")
    library, quick, hanging = (tmp_path / f"{name}.so" for name in ("tested", "quick", "hanging"))
    _compile("int quick() { return 1; }", quick)
    _compile(
        "#include <unistd.h>\n"
        "__attribute__((constructor)) static void hang() { for (;;) pause(); }",
        hanging,
    )
    with (
        override(build_timeout=2),
        loadtest.start(spec, None, str(library), tmpdir=str(tmp_path)) as test,
    ):
        time.sleep(2.2)
        quick.replace(library)
        test.check()
    library.unlink()
    with (
        override(build_timeout=0.5),
        loadtest.start(spec, None, str(library), tmpdir=str(tmp_path)) as test,
    ):
        hanging.replace(library)
        with pytest.raises(BuildTimeout, match=r"loading it took longer than 0.5 s"):
            test.check()
    assert not any(str(library).encode() in line for line in _commands())


@pytest.mark.parametrize("abi", ["stable", "full"])
def test_library_that_does_not_name_torch_among_its_needs_is_refused(
    tmp_path: Path, plain: Package, abi: str
) -> None:
    spec, torch = plain.builder().spec()._replace(kernels=(), abi=abi), torch_sdk.find()
    if torch is None:
        pytest.skip("torch is not installed")
    text = "int aoti_torch_device_type_cpu(); int cpu() { return aoti_torch_device_type_cpu(); }"
    needing, forgetting = tmp_path / "needing.so", tmp_path / "forgetting.so"
    _compile(text, needing, f"-L{torch.path}/lib", "-Wl,--no-as-needed", "-ltorch_cpu")
    loadtest.check(spec, torch, str(needing), tmpdir=str(tmp_path))
    _compile(text, forgetting)
    with pytest.raises(LoadTestError, match="undefined symbol: aoti_torch_device_type_cpu"):
        loadtest.check(spec, torch, str(forgetting), tmpdir=str(tmp_path))
    # It is what a user's process says.
    out = child.run(f"import ctypes, torch\ntry: ctypes.CDLL({str(forgetting)!r}, mode=2)\n"
                    "except OSError as error: print(error)", bare=False)  # fmt: skip
    assert "undefined symbol: aoti_torch_device_type_cpu" in out


def _compile(text: str, library: Path, *flags: str) -> None:
    source = library.with_suffix(".c")
    source.write_text(text)
    argv = ("gcc", "-shared", "-fPIC", str(source), "-o", str(library), *flags)
    done = process.run(argv, timeout=60)
    assert done.returncode == 0, done.output


def _commands() -> list[bytes]:
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            found.append(each.read_bytes())
    return found
