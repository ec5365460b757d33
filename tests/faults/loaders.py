"""Processes that load ops, and what the tests of faults share: sources, entries, shims."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sample import forks
from sample.child import SOURCE

from opkiln import settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HERE = Path(__file__).parent
LOADS = HERE / "loads.py"
# How long a file has to rest until its signature is believed (digest.Signature), instead of two
# seconds. The kernel's clock ticks every 10 ms or faster.
SETTLED_NS = 20_000_000
HANGS = 300.0  # seconds without an answer, after which a process of a busy machine hangs, too


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
        self.refused: list[str] = fields.get("refused", [])

    @property
    def path(self) -> Path:
        return Path(self.fields["path"])

    def __repr__(self) -> str:
        return f"Answer({self.fields})"


class Loader:
    """A process that loads what it is told to, until it is closed or killed.

    It is forked from one that has opkiln imported, unless ``forked`` is False or it is to differ in
    what a process is started with.
    """

    def __init__(
        self,
        env: Mapping[str, str | None] | None = None,
        *,
        prefix: Sequence[str] = (),
        preload: str = "",
        python: str = sys.executable,
        user: int | None = None,
        group: int | None = None,
        forked: bool = True,
    ) -> None:
        given = {**os.environ, "PYTHONPATH": str(SOURCE), **(env or {})}
        environment = {name: text for name, text in given.items() if text is not None}
        if preload:
            environment["LD_PRELOAD"] = preload
        # -S: without site-packages there is no torch, and the interpreter starts sooner.
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        pipes["env"] = environment
        plain = forked and not prefix and python == sys.executable and user is None
        if plain and forks.suits(environment):
            self.process: subprocess.Popen[str] = forks.Fork([str(LOADS)], bare=True, **pipes)
            return
        self.process = subprocess.Popen(
            [*prefix, python, "-S", str(LOADS)],
            user=user,
            group=user if group is None else group,
            extra_groups=None if user is None else [],
            **pipes,
        )

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(
        self, name: str, source: Path | Sequence[Path] | None = None, text: str = "", **more: Any
    ) -> None:
        """Begin a load; ``answer`` waits for it."""
        sources = [source] if isinstance(source, Path) else list(source or ())
        what = {"sources": [*map(str, sources)]} if sources else {"text": text}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"name": name, **what, "more": more}) + "\n")
        self.process.stdin.flush()

    def has_answered(self) -> bool:
        """Whether ``answer`` would return at once."""
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def answer(self, timeout: float = HANGS) -> Answer:
        """The end of the load that was begun; a process that hangs or dies fails the test."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout)
        assert ready, f"process {self.process.pid} hangs: no answer within {timeout:.1f} s"
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the process died: exit {self.process.wait()}")
        return Answer(json.loads(line))

    def load(
        self, name: str, source: Path | Sequence[Path] | None = None, text: str = "", **more: Any
    ) -> Answer:
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


class Compiler:
    """A g++ that notes each compile and takes its time."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "compiles"
        self.delay = directory / "delay"
        self.path = directory / "g++"
        real = shutil.which("g++")
        self.path.write_text(
            "#!/bin/sh\n"
            'for each in "$@"; do\n'
            '  if [ "$each" = -c ]; then\n'
            f'    echo c >> "{self.log}"; read delay < "{self.delay}"\n'
            '    [ "$delay" = 0 ] || sleep "$delay"\n'
            "  fi\n"
            "done\n"
            f'exec {real} "$@"\n'
        )
        self.path.chmod(0o755)
        self.take(0)

    def take(self, seconds: float) -> None:
        self.delay.write_text(f"{seconds}\n")
        let_rest()  # the compiler reads it, so it is one of the inputs

    @property
    def compiles(self) -> int:
        return len(self.log.read_text().split()) if self.log.exists() else 0


def learn(compiler: Path) -> Path:
    """What a store that has built with a compiler knows of it (the directory)."""
    place = compiler.parent
    environment = {"CXX": str(compiler), "OPKILN_CACHE_DIR": str(place / "cache")}
    with Loader({**environment, "OPKILN_RUNTIME_DIR": str(place / "run")}) as process:
        for name in ("one", "two"):  # the programs of a compiler are remembered by the second one
            source = write(place / f"{name}.cpp", returning(f'sizeof "{name}"'))
            assert process.load(name, source).value == 4
    return place / "cache" / settings.LAYOUT / "toolchains"


def with_torch_in(directory: Path) -> dict[str, str | None]:
    """The environment of a process that imports the torch that lies in a directory."""
    # torch's own bytecode is beside its sources: to make it anew takes ten seconds.
    return {
        "PYTHONPATH": os.pathsep.join((str(directory), str(SOURCE))),
        "PYTHONPYCACHEPREFIX": None,
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def write(path: Path, text: str) -> Path:
    """Write a file in place (the same inode), and the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def returning(expression: object, before: str = "") -> str:
    """A source whose ``value()`` is an expression."""
    return f'{before}\nextern "C" int value() {{ return {expression}; }}\n'


def let_rest() -> None:
    """Wait until signatures of what was written so far are believed (SETTLED_NS)."""
    time.sleep(0.03)


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
