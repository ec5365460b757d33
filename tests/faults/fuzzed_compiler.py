"""A program in front of g++ that decides by something of its own what is compiled, and random
changes to that. Each kind is a way in which a compiler may come to its answer.

It passes ``-DWRAPPED=N`` on, and the sources have that number.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from pathlib import Path

NUMBERS = 6

_STATIC = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(int count, char** given) {
  char path[4096], flag[64] = "-DWRAPPED=";
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path - 16);
  path[length] = 0;
  strcpy(strrchr(path, '/'), "/../number");
  FILE* file = fopen(path, "r");
  if (file && fgets(flag + 10, 20, file)) flag[strcspn(flag, "\n")] = 0;
  char* words[count + 2];
  words[0] = "g++";
  words[1] = flag;
  for (int each = 1; each <= count; each++) words[each + 1] = given[each];
  return execvp("g++", words);
}
"""
_DYNAMIC = r"""
#include <stdio.h>
#include <unistd.h>
int number(void);
int main(int count, char** given) {
  char flag[64];
  snprintf(flag, sizeof flag, "-DWRAPPED=%d", number());
  char* words[count + 2];
  words[0] = "g++";
  words[1] = flag;
  for (int each = 1; each <= count; each++) words[each + 1] = given[each];
  return execvp("g++", words);
}
"""
_LOOKS = """
n=0
[ -e {0}/flag ] && n=$((n + 1))
[ -d {0}/place ] && n=$((n + 2))
[ -x {0}/tool ] && n=$((n + 4))
[ -s {0}/flag ] && n=$((n + 8))
[ -L {0}/tool ] && n=$((n + 16))
(cd {0}/place/inner) 2>/dev/null && n=$((n + 32))
"""
_LISTS = """
n=0
for each in {0}/parts/*; do n=$((n + 1)); case $each in *0) n=$((n + 10));; esac; done
"""
_READS = """
: >> {0}/number
read n < {0}/number
"""
_VARIABLES = 'n=${#HOME}; [ -n "$CCACHE_TRIED" ] && n=$((n + 1000))\n'
_FOLLOWS = "n=$(basename $(readlink -f {0}/current) | tr -dc 0-9)\n"
SCRIPTS = {
    "looks": _LOOKS, "lists": _LISTS, "reads": _READS, "variables": _VARIABLES,
    "follows": _FOLLOWS,
}  # fmt: skip
KINDS = (*SCRIPTS, "static", "library")


def compile_parts(where: Path) -> Path:
    """The programs and libraries that trees take copies of."""
    parts = where / "compilers"
    if parts.exists():
        return parts
    parts.mkdir()
    for number in range(NUMBERS):
        source = parts / f"number{number}.c"
        source.write_text(f"int number(void) {{ return {number}; }}\n")
        library = str(parts / f"libnumber{number}.so")
        subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libnumber.so", str(source), "-o",
                        library], check=True)  # fmt: skip
    for name, text in (("static", _STATIC), ("library", _DYNAMIC)):
        (parts / f"{name}.c").write_text(text)
    subprocess.run(["gcc", "-static", str(parts / "static.c"), "-o", str(parts / "static")],
                   check=True)  # fmt: skip
    places = "-Wl,-rpath,$ORIGIN/../front:$ORIGIN/../lib"
    subprocess.run(["gcc", str(parts / "library.c"), str(parts / "libnumber0.so"), "-o",
                    str(parts / "library"), places], check=True)  # fmt: skip
    return parts


