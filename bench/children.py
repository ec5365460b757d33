"""Fresh processes for the measures: their environment, their caches, their answer.

Every cache of every system lies below one temporary directory, and no variable of the caller that
could change a result reaches a child, so that a run leaves nothing behind and finds nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from measured import Failure

HERE = Path(__file__).resolve().parent
ANSWER = "BENCH-ANSWER "
# A build that hangs must not hang the bench; DeepSpeed's takes about a minute on two cores.
PATIENCE = 900.0

# What a child keeps of the caller's environment. PYTHONDONTWRITEBYTECODE is left out on purpose:
# with it nobody's bytecode is cached, and every import would be timed with a compile in it.
_PASSED = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR")


class Caches(NamedTuple):
    """A set of build caches, one directory per system, below ``root``."""

    root: Path
    added: Mapping[str, str] = MappingProxyType({})  # to the environment, over everything else

    def environment(self) -> dict[str, str]:
        """What makes every system keep its builds here and take nothing from elsewhere."""
        passed = {name: os.environ[name] for name in _PASSED if name in os.environ}
        # The peers look for ninja on PATH; it lies beside this Python.
        passed["PATH"] = os.pathsep.join(
            [str(Path(sys.executable).parent), passed.get("PATH", os.defpath)]
        )
        return passed | {
            "HOME": str(self._made("home")),
            "XDG_CACHE_HOME": str(self._made("home/.cache")),
            "OPKILN_CACHE_DIR": str(self._made("opkiln", mode=0o700)),
            "OPKILN_RUNTIME_DIR": str(self._made("opkiln-run", mode=0o700)),
            "OPKILN_MODE": "native",  # a reference that serves silently is not a measurement
            "TORCH_EXTENSIONS_DIR": str(self._made("torch-extensions")),
            "TVM_FFI_CACHE_DIR": str(self._made("tvm-ffi")),
            "BENCH_BUILD_DIR": str(self._made("build")),
            "DS_ACCELERATOR": "cpu",
            **self.added,
        }

    def _made(self, name: str, mode: int = 0o755) -> Path:
        path = self.root / name
        path.mkdir(mode=mode, parents=True, exist_ok=True)
        return path


class Workspace:
    """The directory of a run, temporary or kept: one warm set of caches, cold ones on demand."""

    def __init__(
        self, kept: Path | None = None, added: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        if kept is not None:
            kept.mkdir(parents=True, exist_ok=True)
        self.kept = kept is not None
        self.root = kept.resolve() if kept else Path(tempfile.mkdtemp(prefix="opkiln-bench-"))
        self.fresh = not (self.root / "warm").exists()
        self.warm = Caches(self.root / "warm", added)
        self._first: dict[str, dict[str, Any] | Failure] = {}

    def close(self) -> None:
        """Remove everything that the run built, unless it is to be kept."""
        if not self.kept:
            shutil.rmtree(self.root, ignore_errors=True)

    def first_load(self, peer: str) -> dict[str, Any]:
        """Timings of the load that filled the warm caches; it happens once per run and peer.

        Raises Failure, every time it is asked, when that load failed.
        """
        if peer not in self._first:
            try:
                self._first[peer] = load(peer, self.warm)
            except Failure as failure:
                self._first[peer] = failure
        answer = self._first[peer]
        if isinstance(answer, Failure):
            raise answer
        return answer

    def cold_load(self, peer: str) -> dict[str, Any]:
        """Timings of a load into caches of its own, which are removed again."""
        with self.cold() as caches:
            return load(peer, caches)

    @contextmanager
    def cold(self) -> Iterator[Caches]:
        """Empty caches, which are removed again."""
        directory = Path(tempfile.mkdtemp(prefix="cold-", dir=self.root))
        try:
            yield self.warm._replace(root=directory)
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def load(peer: str, caches: Caches, *, prefix: tuple[str, ...] = ()) -> dict[str, Any]:
    """What ``child_load.py`` measured of one peer in a fresh process."""
    return ask(["child_load.py", peer], caches, prefix=prefix)


def ask(
    script: list[str],
    caches: Caches,
    *,
    prefix: tuple[str, ...] = (),
    python: str = sys.executable,
) -> dict[str, Any]:
    """Run one of the child scripts and give its answer; Failure with the reason otherwise."""
    command = [*prefix, python, str(HERE / script[0]), *script[1:]]
    done = finish(command, caches)
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(ANSWER):
            answer: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
            return answer
    raise Failure(f"no answer from {' '.join(script)}: {reason(done)}")


def timed(command: list[str], caches: Caches, *, cwd: Path | None = None) -> float:
    """Wall seconds of a command that has to succeed."""
    begin = time.perf_counter()
    finish(command, caches, cwd=cwd)
    return time.perf_counter() - begin


def finish(
    command: list[str], caches: Caches, *, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; Failure with its last words when it did not succeed."""
    try:
        done = subprocess.run(
            command,
            env=caches.environment(),
            cwd=cwd or caches.root,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=PATIENCE,
            check=False,
        )
    except FileNotFoundError:
        raise Failure(f"{Path(command[0]).name} is not installed") from None
    except subprocess.TimeoutExpired:
        raise Failure(f"still running after {PATIENCE:.0f} s") from None
    if done.returncode != 0:
        raise Failure(f"exit status {done.returncode}: {reason(done)}")
    return done


def reason(done: subprocess.CompletedProcess[str]) -> str:
    """The last line that says something, cut to what fits a table."""
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    # Paths are cut to their last part: they are long, and they are this machine's.
    text = re.sub(r"/\S*/", "", (errors or lines or ["it said nothing"])[-1])
    return text if len(text) <= 160 else text[:157] + "..."
