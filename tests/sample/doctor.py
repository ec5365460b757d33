"""The doctor in a process of its own, after a command was typed into its shell."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sample.child import SOURCE

if TYPE_CHECKING:
    from collections.abc import Mapping

_CHECK = """
import json, sys
exec(sys.argv[2])
from opkiln.report.doctor import checks
from opkiln.report.doctor.here import Here
print(json.dumps(checks.outcome((checks.CHECKS | checks.BUILDS)[sys.argv[1]], Here())))
"""


class Found(NamedTuple):
    """What a check says."""

    verdict: str
    evidence: str
    command: str


class Patient:
    """A shell with an environment of its own, and what is mounted or put in place there."""

    def __init__(
        self,
        env: Mapping[str, str],
        *,
        mounts: Mapping[Path | str, str] | None = None,
        stand_ins: str = "",
    ) -> None:
        own = os.path.dirname(sys.executable)  # commands say `opkiln` and `python`
        self.env = {**os.environ, "PYTHONPATH": str(SOURCE), **env}
        self.env["PATH"] = f"{own}{os.pathsep}{self.env['PATH']}"
        self.mounts = mounts or {}
        self.stand_ins = stand_ins  # Python that runs before the check

    def check(self, name: str, *, after: str = "") -> Found:
        """One check, in the shell in which the command ``after`` was typed before."""
        argv = [sys.executable, "-c", _CHECK, name, self.stand_ins]
        done = self.shell(f'{after}\nexec "$@"', *argv)
        assert done.returncode == 0, done.stderr
        return Found(*json.loads(done.stdout.splitlines()[-1]))

    def shell(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A script in this shell; each mount is a fresh tmpfs that nobody else sees."""
        lines = [
            f"mount -t tmpfs -o {options} tmpfs '{path}'" for path, options in self.mounts.items()
        ]
        prefix = ["unshare", "--mount"] if lines else []
        return subprocess.run(
            [*prefix, "sh", "-ec", "\n".join([*lines, script]), "sh", *arguments],
            env=self.env, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip


def can_mount(path: Path) -> bool:
    """Whether this user may mount a file system that only its own processes see."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    argv = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", str(path)]
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


def torch_stand_in(where: Path, version: str, cuda: str | None = None) -> Path:
    """A torch that has a version and nothing else; ``where`` goes on PYTHONPATH."""
    package = where / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "version.py").write_text(
        f"__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = None\n"
    )
    return where
