"""``make release-check``: what would be released, built, examined and used as its users will.

The archives are built from clones of the last commit: twice in two directories, under two umasks
and two time zones, and the wheel once more from the source archive. All must have the same bytes.
They are compared with the files of the repository, held against the rules of the package index, and
installed into an empty environment, first without torch and then with one. There the demo, a smoke
test, a type checker and the commands of README.md run. What passed lies in ``dist``.

Everything that the tools' versions could change is pinned by the dependency group ``release``.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import archives  # noqa: E402 (found by the line above)
import installed  # noqa: E402
from environments import REPOSITORY, ready  # noqa: E402
from steps import Failure, Tools, say  # noqa: E402

VENV = REPOSITORY / ".release-venv"
DIST = REPOSITORY / "dist"


def main() -> int:
    """0 when it may be released."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torch", default="torch==2.13.0", help="what the users have")
    parser.add_argument("--archives", action="store_true", help="build and examine them alone")
    asked = parser.parse_args()
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    if reason := ready(VENV, tuple(project["dependency-groups"]["release"])):
        sys.stderr.write(f"release-check: {reason}\n")
        return 1
    try:
        with tempfile.TemporaryDirectory(prefix="release-") as directory:
            check(Tools(VENV / "bin"), Path(directory), asked.torch, asked.archives)
    except Failure as failure:
        sys.stderr.write(f"release-check: FAILED: {failure}\n")
        return 1
    say("all checks passed")
    return 0


def check(tools: Tools, work: Path, torch: str, only_archives: bool) -> None:
    """Build the archives, examine and use them, and keep them. Raises Failure."""
    changed = git("status", "--porcelain", "--untracked-files=no")
    if changed:
        say(f"not part of it, because it is not committed:\n{changed}")
    archives.check_files(tools)
    found = archives.built_alike(tools, work)
    archives.check_names(found, git("tag", "--points-at", "HEAD").split())
    archives.check_contents(found)
    archives.check_metadata(tools, found)
    if not only_archives:
        installed.check(tools, found, work / "user", torch)
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    for path in (found.wheel, found.source):
        shutil.copy(path, DIST)
        say(f"sha256 {archives.sha256(path)}  dist/{path.name}")


def git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.rstrip()


if __name__ == "__main__":
    sys.exit(main())
