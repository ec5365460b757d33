"""The CUDA bench: a one-kernel op compiled and loaded by opkiln and its peers, in one run.

``python bench/cuda_cold.py --out bench/results/cuda.json`` needs nvcc. Where there is a GPU, each
system's op is also called on it and its result checked; without one it is only loaded. The peers
are found as Python finds them (``PYTHONPATH``, ``.bench-venv``); what is missing stays in the table
with the reason.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import table
from children import Workspace
from measure import Options, cuda_cold, cuda_load
from measured import Failure, Row

import opkiln

MEASURES: dict[str, Callable[[Options, Workspace], list[Row]]] = {
    cuda_cold.NAME: cuda_cold.rows,
    cuda_load.NAME: cuda_load.rows,
}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="write the results here")
    parser.add_argument("--only", action="append", choices=tuple(MEASURES), help="measure this")
    parser.add_argument("--arch", help="what all of them compile for, such as 9.0a")
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parser.add_argument("--repeats", type=int, help="repeats of everything but the slowest")
    parser.add_argument("--quick", action="store_true", help="few repeats")
    return parser.parse_args()


def gpus() -> list[dict[str, str]]:
    """The GPUs here, by nvidia-smi."""
    fields = ("name", "compute_cap", "memory.total", "driver_version")
    said = _said("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    lines = [[cell.strip() for cell in line.split(",")] for line in said.splitlines()]
    return [dict(zip(fields, line, strict=True)) for line in lines]


def toolkit() -> tuple[Path, str]:
    """The directory and the version of the toolkit of the nvcc on PATH. Raises Failure."""
    nvcc = shutil.which("nvcc") or os.path.join(os.environ.get("CUDA_HOME", ""), "bin", "nvcc")
    version = re.search(r"release .*V(\S+)", _said(nvcc, "--version"))
    # nvcc may be a script or a link: only it knows where its toolkit is.
    top = re.search(r"^#\$ TOP=(.+)$", _said(nvcc, "--dryrun", "-x", "cu", "-c", os.devnull), re.M)
    if version is None or top is None:
        raise Failure("there is no nvcc on PATH, or it does not work")
    return Path(top.group(1)).resolve(), version.group(1)


def architecture(found: list[dict[str, str]]) -> str:
    """That of ``TORCH_CUDA_ARCH_LIST`` where it is one; else the GPU's; else Hopper's."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    if re.fullmatch(r"\d+\.\d[af]?", listed):
        return listed
    return found[0]["compute_cap"] if found else "9.0"


def environment(home: Path, arch: str, has_gpu: bool) -> dict[str, str]:
    """One and the same for every system."""
    # tvm-ffi's libraries need libcudart, which a CPU torch does not bring.
    searched = [os.environ.get("LD_LIBRARY_PATH", ""), str(home / "lib64")]
    packages = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return {
        # The children have another working directory, and another home.
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, packages)),
        "PYTHONUSERBASE": site.getuserbase(),
        "CUDA_HOME": str(home),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, searched)),
        "TORCH_CUDA_ARCH_LIST": arch,
        "TVM_FFI_CUDA_ARCH_LIST": arch,
        "DS_ACCELERATOR": "cuda",
        "BENCH_GPU": "1" if has_gpu else "0",
    }


def described(found: list[dict[str, str]], nvcc: str, arch: str, commit: str) -> dict[str, Any]:
    """The head of the results file."""
    head = machine.described()
    head["commit"] = commit or head["commit"]
    names = [f"{gpu['name']}, driver {gpu['driver_version']}" for gpu in found]
    head["machine"]["gpus"] = names or "none: compiled and loaded, not called"
    head["versions"] |= {"opkiln": opkiln.__version__, "nvcc": nvcc, "arch": arch}
    return head


def main() -> int:
    """Measure, print, store; 1 when a bar was missed or opkiln could not be measured."""
    asked = arguments()
    try:
        home, nvcc = toolkit()
    except Failure as failure:
        print(f"bench: {failure}", file=sys.stderr)
        return 1
    found = gpus()
    arch = asked.arch or architecture(found)
    head = described(found, nvcc, arch, asked.commit)
    head["load_average"] = {"before": machine.load_average()}
    workspace = Workspace(added=environment(home, arch, bool(found)))
    rows: list[Row] = []
    try:
        for name in asked.only or MEASURES:
            print(f"bench: {name} ...", file=sys.stderr, flush=True)
            try:
                rows += MEASURES[name](Options(asked.repeats, asked.quick), workspace)
            except Failure as failure:
                rows.append(Row(name, "all", "", None, str(failure)))
            head["load_average"]["after"] = machine.load_average()
            if asked.out:  # after each: a machine that is lent may be taken back
                table.store(asked.out, head, rows)
    finally:
        workspace.close()
    print(machine.heading(head))
    print("GPUs:", head["machine"]["gpus"])
    print("load average before {before:.2f}, after {after:.2f}\n".format(**head["load_average"]))
    print(table.render(rows))
    missed = [row for row in rows if row.bar is not None and not row.bar.met]
    broken = [row for row in rows if row.sample is None and row.who.startswith(("opkiln", "all"))]
    return 1 if missed or broken else 0


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except (FileNotFoundError, PermissionError):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