class Compiler:
    """A compiler of one kind below a directory, and the variables that loads get."""

    def __init__(self, path: Path, kind: str, dice: random.Random, parts: Path) -> None:
        self.path = path
        self.kind = kind
        self.dice = dice
        self.parts = parts
        self.program = path / "bin" / "g++"
        self.variables = {"CXX": str(self.program), "HOME": str(path)}
        for name in ("bin", "front", "lib", "other", "parts", "one1", "two22"):
            (path / name).mkdir(parents=True)
        (path / "number").write_text("7\n")
        (path / "tool").touch(0o644)
        (path / "current").symlink_to("one1")
        if kind in SCRIPTS:
            text = SCRIPTS[kind].replace("{0}", str(path))
            self.program.write_text(f'#!/bin/sh\n{text}exec g++ -DWRAPPED=$n "$@"\n')
            self.program.chmod(0o755)
        else:
            shutil.copy(parts / kind, self.program)
            shutil.copy(parts / "libnumber0.so", path / "lib" / "libnumber.so")

    def change(self) -> str:
        """Change what its answer rests on, and say what was done."""
        changes: dict[str, Callable[[], str]] = {
            "looks": self._look, "lists": self._list, "reads": self._write_number,
            "variables": self._set_variable, "follows": self._follow,
            "static": self._write_number, "library": self._library,
        }  # fmt: skip
        return f"the compiler that {self.kind}: {changes[self.kind]()}"

    def _look(self) -> str:
        flag, place, tool = self.path / "flag", self.path / "place", self.path / "tool"
        match self.dice.randrange(6):
            case 0:
                return _toggle(flag, flag.touch, flag.unlink)
            case 1:
                return _toggle(place, place.mkdir, lambda: shutil.rmtree(place))
            case 2:
                tool.chmod(tool.stat().st_mode ^ 0o111)
                return f"mode of {tool}"
            case 3:
                inner = place / "inner"
                return _toggle(inner, lambda: inner.mkdir(parents=True), inner.rmdir)
            case 4:
                if not tool.is_symlink():
                    tool.replace(self.path / "moved")
                    tool.symlink_to("moved")
                    return f"{tool} is a link to what it was"
                (self.path / "moved").replace(tool)
                return f"{tool} is a file again"
            case _:
                flag.write_text(self.dice.choice(["", "x"]))
                return f"write {flag}"

    def _list(self) -> str:
        part = self.path / "parts" / f"p{self.dice.randrange(4)}"
        return _toggle(part, part.touch, part.unlink)

    def _write_number(self) -> str:
        number = self.path / "number"
        text = f"{self.dice.randrange(10)}\n"
        if self.dice.random() < 0.5:
            number.write_text(text)
        else:
            fresh = self.path / "fresh"
            fresh.write_text(text)
            fresh.replace(number)
        return f"write {number}"

    def _set_variable(self) -> str:
        if self.dice.random() < 0.5:
            self.variables["HOME"] = str(self.path / ("x" * self.dice.randrange(5)))
            return f"HOME={self.variables['HOME']}"
        self.variables["CCACHE_TRIED"] = self.dice.choice(["", "1"])
        return f"CCACHE_TRIED={self.variables['CCACHE_TRIED']}"

    def _follow(self) -> str:
        """Lead the link elsewhere; what it leads to is the same otherwise."""
        link = self.path / "current"
        target = self.dice.choice(["one1", "two22"])
        fresh = self.path / "fresh"
        fresh.symlink_to(target)
        fresh.replace(link)
        return f"link {link} to {target}"

    def _library(self) -> str:
        number = self.dice.randrange(NUMBERS)
        if self.dice.random() < 0.3:
            place = self.dice.choice(["", "lib", "other"])
            self.variables["LD_LIBRARY_PATH"] = str(self.path / place) if place else ""
            return f"LD_LIBRARY_PATH={self.variables['LD_LIBRARY_PATH']}"
        place = self.dice.choice(["front", "lib", "other"])
        library = self.path / place / "libnumber.so"
        if place != "lib" and library.exists():
            library.unlink()
            return f"remove {library}"
        fresh = self.path / "fresh"
        shutil.copy(self.parts / f"libnumber{number}.so", fresh)
        fresh.replace(library)
        return f"{library} is number {number}"


def _toggle(path: Path, make: Callable[[], object], remove: Callable[[], object]) -> str:
    if os.path.lexists(path):
        remove()
        return f"remove {path}"
    make()
    return f"make {path}"
