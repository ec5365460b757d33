"""Cold and warm jobs under each launcher: two nodes in network namespaces, four ranks each.

    make test-cluster            needs root, iproute2; for srun slurmctld, slurmd and munge, too
    python tests/cluster/launchers.py torchrun --runs 20 --keep

torchrun's agents and Slurm's daemons are real. The ranks that they start have a process that has
torch already fork them, on the same node and with the launcher's environment (forked.py).

Two ops. In a cold job each is compiled once, and fetched once by the other node; it takes at most
3 s longer than the compile, from the last rank's call of ``ensure``. A warm job compiles nothing,
and takes half a second. ``--keep`` writes bench/results/cluster.json. On a machine that others use,
``nice -n -10`` keeps them out of what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import slurm
from network import ADDRESSES, NAMES, Case, Host, Network, apart, inside, missing, name_hosts
from ranks import Node
from results import keep, spread

EACH = 4
FORKED = Path(__file__).resolve().with_name("forked.py")
# The lease is the one that users get.
OPTIONS: dict[str, Any] = {"ops": ["OP", "OTHER"], "timeout": 100, "lease": 6.0}
MOST_BEYOND_COMPILE, MOST_WARM = 3.0, 0.5  # seconds


class Ranks(NamedTuple):
    """What the ranks of a job said."""

    said: list[dict[str, Any]]

    def how(self) -> list[Counter[str]]:
        """For each op, where the ranks have it from. All must have the same libraries."""
        assert all("choices" in each for each in self.said), self.said
        libraries = {tuple(digest for _, digest, *_ in each["choices"]) for each in self.said}
        assert len(libraries) == 1, libraries
        assert all(libraries.pop()), self.said
        return [
            Counter(each["choices"][op][3] for each in self.said)
            for op in range(len(OPTIONS["ops"]))
        ]

    @property
    def compiles(self) -> int:
        return sum(each["compiles"] for each in self.said)

    @property
    def longest_build(self) -> float:
        return float(max(wall for each in self.said for wall in each["built"].values()))

    @property
    def seconds(self) -> float:
        """From the last rank's call until all have returned."""
        return float(max(e["ended"] for e in self.said) - max(e["called"] for e in self.said))

    def times(self) -> str:
        """When each rank called and returned, from the first call on."""
        first = min(each["called"] for each in self.said)
        return ", ".join(
            f"rank {e['rank']} {e['called'] - first:.2f}-{e['ended'] - first:.2f} s"
            for e in self.said
        )


class Launcher(Protocol):
    def run(self, where: Path, nodes: list[Node], **options: Any) -> Ranks: ...


class ByHand:
    """Each rank is a process with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

    def __init__(self, stack: ExitStack) -> None:
        self.hosts = [Host(inside(name)) for name in NAMES]
        for host in self.hosts:
            stack.callback(host.end)
            host.ready()

    def run(self, where: Path, nodes: list[Node], **options: Any) -> Ranks:
        case = Case(self.hosts, where, nodes, each=EACH)
        case.start(**{**OPTIONS, **options})
        return Ranks(case.end()[0])


class Forking:
    """The nodes' processes that have torch."""

    def __init__(self, stack: ExitStack, where: Path) -> None:
        self.sockets = [where / f"{name}.socket" for name in NAMES]
        for name, path in zip(NAMES, self.sockets, strict=True):
            host = Host(inside(name), socket=path)
            stack.callback(host.end)
            host.ready()

    def rank(self, where: Path, options: dict[str, Any]) -> list[str]:
        """The command of a rank. Its node's socket is in its environment."""
        asked = json.dumps({**OPTIONS, "out": str(where / "said"), **options})
        return [sys.executable, "-S", str(FORKED), str(where / "log"), asked]


def from_files(where: Path) -> Ranks:
    said = []
    for rank in range(2 * EACH):
        file = where / f"said{rank}"
        log = where / f"log{rank}"
        assert file.exists(), f"rank {rank}: {log.read_text() if log.exists() else 'not started'}"
        said.append(json.loads(file.read_text()))
        file.unlink()
    return Ranks(said)


