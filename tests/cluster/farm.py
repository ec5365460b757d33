"""The recipes of the docs for build farms: one machine's bytes, also if a worker dies.

    make test-cluster
    python tests/cluster/farm.py dask slurm

Installs them into an environment of its own. Prints a line for each; what cannot be had is skipped.
Slurm is a real one with two nodes, in namespaces (``slurm.py``), which needs root. It has no
accounting, so submitit would wait for a killed job forever, and none is killed there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import slurm  # noqa: E402 (beside this file)
from environments import REPOSITORY, ready  # noqa: E402 (found by the line above)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sample.farm import Farm

PACKAGES = {
    "dask": ("distributed",),
    "ray": ("ray",),
    "mpi": ("mpi4py", "mpich"),
    "submitit": ("submitit",),
    "slurm": ("submitit",),
}


def main() -> int:
    """1 if something differs, 0 otherwise, also if nothing can be had."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=list(PACKAGES), help=", ".join(PACKAGES))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        (kind,) = arguments.kinds
        return check(kind)
    status = 0
    for kind in arguments.kinds:
        venv = REPOSITORY / f".farm-{kind}-venv"
        if reason := ready(venv, PACKAGES[kind], ("--editable", str(REPOSITORY))):
            print(f"farm on {kind}: skipped: {reason}")
            continue
        command = [str(venv / "bin/python"), str(HERE / "farm.py"), "--inside", kind]
        if kind == "slurm":
            if reason := no_slurm():
                print(f"farm on slurm: skipped: this needs {reason}")
                continue
            command = ["unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc",
                       "--kill-child", *command]  # fmt: skip
        status |= subprocess.run(command, check=False).returncode
    return status


def no_slurm() -> str:
    """What Slurm lacks here, or nothing."""
    if os.getuid() != 0:
        return "root"
    return ", ".join(each for each in slurm.PROGRAMS if not shutil.which(each))


def check(kind: str) -> int:
    """Build the matrix on one machine and on a farm whose first worker dies; compare."""
    from sample.farm import Farm

    with tempfile.TemporaryDirectory(prefix="opkiln-farm-") as directory:
        farm = Farm(Path(directory))
        alone, together = farm.base / "alone", farm.base / "together"
        matrix = ("--targets", str(farm.matrix), "-j", "1")
        require(farm(*matrix, *written(alone), store=farm.store()))
        killed = farm.base / "killed"
        at_worker = farm.environment(
            farm.store(), KILL_A_WORKER=str(killed), IS_A_WORKER="1",
            PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        )  # fmt: skip
        began = time.monotonic()
        told = FARMS[kind](farm, matrix, at_worker, together)
        seconds = time.monotonic() - began
        same = digests(alone) == digests(together)
        died = killed.exists()
        print(f"farm on {kind}: {'same bytes' if same else 'OTHER BYTES'}, "
              f"{'a' if died else 'no'} worker was killed, {seconds:.1f} s, "
              f"wheel {digests(together)[1]:.12}")  # fmt: skip
        print("".join(f"    {line}\n" for line in told.splitlines()), end="")
        return not (same and died == (kind != "slurm"))


def written(out: Path) -> tuple[str, ...]:
    """The options that write a bundle and a wheel."""
    return ("--bundle", str(out), "--wheel", f"{out}.wheels")


def digests(out: Path) -> list[str]:
    """Of the bundle and the wheel."""
    (wheel,) = Path(f"{out}.wheels").iterdir()
    return [hashlib.sha256(each.read_bytes()).hexdigest() for each in (out, wheel)]


def require(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode:
        raise SystemExit(f"{done.args} exits with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stderr


@contextmanager
def running(environment: dict[str, str], *command: str) -> Iterator[None]:
    """A server with all that it starts, for the length of a block."""
    server = subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(120)  # Ray takes its time


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def dask(farm: Farm, matrix: tuple[str, ...], at_worker: dict[str, str], out: Path) -> str:
    port = free_port()
    where = f"127.0.0.1:{port}"
    module = (sys.executable, "-m", "dask")
    with (
        running(at_worker, *module, "scheduler", "--host", "127.0.0.1", "--port", str(port),
                "--no-dashboard"),
        running(at_worker, *module, "worker", f"tcp://{where}", "--nworkers", "2", "--nthreads",
                "1", "--no-dashboard", "--local-directory", str(farm.base / "dask")),
    ):  # fmt: skip
        listens(port)
        farm.write_recipes(("scheduler:8786", where))
        arguments = (*matrix, "--executor", "farms:dask", *written(out))
        return require(farm(*arguments, store=farm.store()))


def listens(port: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise SystemExit(f"nothing listens on port {port}")


def ray(farm: Farm, matrix: tuple[str, ...], at_worker: dict[str, str], out: Path) -> str:
    port = free_port()
    program = str(Path(sys.executable).parent / "ray")
    directory = f"/tmp/ray-{port}"  # short: a socket's path has at most 107 characters
    start = (program, "start", "--head", "--block", "--port", str(port), "--num-cpus", "2",
             "--include-dashboard", "false", "--temp-dir", directory)  # fmt: skip
    try:
        with running(at_worker, *start):
            listens(port)
            farm.write_recipes()
            arguments = (*matrix, "--executor", "farms:Ray", *written(out))
            address = f"127.0.0.1:{port}"
            return require(farm(*arguments, store=farm.store(), RAY_ADDRESS=address))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def mpi(farm: Farm, matrix: tuple[str, ...], at_worker: dict[str, str], out: Path) -> str:
    """MPI ends all ranks with the one that was killed. The same command goes on from there."""
    program = str(Path(sys.executable).parent / "mpiexec")
    command = [program, "-n", "3", sys.executable, "-m", "mpi4py.futures", "-m", "opkiln", "build",
               *matrix, "--executor", "mpi4py.futures:MPIPoolExecutor",
               *written(out)]  # fmt: skip
    environment = {k: v for k, v in at_worker.items() if k != "IS_A_WORKER"}
    first, second = (
        subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        for _ in range(2)
    )
    if first.returncode == 0:
        raise SystemExit("the first run did not end with its worker")
    return require(second)


def submitit(farm: Farm, matrix: tuple[str, ...], at_worker: dict[str, str], out: Path) -> str:
    """Without Slurm, submitit's jobs are processes on this machine."""
    farm.write_recipes(("/shared/jobs", str(farm.base / "jobs")))
    arguments = (*matrix, "--executor", "farms:Slurm", *written(out))
    killed = at_worker["KILL_A_WORKER"]
    return require(farm(*arguments, store=farm.store(), KILL_A_WORKER=killed))


def on_slurm(farm: Farm, matrix: tuple[str, ...], _: dict[str, str], out: Path) -> str:
    (farm.base / "slurm").mkdir()
    queue = slurm.Slurm(farm.base / "slurm")
    farm.write_recipes(("/shared/jobs", str(farm.base / "jobs")))
    try:
        queue.start()
        arguments = (*matrix, "--executor", "farms:Slurm", *written(out))
        conf = queue.environment["SLURM_CONF"]
        return require(farm(*arguments, store=farm.store(), SLURM_CONF=conf))
    except (TimeoutError, SystemExit, subprocess.TimeoutExpired):
        for log in sorted(queue.where.glob("*.log")):
            print(f"{log.name}:\n{log.read_text()[-2000:]}")
        raise


FARMS: dict[str, Callable[[Farm, tuple[str, ...], dict[str, str], Path], str]] = {
    "dask": dask, "ray": ray, "mpi": mpi, "submitit": submitit, "slurm": on_slurm,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
