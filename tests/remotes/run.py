"""``make test-remotes``: remote tiers on real servers: docker-registry with TLS and a password,
nginx, moto's S3 server and an emulator of Google's; and what skopeo and oras make of the artifacts.

Servers are installed by apt-get where that is possible. Where something cannot be had, its tests
are skipped with the reason.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from environments import REPOSITORY, ready  # noqa: E402 (found by the line above)

REQUIREMENTS = (
    "cryptography>=42",
    "gcp-storage-emulator",
    "gcsfs",
    "hypothesis>=6.100",
    "moto[server]>=5",
    "oras>=0.2",
    "pytest>=8.3",
    "s3fs",
)
# Program: Debian's package.
PROGRAMS = {
    "docker-registry": "docker-registry",
    "nginx": "nginx-light",
    "htpasswd": "apache2-utils",
    "skopeo": "skopeo",
    "openssl": "openssl",
}


def install() -> None:
    """Install the programs that are missing. Says why, if that cannot be done."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [package for name, package in PROGRAMS.items() if not shutil.which(name, path=path)]
    if not missing:
        return
    for words in (["update"], ["install", "-y", "--no-install-recommends", *missing]):
        command = ["apt-get", "-q", *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            reason = done.stderr.strip() if done.returncode else ""
        except OSError as error:
            reason = str(error)
        if reason:
            print(f"test-remotes: {' '.join(command)}: {reason}", file=sys.stderr)
            return


def main() -> int:
    """The exit status of the tests; 0 if the packages cannot be had."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=REPOSITORY / ".remotes-venv")
    arguments, pytest = parser.parse_known_args()
    reason = ready(arguments.venv, REQUIREMENTS, ("--editable", str(REPOSITORY)))
    if reason:
        print(f"test-remotes: skipped: {reason}", file=sys.stderr)
        return 0
    install()
    python = os.path.join(os.path.abspath(arguments.venv), "bin", "python")
    files = [str(HERE.parent / "build/test_remotes.py"), str(HERE)]
    command = [python, "-m", "pytest", "-rs", *files, *pytest]
    environment = {**os.environ, "TEST_REMOTES": "real"}
    return subprocess.run(command, cwd=REPOSITORY, check=False, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
