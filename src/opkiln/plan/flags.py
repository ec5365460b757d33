"""Refuses flags from authors and variables that would take effect before the observer can see it.

Options that belong to the plan are refused by name, and options that name an output file, a
program, a plugin or a response file. Any other flag is accepted. The files that it makes a step
read become facts. A step that starts a program outside the toolchain, or writes outside its
directory, is refused by what the observer saw (``observing.limits``).

Each word of a list is judged, even if it is the value of an option. Words that are passed on
(``-Wl,``, ``-Xlinker``, ``-Wa,``, ``-Xptxas``) are judged as options of the program that gets them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from opkiln.base.lazy import Record
from opkiln.errors import SpecError

# Why a flag is refused.
_RUNS = "it could start another program or load code into the compiler"
_WRITES = "it could write a file outside the build, or one that the build does not expect"
_PLANNED = "the plan chooses languages, outputs, dependency files and the target itself"
_NO_VALUE = "its value is missing, so it would take the next argument of the plan"
_MAKE = "gcc starts make, mv and touch for it"
_RESPONSE = "compilers replace a value that begins with '@' by the words of a file"
_CHOSEN_BY_PLAN = "the plan chooses architectures, host compiler, threads and outputs"
_ONE_ARCHITECTURE = "nvcc does not accept a list of architectures together with it"
_SHELL = "nvcc passes its flags to a shell, which would interpret one of its characters"

# Text without characters that are special to a shell or in nvcc's lists.
PLAIN = re.compile(r"[A-Za-z0-9_@%+=:./^-]*\Z")


class Option(Record):
    """One option of a list of flags, with its value."""

    name: str  # empty for an input file, which is not an option
    value: str = ""
    words: tuple[str, ...] = ()  # as they were given
    complete: bool = True  # False if the value is missing


class _FlagRefused(Exception):
    """A flag that is refused, and why."""

    def __init__(self, flag: str, why: str) -> None:
        self.flag = flag
        self.why = why


# -- gcc and clang -----------------------------------------------------------------------------

# Options that take a value, joined or as the next word; the longer ones first.
_WITH_VALUE = (
    "--include-directory-after", "--include-directory", "--library-directory", "--undefine-macro",
    "--define-macro", "--include", "--imacros", "-iwithprefixbefore", "-iwithprefix",
    "-cxx-isystem", "-idirafter", "-isysroot", "-isystem", "-iprefix", "-include", "-imacros",
    "-iquote", "-rpath", "-D", "-U", "-I", "-L", "-l", "-T", "-R", "-z",
)  # fmt: skip
_PASSED_LISTS = ("-Wl", "-Wa", "-Wp")
_TO_LINKER = ("-Wl", "-Xlinker", "--for-linker")
_TO_ASSEMBLER = ("-Wa", "-Xassembler", "--for-assembler")
_TO_LLVM = ("-mllvm",)
_PASSED_WORDS = (
    *_TO_LINKER[1:], *_TO_ASSEMBLER[1:], *_TO_LLVM, "-Xpreprocessor", "-Xclang",
)  # fmt: skip
# Options that take the next word as their value if nothing is joined to them.
_ALONE = frozenset((
    *_WITH_VALUE, *_PASSED_WORDS, "--param", "--std", "-e", "-u", "--entry", "--force-link",
))  # fmt: skip
# Beginnings of options that are refused. gcc takes --NAME for -fNAME.
_REFUSED_BY_HOST = {
    _RUNS: (
        "-wrapper", "--wrapper", "-specs", "--specs", "--config", "-B", "--prefix", "--ld-path",
        "-ccc-", "-gcc-", "--gcc-", "--sysroot", "-fuse-ld=", "-load", "-add-plugin", "-plugin",
        "-fplugin", "-fpass-plugin", "-fmodule-mapper", "-foffload-options", "-fsycl-host-compiler",
        "--ptxas-path", "--amdgpu-arch-tool", "--hipspv-pass-plugin", "-ftarget-ar",
        "-ftarget-ranlib", "-iplugindir",
    ),
    _WRITES: (
        "-d", "-aux-info", "-save-", "--save-", "-time=", "-serialize", "--serialize", "-gen-",
        "-module-", "-index-", "-stats-file", "-header-include-file", "-fdump", "-fdeps",
        "-fdiagnostics-add-output", "-fdiagnostics-set-output", "-fproc-stat-report=",
        "-fprofile-note", "-fcrash-diagnostics-dir", "-foptimization-record-file", "-fsave-",
        "-fthin-link-bitcode", "-ftime-trace=", "-fmodules-cache-path", "-fmodule-output",
        "-fsycl-dump", "-fsycl-int", "-qopt-report-file", "-arcmt-",
        "-gsplit-dwarf", "--debug=split",
    ),
    _PLANNED: (
        "-M", "--dependencies", "--write-", "--user-dependencies", "-o", "--output", "-x",
        "--language", "--preprocess", "--assemble", "--target", "-target", "-###", "-fsyntax-only",
        "-emit-", "--emit-", "--driver-mode", "-working-directory", "--analyze", "--precompile",
        "--migrate", "-rewrite-", "-extract-api", "-print-", "--print-", "--help", "--version",
    ),
}  # fmt: skip
_REFUSED_WORDS = ("-E", "-S", "-r", "-")  # the plan's
_LINKERS = frozenset(f"-fuse-ld={name}" for name in ("bfd", "gold", "lld", "mold"))
# With a value, they write a file.
_WRITES_BY_VALUE = ("-fopt-info", "-fdiagnostics-format=sarif-file", "-fdiagnostics-format=json-f")
_ONE_PROCESS = ("-flto=thin", "-flto=full", "-flto=1", "-flto=none")


def host_options(words: Iterable[str]) -> Iterator[Option]:
    """How gcc and clang divide a list of flags, as far as their values matter here."""
    rest = iter(words)
    for word in rest:
        passed, comma, value = word.partition(",")
        if not word.startswith("-") or word == "-":
            yield Option("", word, (word,))
        elif comma and passed in _PASSED_LISTS:
            yield Option(passed, value, (word,))
        elif word in _ALONE:
            yield _take_value(word, rest)
        else:
            yield _split_value(word)


def _take_value(word: str, rest: Iterator[str]) -> Option:
    value = next(rest, None)
    if value is None:
        return Option(word, "", (word,), complete=False)
    return Option(word, value, (word, value))


def _split_value(word: str) -> Option:
    name, equals, value = word.partition("=")
    if equals and name in _ALONE and name.startswith("--"):
        return Option(name, value, (word,))
    for option in _WITH_VALUE:
        if word.startswith(option) and not option.startswith("--"):
            return Option(option, word[len(option) :], (word,))
    return Option(word, "", (word,))


def _judge_host(words: Iterable[str]) -> None:
    to_linker: list[str] = []
    for option in host_options(words):
        values = option.value.split(",") if option.name in _PASSED_LISTS else [option.value]
        flag = " ".join(option.words)
        if any(word.startswith("@") for word in (*option.words, *values)):
            raise _FlagRefused(flag, _RESPONSE)
        if not option.complete:
            raise _FlagRefused(flag, _NO_VALUE)
        if option.name in _TO_LINKER:
            to_linker += values
        elif option.name in _TO_ASSEMBLER:
            for word in values:
                _judge_assembler(word)
        elif option.name in _TO_LLVM:
            _judge_part(option.value, flag)
        else:
            for word in (*option.words, *values):
                _judge_host_word(word, option)
    _judge_linker(to_linker)


def _judge_host_word(word: str, option: Option) -> None:
    if not word.startswith("-"):
        return
    passed = option.name in _PASSED_WORDS or word not in option.words
    flag = word if passed else " ".join(option.words)
    # The driver gives the compiler -I@file as two words, and that one replaces the second.
    if _split_value(word).value.startswith("@") or re.match(r"-(?:[eu]|(?![DU])[^=]*=)@", word):
        raise _FlagRefused(flag, _RESPONSE)
    if word in _REFUSED_WORDS:
        raise _FlagRefused(flag, _PLANNED)
    names = (word, "-f" + word[2:]) if word.startswith("--") else (word,)
    for name in names:
        for why, refused in _REFUSED_BY_HOST.items():
            if name.startswith(refused) and name not in _LINKERS:
                raise _FlagRefused(flag, why)
        if name.startswith(_WRITES_BY_VALUE) and "=" in name:
            raise _FlagRefused(flag, _WRITES)
        if name.startswith("-flto=") and name not in _ONE_PROCESS:
            raise _FlagRefused(flag, _MAKE)


# -- ld and as ---------------------------------------------------------------------------------

# Options of ld, gold, lld and mold, without their dashes. An abbreviation counts as the option.
_REFUSED_BY_LINKER = {
    _RUNS: (
        "plugin", "error-handling-script", "run", "load-pass-plugin", "mllvm", "chroot",
    ),
    _WRITES: (
        "Map", "print-map", "dependency-file", "out-implib", "cmse-implib", "repro", "save-temps",
        "thinlto-cache-dir", "time-trace", "lto-obj-path", "opt-remarks-filename", "dwo-dir",
        "print-symbol-order", "why-extract", "separate-debug-file", "incremental", "dump",
        "print-archive-stats", "base-file", "output-def", "remap-inputs-file",
    ),
    _PLANNED: (
        "output", "oformat", "relocatable", "Ur", "mri-script", "target-help", "emit-llvm",
        "lto-emit-asm",
    ),
}  # fmt: skip
_REFUSED_NAMES = ("o", "r", "i", "M", "c", "help", "version")
# These print; with a value they write a file.
_PRINTS_OR_WRITES = ("stats", "cref", "print-gc-sections", "print-icf-sections", "verbose")
_LINKER_VALUES = ("rpath", "rpath-link", "soname", "version-script", "dynamic-linker", "z", "T")


def _judge_linker(words: list[str]) -> None:
    for index, word in enumerate(words):
        if word.startswith("@") or re.match(r"-[LTRyzuleh]@|--?[\w-]+=@", word):
            raise _FlagRefused(word, _RESPONSE)
        if not word.startswith("-"):
            continue
        name, equals, value = word.lstrip("-").partition("=")
        following = words[index + 1 : index + 2]
        flag = " ".join((word, *(each for each in following if not each.startswith("-"))))
        if name in _LINKER_VALUES and not equals and not following:
            raise _FlagRefused(word, _NO_VALUE)
        # "-omagic" is "-o magic", and "-sM" is "-s -M", but "--orphan-handling" is one name.
        letters = name[:1] if name.startswith("o") and not word.startswith("--") else name
        if letters in _REFUSED_NAMES or re.match(r"-[sSxXtvEdn]+M\Z", word):
            raise _FlagRefused(word, _PLANNED if letters != "M" else _WRITES)
        for why, refused in _REFUSED_BY_LINKER.items():
            if len(name) > 1 and any(
                each.startswith(name) or name.startswith(each) for each in refused
            ):
                raise _FlagRefused(word if equals else flag, why)
        if value and name.startswith(_PRINTS_OR_WRITES):
            raise _FlagRefused(word, _WRITES)


def _judge_assembler(word: str) -> None:
    if word.startswith(("@", "-I@")):
        raise _FlagRefused(word, _RESPONSE)
    if re.match(r"-a[a-z]*=|--M|--dump|-o", word):
        raise _FlagRefused(word, _WRITES)


# -- the parts behind nvcc, and LLVM -----------------------------------------------------------

_PART_REFUSED = (
    r"--?(?:o|optf|L|l|create|image\d?|cmdline|link|time|uidx|Xnvvm|Xptxas|load|add-plugin)\Z|"
    r".*(?:file|path|[_-]dir|directory|output|plugin|script|remark|[_-]name\b|trace|temps|"
    r"register-link|gen_c|stub|dot-cfg|view-|reproducer)"
)


def _judge_part(word: str, flag: str) -> None:
    """Judge an option of ptxas, nvlink, cudafe++, fatbinary or LLVM."""
    name, _, value = word.partition("=")
    if word.startswith("@") or value.startswith("@"):
        raise _FlagRefused(flag, _RESPONSE)
    if name in ("-arch", "--gpu-name"):
        raise _FlagRefused(flag, _CHOSEN_BY_PLAN)
    if "/" in word or (word.startswith("-") and re.match(_PART_REFUSED, name)):
        raise _FlagRefused(flag, _WRITES)


# -- nvcc --------------------------------------------------------------------------------------

_NVCC_TO_HOST = ("-Xcompiler", "--compiler-options")
_NVCC_TO_LINKER = ("-Xlinker", "--linker-options")
_NVCC_TO_PARTS = (
    "-Xptxas", "--ptxas-options", "-Xnvlink", "--nvlink-options", "-Xcudafe", "-Xfatbin", "-Xcicc",
)  # fmt: skip
_NVCC_LISTS = (
    *_NVCC_TO_HOST, *_NVCC_TO_LINKER, *_NVCC_TO_PARTS, "-diag-suppress", "--diag-suppress",
    "-diag-warn", "--diag-warn", "-diag-error", "--diag-error",
)  # fmt: skip
# Options, without their dashes, that the plan chooses or that write, run or stop early.
_REFUSED_BY_NVCC = frozenset((
    "gencode", "generate-code", "arch", "gpu-architecture", "code", "gpu-code", "ccbin",
    "compiler-bindir", "optf", "options-file", "run", "run-args", "link", "lib", "ptx", "cubin",
    "fatbin", "cuda", "keep", "keep-dir", "save-temps", "clean", "clean-targets", "odir",
    "output-directory", "o", "output-file", "dryrun", "ldir", "libdevice-directory", "target-dir",
    "target-directory", "t", "threads", "objtemp", "objdir-as-tempdir", "dlink", "device-link",
    "optix-ir", "ltoir", "time", "split-compile", "split-compile-extended", "x", "E", "preprocess",
    "arbin", "archiver-binary", "Xarchive", "archive-options", "fdevice-time-trace",
    "fdevice-syntax-only", "idp", "input-drive-prefix", "ddp", "dependency-drive-prefix", "dp",
    "drive-prefix", "hls", "host-linker-script", "aug-hls", "augment-host-linker-script", "r",
    "relocatable-link", "jobserver", "gen-opt-lto", "qpp-config", "h", "help", "V", "version",
))  # fmt: skip
_REFUSED_NVCC_PREFIXES = ("-M", "--generate-dependenc", "--generate-nonsystem", "--dependency-")
# Other options with a value, as the next word or after a "=". The first of them have two forms.
_NVCC_VALUES = frozenset((
    *(dashes + name for dashes in ("-", "--") for name in (
        "std", "maxrregcount", "ftz", "fmad", "prec-div", "prec-sqrt", "cudart", "cudadevrt",
        "default-stream", "Werror", "dopt", "compress-mode", "sanitize", "frandom-seed",
        "ftemplate-depth", "ftemplate-backtrace-limit", "static-global-template-stub",
        "device-entity-has-hidden-visibility", "device-stack-protector",
    )),
    *_NVCC_LISTS, "-D", "-U", "-I", "-L", "-l", "-O", "-m", "-e", "-isystem", "--system-include",
    "-include", "--pre-include", "--include-path", "--define-macro", "--undefine-macro",
    "--library", "--library-path", "--machine", "--entries", "--optimize", "-rdc",
    "--relocatable-device-code", "-opt-info", "--optimization-info", "-Ofc", "--Ofast-compile",
    "-jtd", "--jump-table-density", "-brief-diag", "--brief-diagnostics",
))  # fmt: skip
_NVCC_JOINED = ("-D", "-U", "-I", "-L", "-l", "-O")
_NOT_JOINED = ("-lineinfo", "-lto", "-link")
# nvcc does not accept these together with -gencode.
_WHOLE_PROGRAM = (
    "-dlto", "-lto", "--lto", "--dlink-time-opt", "-ewp", "--extensible-whole-program",
)  # fmt: skip
# Device code in one file calls device code in another. The objects need a device link.
_RELOCATABLE = ("-rdc", "--relocatable-device-code")
_COMPILE_RELOCATABLE = ("-dc", "--device-c")  # they also mean -c, which the plan adds itself


def nvcc_options(words: Iterable[str]) -> Iterator[Option]:
    """How nvcc divides a list of flags, as far as their values matter here."""
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        valued = name in _NVCC_VALUES or name.lstrip("-") in _REFUSED_BY_NVCC
        if not word.startswith("-"):
            yield Option("", word, (word,))
        elif equals and (valued or not word.startswith(_NVCC_JOINED)):
            yield Option(name, value, (word,))
        elif valued:
            yield _take_value(word, rest)
        elif word.startswith(_NVCC_JOINED) and word not in _NOT_JOINED:
            yield Option(word[:2], word[2:].removeprefix("="), (word,))
        elif word.startswith("-t") and word[2:].isdigit():
            yield Option("-t", word[2:], (word,))
        else:
            yield Option(word, "", (word,))


def _judge_nvcc(words: tuple[str, ...]) -> None:
    to_host: list[str] = []
    to_linker: list[str] = []
    for option in nvcc_options(words):
        flag = " ".join(option.words)
        name, values = option.name, [option.value]
        if name in _NVCC_LISTS:
            values = option.value.split(",")
        if name.lstrip("-") in _REFUSED_BY_NVCC or name.startswith(_REFUSED_NVCC_PREFIXES):
            raise _FlagRefused(flag, _CHOSEN_BY_PLAN)
        if name in _WHOLE_PROGRAM:
            raise _FlagRefused(flag, _ONE_ARCHITECTURE)
        if not all(PLAIN.match(each) for each in (name, *values)):
            raise _FlagRefused(flag, _SHELL)
        if any(each.startswith("@") for each in (*option.words, *values)):
            raise _FlagRefused(flag, _RESPONSE)
        if not option.complete:
            raise _FlagRefused(flag, _NO_VALUE)
        if name in _NVCC_TO_HOST:
            to_host += values
        elif name in _NVCC_TO_LINKER:
            to_linker += values
        elif name in _NVCC_TO_PARTS:
            for value in values:
                _judge_part(value, flag)
        elif name not in (*_NVCC_VALUES, *_COMPILE_RELOCATABLE, "-dw"):
            # It is for the host compiler, if nvcc was told to pass on unknown options.
            _judge_host_word(option.words[0], option)
    _judge_host(to_host)
    _judge_linker(to_linker)


def is_relocatable(flags: tuple[str, ...]) -> bool:
    """Whether nvcc flags ask for relocatable device code. If there are several, the last counts."""
    asked = False
    for option in nvcc_options(flags):
        if option.name in _COMPILE_RELOCATABLE:
            asked = True
        elif option.name in _RELOCATABLE:
            asked = option.value == "true"
    return asked


def remove_relocatable(flags: tuple[str, ...]) -> tuple[str, ...]:
    """The flags without those for relocatable device code. The plan adds its own, once."""
    return tuple(
        word
        for option in nvcc_options(flags)
        if option.name not in (*_RELOCATABLE, *_COMPILE_RELOCATABLE)
        for word in option.words
    )


# -- for the plan ------------------------------------------------------------------------------

_HINTS = {
    _CHOSEN_BY_PLAN: "TORCH_CUDA_ARCH_LIST chooses architectures, NVCC_CCBIN the host compiler, "
    "NVCC_THREADS the threads",
    _ONE_ARCHITECTURE: "-rdc=true links device code of several files",
    _NO_VALUE: "write the option and its value together, as in -I/path",
    _MAKE: "write -flto",
    _RESPONSE: "write the words of the file themselves",
}


def is_encodable(text: str) -> bool:
    """Whether a text can be an argument or a path: not if it has a lone surrogate."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def check(op: str, flags: tuple[str, ...], variable: str = "") -> None:
    """Refuse flags that a host compiler or linker must not get. Raises SpecError. ``variable`` is
    the variable that the flags come from; empty for the author's flags."""
    _check(op, flags, variable, "flag", _judge_host)


def check_nvcc(op: str, flags: tuple[str, ...], variable: str = "") -> None:
    """Refuse flags that nvcc must not get. Raises SpecError."""
    _check(op, flags, variable, "nvcc flag", _judge_nvcc)


def _check(
    op: str, flags: tuple[str, ...], variable: str, what: str, judge: Callable[..., None]
) -> None:
    for flag in flags:
        if not flag or "\0" in flag or not is_encodable(flag):
            raise SpecError(f"op {op}: the flag {flag!r} is empty or cannot be passed to a program")
    try:
        judge(flags)
    except _FlagRefused as refused:
        raise SpecError(
            f"op {op}: the {what} {refused.flag!r} is not allowed",
            why=refused.why,
            hint=f"unset {variable}" if variable else _HINTS.get(refused.why, ""),
        ) from None
