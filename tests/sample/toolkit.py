"""A CUDA toolkit whose nvcc writes down what it is told, and then does it.

A compile by nvcc takes seconds, so what it gives is kept in the pool: the same nvcc with the same
words on the same text is started once. Run as a program, this file is such an nvcc: its arguments
are the pool's directory, the real nvcc, and what that is told.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_SCRIPT = """\
#!/bin/sh
printf '%s\\0' "$@" > '{log}'/"$$-$(date +%s%N)"
exec '{python}' -IS '{program}' '{kept}' '{home}/bin/nvcc.real' "$@"
"""
_PLACE = re.compile(r"/[^\s,:=;\"']*/")


def compile_once(kept: Path, nvcc: str, words: list[str]) -> int:
    """Run ``nvcc WORDS``, or copy the object that it once gave for them. Returns the exit code.

    Where things lie and the number of threads do not count, so this is not for a test of these.
    """
    if "-c" not in words or "--dryrun" in words or source_of(words) == "probe.cu":
        return subprocess.run([nvcc, *words], check=False).returncode
    (given,) = {word for word in words if os.path.basename(word) == source_of(words)}
    source = Path(given).resolve()
    output = Path(words[words.index("-o") + 1])
    plain = [
        _PLACE.sub("/", word)
        for word in words
        if word != str(output) and "-prefix-map=" not in word and not word.startswith("--threads=")
    ]
    state = os.stat(nvcc)
    key = hashlib.sha256(repr([plain, state.st_size, state.st_mtime_ns]).encode())
    for path in sorted(source.parent.rglob("*")):
        if path.suffix in (".cu", ".cuh", ".h", ".cpp"):
            key.update(f"{path.relative_to(source.parent)}\0".encode() + path.read_bytes())
    found = kept / key.hexdigest()[:40]
    if not found.exists():
        if code := subprocess.run([nvcc, *words], check=False).returncode:
            return code
        kept.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept) as new:
            shutil.copy(output, Path(new, "object"))
            Path(new).rename(found)
            Path(new).mkdir()  # for it to end with
        return 0
    shutil.copy(found / "object", output)
    return 0


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
        from sample import pool

        script.write_text(_SCRIPT.format(
            home=home, log=self._log, kept=pool.ROOT / "nvcc", program=__file__,
            python=sys.executable,
        ))  # fmt: skip
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
        of_path = before == "-o" or "prefix-map=" in word or word.startswith(("-I", "/"))
        if not of_path and (_CHOOSES.match(word) or _CHOOSES.fullmatch(before)):
            found.append(word)
    return found


if __name__ == "__main__":
    sys.exit(compile_once(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
