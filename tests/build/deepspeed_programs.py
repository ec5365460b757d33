"""Programs in an interpreter that has DeepSpeed: this one, or that of an environment beside it,
which ``make test-deepspeed`` and ``make bench`` make."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import opkiln

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = Path(opkiln.__file__).parent.parent
ENVIRONMENTS = (".deepspeed-venv", ".bench-venv")


def _python() -> str | None:
    if any(importlib.metadata.distributions(name="deepspeed")):
        return sys.executable
    for name in ENVIRONMENTS:
        python = REPOSITORY / name / "bin" / "python"
        if list((REPOSITORY / name).glob("lib/python*/site-packages/deepspeed/__init__.py")):
            return str(python)
    return None


PYTHON = _python()


class Programs:
    """Runs programs with DeepSpeed, and opkiln beside it."""

    def __init__(self, store: Path, folder: Path) -> None:
        self.store = store
        self.folder = folder

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ, "OPKILN_CACHE_DIR": str(self.store), "PYTHONPATH": str(SOURCE),
            "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(self.folder / "extensions"),
            **variables,
        }  # fmt: skip
        return subprocess.run(
            [str(PYTHON), *command], env=environment, cwd=self.folder, capture_output=True,
            text=True, check=False, timeout=1200,
        )  # fmt: skip

    def answer(self, code: str, **variables: str) -> Any:
        """What the code puts into ``answer``."""
        text = textwrap.dedent(code) + "\nimport json; print('\\nANSWER', json.dumps(answer))"
        done = self.run("-c", text, **variables)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
        return json.loads(line.removeprefix("ANSWER "))
