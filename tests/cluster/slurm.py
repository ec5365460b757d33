"""The Slurm recipe on a real Slurm: two nodes on this host, in namespaces of their own.

    make test-cluster            needs root, and slurmctld, slurmd, slurm-client, munge
    apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge

Ports, processes and /etc/hosts are those of the namespaces, so nothing of this host changes, and
all daemons end with this program. A prolog of the tasks gives each node a store of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "examples" / "cluster" / "slurm.sbatch"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged", "openssl", "unshare")
INSIDE = "OPKILN_TEST_SLURM_INSIDE"
CONF = """\
ClusterName=opkiln
SlurmctldHost=localhost(127.0.0.1)
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
NodeName=n[0-1] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[16818-16819] CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
PROLOG = """\
#!/bin/sh
echo "export OPKILN_CACHE_DIR={where}/store.$SLURMD_NODENAME"
"""


class Slurm:
    """The daemons. They end with the process namespace."""

    def __init__(self, where: Path) -> None:
        self.where = where
        (where / "state").mkdir()
        (where / "slurm.conf").write_text(CONF.format(where=where))
        (where / "prolog").write_text(PROLOG.format(where=where))
        (where / "prolog").chmod(0o755)
        where.chmod(0o755)
        (where / "hosts").write_text(f"127.0.0.1 localhost n0 n1 {os.uname().nodename}\n")
        (where / "key").write_bytes(os.urandom(128))
        (where / "key").chmod(0o600)
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("OPKILN_", "PYTHON"))},
            "SLURM_CONF": str(where / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        subprocess.run(["mount", "--bind", where / "hosts", "/etc/hosts"], check=True)
        # Slurm finds no address to listen at if there is none but the loopback's.
        for words in (
            "link set lo up", "link add opk-s type veth peer name opk-t", "link set opk-s up",
            "link set opk-t up", "addr add 10.77.14.1/24 dev opk-s",
        ):  # fmt: skip
            subprocess.run(["ip", *words.split()], check=True)

    def start(self) -> None:
        where = self.where
        files = [f"--{name}-file={where}/munge.{name}" for name in ("pid", "log", "seed")]
        key, socket = f"--key-file={where}/key", f"--socket={where}/munge.socket"
        self._daemon("munged", "munged", "--foreground", "--force", key, socket, *files)
        _until((where / "munge.socket").exists, "munged's socket")
        self._daemon("slurmctld", "slurmctld", "-D", "-c")
        for node in ("n0", "n1"):
            self._daemon(f"slurmd-{node}", "slurmd", "-D", "-N", node)
        _until(lambda: self.said("sinfo", "-h", "-o", "%T %D").split() == ["idle", "2"], "nodes")

    def _daemon(self, name: str, *words: str) -> None:
        log = (self.where / f"{name}.log").open("w")
        subprocess.Popen(words, env=self.environment, stdout=log, stderr=log, cwd=self.where)

    def said(self, *words: str) -> str:
        """What a command prints; empty if it fails, as it does before the controller listens."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=False, timeout=60
        )
        return done.stdout if done.returncode == 0 else ""

    def run(self, name: str, limit: float = 400) -> tuple[int, str, float]:
        """Submit the recipe as it is: its exit code, what it printed, and the seconds it took."""
        out = self.where / f"{name}.out"
        began = time.monotonic()
        done = subprocess.run(
            ["sbatch", "--wait", f"--output={out}", RECIPE],
            env={**self.environment, "GLOO_SOCKET_IFNAME": "lo"}, cwd=RECIPE.parent,
            capture_output=True, text=True, check=False, timeout=limit,
        )  # fmt: skip
        said = out.read_text() if out.exists() else done.stderr
        return done.returncode, said, time.monotonic() - began


def _until(ready: object, what: str, limit: float = 30) -> None:
    assert callable(ready)
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
    if os.getuid() != 0 or not all(map(shutil.which, PROGRAMS)):
        missing = ", ".join(each for each in PROGRAMS if not shutil.which(each)) or "root"
        print(f"skipped: this needs {missing}")
        return 0
    if INSIDE not in os.environ:
        spaces = ["--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
        me = ["unshare", *spaces, sys.executable, __file__]
        return subprocess.run(me, env={**os.environ, INSIDE: "1"}, check=False).returncode
    with tempfile.TemporaryDirectory() as scratch:
        slurm = Slurm(Path(scratch))
        cold = Counter({"built": 1, "fetched": 1, "found on this node": 2})
        try:
            slurm.start()
            good = check("cold", slurm, cold) and check("warm", slurm, Counter({"cached": 4}))
        except TimeoutError as error:
            good = False
            print(f"FAIL {error}")
        if not good:
            for log in sorted(Path(scratch).glob("*.log")):
                print(f"{log.name}:\n{log.read_text()[-2000:]}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
