"""Code of others, and what imports torch, runs in a Python of its own: a crash is an answer."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import opkiln
from opkiln.process import capture
from opkiln.settings import whole_environment

_LONGEST = 120.0  # seconds: importing torch from a network file system takes its time


def argv(code: str, *arguments: str) -> tuple[str, ...]:
    """This Python with ``code``, and the arguments in ``sys.argv[1:]``.

    Nothing is imported from the current directory, where a file may have any name. opkiln comes
    from where it is now, after all else: it may itself be found in that directory alone.
    """
    home = os.path.dirname(os.path.dirname(os.path.abspath(opkiln.__file__)))
    start = f"import sys; sys.path.append({home!r})\n{code}"
    return (sys.executable or "python3", "-P", "-c", start, *arguments)


def answer(code: str, *arguments: str) -> tuple[Any, str]:
    """(what ``code`` prints as JSON on its last line, why there is none). One of them is empty."""
    done = capture(argv(code, *arguments), env=whole_environment(), timeout=_LONGEST)
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        try:
            return json.loads(lines[-1]), ""
        except json.JSONDecodeError:
            pass  # it ended before its last line, with words of its own
    said = done.stderr.strip().splitlines()[-1:]
    return None, "; ".join([f"the child {ended(done.returncode)}", *said])


def ended(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode < 0:
        return f"died of {signal.Signals(-returncode).name}"
    return f"ended with {returncode}"