class Torchrun:
    """An agent on each node."""

    ports = iter(range(28600, 29600))

    def __init__(self, forking: Forking) -> None:
        self.forking = forking

    def run(self, where: Path, nodes: list[Node], **options: Any) -> Ranks:
        port = next(self.ports)
        agents = [
            subprocess.Popen(
                [
                    *inside(name), sys.executable, "-m", "torch.distributed.run",
                    "--nnodes=2", f"--nproc-per-node={EACH}", "--max-restarts=1",
                    "--monitor-interval=1", "--rdzv-backend=c10d", f"--rdzv-id=job-{port}",
                    f"--rdzv-endpoint={ADDRESSES[0]}:{port}", f"--local-addr={address}",
                    "--no-python", *self.forking.rank(where, options),
                ],
                env={**node.environment(), "FORKING_SOCKET": str(path)}, cwd=node.path, text=True,
                stdout=subprocess.DEVNULL, stderr=(where / f"{name}.log").open("w"),
            )
            for name, address, node, path in zip(
                NAMES, ADDRESSES, nodes, self.forking.sockets, strict=True
            )
        ]  # fmt: skip
        try:
            for agent, name in zip(agents, NAMES, strict=True):
                code = agent.wait(timeout=240)
                assert code == 0, (where / f"{name}.log").read_text()
        finally:
            for agent in agents:
                agent.kill()
                agent.wait()
        return from_files(where)


class Srun:
    """A step of a real Slurm. Neither MASTER_ADDR nor MASTER_PORT is set."""

    def __init__(self, forking: Forking, where: Path) -> None:
        self.forking = forking
        where.mkdir()
        self.slurm = slurm.Slurm(where)
        self.slurm.start()

    def run(self, where: Path, nodes: list[Node], **options: Any) -> Ranks:
        wanted = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
        for name, node, path in zip(slurm.NODES, nodes, self.forking.sockets, strict=True):
            given = node.environment().items()
            self.slurm.give(name, {
                "FORKING_SOCKET": str(path),
                **{k: v for k, v in given if k.startswith("OPKILN_") or k in wanted},
            })  # fmt: skip
        done = self.slurm.ask(
            "srun", "--nodes=2", f"--ntasks-per-node={EACH}", "--kill-on-bad-exit=1",
            *self.forking.rank(where, options), limit=240,
        )  # fmt: skip
        assert done.returncode == 0, (done.stderr, self.slurm.logs())
        return from_files(where)


def cold(launcher: Launcher, where: Path, nodes: list[Node]) -> Ranks:
    ranks = launcher.run(where, nodes)
    wanted = {"built": 1, "fetched": 1, "found on this node": 2 * EACH - 2}
    assert ranks.how() == [wanted, wanted], ranks.how()
    assert ranks.compiles == 2, ranks.said
    assert sum(node.builds() for node in nodes) == 2
    return ranks


def warm(launcher: Launcher, where: Path, nodes: list[Node]) -> Ranks:
    ranks = launcher.run(where, nodes)
    assert ranks.how() == [{"cached": 2 * EACH}] * 2, ranks.how()
    assert ranks.compiles == 0, ranks.said
    return ranks


def restarted(launcher: Launcher, where: Path, nodes: list[Node]) -> float:
    """A rank that has fetched dies before it votes, and torchrun starts all ranks again."""
    ranks = launcher.run(
        where, nodes, at="after _import", signal=int(signal.SIGKILL), once=str(where / "killed")
    )
    assert (where / "killed").exists()
    # Only the node on which the rank died counts the restart.
    assert {each["restarts"] for each in ranks.said} == {"0", "1"}, ranks.said
    how = ranks.how()
    assert not any(each["built"] for each in how), how
    for node in nodes:
        node.verify()
    return ranks.seconds


