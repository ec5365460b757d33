"""Asks the compilers how their options take values, and writes ``opkiln/steps/option_tables.py``.

    python tests/option_tables.py > src/opkiln/steps/option_tables.py

An option takes a separate value if its program says so in its help, or complains that the value is
missing when the option is the last word. What is known already stays: other machines have other
compilers, so a table only grows.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor

from opkiln.steps import option_tables as known

_MISSING = re.compile(r"missing (argument|path|filename)|is missing|macro name missing")
_NVCC = re.compile(r"^--(\S+)( [<{\[]\S.*?| entry,\.\.\.)? +(?:\(-(\S+)\))?")


def said(*argv: str) -> str:
    """What a program prints, in English."""
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", check=False, cwd=directory,
            env={"LC_ALL": "C", "PATH": "/usr/local/bin:/usr/bin:/bin"},
        )  # fmt: skip
    return done.stdout + done.stderr


def gcc_names() -> set[str]:
    """Every option that g++ completes."""
    return {
        line.split()[0] for line in said("g++", "--completion=-").splitlines() if line[:1] == "-"
    }


def clang_names(program: str = "clang++") -> set[str]:
    """Every option that clang completes."""
    return {
        line.split()[0] for line in said(program, "--autocomplete=-").splitlines() if line.strip()
    }


def takes_value(program: str, option: str) -> bool:
    """Whether a compiler misses a value when the option is the last word."""
    return _MISSING.search(said(program, "-###", "-c", "x.cpp", option)) is not None


def gcc_help() -> set[str]:
    """The options that ``g++ --help=separate`` lists."""
    text = said("g++", "--help=separate")
    return set(re.findall(r"^  (--?[^\s<=]+)(?=[\s<])", text, re.MULTILINE))


def clang_help(program: str = "clang++") -> set[str]:
    """The options that ``clang --help-hidden`` shows with a value after a space."""
    text = said(program, "--help-hidden")
    return set(re.findall(r"^  (--?[^\s<=,]+) <", text, re.MULTILINE))


def separate(program: str, names: set[str], listed: set[str]) -> set[str]:
    """The options of a compiler that take the next word as their value."""
    asked = sorted(name for name in names - listed if name[-1] not in "=-")
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda name: takes_value(program, name), asked)
    return listed | {name for name, takes in zip(asked, answers, strict=True) if takes}


def linker(program: str = "ld") -> tuple[set[str], set[str]]:
    """The options of ld without their dashes: all, and those that need a value. Not those of
    Windows' formats, which a link for Linux refuses."""
    names: set[str] = {"z"}
    emulation = ""
    for line in said(program, "--help").splitlines():
        if headed := re.match(r"(\w+):\s*$", line):
            emulation = headed[1]
        if emulation.endswith(("pe", "pep")):
            continue
        if re.match(r"  -[-\w]", line):
            forms = re.split(r"  +", line.strip())[0].split(", ")
            names |= {re.split(r"[ =\[]", form.strip())[0].lstrip("-") for form in forms}
    names.discard("")
    asked = sorted(names)
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda name: linker_takes_value(name, program), asked)
    return names, {name for name, takes in zip(asked, answers, strict=True) if takes}


def linker_takes_value(name: str, program: str = "ld") -> bool:
    """Whether ld misses a value when the option is the last word, but not with a word after it."""
    option = f"-{name}" if len(name) == 1 else f"--{name}"
    alone = said(program, option)
    unknown = "unrecognized option"
    return "missing argument" in alone or (
        unknown in alone and unknown not in said(program, option, "x")
    )


def nvcc(program: str = "nvcc") -> dict[str, tuple[str, str]]:
    """The options of nvcc: the long name, the short name, and ``value`` or nothing."""
    found: dict[str, tuple[str, str]] = {}
    for line in said(program, "--help").splitlines():
        match = _NVCC.match(line)
        if match:
            found[match[1]] = (match[3] or match[1], "value" if match[2] else "")
    return found


def _written(name: str, values: set[str], what: str) -> str:
    listed = " ".join(f'"{each}",' for each in sorted(values))
    words = textwrap.fill(listed, 100, initial_indent="    ", subsequent_indent="    ",
                          break_on_hyphens=False)  # fmt: skip
    return f"# {what}\n{name} = frozenset((\n{words}\n))  # fmt: skip\n"


def main() -> None:
    """Print the module."""
    host = set(known.HOST_VALUES)
    if shutil.which("g++"):
        host |= separate("g++", gcc_names(), gcc_help())
    for program in ("clang++", "clang++-15"):
        if shutil.which(program):
            host |= separate(program, clang_names(program), clang_help(program))
    names, values = linker()
    flags, valued = set(known.NVCC_FLAGS), set(known.NVCC_VALUES)
    for long, (short, value) in nvcc().items():
        (valued if value else flags).update((f"--{long}", f"-{short}"))
    print('"""How the compilers\' options take values. Written by ``tests/option_tables.py``."""\n')
    print("from __future__ import annotations\n")
    print(_written("HOST_VALUES", host, "Options of gcc or clang whose value is the next word."))
    print(_written("LINKER", names | known.LINKER, "Options of ld, without their dashes."))
    print(_written("LINKER_VALUES", values | known.LINKER_VALUES, "Those that need a value."))
    print(_written("NVCC_FLAGS", flags, "Options of nvcc without a value."))
    print(_written("NVCC_VALUES", valued, "Options of nvcc with a value."), end="")


if __name__ == "__main__":
    sys.exit(main())
