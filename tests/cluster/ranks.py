"""Jobs of real processes: ranks on "nodes" that have a store directory and sources of their own."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sample import command, forks, known, pool, temporary
from sample.child import SOURCE

from opkiln.settings import LAYOUT
from opkiln.store.entry import read_manifest

if TYPE_CHECKING:
    from collections.abc import Mapping

HERE = Path(__file__).parent
SOURCE_TEXT = 'extern "C" int value() { return %d; }\n'
# Ops without torch: a rank starts in a tenth of a second.
BARE_OPS = """
import opkiln

class OP(opkiln.OpBuilder):
    NAME = "value"
    ABI = "none"
    KIND = "plain"
    VALUE = 23

    def sources(self):
        return [f"{self.NAME}.cpp"]

class OTHER(OP):
    NAME = "other"
    VALUE = 24
"""
# Ops of torch, with references.
TORCH_OPS = """
import opkiln
from torch import Tensor

SOURCE = '''
#include <opkiln/op.h>
opk::Tensor NAME(const opk::Tensor& x) {
  opk::check_contiguous(x);
  opk::Tensor out = opk::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) out.data<float>()[i] = FACTOR * x.data<const float>()[i];
  return out;
}
OPKILN_OP(NAME, cpu);
'''

@opkiln.op(source=SOURCE.replace("NAME", "twice").replace("FACTOR", "2"))
def twice(x: Tensor) -> Tensor:
    return x * 2

@opkiln.op(source=SOURCE.replace("NAME", "thrice").replace("FACTOR", "3"))
def thrice(x: Tensor) -> Tensor:
    return x * 3

@opkiln.op(source=SOURCE.replace("NAME", "fourfold").replace("FACTOR", "4"))
def fourfold(x: Tensor) -> Tensor:
    return x * 4
"""


class Node:
    """A machine: sources, a store, and what its ranks have in their environment.

    Ops of torch take seconds to compile: their objects are copied from the pool.
    """

    def __init__(self, path: Path, *, torch: bool = False, compilers: bool = True) -> None:
        self.path, self.torch = path, torch
        path.mkdir()
        (path / "cluster_ops.py").write_text(TORCH_OPS if torch else BARE_OPS)
        self.source = path / "value.cpp"
        self.source.write_text(SOURCE_TEXT % 23)
        (path / "other.cpp").write_text(SOURCE_TEXT % 24)
        self.cache = known.make_store(path / "cache")
        self.variables: dict[str, str] = {}
        if not compilers:
            (path / "bin").mkdir()
            self.variables["PATH"] = str(path / "bin")
            for each in (self.cache / LAYOUT / "toolchains").iterdir():
                each.unlink()

    def environment(self) -> dict[str, str]:
        ours = ("OPKILN_", "PYTHONPATH", "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        if self.torch:  # its bytecode is beside its sources
            kept |= {"PYTHONDONTWRITEBYTECODE": "1", "OPKILN_STORE_LAYERS": str(pool.LAYER)}
        else:
            kept["PYTHONPYCACHEPREFIX"] = str(_bytecode())
        return {
            **kept,
            "PYTHONPATH": os.pathsep.join([str(SOURCE), str(self.path)]),
            "OPKILN_CACHE_DIR": str(self.cache),
            "OPKILN_RUNTIME_DIR": str(self.path / "run"),
            "OPKILN_PROGRESS": "off",
            **self.variables,
        }

    def shift_times(self, hours: int) -> None:
        """The files that the node has written bear the times of its own clock."""
        for path in [self.path, *self.path.rglob("*")]:
            old = path.stat()
            os.utime(path, (old.st_atime + 3600 * hours, old.st_mtime + 3600 * hours))

    def entries(self) -> list[dict[str, Any]]:
        """The manifests of its store."""
        found = (self.cache / LAYOUT / "ops").glob("*/*/*/*/*")
        return [read_manifest(str(each)) for each in found]

    def verify(self) -> None:
        """Every entry is whole, as `opkiln cache verify` says."""
        own = {"OPKILN_CACHE_DIR": str(self.cache), "OPKILN_STORE_LAYERS": ""}  # not the pool
        done = command.run("cache", "verify", **own)
        assert done.returncode == 0, (done.stdout, done.stderr)

    def builds(self) -> int:
        """How many entries were built here, not fetched."""
        return sum("created" in each for each in self.entries())


@functools.cache
def _bytecode() -> Path:
    """Shared by the ranks that are started, not forked."""
    return temporary.directory("opkiln-bytecode-")


class Ended(NamedTuple):
    """What came of a rank."""

    code: int
    said: dict[str, Any]
    errors: str
    seconds: float

    @property
    def choice(self) -> tuple[str, str, str]:
        """(digest, reason, how) of the one op."""
        _, digest, reason, how = self.said["choices"][0]
        return digest, reason, how


class Job:
    """Ranks that were started."""

    def __init__(self, **options: Any) -> None:
        self.options = {"lease": 20, **options}  # on a busy machine, ranks are silent for seconds
        self.ranks: list[subprocess.Popen[str]] = []
        self.began: list[float] = []

    def start(self, node: Node, rank: int, world: int, **options: Any) -> None:
        given = {**self.options, **options}
        variables: Mapping[str, str] = given.pop("variables", {})
        env = {**node.environment(), "RANK": str(rank), "WORLD_SIZE": str(world), **variables}
        argv = [str(HERE / ("torch_rank.py" if node.torch else "rank.py")), json.dumps(given)]
        bare = not node.torch and "MASTER_ADDR" not in env  # torch's store needs torch
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env,
                   "cwd": node.path}  # fmt: skip
        self.began.append(time.monotonic())
        if forks.suits(env):
            self.ranks.append(forks.Fork(argv, bare=bare, **options))
            return
        python = [sys.executable, *(["-S"] if bare else [])]
        self.ranks.append(subprocess.Popen([*python, *argv], **options))

    def end(self, limit: float = 90) -> list[Ended]:
        """What came of all; a rank that hangs fails the test."""
        deadline = time.monotonic() + limit
        ended = []
        try:
            for rank, began in zip(self.ranks, self.began, strict=True):
                out, err = rank.communicate(timeout=max(0.1, deadline - time.monotonic()))
                lines = [line for line in out.splitlines() if line.startswith("{")]
                said = json.loads(lines[-1]) if lines else {}
                ended.append(Ended(rank.returncode, said, err, time.monotonic() - began))
        finally:
            self.kill()
        return ended

    def kill(self) -> None:
        for rank in self.ranks:
            with suppress(ProcessLookupError):
                rank.send_signal(signal.SIGCONT)
                rank.kill()
            rank.wait()
            for pipe in (rank.stdout, rank.stderr):
                if pipe is not None and not pipe.closed:
                    pipe.close()


def run(nodes: list[Node], each: int, options: Mapping[int, dict[str, Any]] | None = None,
        **common: Any) -> list[Ended]:  # fmt: skip
    """Run a job of ``each`` ranks on every node; ``options`` are those of single ranks."""
    started = Job(**common)
    world = len(nodes) * each
    for rank in range(world):
        started.start(nodes[rank // each], rank, world, **(options or {}).get(rank, {}))
    return started.end(limit=240 if nodes[0].torch else 90)


def skewed(directory: Path, hours: int) -> dict[str, str]:
    """What makes the wall clock of a process wrong by some hours."""
    library = directory / "skewed_clock.so"
    source = HERE.parent / "faults" / "skewed_clock.c"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-pthread"]
    subprocess.run(["g++", "-x", "c", *flags, source, "-o", library, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "SKEW_SECONDS": str(3600 * hours)}


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])