def repeated(
    name: str, launcher: Launcher, where: Path, runs: int, also: int, *, kept: bool
) -> bool:
    """So many cold jobs; the first ones are followed by a warm one."""
    compiles, beyond, warmed, faults, late = [], [], [], [], []
    began = time.monotonic()
    for number in range(runs):
        place = where / f"{name}-{number}"
        place.mkdir()
        nodes = [Node(place / "a"), Node(place / "b")]
        try:
            ranks = cold(launcher, place, nodes)
            compiles.append(ranks.longest_build)
            beyond.append(ranks.seconds - ranks.longest_build)
            if beyond[-1] > MOST_BEYOND_COMPILE:
                late.append(f"run {number + 1}, cold: {ranks.times()}")
            if number < also:
                ranks = warm(launcher, place, nodes)
                warmed.append(ranks.seconds)
                if ranks.seconds > MOST_WARM:
                    late.append(f"run {number + 1}, warm: {ranks.times()}")
        except (AssertionError, subprocess.TimeoutExpired) as error:
            faults.append(f"run {number + 1}: {error}")
    for fault in (*faults, *late):
        print(f"FAIL {name}, {fault}", flush=True)
    row = {
        "runs": runs, "cold_good": len(beyond), "warm_runs": min(also, runs),
        "warm_good": len(warmed), "seconds": round(time.monotonic() - began),
        "niceness": os.nice(0),
        "cold_in_time": sum(each <= MOST_BEYOND_COMPILE for each in beyond),
        "warm_in_time": sum(each <= MOST_WARM for each in warmed),
    }  # fmt: skip
    if beyond and warmed:
        row |= {
            "compile_s": spread(compiles), "beyond_compile_s": spread(beyond),
            "warm_s": spread(warmed),
        }  # fmt: skip
    good = not faults and not late
    print(f"{'PASS' if good else 'FAIL'} {name}: {json.dumps(row)}", flush=True)
    if kept:
        keep("cold and warm", name, row)
    return good


def elastic(launcher: Launcher, where: Path, runs: int, *, kept: bool) -> bool:
    seconds = []
    for number in range(runs):
        place = where / f"elastic-{number}"
        place.mkdir()
        try:
            seconds.append(restarted(launcher, place, [Node(place / "a"), Node(place / "b")]))
        except (AssertionError, subprocess.TimeoutExpired) as error:
            print(f"FAIL elastic restart, run {number + 1}: {error}", flush=True)
    if seconds:
        row = {"runs": runs, "good": len(seconds), "seconds_after_restart": spread(seconds)}
        print(f"{'PASS' if len(seconds) == runs else 'FAIL'} elastic restart: {json.dumps(row)}")
        if kept:
            keep("faults", "elastic restart under torchrun, 2 x 4 ranks", row)
    return len(seconds) == runs


def main() -> int:
    names = ("hand", "torchrun", "srun", "elastic")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("launchers", nargs="*", default=names, help=", ".join(names))
    parser.add_argument("--runs", type=int, default=20, help="cold jobs of each")
    parser.add_argument("--warm", type=int, default=20, help="of them followed by a warm job")
    parser.add_argument("--restarts", type=int, default=3, help="jobs that torchrun restarts")
    parser.add_argument("--keep", action="store_true", help="write the results")
    asked = parser.parse_args()
    if lacking := missing("ip", "unshare"):
        print(f"skipped: this needs {lacking}")
        return 0
    if (code := apart(*sys.argv)) is not None:
        return code
    good = True
    with Network(), tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        where = Path(scratch)
        where.chmod(0o755)
        name_hosts(where)
        forking = Forking(stack, where) if {*asked.launchers} - {"hand"} else None
        for name in asked.launchers:
            if name == "srun" and (lacking := missing(*slurm.PROGRAMS)):
                print(f"skipped srun: this needs {lacking}")
                continue
            launcher: Launcher
            if forking is None or name == "hand":
                launcher = ByHand(stack)
            elif name == "srun":
                launcher = Srun(forking, where / "slurm")
            else:
                launcher = Torchrun(forking)
            if name == "elastic":
                good &= elastic(launcher, where, asked.restarts, kept=asked.keep)
            else:
                good &= repeated(name, launcher, where, asked.runs, asked.warm, kept=asked.keep)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
