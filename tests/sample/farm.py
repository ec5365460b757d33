"""Two small ops of installed packages, for build farms, the command that builds them, and the
recipes of the docs, as a module ``farms`` beside the ops."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

from sample import known
from sample.levels import HIGH, LOW
from sample.package import Package
from sample.shipped import clean_environment

PAGE = Path(__file__).resolve().parents[2] / "docs" / "clusters.md"
MATRIX = f'ops = ["first", "second"]\ntargets = ["cpu:{LOW},{HIGH}"]\n'
# A worker that builds the op for the first time ends as one does that the kernel kills.
KILLED = """
    def sources(self) -> list[str]:
        import multiprocessing, os, signal
        note = os.environ.get("KILL_A_WORKER")
        marks = {"IS_A_WORKER", "SUBMITIT_LOCAL_JOB_ID", "SLURM_JOB_ID"}  # ours, and others'
        rank = os.environ.get("PMI_RANK", "0")  # MPICH's
        worker = multiprocessing.parent_process() or marks & {*os.environ} or rank != "0"
        if note and worker and not os.path.exists(note):
            try:
                open(note, "x").close()
            except FileExistsError:  # another worker was faster
                return ["csrc/add.cpp"]
            os.kill(os.getpid(), signal.SIGKILL)
        return ["csrc/add.cpp"]
"""


def offer(site: Path, op: str) -> Package:
    """A small torch-free op of an installed package of the same name."""
    package = Package("plain", site, op)
    package.edit("op.py", 'NAME = "plain"', f'NAME = "{op}"')
    text = (package / "op.py").read_text()
    whole, _, rest = text.partition("    def sources")
    (package / "op.py").write_text(whole + KILLED + "\n" + rest[rest.index("    def include") :])
    metadata = site / f"{op}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {op}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[opkiln.ops]\n{op} = {op}.op:PlainBuilder\n")
    return package


class Farm:
    """Two ops, the command line, and a store for each run."""

    def __init__(self, base: Path) -> None:
        self.base, self.site = base, base / "site"
        self.ops = {name: offer(self.site, name) for name in ("first", "second")}
        self.matrix = base / "matrix.toml"
        self.matrix.write_text(MATRIX)
        self._numbers = itertools.count()

    def write_recipes(self, *changes: tuple[str, str]) -> None:
        """Write ``farms.py`` as the page has it, with other numbers and places."""
        (text,) = re.findall(r"<!-- farms.py -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        for shown, here in changes:
            assert text.count(shown) == 1, shown
            text = text.replace(shown, here)
        (self.site / "farms.py").write_text(text)

    def store(self) -> Path:
        return known.make_store(self.base / f"store{next(self._numbers)}")

    def environment(self, store: Path, **variables: str) -> dict[str, str]:
        """That of a process which sees the ops, and nothing that the user has set."""
        return clean_environment(**variables) | {
            "OPKILN_CACHE_DIR": str(store), "OPKILN_RUNTIME_DIR": str(self.base / "run"),
            "OPKILN_PROGRESS": "lines", "PYTHONPATH": str(self.site),
        }  # fmt: skip

    def __call__(
        self, *arguments: str, store: Path, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """``opkiln build``."""
        command = [sys.executable, "-m", "opkiln", "build", *arguments]
        return subprocess.run(
            command, env=self.environment(store, **variables), capture_output=True, text=True,
            timeout=300, check=False,
        )  # fmt: skip
