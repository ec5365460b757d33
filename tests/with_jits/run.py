"""``make test-jits``: the tests of other programs' JITs, with tvm-ffi, FlashInfer and four ninjas
from PyPI in an environment of their own.

FlashInfer is installed without what its other backends need, which are gigabytes; of cuBLAS and
cuRAND it needs the headers alone. Where packages cannot be had, that is said with the reason, and
nothing is run. ``--own`` runs tvm-ffi's own tests of ``tvm_ffi.cpp`` instead, from its source
distribution, without opkiln and under ``opkiln run``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from environments import REPOSITORY, ready  # noqa: E402 (found by the line above)

TVM_FFI = "apache-tvm-ffi==0.1.15.post2"
FLASHINFER = "flashinfer-python==0.7.2.post1"
BEFORE = (
    "numpy", "setuptools", "wheel", "ninja==1.13.0", "cmake", "pytest>=8.3", "pytest-xdist>=3.6",
    "hypothesis>=6.100", "click", TVM_FFI,
)  # fmt: skip
# What FlashInfer imports, and the headers that two of its modules include.
IMPORTED = ("requests", "tabulate", "tqdm", "einops", "nvidia-ml-py", "filelock", "jinja2")
ALONE = ("--no-deps", FLASHINFER, "nvidia-cublas==13.0.*", "nvidia-curand==10.4.0.35")
NINJAS = ("1.10.2", "1.11.1.4", "1.13.0", "1.13.2")  # PyPI has no 1.12
TESTS = REPOSITORY / "tests" / "compat"


def main() -> int:
    """The exit status of the tests; 0 where the packages cannot be had."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=REPOSITORY / ".jits-venv")
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip is to install")
    parser.add_argument("--own", action="store_true", help="tvm-ffi's tests")
    asked, pytest = parser.parse_known_args()
    venv = asked.venv.absolute()
    editable = ("--editable", str(REPOSITORY))
    if reason := ready(venv, (asked.torch,), BEFORE, IMPORTED, ALONE, editable):
        print(f"test-jits: skipped: {reason}", file=sys.stderr)
        return 0
    python = str(venv / "bin" / "python")
    add_ninjas(python, venv / "ninjas")
    environment = {**os.environ, "PATH": f"{venv / 'bin'}:{os.environ['PATH']}"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if asked.own:
        return run_own(python, environment)
    command = [python, "-m", "pytest", "-rs", str(TESTS), *pytest]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode


def add_ninjas(python: str, directory: Path) -> None:
    """Each ninja in a directory of its own."""
    for version in NINJAS:
        if not (directory / version).exists():
            pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
            subprocess.run([*pip, str(directory / version), f"ninja=={version}"], check=True)


def run_own(python: str, environment: dict[str, str]) -> int:
    """tvm-ffi's tests that compile, without opkiln and with it; both must say the same."""
    with tempfile.TemporaryDirectory() as place:
        pip = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "--dest", place, TVM_FFI], check=True)
        (archive,) = Path(place).glob("*.tar.gz")
        with tarfile.open(archive) as file:
            file.extractall(place, filter="data")
        (tests,) = Path(place).glob("*/tests/python")
        files = [each.name for each in tests.glob("test_*.py") if "cpp." in each.read_text()]
        pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *sorted(files)]
        said = []
        for run in ([], [python, "-m", "opkiln", "run"]):
            own = {**environment, "TVM_FFI_CACHE_DIR": f"{place}/cache{len(said)}"}
            own["OPKILN_CACHE_DIR"] = f"{place}/store"
            done = subprocess.run(
                [*run, *pytest], cwd=tests, env=own, check=False, capture_output=True, text=True
            )
            said.append(done.stdout.strip().rpartition("\n")[2])
            print(f"{' '.join(run[1:]) or 'alone'}: {said[-1]}", flush=True)
    counts = [line.split(" in ")[0].split(", ")[:2] for line in said]
    return int(counts[0] != counts[1])


if __name__ == "__main__":
    sys.exit(main())
