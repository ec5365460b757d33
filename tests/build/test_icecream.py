"""Compiles through icecream: a scheduler, this host's daemon, and a daemon that compiles for it.

The second daemon stands for another host. It gets a compiler in an archive, unpacks it, and runs it
in a directory of its own.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sample.op_tree import Tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# An object from the pool would not ask icecream.
pytestmark = [pytest.mark.counts_compiles, pytest.mark.timed]

HEADER = '#include "n.h"\nextern "C" int answer() { return N; }\n'


def program(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        pytest.skip(f"there is no {name} here")
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Network:
    """The daemons of two hosts, and what tells a client to use them."""

    def __init__(self, base: Path) -> None:
        if os.getuid() != 0:
            pytest.skip("icecream's daemon compiles for others only as root")
        self.base = base
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._over = threading.Event()
        self._port = free_port()
        self.variables = {
            "ICECC_TEST_SOCKET": str(base / "here.socket"),
            "ICECC_TEST_REMOTEBUILD": "1",  # also if the other host has this one's address
            "ICECC_PREFERRED_HOST": "elsewhere",
            "ICECC_DEBUG": "debug",
            "ICECC_LOGFILE": str(base / "client.log"),
            "ICECC_VERSION": self.packed("g++"),
        }

    def start(self) -> None:
        (self.base / "stat").write_text("cpu  100 0 100 100 0 0 0 0 0 0\n")
        threading.Thread(target=self._idle, daemon=True).start()
        self._run("scheduler", program("icecc-scheduler"), "-p", str(self._port))
        self._daemon("here", "--no-remote")
        self._daemon("elsewhere", "-p", str(free_port()))

    def packed(self, compiler: str) -> str:
        """An archive of a compiler, as a daemon would make of its host's."""
        names = (compiler.replace("g++", "gcc"), compiler)
        paths = [str(shutil.which(each)) for each in names]
        place = self.base / compiler
        place.mkdir()
        subprocess.run(
            [program("icecc-create-env"), *paths], cwd=place, check=True, capture_output=True,
            env={**os.environ, "GZIP": "-1"},
        )  # fmt: skip
        (made,) = place.glob("*.tar.*")
        return str(made)

    def _idle(self) -> None:
        """Keep a file that says of this machine's CPUs that they are idle."""
        ticks = 0
        while not self._over.wait(0.5):
            ticks += 100
            lines = [f"{each} 100 0 100 {ticks} 0 0 0 0 0 0\n" for each in ("cpu ", "cpu0", "cpu1")]
            (self.base / "stat").write_text("".join(lines))

    def _daemon(self, name: str, *words: str) -> None:
        # The scheduler gives nothing to a busy host, as a machine is that runs tests. In a
        # namespace of its own, the daemon reads another /proc/stat.
        script = 'mount --bind "$0" /proc/stat && exec "$@"'
        self._run(
            name, program("unshare"), "--mount", "sh", "-c", script, str(self.base / "stat"),
            program("iceccd"), "-s", f"127.0.0.1:{self._port}", "-N",
            name, "-m", "2", "--nice", "0", "-b", str(self.base / f"{name}.envs"), *words,
            ICECC_TEST_SOCKET=str(self.base / f"{name}.socket"),
        )  # fmt: skip
        self.until(lambda: f"login {name}" in self.said("scheduler"), f"{name} at the scheduler")

    def _run(self, name: str, *command: str, **variables: str) -> None:
        with open(self.base / f"{name}.log", "wb") as log:
            self._daemons.append(subprocess.Popen(
                [*command, "-n", "opkiln-test", "-vvv"], stdout=log, stderr=log,
                env={**os.environ, **variables},
            ))  # fmt: skip

    def until(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 30
        while not ready():
            assert time.monotonic() < deadline, f"{what}: not there\n{self.logs()}"
            assert all(each.poll() is None for each in self._daemons), self.logs()
            time.sleep(0.1)

    def logs(self) -> str:
        names = [each.stem for each in self.base.glob("*.log")]
        return "\n".join(f"{name}:\n{self.said(name)[-2000:]}" for name in names)

    def said(self, name: str) -> str:
        return (self.base / f"{name}.log").read_text(errors="replace")

    def stop(self) -> None:
        self._over.set()
        for each in reversed(self._daemons):
            each.terminate()
            each.wait()


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with tempfile.TemporaryDirectory(prefix="ice") as base:  # a socket's path must be short
        Path(base).chmod(0o777)  # the daemons run as a user of their own
        made = Network(Path(base))
        try:
            made.start()
            yield made
        finally:
            made.stop()


@pytest.fixture
def tree(network: Network, tmp_path: Path) -> Tree:
    made = Tree(tmp_path / "tree")
    made.environment.update(network.variables)
    made.environment["CXX"] = f"{program('icecc')} g++"
    made.write("pkg/a.cpp", HEADER)
    made.write("inc/n.h", "#define N 1\n")
    made.declare(sources=["a.cpp"], include_paths=[f"{made.path}/inc"])
    return made


def test_the_variables_of_icecream_reach_it_and_the_other_host_compiles(
    network: Network, tree: Tree
) -> None:
    assert tree.answer("first") == (1, "observed")
    assert "Have to use host" in network.said("client"), network.said("client")
    tree.write("inc/n.h", "#define N 2\n")
    assert tree.answer("first") == (2, "observed")
    told = tree.run(
        """
        from pkg.op import Builder
        from opkiln.loading.explain import explain
        print(explain(Builder().op()))
        """,
        "first",
    )
    assert f"launcher: {program('icecc')}" in " ".join(told.split())


def test_another_compiler_that_icecream_sends_is_refused(network: Network, tree: Tree) -> None:
    if shutil.which("g++-11") is None:
        pytest.skip("there is no g++-11 here")
    tree.environment["ICECC_VERSION"] = network.packed("g++-11")
    with pytest.raises(AssertionError) as refused:
        tree.answer("first")
    told = str(refused.value)
    assert "a.cpp was compiled by another compiler" in told, told
    assert "11." in told
