"""Runs what a page shows in its ``console`` blocks, and compares what it prints with the page.

A line that begins with ``$`` is a command; the lines below it are what it prints. All commands of a
page run in one shell. ``…`` stands for anything, alone on its line for any number of lines. Times,
sizes, numbers with a point and digests may differ.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from sample import forks

_BLOCK = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
_END = "-- the command above ended with "


# Asks the server of forks for an interpreter, which takes over its streams, and ends as that does.
_ASK = """#!{python} -IS
import array, json, os, socket, sys
if sys.argv[1:3] == ["-m", "pytest"]:  # it warns of plugins that are imported before it
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
asked = {{"args": [*{words}, *sys.argv[1:]], "env": dict(os.environ), "cwd": os.getcwd()}}
text = json.dumps(asked).encode()
server = socket.socket(socket.AF_UNIX)
server.connect({socket!r})
streams = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))
server.sendmsg([len(text).to_bytes(8, "little")], [streams])
server.sendall(text)
server.recv(8, socket.MSG_WAITALL)
sys.exit(int.from_bytes(server.recv(8, socket.MSG_WAITALL), "little", signed=True))
"""


class Shown(NamedTuple):
    """A command, and the lines that a page shows below it."""

    command: str
    lines: list[str]


def commands(page: str) -> list[Shown]:
    """All commands of a page, in order."""
    found = []
    for block in _BLOCK.findall(page):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append(Shown(line[2:], []))
            else:
                found[-1].lines.append(line)
    return found


def programs(where: Path) -> Path:
    """A directory with ``python`` and ``opkiln`` for a script, forked with torch imported."""
    assert forks.suits(os.environ)
    where.mkdir()
    for name, words in {"python": (), "opkiln": ("-m", "opkiln")}.items():
        text = _ASK.format(python=sys.executable, words=words, socket=forks._server(bare=False))
        (where / name).write_text(text)
        (where / name).chmod(0o755)
    return where


def run(shown: list[Shown], cwd: Path, environment: dict[str, str]) -> list[str]:
    """What each command printed, standard error included, and its exit status as the last line."""
    script = "\n".join(f"{each.command}\necho '{_END}'$?" for each in shown)
    done = subprocess.run(
        ["bash", "-c", f"exec 2>&1\n{script}"], cwd=cwd, env=environment, text=True,
        stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=600, check=False,
    )  # fmt: skip
    parts = re.split(rf"^{re.escape(_END)}(\d+)\n", done.stdout, flags=re.MULTILINE)
    printed, codes = parts[0::2], parts[1::2]
    return [text + code for text, code in zip(printed, codes, strict=False)]


def differences(shown: Shown, printed: str, *places: tuple[Path, str]) -> str:
    """Nothing, or what was printed, if that is not what the page shows."""
    *lines, _ = printed.splitlines(keepends=True)
    text = "".join(line for line in lines if "waiting for pid" not in line)  # a busy machine
    for path, name in places:
        text = text.replace(str(path), name)
    if re.fullmatch(_pattern(shown.lines), _plain(text)):
        return ""
    return f"$ {shown.command}\n{text}"


def _pattern(lines: list[str]) -> str:
    parts = [
        r"(?:.*\n)*?" if line == "…" else f"{'.*'.join(map(re.escape, _plain(line).split('…')))}\n"
        for line in lines
    ]
    return "".join(parts)


def _plain(text: str) -> str:
    """Text in which what differs from run to run is the same."""
    text = re.sub(r"\b[0-9a-f]{12,64}\b", "DIGEST", text)
    text = re.sub(r"\b\d+(\.\d+)? (us|ms|s|B|kB|MB|GB|KiB|MiB)\b", "AMOUNT", text)
    return re.sub(r"\b\d+\.\d+\b", "NUMBER", text)
