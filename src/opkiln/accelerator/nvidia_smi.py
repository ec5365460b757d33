"""``nvidia-smi``, for machines on which its library cannot be opened from here."""

from __future__ import annotations

import re

from opkiln import process
from opkiln.accelerator.gpu import GPU, Devices
from opkiln.errors import ToolchainError
from opkiln.toolchain import find

# Besides PATH: where WSL and some container runtimes put the driver.
_PLACES = ("/usr/lib/wsl/lib/nvidia-smi", "/usr/local/nvidia/bin/nvidia-smi")
_FIELDS = "index,uuid,name,compute_cap,memory.total,driver_version,mig.mode.current"

_CUDA = re.compile(r"^CUDA Version\s*:\s*(\d+\.\d+)", re.MULTILINE)
_CAPABILITY = re.compile(r"\d+\.\d+")
_LISTED = re.compile(r"^(?:GPU (\d+):.*| +MIG .*)\(UUID: ([^)]+)\)", re.MULTILINE)


def ask() -> Devices:
    """What the program tells of every GPU. None where it is absent or fails: ``why``."""
    program = next(filter(None, map(find.first, ("nvidia-smi", *_PLACES))), None)
    if program is None:
        return Devices(why="there is no nvidia-smi on PATH")
    try:
        return _devices(program)
    except ToolchainError as error:
        words = " ".join(f"{error.what} {error.why}".split())
        return Devices(how="nvidia-smi", why=f"nvidia-smi: {words}")


def _devices(program: str) -> Devices:
    rows = [
        [cell.strip() for cell in line.split(",")]
        for line in _said(program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
        if line.count(",") == _FIELDS.count(",")
    ]
    parts = _parts(program) if any(row[-1] == "Enabled" for row in rows) else {}
    gpus, lost = [], []
    for index, uuid, name, capability, mebibytes, _, _ in rows:
        if not _CAPABILITY.fullmatch(capability):
            lost.append(f"GPU {index}: {capability}")
            continue
        memory = int(mebibytes) << 20 if mebibytes.isdigit() else 0
        gpus.append(GPU(int(index), uuid, name, capability, memory, parts.get(index, ())))
    driver = rows[0][5] if rows else ""
    why = "; ".join(lost) if rows else "the NVIDIA driver shows no GPU to this process"
    return Devices(tuple(gpus), driver, _cuda(program) if rows else "", "nvidia-smi", why)


def _cuda(program: str) -> str:
    """The highest CUDA that the driver takes. It is no field of a query, only of the report."""
    match = _CUDA.search("\n".join(_said(program, "-q", "-d", "COMPUTE")))
    return match[1] if match else ""


def _parts(program: str) -> dict[str, tuple[str, ...]]:
    """The UUIDs of the MIG instances, by the index of their GPU."""
    found: dict[str, tuple[str, ...]] = {}
    index = ""
    for match in _LISTED.finditer("\n".join(_said(program, "-L"))):
        if match[1]:
            index = match[1]
        else:
            found[index] = (*found.get(index, ()), match[2])
    return found


def _said(program: str, *arguments: str) -> list[str]:
    ended = process.capture([program, *arguments])
    if ended.returncode:
        # Its errors come on either stream: a mismatch of versions on the first.
        raise ToolchainError(
            f"exits with {ended.returncode}", why=(ended.stdout or ended.stderr).strip()[:300]
        )
    return ended.stdout.splitlines()
