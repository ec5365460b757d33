"""The Slurm recipe on a real Slurm: two nodes on this host, in network namespaces of their own.

    make test-cluster            needs root, iproute2, slurmctld, slurmd, slurm-client, munge
    apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge

Processes, mounts and /etc/hosts are those of a namespace, so nothing of this host changes, and all
daemons end with this program. A prolog of the tasks gives each node a store of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from network import ADDRESSES, NAMES, Network, apart, inside, missing, name_hosts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "examples" / "cluster" / "slurm.sbatch"
PROGRAMS = (
    "ip", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged", "openssl", "unshare",
)  # fmt: skip
NODES = ("n0", "n1")
CONF = """\
ClusterName=opkiln
SlurmctldHost={names[0]}({addresses[0]})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={where}/munge.socket
StateSaveLocation={where}/state
SlurmdSpoolDir={where}/spool.%n
SlurmctldPidFile={where}/slurmctld.pid
SlurmdPidFile={where}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={where}/prolog
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
NodeName=n0 NodeHostname={names[0]} NodeAddr={addresses[0]} Port=16818 CPUs=4 State=UNKNOWN
NodeName=n1 NodeHostname={names[1]} NodeAddr={addresses[1]} Port=16819 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# What it prints is what each task has in its environment.
PROLOG = """\
#!/bin/sh
cat {where}/variables.$SLURMD_NODENAME
"""


class Slurm:
    """The daemons, on the nodes of a Network. They end with the process namespace."""

    def __init__(self, where: Path) -> None:
        self.where = where
        known = {"where": where, "names": NAMES, "addresses": ADDRESSES}
        (where / "state").mkdir()
        (where / "slurm.conf").write_text(CONF.format(**known))
        (where / "prolog").write_text(PROLOG.format(**known))
        (where / "prolog").chmod(0o755)
        where.chmod(0o755)
        (where / "key").write_bytes(os.urandom(128))
        (where / "key").chmod(0o600)
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("OPKILN_", "PYTHON"))},
            "SLURM_CONF": str(where / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        for node in NODES:
            self.give(node, {"OPKILN_CACHE_DIR": str(where / f"store.{node}")})

    def give(self, node: str, variables: Mapping[str, str]) -> None:
        """What the tasks on a node have in their environment."""
        lines = [f"export {name}={value}\n" for name, value in variables.items()]
        (self.where / f"variables.{node}").write_text("".join(lines))

    def start(self) -> None:
        where, (first, second) = self.where, NAMES
        files = [f"--{name}-file={where}/munge.{name}" for name in ("pid", "log", "seed")]
        key, socket = f"--key-file={where}/key", f"--socket={where}/munge.socket"
        self._daemon("munged", first, "munged", "--foreground", "--force", key, socket, *files)
        _until((where / "munge.socket").exists, "munged's socket")
        self._daemon("slurmctld", first, "slurmctld", "-D", "-c")
        self._daemon("slurmd-n0", first, "slurmd", "-D", "-N", "n0")
        self._daemon("slurmd-n1", second, "slurmd", "-D", "-N", "n1")
        try:
            _until(
                lambda: self.said("sinfo", "-h", "-o", "%T %D").split() == ["idle", "2"], "nodes"
            )
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.logs()}") from None

    def _daemon(self, name: str, host: str, *words: str) -> None:
        log = (self.where / f"{name}.log").open("w")
        command = [*inside(host), *words]
        subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, cwd=self.where)

    def ask(self, *words: str | Path, limit: float = 60) -> subprocess.CompletedProcess[str]:
        """A command on the first node."""
        return subprocess.run(
            [*inside(NAMES[0]), *words], env=self.environment, cwd=RECIPE.parent,
            capture_output=True, text=True, check=False, timeout=limit,
        )  # fmt: skip

    def said(self, *words: str) -> str:
        """What a command prints; empty if it fails, as it does before the controller listens."""
        done = self.ask(*words)
        return done.stdout if done.returncode == 0 else ""

    def run(self, name: str, limit: float = 400) -> tuple[int, str, float]:
        """Submit the recipe as it is: its exit code, what it printed, and the seconds it took."""
        out = self.where / f"{name}.out"
        began = time.monotonic()
        done = self.ask("sbatch", "--wait", f"--output={out}", RECIPE, limit=limit)
        said = out.read_text() if out.exists() else done.stderr
        return done.returncode, said, time.monotonic() - began

    def logs(self) -> str:
        return "\n".join(
            f"{log.name}:\n{log.read_text()[-2000:]}" for log in sorted(self.where.glob("*.log"))
        )


def _until(ready: Callable[[], bool], what: str, limit: float = 30) -> None:
    deadline = time.monotonic() + limit
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not there after {limit:g} s")
        time.sleep(0.3)


def check(name: str, slurm: Slurm, wanted: Counter[str]) -> bool:
    code, said, took = slurm.run(name)
    lines = re.findall(r"rank \d of 4: cpu_adam (.+), library ([0-9a-f]{16})$", said, re.MULTILINE)
    how, libraries = Counter(each for each, _ in lines), {each for _, each in lines}
    good = code == 0 and how == wanted and len(libraries) == 1
    print(f"{'PASS' if good else 'FAIL'} {name}, two nodes with two ranks each: "
          f"{dict(how)}, {len(libraries)} library, {took:.1f} s", flush=True)  # fmt: skip
    if not good:
        print(f"exit code {code}\n{said}")
    return good


def main() -> int:
    if lacking := missing(*PROGRAMS):
        print(f"skipped: this needs {lacking}")
        return 0
    if (code := apart(__file__)) is not None:
        return code
    with Network(), tempfile.TemporaryDirectory() as scratch:
        name_hosts(Path(scratch))
        slurm = Slurm(Path(scratch))
        cold = Counter({"built": 1, "fetched": 1, "found on this node": 2})
        try:
            slurm.start()
            good = check("cold", slurm, cold) and check("warm", slurm, Counter({"cached": 4}))
        except TimeoutError as error:
            good = False
            print(f"FAIL {error}")
        if not good:
            print(slurm.logs())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
