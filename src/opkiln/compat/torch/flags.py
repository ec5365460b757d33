"""Flags as packages write them for torch.utils.cpp_extension, translated for a plan.

Packages write flags for the compilers: they ask nvcc for threads and architectures, g++ for the
CPU it runs on, and give paths relative to where ``setup.py`` runs. A plan chooses threads and
architectures itself, is the same on every machine, and runs its compilers in another directory. So
such flags are translated here, and only here, or left out with a remark. A flag that would start
another program or write elsewhere is passed on: ``plan.flags`` refuses it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from opkiln.base.model import CPU, CUDA, OpSpec
from opkiln.errors import SpecError
from opkiln.machine.toolchain import find
from opkiln.settings import settings

# Options that take a directory or a file, the longer ones first.
_DIRECTORIES = ("-isystem", "-iquote", "-idirafter", "-I", "-L")
_FILES = ("-include", "-imacros")

# Flags that are left out. Those for dependency files, intermediate files and languages, of every
# compiler; of nvcc, those for threads, because the engine knows what else runs, and for link-time
# optimization of device code, which nvcc does for only one architecture at a time.
_LEFT_OUT = frozenset((
    "-MD", "-MMD", "-MP", "-MG", "-save-temps", "--save-temps", "-keep", "--keep", "-time",
    "--time", "-dryrun", "--dryrun",
))  # fmt: skip
_LEFT_OUT_WITH_VALUE = frozenset(("-MF", "-MT", "-MQ", "-x", "--x", "-keep-dir", "--keep-dir"))
_THREADS = frozenset(("-t", "--threads", "-split-compile", "--split-compile"))
_THREADS_JOINED = re.compile(r"-t\d+\Z")
_PLANNED = "the plan sets intermediate files and languages itself"
_PORTABLE = "a build does not depend on where it runs"
_LEFT_OUT_OF_NVCC = {
    **dict.fromkeys(_LEFT_OUT | _LEFT_OUT_WITH_VALUE, _PLANNED),
    **dict.fromkeys(_THREADS, "NVCC_THREADS limits nvcc's threads"),
    **dict.fromkeys(
        ("-dlto", "-lto", "--dlink-time-opt"), "device code is linked without optimization"
    ),
}
# Link-time optimization in several processes, for which gcc starts make. One process does the same.
_PARALLEL_LTO = re.compile(r"-flto=(auto|jobserver|\d+)\Z")
_HOST_COMPILER = frozenset(("-ccbin", "--compiler-bindir"))
_FOR_HOST = frozenset(("-Xcompiler", "--compiler-options"))
_FOR_OTHERS = frozenset((
    "-Xptxas", "--ptxas-options", "-Xcudafe", "-Xnvlink", "--nvlink-options", "-Xfatbin",
))  # fmt: skip
_WITH_VALUE = _THREADS | _LEFT_OUT_WITH_VALUE | _HOST_COMPILER | _FOR_HOST | _FOR_OTHERS
_ARCHITECTURES = frozenset(("-gencode", "--generate-code", "-arch", "--gpu-architecture"))
_WORDS = ("native", "all", "all-major")  # that nvcc's -arch takes, and so does an arch list
_NATIVE = frozenset(("-march=native", "-mcpu=native"))


class Flags(NamedTuple):
    """The flags for a declaration; ``remarks`` name those that were left out."""

    cxx: tuple[str, ...] = ()
    device: tuple[str, ...] = ()
    link: tuple[str, ...] = ()
    archs: str = ""  # an arch list, if the flags name architectures
    native: bool = False  # build for the CPU of this machine, or the one that OPKILN_CPU names
    remarks: tuple[str, ...] = ()

    def add_to(self, spec: OpSpec) -> OpSpec:
        """The declaration with these flags. A plan for CUDA links the CUDA runtime itself."""
        link = tuple(flag for flag in self.link if spec.backend != CUDA or flag != "-lcudart")
        return spec._replace(
            cxx_args=(*spec.cxx_args, *self.cxx),
            device_args=(*spec.device_args, *(self.device if spec.backend != CPU else ())),
            ldflags=link,
            vectorize=self.native,
        )


def translate(
    op: str,
    cxx: Iterable[str] = (),
    device: Iterable[str] = (),
    link: Iterable[str] = (),
    *,
    backend_is_cuda: bool = True,
) -> Flags:
    """Flags for the C++ compiler, the device compiler and the linker. Raises SpecError, ArchError.

    Paths are relative to the current directory.
    """
    remarks: list[str] = []
    own, native = _translate_cxx(_drop_empty(cxx), remarks)
    words, asked = tuple(_drop_empty(device)), ""
    if backend_is_cuda:
        words, asked = _split_architectures(_translate_nvcc(op, words, remarks))
    return Flags(
        cxx=tuple(own),
        device=words,
        link=tuple(_translate_link(_drop_empty(link))),
        archs=asked,
        native=native,
        remarks=tuple(dict.fromkeys(remarks)),
    )


def shell_words(flags: Iterable[str] | None) -> list[str]:
    """Flags as torch passes them to ninja, and ninja to a shell, split into words.

    One flag may contain several words. Quotes are the shell's, and ``$$`` is ninja's ``$``.
    """
    return [word for flag in flags or () for word in shlex.split(flag.replace("$$", "$"))]


def _drop_empty(flags: Iterable[str]) -> list[str]:
    """The flags without empty ones, which come from splitting a variable that is not set."""
    return [word for flag in flags if (word := os.fspath(flag).strip())]


def _translate_cxx(words: Iterable[str], remarks: list[str]) -> tuple[list[str], bool]:
    kept: list[str] = []
    native = False
    rest = iter(words)
    for word in rest:
        if word in _NATIVE:
            native = True
        elif word == "-mtune=native":
            remarks.append(f"{word} is left out: {_PORTABLE}")
        elif _PARALLEL_LTO.match(word):
            kept.append("-flto")
        elif word in _LEFT_OUT or word.startswith("-save-temps="):
            remarks.append(f"{word} is left out: {_PLANNED}")
        elif word in _LEFT_OUT_WITH_VALUE:
            remarks.append(f"{word} {next(rest, '')} is left out: {_PLANNED}")
        else:
            kept += _make_path_absolute(word, rest, "")
    return kept, native


def _translate_nvcc(op: str, words: Iterable[str], remarks: list[str]) -> Iterator[str]:
    rest = iter(words)
    for word in rest:
        option, joined, value = word.partition("=")
        whole = word
        if option in _WITH_VALUE and not joined:
            value = next(rest, "")
            whole = f"{word} {value}"
        if _THREADS_JOINED.match(word):
            option = "-t"
        if option in _LEFT_OUT_OF_NVCC:
            remarks.append(f"{whole} is left out: {_LEFT_OUT_OF_NVCC[option]}")
        elif option in _HOST_COMPILER:
            if _is_host_compiler(value):
                remarks.append(f"{option} {value} is left out: it is the host compiler anyway")
                continue
            raise SpecError(
                f"op {op}: the nvcc flag {option!r} is not allowed",
                why="a setting chooses nvcc's host compiler, which also compiles the rest of the "
                "op",
                hint=f"NVCC_CCBIN={shlex.quote(value)}    # without the flag",
            )
        elif option in _FOR_HOST:
            yield from _translate_host_flags(value, remarks)
        elif option in _FOR_OTHERS:
            # nvcc takes a list separated by commas. It removes quotes with its own shell.
            yield f"{option}={','.join(shlex.split(value.replace(',', ' ')))}"
        else:
            yield from _make_path_absolute(_unquote(word), rest, "=")


def _is_host_compiler(named: str) -> bool:
    """Whether this is the host compiler or its C driver: packages pass on ``$CC``."""
    own = settings.ccbin or (settings.cxx[-1] if settings.cxx else "g++")
    directory, name = os.path.split(named)
    of_cxx = re.sub(r"clang(?!\+)", "clang++", re.sub(r"(g|\bc)cc?\b", r"\1++", name))
    drivers = (find.find_program(each) for each in (named, os.path.join(directory, of_cxx)))
    chosen = find.find_program(own)
    return chosen is not None and os.path.realpath(chosen) in {
        os.path.realpath(path) for path in drivers if path is not None
    }


def _translate_host_flags(text: str, remarks: list[str]) -> Iterator[str]:
    for part in shlex.split(text.replace(",", " ")):
        if part in _NATIVE or part == "-mtune=native":
            remarks.append(f"-Xcompiler={part} is left out: {_PORTABLE}")
        else:
            yield f"-Xcompiler={part}"


def _unquote(word: str) -> str:
    """The word without quotes around it, or around the part after the first ``=``."""
    option, equals, value = word.partition("=")
    for text, before in ((word, ""), (value, option + equals)):
        if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
            return before + text[1:-1]
    return word


def _split_architectures(words: Iterable[str]) -> tuple[tuple[str, ...], str]:
    """The other flags, and the architecture flags as an arch list."""
    plain: list[str] = []
    asked: list[str] = []
    rest = iter(words)
    for word in rest:
        option, joined, value = word.partition("=")
        if option not in _ARCHITECTURES:
            plain.append(word)
            continue
        text = (value if joined else next(rest, "")).replace('"', "").replace("\\", "")
        if text in _WORDS:
            asked.append(text)
        else:
            plain.append(f"{option}={text}")
    if not plain:
        return (), ";".join(asked)
    from opkiln.machine.arch import cuda

    others, found = cuda.split_flags(plain)
    return others, ";".join([*asked, *filter(None, [cuda.show(found)])])


def _translate_link(words: Iterable[str]) -> Iterator[str]:
    rest = iter(words)
    for word in rest:
        if _PARALLEL_LTO.match(word):
            yield "-flto"
        elif word.startswith("-Wl,"):
            yield ",".join(_make_file_absolute(part) for part in word.split(","))
        elif word.startswith("-"):
            yield from _make_path_absolute(word, rest, "")
        else:
            yield _make_file_absolute(word)


def _make_file_absolute(word: str) -> str:
    """The word. If it is the path of an existing file, alone or after a ``=``, made absolute."""
    option, equals, value = word.rpartition("=")
    if value and not value.startswith("-") and os.path.isfile(value):
        return option + equals + os.path.abspath(value)
    return word


def _make_path_absolute(word: str, rest: Iterator[str], joint: str) -> list[str]:
    """One flag; a path in it or after it is made absolute and joined to its option.

    ``joint`` is what nvcc needs between an option of several letters and its value.
    """
    for option in (*_DIRECTORIES, *_FILES):
        if not word.startswith(option):
            continue
        value = word[len(option) :].removeprefix("=") or next(rest, "")
        if not value:
            return [word]
        # -include may also name a header that is searched for, such as torch/extension.h.
        if option in _DIRECTORIES or os.path.isfile(value):
            value = os.path.abspath(value)
        return [option + (joint if len(option) > 2 else "") + value]
    return [word]
