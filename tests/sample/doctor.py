"""The doctor in a process of its own, after a command was typed into its shell."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sample import forks
from sample.child import SOURCE

if TYPE_CHECKING:
    from collections.abc import Mapping

_CHECK = """
import json, sys
exec(sys.argv[2])
from opkiln.report.doctor import checks, terms
print(json.dumps(terms.run_check((checks.CHECKS | checks.BUILDS)[sys.argv[1]], terms.Facts())))
"""

# Each line of its input has a fork run a script in a shell, take that shell's environment, and do
# a check. Only the interpreter is not started again: the modules of the doctor are imported here.
_SERVER = """
import ctypes, json, os, signal, subprocess, sys, traceback
from opkiln.report.doctor import checks, terms

def check(name, stand_ins, env, script, own_mounts):
    os.environ.clear()
    os.environ.update(env)
    if own_mounts and ctypes.CDLL(None).unshare(0x20000):  # CLONE_NEWNS
        raise OSError("no mounts of its own")
    shell = ["sh", "-ec", script + "\\nprintf '\\\\001'\\nexec /usr/bin/env -0"]
    done = subprocess.run(shell, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = done.stdout.rpartition("\\x01")[2].split("\\0")[:-1]
    os.environ.clear()
    os.environ.update(each.split("=", 1) for each in told)
    path = os.environ.get("PYTHONPATH", "")
    sys.path[:2] = ["", *filter(None, path.split(os.pathsep))]
    exec(stand_ins, {})
    return terms.run_check((checks.CHECKS | checks.BUILDS)[name], terms.Facts())

for line in sys.stdin:
    if os.fork() == 0:
        signal.alarm(300)
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        try:
            json.dump(check(*json.loads(line)), answers)
        except BaseException:
            json.dump(traceback.format_exc(), answers)
        answers.flush()
        sys.exit()
    _, status = os.wait()
    print(f" {status}", flush=True)
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
    )  # fmt: skip


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

    def check(self, name: str, *, after: str = "", forked: bool = True) -> Found:
        """One check, in the shell in which the command ``after`` was typed before. ``forked``: the
        interpreter is forked, unless the environment has what is read at the start of one."""
        if forked and forks.suits(self.env):
            return Found(*self._fork(name, after))
        argv = [sys.executable, "-c", _CHECK, name, self.stand_ins]
        done = self.shell(f'{after}\nexec "$@"', *argv)
        assert done.returncode == 0, done.stderr
        return Found(*json.loads(done.stdout.splitlines()[-1]))

    def _fork(self, name: str, after: str) -> list[str]:
        lines = self._mount_commands()
        private = ["mount --make-rprivate /"] if lines else []
        script = "\n".join([*private, *lines, after])
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps([name, self.stand_ins, self.env, script, bool(lines)]) + "\n")
        server.stdin.flush()
        told, _, status = server.stdout.readline().rpartition(" ")
        assert status == "0\n", f"the check ended with {status!r}"
        answer = json.loads(told)
        assert isinstance(answer, list), answer
        return answer

    def _mount_commands(self) -> list[str]:
        return [
            f"mount -t tmpfs -o {options} tmpfs '{path}'" for path, options in self.mounts.items()
        ]

    def shell(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A script in this shell; each mount is a fresh tmpfs that nobody else sees."""
        lines = self._mount_commands()
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
