"""``make test-packages``: real extension packages from PyPI, built by opkiln as they are.

Each is installed twice from its source distribution by ``opkiln run pip install``, each time into a
directory of its own from sources that pip unpacks anew, with one store that is empty before the
first. After each the package is imported and called. The second installation may take a tenth of
the first at most, but for a package of one C++ source. ``--beside-torch`` installs a third time
without opkiln, for comparison.

Two environments are made beside the project's own, with a CPU build of torch and with a CUDA build,
which takes gigabytes; ``--cpu`` and ``--cuda`` name interpreters that have them already. No GPU is
needed: packages with CUDA code are compiled, loaded, and called on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE.parents[1] / "bench"))

import machine  # noqa: E402 (found by the line above)
from environments import REPOSITORY, ready  # noqa: E402 (found by the line above)

RESULTS = REPOSITORY / "bench" / "results" / "packages.json"
TORCHES = {"cpu": "torch==2.13.0", "cuda": "torch==2.14.1"}
SHARE = 0.1
PATIENCE = 3600


class Package(NamedTuple):
    """A source distribution, how it is asked to be built, and what it must compute."""

    name: str
    version: str
    torch: str  # cpu or cuda: the build of torch it is compiled against
    kind: str
    check: str
    # The second installation is held to a tenth of the first. Not of a package with one C++ source:
    # pip and its two imports of torch alone take more than a tenth of compiling that.
    held: bool = True


PACKAGES = (
    Package("torch-spline-conv", "1.2.2", "cpu", "C++, 3 extensions", """
from torch_spline_conv import spline_basis
basis, index = spline_basis(torch.tensor([[0.25, 0.5]]), torch.tensor([5, 5]),
                            torch.tensor([1, 1], dtype=torch.uint8), 1)
assert torch.allclose(basis.sum(), torch.ones(())), basis
"""),
    Package("torch-scatter", "2.1.2", "cpu", "C++, 4 extensions", """
from torch_scatter import segment_csr
found = segment_csr(torch.arange(6.0), torch.tensor([0, 2, 6]), reduce="max")
assert found.tolist() == [1.0, 5.0], found
"""),
    Package("torch-cluster", "1.6.3", "cpu", "C++, 9 extensions", """
import importlib.util
from pathlib import Path
# Importing the package itself would need scipy.
where = Path(importlib.util.find_spec("torch_cluster").submodule_search_locations[0])
(library,) = where.glob("_fps_cpu*")
torch.ops.load_library(library)
x = torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [1.0, 1.0]])
found = torch.ops.torch_cluster.fps(x, torch.tensor([0, 4]), torch.tensor([0.5]), False)
assert found.tolist() == [0, 3], found
"""),
    Package("torchlpc", "0.7.2", "cpu", "C++, TORCH_LIBRARY", """
import importlib.util, sys
where = importlib.util.find_spec("torchlpc").submodule_search_locations[0]
from importlib.machinery import EXTENSION_SUFFIXES
torch.ops.load_library(f"{where}/_C{EXTENSION_SUFFIXES[0]}")
found = torch.ops.torchlpc.scan(torch.ones(1, 3), torch.full((1, 3), 0.5), torch.zeros(1))
assert found.tolist() == [[1.0, 1.5, 1.75]], found
""", held=False),
    Package("torchsort", "0.1.9", "cuda", "C++ and CUDA", """
import torchsort, torchsort.isotonic_cuda
x = torch.tensor([[8.0, 0.0, 5.0, 3.0]])
assert torchsort.soft_rank(x, regularization_strength=0.1).tolist() == [[4.0, 1.0, 3.0, 2.0]]
"""),
    Package("torch-discounted-cumsum", "1.1.0", "cuda", "C++ and CUDA", """
import torch_discounted_cumsum_cuda
from torch_discounted_cumsum import discounted_cumsum_right
found = discounted_cumsum_right(torch.ones(1, 3), 0.5)
assert found.tolist() == [[1.75, 1.5, 1.0]], found
"""),
)  # fmt: skip


class Outcome(NamedTuple):
    """What became of a package; seconds of whole installations."""

    package: Package
    first: float | None = None
    second: float | None = None
    torchs: float | None = None
    error: str = ""
    torch_version: str = ""  # of the environment it was built in
    loads: tuple[float, ...] = ()  # the load average before and after

    @property
    def ratio(self) -> float | None:
        return self.second / self.first if self.first and self.second else None

    @property
    def good(self) -> bool:
        fast = self.ratio is not None and self.ratio <= SHARE
        return not self.error and (fast or not self.package.held)


class Failure(Exception):
    """A command did not succeed; its text is what it said last."""


def main() -> int:
    """0 when every package was built, called, and fast the second time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", nargs="*", help="some of them, by name")
    parser.add_argument("--cpu", metavar="PYTHON", help="has a CPU build of torch, and setuptools")
    parser.add_argument("--cuda", metavar="PYTHON", help="has a CUDA build of torch, likewise")
    parser.add_argument("--archs", default="9.0", help="TORCH_CUDA_ARCH_LIST for CUDA packages")
    parser.add_argument("--beside-torch", action="store_true", help="also time torch's own builds")
    asked = parser.parse_args()
    chosen = [each for each in PACKAGES if not asked.packages or each.name in asked.packages]
    outcomes = []
    with tempfile.TemporaryDirectory() as directory:
        pythons: dict[str, str] = {}
        for package in chosen:
            try:
                if package.torch not in pythons:
                    named = {"cpu": asked.cpu, "cuda": asked.cuda}[package.torch]
                    pythons[package.torch] = _python(package.torch, named, Path(directory))
                place = Path(directory, package.name)
                outcome = _tried(package, pythons[package.torch], place, asked)
            except Failure as failure:
                outcome = Outcome(package, error=str(failure))
            outcomes.append(outcome)
            print(_row(outcome), flush=True)
            store(outcome)
    print(f"\n{_table(outcomes)}")
    return 0 if all(outcome.good for outcome in outcomes) else 1


