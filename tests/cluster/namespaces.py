"""Faults of nodes and links: two nodes in network namespaces, four ranks each.

    make test-cluster            needs root, iproute2 and iptables; prints a line for each case
    python tests/cluster/namespaces.py --only clock

Each node has an address, a host name, a store and sources of its own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from network import NAMES, Case, Host, Network, inside, missing
from ranks import Node, skewed

if TYPE_CHECKING:
    from collections.abc import Callable

EACH = 4


def same_library(said: list[dict[str, Any]]) -> None:
    assert all("choices" in each for each in said), said
    assert len({each["choices"][0][1] for each in said}) == 1, said


def cold(case: Case) -> str:
    case.start()
    said, _ = case.end()
    same_library(said)
    how = Counter(each["choices"][0][3] for each in said)
    assert how["built"] == 1, how
    assert how["fetched"] == 1, how
    assert sum(node.builds() for node in case.nodes) == 1
    return f"1 build, 1 fetch, one library, {max(e['seconds'] for e in said):.1f} s"


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
        assert all("error" in each for each in said), said
        # The rank that was stopped may come back when rank 0 has ended, and the store with it.
        named = {each["error"].splitlines()[0] for each in said if each["pid"] != pid}
        assert len(named) == 1, said
        assert f"pid {pid})" in next(iter(named)), said
        (back,) = (each["error"] for each in said if each["pid"] == pid)
        assert f"pid {pid})" in back or "is gone" in back, said
        return f"an error on all ranks: {named.pop()}"
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


def cut_off(network: Network, chains: tuple[str, ...]) -> Callable[[Case], str]:
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


def slow(network: Network) -> Callable[[Case], str]:
    def run(case: Case) -> str:
        network.slow("8mbit")
        try:
            return cold(case)
        finally:
            network.slow(None)

    return run


def other_clock(hours: int) -> Callable[[Case], str]:
    """The clock of the second node and the times of its files are wrong by some hours."""

    def run(case: Case) -> str:
        variables = skewed(case.where, hours)
        case.nodes[1].variables |= variables  # the forked ranks read them
        case.nodes[1].shift_times(hours)
        there = Host(inside(NAMES[1]), variables)
        there.ready()
        case.hosts = [case.hosts[0], there]
        try:
            told = cold(case)
            case.start()
            said, _ = case.end()
        finally:
            there.end()
        assert {each["choices"][0][3] for each in said} == {"cached"}, said
        apart = said[EACH]["now"] - said[0]["now"]
        assert abs(apart - 3600 * hours) < 60, apart  # the second node's clock is wrong
        return (
            f"{told}; warm {max(e['ended'] for e in said) - max(e['called'] for e in said):.2f} s"
        )

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    only = parser.parse_args().only
    if lacking := missing("ip", "iptables", "tc"):
        print(f"skipped: this needs {lacking}")
        return 0
    failed = 0
    with Network() as network, tempfile.TemporaryDirectory() as scratch:
        hosts = [Host(inside(name)) for name in NAMES]
        for host in hosts:
            host.ready()
        cases: list[tuple[str, Callable[[Case], str]]] = [
            ("the builder is killed", killed),
            ("the rank with the store is killed", server_killed),
            ("the builder is stopped for 3 s", stopped),
            ("a full disk", full_disk),
            ("cut in both directions", cut_off(network, ("INPUT", "OUTPUT"))),
            ("nothing arrives", cut_off(network, ("INPUT",))),
            ("nothing leaves", cut_off(network, ("OUTPUT",))),
            ("8 Mbit/s", slow(network)),
            ("a clock two hours ahead", other_clock(2)),
            ("a clock two hours behind", other_clock(-2)),
        ]
        for number, (name, run) in enumerate(each for each in cases if only in each[0]):
            where = Path(scratch) / str(number)
            where.mkdir()
            compilers = run not in (killed, stopped)
            nodes = [Node(where / "a", compilers=compilers), Node(where / "b")]
            try:
                print(f"PASS {name}: {run(Case(hosts, where, nodes))}", flush=True)
            except AssertionError as error:
                failed += 1
                print(f"FAIL {name}: {error}", flush=True)
        for host in hosts:
            host.end()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
