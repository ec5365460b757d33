"""A compiler that keeps count, and a torch that says it is another."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

import pytest

from sample.package import rest

_SCRIPT = """\
#!/bin/sh
# {name} {note}
for each in "$@"; do
  case "$each" in
    --version) {version} ;;
    -c) echo "$*" >> '{log}' ;;
  esac
done
{before}
exec '{real}' "$@"
"""


class Compiler:
    """A script in front of the real g++ (or clang++) that writes down each compile."""

    def __init__(self, directory: Path) -> None:
        real = shutil.which("g++") or shutil.which("clang++")
        if real is None:
            pytest.skip("no C++ compiler")
        self._real = real
        self._log = directory / "compiles.log"
        self._name = secrets.token_hex(8)  # the pool has objects of the compilers of earlier runs
        self.path = directory / "counting-g++"
        self.write()

    def write(self, *, note: str = "", version: str = "", before: str = "") -> None:
        """(Re)place the script. ``version`` is what it says it is; ``before`` runs first."""
        claim = f"echo '{version}'; exit 0" if version else ":"
        text = _SCRIPT.format(
            name=self._name, note=note, version=claim, before=before, log=self._log, real=self._real
        )
        temporary = self.path.with_suffix(".new")
        temporary.write_text(text)
        temporary.chmod(0o755)
        os.replace(temporary, self.path)
        rest()

    def compiles(self) -> list[str]:
        """The sources compiled so far, in order."""
        if not self._log.exists():
            return []
        commands = (line.split() for line in self._log.read_text().splitlines())
        return [os.path.basename(words[words.index("-c") + 1]) for words in commands]


def torch_like(where: Path, version: str) -> Path:
    """The installed torch under another version: links to its files, a version.py of its own.

    Put ``where`` first on the path and it is the torch that is found, and that can be imported.
    """
    from opkiln.machine.toolchain import torch_sdk

    located = torch_sdk.locate()
    if located is None:
        pytest.skip("torch is not installed")
    made = where / "torch"
    made.mkdir(parents=True)
    for entry in Path(located).iterdir():
        if entry.name not in ("version.py", "__pycache__"):
            (made / entry.name).symlink_to(entry)
    rename(made, version)
    return made


def rename(torch: Path, version: str) -> None:
    """Upgrade such a torch in place."""
    from opkiln.machine.toolchain import torch_sdk

    located = torch_sdk.locate()
    assert located is not None
    sdk = torch_sdk.find()
    assert sdk is not None
    text = (Path(located) / "version.py").read_text()
    assert sdk.version in text
    (torch / "version.py").write_text(text.replace(sdk.version, version))
