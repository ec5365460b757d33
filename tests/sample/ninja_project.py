"""A directory with a build.ninja, built by plain ninja or through ``opkiln ninja``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

NINJA = shutil.which("ninja") or ""
needs_ninja = pytest.mark.skipif(not NINJA, reason="there is no ninja on PATH")

RULES = """
rule cc
  command = gcc -Wall -I. -MD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link
  command = gcc $in -o $out
rule ar
  command = ar rcs $out $in
rule touch
  command = touch $out
rule copy
  command = cp $in $out
"""


class Built(NamedTuple):
    """One run of ninja."""

    status: int
    output: str
    hits: list[str]
    misses: list[str]


class Project:
    """The directory, and a way to build it."""

    def __init__(self, path: Path, graph: str = "", **files: str) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            self.write(name.replace("__", "."), text)
        if graph:
            self.write("build.ninja", RULES + graph)

    def write(self, name: str, text: str) -> None:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        # ninja compares times, and a file as new as what is made of it counts as older.
        time.sleep(0.03)

    def environment(self, trace: Path | None = None, **more: str) -> dict[str, str]:
        source = str(Path(__file__).parent.parent.parent / "src")
        given = {**os.environ, "PYTHONPATH": source, **more}
        return given if trace is None else {**given, "OPKILN_TRACE": str(trace)}

    def start(
        self, *arguments: str, trace: Path | None = None, **more: str
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "opkiln", "ninja", *arguments], cwd=self.path, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=self.environment(trace, **more),
        )  # fmt: skip

    def build(self, *arguments: str, **more: str) -> Built:
        """Build through opkiln, and wait until the server has written what it did."""
        trace = self.path.parent / f"{self.path.name}.trace"
        trace.unlink(missing_ok=True)
        done = self.start(*arguments, trace=trace, **more)
        output, _ = done.communicate(timeout=120)
        return Built(done.returncode, output, *self.served(trace))

    @staticmethod
    def served(trace: Path) -> tuple[list[str], list[str]]:
        """The labels of (the hits, the misses) in a trace, which the server writes at its end."""
        while not trace.exists() and servers(trace):
            time.sleep(0.02)
        if not trace.exists():
            return [], []
        ended = [
            each for each in json.loads(trace.read_text())["traceEvents"]
            if "cached" in each.get("args", {})
        ]  # fmt: skip
        return tuple(
            sorted(each["name"] for each in ended if each["args"]["cached"] is cached)
            for cached in (True, False)
        )  # type: ignore[return-value]

    def plain(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [NINJA, *arguments], cwd=self.path, text=True, capture_output=True, check=False,
            timeout=120,
        )  # fmt: skip

    def clean(self) -> None:
        """Remove all that ninja made, with its memory of it."""
        self.plain("-t", "clean")
        for name in (".ninja_log", ".ninja_deps"):
            (self.path / name).unlink(missing_ok=True)

    def is_done(self) -> bool:
        """Whether plain ninja finds nothing to do."""
        return "no work to do" in self.plain().stdout

    def run(self, program: str) -> str:
        return subprocess.run(
            [self.path / program], capture_output=True, text=True, check=True, timeout=60
        ).stdout


def servers(trace: Path) -> list[int]:
    """The servers that will write this trace."""
    found, wanted = [], f"OPKILN_TRACE={trace}\0".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            serves = b"program.py\0serve" in (process / "cmdline").read_bytes()
            if serves and wanted in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found