def _python(torch: str, named: str | None, directory: Path) -> str:
    """The interpreter of an environment with this torch. Raises Failure."""
    if named is None:
        venv = REPOSITORY / f".packages-{torch}-venv"
        if reason := ready(venv, (TORCHES[torch], "numpy"), ("setuptools", "wheel", "ninja")):
            raise Failure(reason)
        return str(venv / "bin" / "python")
    # An environment of its own, which sees the packages of the other and installs nothing there.
    venv = directory / torch
    subprocess.run([named, "-m", "venv", "--without-pip", str(venv)], check=True)
    code = "import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))"
    site = subprocess.run([named, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    python = venv / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    line = f"import site; site.addsitedir({site.stdout.strip()!r})\n"
    Path(own.stdout.strip(), "torch.pth").write_text(line)
    return str(python)


def _tried(package: Package, python: str, place: Path, asked: argparse.Namespace) -> Outcome:
    """Both installations and their checks. Raises Failure."""
    variables = {"OPKILN_CACHE_DIR": str(place / "store")}
    if package.torch == "cuda":
        variables["TORCH_CUDA_ARCH_LIST"] = asked.archs
    run = [sys.executable, "-m", "opkiln", "run"]
    code = "import torch; print(torch.__version__)"
    asked_of = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    before = machine.load_average()
    seconds = [_installed(package, python, place / name, variables, run) for name in ("1", "2")]
    torchs = None
    if asked.beside_torch:
        torchs = _installed(package, python, place / "torchs", variables, [])
    return Outcome(
        package,
        *seconds,
        torchs,
        torch_version=asked_of.stdout.strip(),
        loads=(before, machine.load_average()),
    )


def _installed(
    package: Package, python: str, target: Path, variables: dict[str, str], run: list[str]
) -> float:
    """Seconds that an installation took; what it installed works. Raises Failure."""
    target.mkdir(parents=True)
    environment = {**os.environ, **variables, "PYTHONPATH": ""}
    # pip keeps wheels that it has built, and would install one of those the second time.
    pip = [python, "-m", "pip", "install", "--no-cache-dir", "--no-build-isolation", "--no-deps"]
    pip += ["--disable-pip-version-check", "--no-binary", ":all:", "--target", str(target)]
    begin = time.perf_counter()
    _finished([*run, *pip, f"{package.name}=={package.version}"], environment, target)
    taken = time.perf_counter() - begin
    environment["PYTHONPATH"] = str(target)
    _finished([python, "-c", f"import torch\n{package.check}"], environment, target)
    return taken


def _finished(command: list[str], environment: dict[str, str], cwd: Path) -> None:
    done = subprocess.run(
        command, env=environment, cwd=cwd, capture_output=True, text=True, errors="replace",
        timeout=PATIENCE, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        said = f"{done.stdout}\n{done.stderr}".strip()
        sys.stderr.write(f"{said}\n")
        raise Failure(said.splitlines()[-1] if said else f"exit status {done.returncode}")


def _cells(outcome: Outcome) -> list[str]:
    def shown(value: float | None, digits: int = 1) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    package = outcome.package
    return [
        package.name, package.version, package.kind, shown(outcome.first), shown(outcome.second),
        shown(outcome.ratio, 3), shown(outcome.torchs), outcome.error or "called",
    ]  # fmt: skip


def _row(outcome: Outcome) -> str:
    return "| " + " | ".join(_cells(outcome)) + " |"


def _table(outcomes: list[Outcome]) -> str:
    head = "| package | version | kind | first, s | second, s | ratio | torch's own, s | check |"
    return "\n".join([head, "|---" * 8 + "|", *map(_row, outcomes)])


def store(outcome: Outcome) -> None:
    """Put what was measured into the results, in the place of what was there of this package."""
    package = outcome.package
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    head = machine.described()
    record[package.name] = {
        "version": package.version, "kind": package.kind, "first_s": outcome.first,
        "second_s": outcome.second, "ratio": outcome.ratio, "torchs_own_s": outcome.torchs,
        "error": outcome.error, "torch": outcome.torch_version, "load_average": outcome.loads,
        "date": head["date"], "commit": head["commit"], "machine": head["machine"],
    }  # fmt: skip
    RESULTS.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
