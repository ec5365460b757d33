"""What processes did to files, and which programs they started, as strace saw it."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from pathlib import Path

WRITING = (
    "open,openat,openat2,creat,mkdir,mkdirat,rmdir,rename,renameat,renameat2,unlink,unlinkat,link,"
    "linkat,symlink,symlinkat,mknod,mknodat,chmod,fchmod,fchmodat,chown,fchown,fchownat,truncate,"
    "ftruncate,fallocate,utimensat,setxattr,fsetxattr,write,pwrite64,writev,pwritev,sendfile,"
    "copy_file_range,fsync,fdatasync,flock,execve"
)
NETWORK = "socket,connect,bind,listen,accept,accept4,sendto,sendmsg"
_CALL = re.compile(r"^(?P<pid>\d+) +(?P<name>\w+)\((?P<arguments>.*)\) += (?P<result>-?\w+)")


class Call(NamedTuple):
    """One system call that was made, with its arguments as strace writes them."""

    pid: int
    name: str
    arguments: str
    result: str

    @property
    def failed(self) -> bool:
        return self.result.startswith("-")

    @property
    def path(self) -> str:
        """The first quoted argument, or the name that -y gives a descriptor."""
        quoted = re.search(r'"((?:[^"\\]|\\.)*)"', self.arguments)
        opened = re.match(r"\d+<([^>]*)>", self.arguments)
        if self.name in ("write", "pwrite64", "writev") and opened:
            return opened.group(1)
        return quoted.group(1) if quoted else (opened.group(1) if opened else "")

    @property
    def writes(self) -> bool:
        """Whether it changes, or could change, a file system."""
        if self.name in ("execve", "flock", *NETWORK.split(",")):
            return False
        if self.name in ("open", "openat", "openat2"):
            return any(flag in self.arguments for flag in ("O_WRONLY", "O_RDWR", "O_CREAT"))
        return True


def strace(log: Path, also: str = "") -> list[str]:
    """The command to put before another one; ``also`` are further calls to look at."""
    if shutil.which("strace") is None or not _works():
        pytest.skip("strace cannot be used here")
    wanted = f"{WRITING},{also}" if also else WRITING
    return ["strace", "-f", "-y", "-s", "4096", "-o", str(log), "-e", f"trace={wanted}"]


def _works() -> bool:
    done = subprocess.run(["strace", "-f", "true"], capture_output=True, check=False)
    return done.returncode == 0


def calls(log: Path) -> list[Call]:
    """Every call of every process; those that were interrupted by another's are joined."""
    pending: dict[str, str] = {}
    found = []
    for line in log.read_text(errors="replace").splitlines():
        pid = line.split(" ", 1)[0]
        if line.endswith("<unfinished ...>"):
            pending[pid] = line.removesuffix("<unfinished ...>").rstrip()
            continue
        resumed = re.search(r"<\.\.\. \w+ resumed>", line)
        whole = pending.pop(pid, "") + line[resumed.end() :] if resumed else line
        match = _CALL.match(whole)
        if match:
            pid, name, arguments, result = match.groups()
            found.append(Call(int(pid), name, arguments, result))
    return found
