"""The command line in this process: for tests of what a command says and how it ends.

A test of what is outside of the command (signals, pipes, an environment of its own) starts one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import warnings
from typing import TYPE_CHECKING, Any
from unittest import mock

from opkiln.cli import main

if TYPE_CHECKING:
    from pathlib import Path


def run(
    *arguments: str, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """``opkiln ARGUMENTS`` with these variables in its environment."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, variables),
        contextlib.chdir(cwd or os.getcwd()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        warnings.showwarning = main._show_warning  # type: ignore[assignment]
        code = main._run(list(arguments))
    return subprocess.CompletedProcess(list(arguments), code, out.getvalue(), err.getvalue())


def answer(*arguments: str, **variables: str) -> Any:
    """What ``opkiln ARGUMENTS --json`` prints. It must end with 0, or with 1 for "no"."""
    done = run(*arguments, "--json", **variables)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)
