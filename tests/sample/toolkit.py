"""A CUDA toolkit whose nvcc writes down what it is told, and then does it."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_SCRIPT = """\
#!/bin/sh
printf '%s\\0' "$@" > '{log}'/"$$-$(date +%s%N)"
exec '{home}/bin/nvcc.real' "$@"
"""

# What chooses an architecture, in every spelling that nvcc has for it.
_CHOOSES = re.compile(
    r"--?(gencode|generate-code|arch|gpu-architecture|code|gpu-code|arch-list)\b"
    r"|.*\b(sm|compute|lto)_\d"
)


class Recording:
    """A directory laid out as the toolkit at ``real``, of links, with a script for its nvcc.

    The real nvcc runs under a name beside the script, so it takes this directory for its own: to
    whoever asks it, the script is the nvcc of this toolkit.
    """

    def __init__(self, home: Path, real: Path) -> None:
        self.home = home
        self._log = home.with_name(f"{home.name}-log")
        self._log.mkdir()
        (home / "bin").mkdir(parents=True)
        for entry in real.iterdir():
            if entry.name != "bin":
                (home / entry.name).symlink_to(entry)
        for entry in (real / "bin").iterdir():
            name = "nvcc.real" if entry.name == "nvcc" else entry.name
            (home / "bin" / name).symlink_to(entry)
        script = home / "bin" / "nvcc"
        script.write_text(_SCRIPT.format(home=home, log=self._log))
        script.chmod(0o755)

    def compiles(self) -> list[list[str]]:
        """The arguments of each compile so far, and none from now on.

        Questions (``--version``, ``--dryrun``) and the compile by which opkiln tries a toolkit are
        left out.
        """
        found = []
        for file in sorted(self._log.iterdir()):
            words = file.read_bytes().decode().split("\0")[:-1]
            file.unlink()
            if "-c" in words and "--dryrun" not in words and source_of(words) != "probe.cu":
                found.append(words)
        return found


def source_of(argv: list[str]) -> str:
    """The name of the source that a command line compiles."""
    (found,) = {word for word in argv if word.endswith((".cu", ".cpp")) and word[0] != "-"}
    return os.path.basename(found)


def arch_words(argv: list[str]) -> list[str]:
    """Every word of a command line that has a say in the architectures, as often as it is there.

    Of an option whose value is a word of its own, both.
    """
    found = []
    for before, word in zip(["", *argv], argv, strict=False):
        of_path = before in ("-o", "-MF") or "prefix-map=" in word or word.startswith(("-I", "/"))
        if not of_path and (_CHOOSES.match(word) or _CHOOSES.fullmatch(before)):
            found.append(word)
    return found
