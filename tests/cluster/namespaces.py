"""Two nodes in network namespaces, four ranks each, and a link that is slow or cut.

    make test-cluster            needs root, iproute2 and iptables; prints a line for each case
    python tests/cluster/namespaces.py --runs 20

Each node has an address, a host name, a store and sources of its own. Rank 0 serves the job's
store.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "src")]

from ranks import Node  # noqa: E402

EACH = 4
ADDRESSES = ("10.77.13.1", "10.77.13.2")
NAMES = ("opkiln-a", "opkiln-b")


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


class Network:
    """Two namespaces and the link between them."""

    def __enter__(self) -> Network:
        self.remove()
        ip("link", "add", "opk-a", "type", "veth", "peer", "name", "opk-b")
        for name, address, link in zip(NAMES, ADDRESSES, ("opk-a", "opk-b"), strict=True):
            ip("netns", "add", name)
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        for name in NAMES:
            ip("netns", "del", name, check=False)
        ip("link", "del", "opk-a", check=False)

    def slow(self, rate: str | None) -> None:
        for name, link in zip(NAMES, ("opk-a", "opk-b"), strict=True):
            tc = ["ip", "netns", "exec", name, "tc", "qdisc"]
            subprocess.run([*tc, "del", "dev", link, "root"], check=False, capture_output=True)
            if rate is not None:
                shape = ["tbf", "rate", rate, "burst", "32kbit", "latency", "400ms"]
                subprocess.run([*tc, "add", "dev", link, "root", *shape], check=True)

    def cut(self, chains: tuple[str, ...]) -> None:
        """Drop what arrives at the second node (INPUT), what it sends (OUTPUT), or both."""
        tables = ["ip", "netns", "exec", NAMES[1], "iptables"]
        subprocess.run([*tables, "-F"], check=True)
        for chain in chains:
            side = "-s" if chain == "INPUT" else "-d"
            subprocess.run([*tables, "-A", chain, side, ADDRESSES[0], "-j", "DROP"], check=True)


class Host:
    """A process in a namespace that forks ranks."""

    def __init__(self, name: str) -> None:
        start = f"hostname {name} && exec {sys.executable} {HERE / 'zygote.py'}"
        environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src")}
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", start],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.put(json.loads(line))

    def start(self, **asked: Any) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        while True:
            told = self.said.get(timeout=60)
            if told.get("rank") == asked["rank"] and "pid" in told:
                return int(told["pid"])
            self.said.put(told)


class Case:
    """One job on the two hosts."""

    ports = iter(range(29600, 30600))

    def __init__(
        self,
        hosts: list[Host],
        where: Path,
        nodes: list[Node] | None = None,
        *,
        compilers: bool = True,
    ) -> None:
        """``compilers``: whether the first node has any."""
        self.hosts, self.where = hosts, where
        where.mkdir()
        self.nodes = nodes or [Node(where / "a", compilers=compilers), Node(where / "b")]
        self.pids: dict[int, int] = {}
        self.began = time.monotonic()

    def start(self, special: dict[int, dict[str, Any]] | None = None, **options: Any) -> None:
        port = str(next(self.ports))
        for rank in range(2 * EACH):
            node = self.nodes[rank // EACH]
            env = {
                **node.environment(), "RANK": str(rank), "WORLD_SIZE": str(2 * EACH),
                "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": port,
            }  # fmt: skip
            self.pids[rank] = self.hosts[rank // EACH].start(
                rank=rank, env=env, cwd=str(node.path), out=str(self.where / f"out{rank}"),
                options={"timeout": 60, **options, **(special or {}).get(rank, {})},
            )  # fmt: skip
        self.began = time.monotonic()

    def end(self, limit: float = 120) -> tuple[list[dict[str, Any]], float]:
        """What each rank said, and the seconds that the job took."""
        codes: dict[int, int] = {}
        deadline = time.monotonic() + limit
        while len(codes) < 2 * EACH:
            for host in self.hosts:
                with suppress(queue.Empty):
                    told = host.said.get(timeout=0.02)
                    codes[told["rank"]] = told["code"]
            if time.monotonic() > deadline:
                for rank in self.pids.keys() - codes.keys():
                    with suppress(ProcessLookupError):
                        os.kill(self.pids[rank], signal.SIGKILL)
                raise AssertionError(f"hang: ranks {sorted(self.pids.keys() - codes.keys())}")
        took = time.monotonic() - self.began
        said = []
        for rank in range(2 * EACH):
            text = (self.where / f"out{rank}").read_text()
            lines = [line for line in text.splitlines() if line.startswith("{")]
            said.append({"code": codes[rank], **(json.loads(lines[-1]) if lines else {})})
            assert "crash" not in said[-1], text
        return said, took

    def await_file(self, path: Path, limit: float = 60) -> None:
        deadline = time.monotonic() + limit
        while not path.exists():
            assert time.monotonic() < deadline, f"no rank came to {path.name}"
            time.sleep(0.01)


def same_library(said: list[dict[str, Any]]) -> None:
    assert all("choices" in each for each in said), said
    assert len({each["choices"][0][1] for each in said}) == 1, said


def cold(case: Case) -> str:
    case.start()
    said, took = case.end()
    same_library(said)
    how = Counter(each["choices"][0][3] for each in said)
    assert how["built"] == 1, how
    assert how["fetched"] == 1, how
    assert sum(node.builds() for node in case.nodes) == 1
    return f"1 build, 1 fetch, one library, {max(e['seconds'] for e in said):.1f} s of {took:.1f}"


def warm(case: Case) -> str:
    case.start()
    said, _ = case.end()
    same_library(said)
    assert {each["choices"][0][3] for each in said} == {"cached"}, said
    return f"0 builds, {max(each['seconds'] for each in said):.2f} s"


def killed(case: Case) -> str:
    # Whoever builds, dies in it.
    case.start(at="before _send", signal=int(signal.SIGKILL), once=str(case.where / "killed"))
    said, took = case.end()
    (dead,) = [rank for rank, each in enumerate(said) if each["code"] == -signal.SIGKILL]
    assert dead >= EACH  # only the second node has a compiler
    living = [each for each in said if each["code"] == 0]
    assert all(f"rank {dead} (host " in each["error"] for each in living), said
    assert len(living) == 2 * EACH - 1
    return f"rank {dead} is named by all others after {took:.1f} s"


def server_killed(case: Case) -> str:
    case.start({0: {"at": "Put vote/0", "signal": int(signal.SIGKILL)}})
    said, took = case.end()
    assert all("the job's store" in each["error"] for each in said[1:]), said
    return f"all others say that the store is gone, after {took:.1f} s"


def stopped(case: Case) -> str:
    case.start(at="before _send", signal=int(signal.SIGSTOP), once=str(case.where / "stopped"))
    case.await_file(case.where / "stopped")
    time.sleep(3)
    pid = int((case.where / "stopped").read_text())
    os.kill(pid, signal.SIGCONT)
    said, took = case.end()
    if any("error" in each for each in said):
        named = {each["error"].splitlines()[0] for each in said if "error" in each}
        assert len(named) == 1, said
        assert all("error" in each for each in said), said
        return f"one error on all ranks: {named.pop()}"
    same_library(said)
    return f"one library on all ranks, after {took:.1f} s"


def full_disk(case: Case) -> str:
    # The first node's store is on a full disk, so it can neither build nor fetch.
    cache = case.nodes[0].cache
    shutil.copytree(cache, case.where / "known")
    there = ["nsenter", "--target", str(case.hosts[0].process.pid), "--mount", "sh", "-c"]
    fill = (
        f"mount -t tmpfs -o size=1m,mode=700 tmpfs {cache} && cp -r {case.where}/known/. {cache} "
        f"&& chmod 700 {cache} && ! dd if=/dev/zero of={cache}/filler bs=4k"
    )
    subprocess.run([*there, fill], check=True, capture_output=True)
    try:
        case.start()
        said, took = case.end()
    finally:
        subprocess.run([*there, f"umount {cache}"], check=True)
    errors = {each.get("error", "none") for each in said}
    assert len(errors) == 1, said
    (text,) = errors
    assert any(f"rank {rank} (host opkiln-a" in text for rank in range(EACH)), said
    case.nodes[1].verify()
    return f"one error on all ranks that names the node, after {took:.1f} s"


def cut_off(network: Network, chains: tuple[str, ...]) -> Any:
    def run(case: Case) -> str:
        touched = case.where / "fetching"
        case.start({
            rank: {"at": "before _import", "once": str(touched), "pause": 1.0}
            for rank in range(EACH, 2 * EACH)
        })  # fmt: skip
        case.await_file(touched)
        network.cut(chains)
        try:
            said, took = case.end()
        finally:
            network.cut(())
        assert all("error" in each for each in said), said
        near = {each["error"].splitlines()[0] for each in said[:EACH]}
        assert len(near) == 1, said
        assert any(f"rank {r}" in next(iter(near)) for r in range(EACH, 2 * EACH)), near
        far = {each["error"].splitlines()[0].partition(": ")[2] for each in said[EACH:]}
        return f"after {took:.1f} s; near: {near.pop()}; far: {far.pop()}"

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="how often the cold job is run")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    runs, only = parser.parse_args().runs, parser.parse_args().only
    if os.getuid() != 0 or not all(map(shutil.which, ("ip", "iptables", "tc"))):
        print("skipped: this needs root, iproute2 and iptables")
        return 0
    failed = 0
    with Network() as network, tempfile.TemporaryDirectory() as scratch:
        hosts = [Host(name) for name in NAMES]
        for host in hosts:
            host.said.get(timeout=300)
        cases: list[tuple[str, Any]] = [(f"cold {n + 1} of {runs}", cold) for n in range(runs)]
        cases += [
            ("warm", warm),
            ("the builder is killed", killed),
            ("the rank with the store is killed", server_killed),
            ("the builder is stopped for 3 s", stopped),
            ("a full disk", full_disk),
            ("cut in both directions", cut_off(network, ("INPUT", "OUTPUT"))),
            ("nothing arrives", cut_off(network, ("INPUT",))),
            ("nothing leaves", cut_off(network, ("OUTPUT",))),
            ("8 Mbit/s", cold),
        ]
        nodes = None
        for number, (name, run) in enumerate(each for each in cases if only in each[0]):
            network.slow("8mbit" if name.startswith("8 ") else None)
            case = Case(
                hosts, Path(scratch) / str(number), nodes if run is warm else None,
                compilers=run not in (killed, stopped),
            )  # fmt: skip
            nodes = case.nodes
            try:
                print(f"PASS {name}: {run(case)}", flush=True)
            except AssertionError as error:
                failed += 1
                print(f"FAIL {name}: {error}", flush=True)
        for host in hosts:
            host.process.kill()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
