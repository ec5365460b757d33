"""Jobs of real processes: ranks on "nodes" that have a store directory and sources of their own."""

from __future__ import annotations

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

from sample import known
from sample.child import SOURCE

from opkiln.settings import LAYOUT
from opkiln.store.entry import read_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SOURCE_TEXT = 'extern "C" int value() { return 23; }\n'
# An op without torch: a rank starts in a tenth of a second.
BARE_OP = """
import opkiln

class ValueBuilder(opkiln.OpBuilder):
    NAME = "value"
    ABI = "none"
    KIND = "plain"

    def sources(self):
        return ["value.cpp"]

OP = ValueBuilder
"""
# An op of torch, with a reference.
TORCH_OP = """
import opkiln
from torch import Tensor

@opkiln.op("twice.cpp")
def twice(x: Tensor) -> Tensor:
    return x + x

OP = twice
"""
TORCH_SOURCE = """
#include <opkiln/op.h>
opk::Tensor twice(const opk::Tensor& x) {
  opk::check_contiguous(x);
  opk::Tensor out = opk::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) out.data<float>()[i] = 2 * x.data<const float>()[i];
  return out;
}
OPKILN_OP(twice, cpu);
"""


class Node:
    """A machine: sources, a store, and what its ranks have in their environment."""

    def __init__(self, path: Path, *, torch: bool = False, compilers: bool = True) -> None:
        self.path, self.torch = path, torch
        path.mkdir()
        (path / "cluster_ops.py").write_text(TORCH_OP if torch else BARE_OP)
        name, text = ("twice.cpp", TORCH_SOURCE) if torch else ("value.cpp", SOURCE_TEXT)
        self.source = path / name
        self.source.write_text(text)
        self.cache = known.make_store(path / "cache")
        self.variables: dict[str, str] = {}
        if not compilers:
            (path / "bin").mkdir()
            self.variables["PATH"] = str(path / "bin")
            for each in (self.cache / LAYOUT / "toolchains").iterdir():
                each.unlink()

    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("OPKILN_", "PYTHON"))}
        return {
            **kept,
            "PYTHONPATH": os.pathsep.join([str(SOURCE), str(self.path)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OPKILN_CACHE_DIR": str(self.cache),
            "OPKILN_RUNTIME_DIR": str(self.path / "run"),
            "OPKILN_PROGRESS": "off",
            "OPKILN_LEASE": "1.5",
            **self.variables,
        }

    def entries(self) -> list[dict[str, Any]]:
        """The manifests of its store."""
        found = (self.cache / LAYOUT / "ops").glob("*/*/*/*/*")
        return [read_manifest(str(each)) for each in found]

    def builds(self) -> int:
        """How many entries were built here, not fetched."""
        return sum("created" in each for each in self.entries())


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
        self.options = options
        self.ranks: list[subprocess.Popen[str]] = []
        self.began: list[float] = []

    def start(self, node: Node, rank: int, world: int, **options: Any) -> None:
        given = {**self.options, **options}
        variables: Mapping[str, str] = given.pop("variables", {})
        env = {**node.environment(), "RANK": str(rank), "WORLD_SIZE": str(world), **variables}
        self.began.append(time.monotonic())
        self.ranks.append(
            subprocess.Popen(
                [sys.executable, *([] if node.torch else ["-S"]), str(RANK), json.dumps(given)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=node.path,
            )
        )  # fmt: skip

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
    return started.end()


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def waiting(condition: Any, seconds: float = 30) -> Iterator[None]:
    """Yields until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
        yield


RANK = Path(__file__).with_name("rank.py")
