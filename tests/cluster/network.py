"""Two nodes on this host, each in a network namespace with a host name of its own, and their ranks.

Needs root and iproute2. Rank 0 serves the job's store. A process in each namespace has torch and
forks the ranks (zygote.py): importing it for each would take longer than all else.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "src")]

from ranks import Node  # noqa: E402 (found by the line above)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ADDRESSES = ("10.77.13.1", "10.77.13.2")
NAMES = ("opkiln-a", "opkiln-b")
LINKS = ("opk-a", "opk-b")
INSIDE = "CLUSTER_TEST_INSIDE"


def missing(*programs: str) -> str:
    """What is not there of what this needs."""
    lacking = [each for each in programs if not shutil.which(each)]
    return ", ".join([*lacking, *(["root"] if os.getuid() != 0 else [])])


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


def inside(name: str) -> list[str]:
    """The beginning of a command that runs on a node. ("ip netns exec" would hide the cgroups.)"""
    space = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "--mount"]
    return [*space, "sh", "-c", f'hostname {name} && exec "$@"', "sh"]


def apart(*words: str) -> int | None:
    """Run this program again where its processes and mounts are its own; None if they are."""
    if INSIDE in os.environ:
        return None
    spaces = ["--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    me = ["unshare", *spaces, sys.executable, *words]
    return subprocess.run(me, env={**os.environ, INSIDE: "1"}, check=False).returncode


def name_hosts(where: Path) -> None:
    """The nodes know each other by name. Only for a program that has its mounts for itself."""
    lines = ["127.0.0.1 localhost"]
    lines += [f"{ADDRESSES[n]} n{n} {NAMES[n]}" for n in range(2)]
    (where / "hosts").write_text("\n".join(lines) + "\n")
    subprocess.run(["mount", "--bind", where / "hosts", "/etc/hosts"], check=True)


class Network:
    """Two namespaces and the link between them."""

    def __enter__(self) -> Network:
        self.remove()
        ip("link", "add", LINKS[0], "type", "veth", "peer", "name", LINKS[1])
        for name, address, link in zip(NAMES, ADDRESSES, LINKS, strict=True):
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
        ip("link", "del", LINKS[0], check=False)

    def slow(self, rate: str | None) -> None:
        for name, link in zip(NAMES, LINKS, strict=True):
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
    """A process that has torch and forks ranks."""

    def __init__(
        self,
        prefix: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        socket: Path | None = None,
    ) -> None:
        """``prefix``: in a namespace, by ``inside``. ``socket``: for forked.py, else ``start``."""
        environment = {
            **os.environ, "PYTHONPATH": str(HERE.parents[1] / "src"), **(variables or {}),
        }  # fmt: skip
        self.process = subprocess.Popen(
            [*prefix, sys.executable, HERE / "zygote.py", *([] if socket is None else [socket])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.put(json.loads(line))

    def ready(self) -> None:
        """Wait until torch is imported."""
        self.said.get(timeout=300)

    def start(self, **asked: Any) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        while True:
            told = self.said.get(timeout=60)
            if told.get("rank") == asked["rank"] and "pid" in told:
                return int(told["pid"])
            self.said.put(told)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Case:
    """One job on two hosts."""

    ports = iter(range(29600, 32600))

    def __init__(
        self, hosts: Sequence[Host], where: Path, nodes: Sequence[Node], *, each: int = 4,
        address: str = ADDRESSES[0],
    ) -> None:  # fmt: skip
        """``each``: ranks on a node. ``address``: of the job's store."""
        self.hosts, self.where, self.nodes = hosts, where, nodes
        self.each, self.world, self.address = each, 2 * each, address
        self.pids: dict[int, int] = {}
        self.began = time.monotonic()

    def start(self, special: dict[int, dict[str, Any]] | None = None, **options: Any) -> None:
        """``special``: options of single ranks."""
        port = str(next(self.ports))
        for rank in range(self.world):
            node = self.nodes[rank // self.each]
            env = {
                **node.environment(), "RANK": str(rank), "WORLD_SIZE": str(self.world),
                "MASTER_ADDR": self.address, "MASTER_PORT": port,
            }  # fmt: skip
            self.pids[rank] = self.hosts[rank // self.each].start(
                rank=rank, env=env, cwd=str(node.path), out=str(self.where / f"out{rank}"),
                options={"timeout": 60, **options, **(special or {}).get(rank, {})},
            )  # fmt: skip
        self.began = time.monotonic()

    def end(self, limit: float = 120) -> tuple[list[dict[str, Any]], float]:
        """What each rank said, and the seconds that the job took."""
        codes: dict[int, int] = {}
        deadline = time.monotonic() + limit
        while len(codes) < self.world:
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
        for rank in range(self.world):
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
