"""Processes that load ops, and what the tests of faults share: sources, entries, shims."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sample.child import SOURCE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HERE = Path(__file__).parent
LOADS = HERE / "loads.py"


class Answer:
    """What one load came to."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        self.value: int | None = fields.get("value")
        self.error: str | None = fields.get("error")
        self.text: str = fields.get("text", "")
        self.compiled: int = fields.get("compiled", 0)
        self.origin: str = fields.get("origin", "")
        self.warnings: list[str] = fields.get("warnings", [])

    @property
    def path(self) -> Path:
        return Path(self.fields["path"])

    def __repr__(self) -> str:
        return f"Answer({self.fields})"


class Loader:
    """A process that loads what it is told to, until it is closed or killed."""

    def __init__(
        self, env: Mapping[str, str] | None = None, *, prefix: Sequence[str] = (), preload: str = ""
    ) -> None:
        environment = {**os.environ, "PYTHONPATH": str(SOURCE), **(env or {})}
        if preload:
            environment["LD_PRELOAD"] = preload
        # -S: without site-packages there is no torch, and the interpreter starts sooner.
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-S", str(LOADS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, name: str, source: Path | None = None, text: str = "", **more: Any) -> None:
        """Begin a load; ``answer`` waits for it."""
        what = {"text": text} if source is None else {"sources": [str(source)]}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"name": name, **what, "more": more}) + "\n")
        self.process.stdin.flush()

    def answer(self, timeout: float = 60) -> Answer:
        """The end of the load that was begun; a process that hangs or dies fails the test."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout)
        assert ready, f"process {self.process.pid} hangs: no answer within {timeout:.1f} s"
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the process died: exit {self.process.wait()}")
        return Answer(json.loads(line))

    def load(self, name: str, source: Path | None = None, text: str = "", **more: Any) -> Answer:
        self.ask(name, source, text, **more)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self._reap()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._reap()

    def _reap(self) -> None:
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def write(path: Path, text: str) -> Path:
    """Write a file in place (the same inode), and the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def returning(expression: object, before: str = "") -> str:
    """A source whose ``value()`` is an expression."""
    return f'{before}\nextern "C" int value() {{ return {expression}; }}\n'


def let_rest() -> None:
    """Wait until signatures of what was written so far are believed (see digest.Signature)."""
    time.sleep(2.1)


def leaves(cache: Path, kind: str = "ops") -> list[Path]:
    """The entries of a store."""
    return sorted(path.parent for path in (cache / "v1" / kind).rglob("manifest.json"))


def shim(source: str, directory: Path) -> str:
    """Compile one of the LD_PRELOAD libraries beside this file; returns its path."""
    output = directory / f"{source}.so"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror"]
    subprocess.run(
        ["gcc", *flags, str(HERE / f"{source}.c"), "-o", str(output), "-ldl", "-pthread"],
        check=True,
    )
    return str(output)
