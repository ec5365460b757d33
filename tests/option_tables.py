"""The options of the compilers here, as they list them."""

from __future__ import annotations

import re
import subprocess
import tempfile

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


def gcc_help() -> set[str]:
    """The options that ``g++ --help=separate`` lists."""
    text = said("g++", "--help=separate")
    return set(re.findall(r"^  (--?[^\s<=]+)(?=[\s<])", text, re.MULTILINE))


def clang_help(program: str = "clang++") -> set[str]:
    """The options that ``clang --help-hidden`` shows with a value after a space."""
    text = said(program, "--help-hidden")
    return set(re.findall(r"^  (--?[^\s<=,]+) <", text, re.MULTILINE))


def linker(program: str = "ld") -> set[str]:
    """The options of ld without their dashes. Not those of Windows' formats, which a link for Linux
    refuses."""
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
    return names - {""}


def nvcc(program: str = "nvcc") -> dict[str, tuple[str, str]]:
    """The options of nvcc: the long name, the short name, and ``value`` or nothing."""
    found: dict[str, tuple[str, str]] = {}
    for line in said(program, "--help").splitlines():
        match = _NVCC.match(line)
        if match:
            found[match[1]] = (match[3] or match[1], "value" if match[2] else "")
    return found
