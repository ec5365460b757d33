"""``make test-torches``: a decorated op from the cache, libraries of op.h (light.py) and a wheel of
all CPU ops (cpu_ops.py), loaded and called on several torches.

All are built once, with the torch of the interpreter that runs this. Each other torch gets an
environment of its own, in which nothing may compile. The wheel is one file for all of them: each
environment's pip installs it, and each op is called where no compiler is found. A torch that cannot
be installed is named with the reason; CUDA's builds of torch take gigabytes, and need no GPU here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "bench")]

import machine  # noqa: E402 (found by the line above)
from environments import REPOSITORY, ready  # noqa: E402
from sample.levels import HIGH  # noqa: E402

LIGHT = HERE / "light.py"
EXAMPLE = REPOSITORY / "examples" / "first_op" / "use.py"
CPU_OPS = HERE / "cpu_ops.py"
TARGET = f"cpu:{HIGH}"
NVRTC_WHEELS = ("nvidia-cuda-nvrtc==13.0.*", "nvidia-cuda-runtime==13.0.*")
TORCHES = ("2.10.0", "2.11.0", "2.12.1", "2.14.1", "2.15.0")


class Check(NamedTuple):
    """What each torch's Python is started with."""

    argv: list[str]
    variables: dict[str, str]
    wheel: Path | None = None  # what its pip installs first, into the directory that is put last


def main() -> int:
    """0 when everything served on every torch that could be installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("torches", nargs="*", default=list(TORCHES), help="versions")
    parser.add_argument("--light", action="store_true", help="the libraries of op.h alone")
    parser.add_argument("--environments", type=Path, default=REPOSITORY, help="where they are made")
    parser.add_argument("--remove", action="store_true", help="each environment after its checks")
    parser.add_argument("--out", type=Path, help="write the results to this file, as JSON")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {**machine.described(), "rows": rows}
    with tempfile.TemporaryDirectory() as directory:
        checks = _checks(Path(directory), asked.light)
        if (wheel := checks["wheel"].wheel if "wheel" in checks else None) is not None:
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            result["wheel"] = {"name": wheel.name, "sha256": digest}
            print(f"{wheel.name}: sha256 {digest}", flush=True)
        rows.append(_checked(sys.executable, checks))
        for version in asked.torches:
            venv = asked.environments / f".torch-{version}-venv"
            packages = ((f"torch=={version}", "numpy"), ("--editable", str(REPOSITORY)))
            if reason := ready(venv, *packages):
                print(f"test-torches: skipped: {reason}", file=sys.stderr)
                rows.append({"torch": version, "skipped": reason})
            else:
                rows.append(_checked(str(venv / "bin" / "python"), checks))
            if asked.remove:
                shutil.rmtree(venv, ignore_errors=True)
            if asked.out is not None:  # after each: the next one may fill the disk
                asked.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(any("failed" in row.values() for row in rows))


def _checks(directory: Path, light: bool) -> dict[str, Check]:
    """Build everything; the checks by name."""
    cache = {"OPKILN_CACHE_DIR": str(directory / "decorated")}
    subprocess.run([sys.executable, str(EXAMPLE)], env=os.environ | cache, check=True)
    checks = {"decorated": Check([str(EXAMPLE)], {**cache, "OPKILN_MODE": "sealed"})}
    for name, path in _libraries(directory).items():
        checks[name] = Check([str(LIGHT), "run", name, path], {})
    if not light:
        expected = directory / "expected.pt"
        subprocess.run([sys.executable, str(CPU_OPS), "expected", str(expected)], check=True)
        # No program is found there: a build would fail even if something allowed it.
        checks["wheel"] = Check(
            [str(CPU_OPS), "served", str(expected)], {"PATH": "/nonexistent"}, _wheel(directory)
        )
    return checks


def _libraries(directory: Path) -> dict[str, str]:
    """Build the libraries of op.h; their paths by name."""
    wheels = directory / "nvrtc"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", str(wheels), *NVRTC_WHEELS], check=True)
    environment = {**os.environ, "OPKILN_CACHE_DIR": str(directory / "cache")}
    done = subprocess.run(
        [sys.executable, str(LIGHT), "build", str(wheels)],
        env=environment, check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    found: dict[str, str] = json.loads(done.stdout)
    return found


def _wheel(directory: Path) -> Path:
    """Build the wheel of all CPU ops."""
    build = [sys.executable, "-m", "opkiln", "build", "--all", "--target", TARGET]
    subprocess.run([*build, "--wheel", str(directory), "--verify"], check=True)
    (wheel,) = directory.glob("*.whl")
    return wheel


def _checked(python: str, checks: dict[str, Check]) -> dict[str, Any]:
    """How each check ended with the torch of this Python."""
    asked = (
        "import sys, torch; print(torch.__version__, torch.version.cuda, sys.version.split()[0])"
    )
    said = subprocess.run([python, "-c", asked], check=True, stdout=subprocess.PIPE, text=True)
    torch, cuda, version = said.stdout.split()
    row: dict[str, Any] = {"torch": torch, "cuda": cuda, "python": version}
    for name, check in checks.items():
        with tempfile.TemporaryDirectory() as site:
            argv = [python, *check.argv]
            if check.wheel is not None:
                pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
                subprocess.run([*pip, "--target", site, str(check.wheel)], check=True)
                argv.append(site)
            environment = os.environ | check.variables
            done = subprocess.run(argv, cwd=REPOSITORY, env=environment, check=False)
        row[name] = "failed" if done.returncode else "passed"
    return row


if __name__ == "__main__":
    sys.exit(main())
