"""A builder that is killed together with its watchdog leaves no compiler and no load test."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING

import pytest
from sample import child
from sample.processes import ENDLESS, UNLIMITED, field, pids, watchdogs
from sample.quiet import within

from opkiln.machine.toolchain import host

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(not host.available(), reason="no C++ compiler is installed"),
    pytest.mark.timed,
]

LOAD = """
    import sys, opkiln
    source, *flags = sys.argv[1:]
    opkiln.load("op", [source], extra_cflags=flags, is_python_module=False, abi="none")
"""
HANGING = "#include <unistd.h>\nstatic int hang = [] { for (;;) pause(); return 0; }();\n"


def living(name: str) -> dict[int, list[bytes]]:
    """The words of living processes that have this text in one of them, or in a variable."""
    found = {}
    for pid in pids():
        words, variables = field(pid, "cmdline"), field(pid, "environ")
        if pid != os.getpid() and any(name.encode() in each for each in (*words, *variables)):
            found[pid] = words
    return found


@pytest.mark.parametrize(
    ("text", "program"),
    [(ENDLESS, b"cc1plus"), (HANGING, b"probe_load.py")],
    ids=["compiler", "load test"],
)
def test_a_builder_killed_together_with_its_watchdog_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, program: bytes
) -> None:
    if program == b"cc1plus" and "clang" in os.path.basename(os.environ.get("CXX", "g++")):
        pytest.skip("clang compiles in one process")
    place = tmp_path / "only here"
    place.mkdir()
    monkeypatch.setenv("OPKILN_TMPDIR", str(place))
    source = place / "op.cpp"
    source.write_text(text)
    builder = child.start(LOAD, str(source), *UNLIMITED)

    def busy() -> bool:
        words = [each for pid, each in living(str(place)).items() if pid != builder.pid]
        return any(word.endswith(program) for each in words for word in each)

    try:
        assert within(60, busy), living(str(place))
        killed = [*watchdogs(builder.pid), builder.pid]
        assert len(killed) == 2
        for pid in killed:
            os.kill(pid, signal.SIGSTOP)  # so that neither sees the other's end
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        builder.communicate()
        assert within(10, lambda: not living(str(place))), living(str(place))
    finally:
        for pid in living(str(place)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_killed_process_leaves_no_compiler_that_it_asked_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "hanging-g++"
    compiler.write_text(f"#!/bin/sh\ntouch '{tmp_path}/asked'\nsleep 600\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    (tmp_path / "op.cpp").write_text("int value;\n")
    builder = child.start(LOAD, str(tmp_path / "op.cpp"))
    assert within(60, (tmp_path / "asked").exists)
    builder.kill()
    builder.communicate()
    assert within(10, lambda: not living(str(compiler))), living(str(compiler))
