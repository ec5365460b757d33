"""Other processes: fresh interpreters that run a few lines with opkiln.

They are forked from servers that have imported torch, or what a load needs of opkiln (``forks``),
if nothing that they are given is read at the start of a process. A test that is about the process
itself (its exit, what it imports, who its parent is) sets ``forked=False``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import opkiln
from opkiln import settings
from opkiln.run.child import _tree
from sample import forks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SOURCE = Path(opkiln.__file__).parent.parent
NOBODY = 65534
# What opkiln reads, but for what other programs need, too.
VARIABLES = {name for setting in settings.table() for name in setting.names} - {
    "PATH",
    "HOME",
    "TMPDIR",
}


def environment(path: Sequence[Path] = ()) -> dict[str, str]:
    """This process's environment, in which a child imports the opkiln that is tested."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [SOURCE, *path]))}


def start(
    code: str,
    *arguments: str,
    path: Sequence[Path] = (),
    env: Mapping[str, str | None] | None = None,
    bare: bool = True,
    prefix: Sequence[str] = (),
    python: str = sys.executable,
    user: int | None = None,
    forked: bool = True,
) -> subprocess.Popen[str]:
    """Start an interpreter on ``code``. ``bare``: without site-packages, so without torch."""
    variables = environment(path)
    for name, value in (env or {}).items():
        if value is None:
            variables.pop(name, None)
        else:
            variables[name] = value
    argv = ["-c", textwrap.dedent(code), *arguments]
    plain = not prefix and python == sys.executable and user is None
    if forked and plain and forks.suits(variables):
        return forks.Fork(
            argv, bare=bare, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=variables,
        )  # fmt: skip
    options = ["-S"] if bare else []
    return subprocess.Popen(
        [*prefix, python, *options, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
    )


def finish(child: subprocess.Popen[str], timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Its end; a child that hangs is killed, with its own children, and fails the test."""
    try:
        out, err = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        for pid in tuple(_tree(child.pid)):  # each of them may hold the pipes
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        out, err = child.communicate()
        raise AssertionError(f"the child hung\n{out}\n{err}") from None
    return subprocess.CompletedProcess(child.args, child.returncode, out, err)


def run(
    code: str,
    *arguments: str,
    path: Sequence[Path] = (),
    env: Mapping[str, str | None] | None = None,
    bare: bool = True,
    prefix: Sequence[str] = (),
    python: str = sys.executable,
    user: int | None = None,
    forked: bool = True,
) -> str:
    """The standard output of a child that must succeed."""
    child = start(
        code, *arguments, path=path, env=env, bare=bare, prefix=prefix, python=python, user=user,
        forked=forked,
    )  # fmt: skip
    done = finish(child)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


def python_for(user: int) -> str | None:
    """An interpreter that this other user can start, or None; also if this checkout is in a
    directory that others cannot enter."""
    for candidate in (sys.executable, shutil.which("python3", path="/usr/bin:/usr/local/bin")):
        if candidate is None:
            continue
        check = "import os, sys; os.listdir(sys.argv[1]); sys.exit(sys.version_info < (3, 11))"
        try:
            done = subprocess.run(
                [candidate, "-S", "-c", check, str(SOURCE)],
                user=user, group=user, extra_groups=[], check=False, capture_output=True,
            )  # fmt: skip
        except OSError:
            continue
        if done.returncode == 0:
            return candidate
    return None
