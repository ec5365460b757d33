"""Refuses flags from authors and variables that would bypass the plan.

A list of flags is divided into options and their values as the compilers divide it. An option's
value is never taken for an option: ``-I -Xlinker`` is a directory. What is passed on (``-Wl,``,
``-Xlinker``, ``-Wa,``, ``-Wp,``, ``-Xclang``, ``-mllvm``, ``-Xcompiler``, ``-Xptxas``) is divided
by the rules of the program that gets it. ``option_tables`` has what the compilers say about their
options.

Each option is then judged by name. An option that is not known here may be used if it belongs to a
family of options that only change code or warnings (``-f``, ``-m``, ``-W``, ``-O``, ``-g``) and
names no path. Everything else is refused.
"""

from __future__ import annotations

import re

from opkiln.errors import SpecError
from opkiln.record import Record
from opkiln.steps import option_tables as tables

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# Why a flag is refused.
_RUNS = "it could start another program or load code into the compiler"
_WRITES = "it could write a file outside the build, or one that the build does not expect"
_READS = "it reads a file that is in no cache key"
_PLANNED = "the plan chooses languages, outputs, dependency files and the target itself"
_NO_VALUE = "its value is missing, so it would take the next argument of the plan"
_UNKNOWN = "opkiln does not know this option"
_PATH = "opkiln does not know what this option does with a path"
_MAKE = "gcc starts make, mv and touch for it"
_RESPONSE = "compilers replace a value that begins with '@' by the words of a file"
_CHOSEN_BY_PLAN = "the plan chooses architectures, host compiler, threads and outputs"

# Patterns below are texts: compiling them takes longer than a hit, and few flags need them.

# Text without characters that are special to a shell or in nvcc's lists.
PLAIN = re.compile(r"[A-Za-z0-9_@%+=:./^-]*\Z")
# A value that names no file outside the working directory and has no option in it.
_IN_WORD = frozenset(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_+.,:;!^~%*#()[]-"
)


def _is_word(value: str) -> bool:
    return _IN_WORD.issuperset(value) and not value.startswith(("-", "."))


class Option(Record):
    """One option of a list of flags, with its value."""

    name: str  # empty for an input file, which is not an option
    value: str = ""
    words: tuple[str, ...] = ()  # as they were given
    complete: bool = True  # False if the value is missing


class _Refused(Exception):
    """A flag that is refused, and why."""

    def __init__(self, flag: str, why: str) -> None:
        self.flag = flag
        self.why = why


# -- gcc and clang -----------------------------------------------------------------------------

# Options that take a value, joined or as the next word, and reach nothing but their own program.
_COMPILER_VALUES = (
    "-D", "-U", "-I", "-isystem", "-iquote", "-idirafter", "-include", "-imacros", "-iprefix",
    "-iwithprefixbefore", "-iwithprefix", "-isysroot", "-cxx-isystem", "--include-directory-after",
    "--include-directory", "--include", "--imacros", "--define-macro", "--undefine-macro",
)  # fmt: skip
_LINK_VALUES = ("-L", "-l", "-T", "-R", "-z", "-rpath", "--library-directory")
# Options whose value is always the next word.
_NEXT_WORD = ("-e", "-u", "--entry", "--force-link")
_PARAMETER = "--param"
_WITH_VALUE = tuple(sorted((*_COMPILER_VALUES, *_LINK_VALUES), key=len, reverse=True))

# Options that pass a word on, and the program that gets it.
_LINKER, _ASSEMBLER, _COMPILER, _LLVM = "linker", "assembler", "compiler", "llvm"
_PASSED_LISTS = {"-Wl": _LINKER, "-Wa": _ASSEMBLER, "-Wp": _COMPILER}
_PASSED_WORDS = {
    "-Xlinker": _LINKER, "--for-linker": _LINKER, "-Xassembler": _ASSEMBLER,
    "--for-assembler": _ASSEMBLER, "-Xpreprocessor": _COMPILER, "-Xclang": _COMPILER,
    "-mllvm": _LLVM,
}  # fmt: skip

# Options without a value that change no more than code, warnings or what is linked.
_HARMLESS = frozenset((
    "-ansi", "-pedantic", "-pedantic-errors", "-w", "-v", "-H", "-C", "-CC", "-P", "-Q", "-c",
    "-p", "-pg", "-pipe", "-pthread", "-pthreads", "-remap", "-trigraphs", "-undef", "-time", "-s",
    "-shared", "-shared-libgcc", "-shared-libasan", "-shared-libsan", "-static", "-static-pie",
    "-pie", "-rdynamic", "-nostdlib", "-nostdlib++", "-nostdlibinc", "-nodefaultlibs",
    "-nostartfiles", "-nolibc", "-nostdinc", "-nostdinc++", "-nobuiltininc",
    "-canonical-prefixes", "-pass-exit-codes", "-Qunused-arguments", "-Qn", "-Qy", "-ipo", "-mkl",
    "--ansi", "--pedantic", "--pedantic-errors", "--all-warnings", "--extra-warnings",
    "--no-warnings", "--coverage", "--debug", "--optimize", "--profile", "--verbose", "--static",
    "--shared", "--no-standard-includes", "--no-standard-libraries", "--trigraphs", "-coverage",
    "--start-no-unused-arguments", "--end-no-unused-arguments",
))  # fmt: skip
# Families of options: one word, and at most a plain value after a "=".
_FAMILIES = (
    "-f", "-m", "-W", "-O", "-g", "-q", "-ax", "-no-", "-static-lib", "-std", "--std", "-stdlib",
    "--stdlib", "-rtlib", "--rtlib", "-unwindlib", "--unwindlib", "--optimize", "--warn-",
    "--gpu-max-threads-per-block", "-disable-llvm-", "-u",
)  # fmt: skip
# Members of these families that are refused, and why. Prefixes.
_REFUSED_MEMBERS = {
    "-fplugin": _RUNS, "-fpass-plugin": _RUNS, "-fmodule": _RUNS, "-fself-test": _RUNS,
    "-foffload-options": _RUNS, "-fsycl-host-compiler": _RUNS, "-fcpp": _RUNS,
    "-no-integrated-cpp": _RUNS, "-gcc-": _RUNS, "-ftarget-ar": _RUNS, "-ftarget-ranlib": _RUNS,
    "-fcompare-debug": _RUNS,
    "-fdump": _WRITES, "-fdeps": _WRITES, "-fdiagnostics-add-output": _WRITES,
    "-fdiagnostics-set-output": _WRITES, "-fproc-stat-report=": _WRITES, "-fprofile-note": _WRITES,
    "-fcrash-diagnostics-dir": _WRITES, "-foptimization-record-file": _WRITES,
    "-fthin-link-bitcode": _WRITES, "-ftime-trace=": _WRITES, "-fsycl-dump": _WRITES,
    "-fsycl-int": _WRITES, "-gen": _WRITES, "-module-": _WRITES, "-qopt-report-file": _WRITES,
    "-fsave-": _WRITES, "-fdoc": _WRITES, "-fdebug-cpp": _WRITES, "-fada": _WRITES,
    "-fgo-": _WRITES,
    "-fimplicit-modules": _WRITES, "-fbuild-session": _READS, "-fwpa": _PLANNED,
    "-fltrans": _PLANNED, "-fresolution": _READS,
    "-fprofile-use": _READS, "-fauto-profile": _READS, "-fprofile-instr-use": _READS,
    "-fprofile-sample-use": _READS, "-fprofile-list": _READS, "-fthinlto-index": _READS,
    "-fcs-profile-use": _READS, "-fpre-include": _READS,
    "-fsyntax-only": _PLANNED, "-fpreprocessed": _PLANNED, "-fdirectives-only": _PLANNED,
    "-Obj": _PLANNED, "-migrate": _PLANNED, "-multi": _PLANNED, "-mrelocatable-lib": _PLANNED,
    "-fuse-ld": _RUNS,
}  # fmt: skip
_REFUSED_PREFIXES = tuple(_REFUSED_MEMBERS)
# Link-time optimization with a number, "auto" or "jobserver": gcc starts make, mv and touch for it.
_ONE_PROCESS = ("-flto=thin", "-flto=full", "-flto=1", "-flto=none")
_LINKERS = frozenset(f"-fuse-ld={name}" for name in ("bfd", "gold", "lld", "mold"))
# Members whose value may be any text: it is only written into the output.
_ANY_TEXT = (
    "-ffile-prefix-map=", "-fdebug-prefix-map=", "-fmacro-prefix-map=", "-fprofile-prefix-map=",
    "-fcoverage-prefix-map=", "-fdebug-compilation-dir=", "-fcoverage-compilation-dir=",
    "-frandom-seed=", "-fmessage-length=",
)  # fmt: skip
# Families that are the compiler's own: a driver would understand more than the compiler behind it.
_REASONS = {
    "-wrapper": _RUNS, "--wrapper": _RUNS, "-specs": _RUNS, "--specs": _RUNS, "--config": _RUNS,
    "-B": _RUNS, "--prefix": _RUNS, "--ld-path": _RUNS, "-ccc-": _RUNS, "--gcc-": _RUNS,
    "--plugin": _RUNS, "--sysroot": _RUNS, "-load": _RUNS, "-plugin": _RUNS, "-add-plugin": _RUNS,
    "-M": _PLANNED, "--dependencies": _PLANNED, "--write-": _PLANNED, "-o": _PLANNED,
    "--user-dependencies": _PLANNED, "--output": _PLANNED, "-E": _PLANNED, "-S": _PLANNED,
    "-x": _PLANNED, "--language": _PLANNED, "--preprocess": _PLANNED, "--assemble": _PLANNED,
    "--target": _PLANNED, "-target": _PLANNED, "-###": _PLANNED, "-r": _PLANNED,
    "-d": _WRITES, "--dump": _WRITES, "-aux-info": _WRITES, "-save-": _WRITES,
    "--save-": _WRITES, "-time=": _WRITES, "-dependency-": _WRITES, "--serialize": _WRITES,
    "-serialize": _WRITES, "-emit-": _PLANNED,
}  # fmt: skip
# Options that take the next word as their value if nothing is joined to them.
_ALONE = frozenset((*_WITH_VALUE, *_PASSED_WORDS, *_NEXT_WORD, _PARAMETER, "--std"))


def host_options(words: Iterable[str]) -> Iterator[Option]:
    """How gcc and clang divide a list of flags."""
    rest = iter(words)
    for word in rest:
        passed, comma, _ = word.partition(",")
        if not word.startswith("-") or word == "-":
            yield Option("", word, (word,))
        elif comma and passed in _PASSED_LISTS:
            yield Option(passed, word.partition(",")[2], (word,))
        elif word in tables.HOST_VALUES or word in _ALONE:
            yield _with_next(word, rest)
        else:
            yield _joined(word)


def _with_next(word: str, rest: Iterator[str]) -> Option:
    value = next(rest, None)
    if value is None:
        return Option(word, "", (word,), complete=False)
    return Option(word, value, (word, value))


def _joined(word: str) -> Option:
    name, equals, value = word.partition("=")
    if equals and name in (*_PASSED_WORDS, _PARAMETER, "--entry", "--force-link"):
        return Option(name, value, (word,))
    for option in _WITH_VALUE:
        if word.startswith(option):
            value = word[len(option) :]
            if option.startswith("--"):
                if not value.startswith("="):
                    continue
                value = value[1:]
            return Option(option, value, (word,))
    return Option(word, "", (word,))


def _judge_host(words: Iterable[str], *, behind: bool = False) -> None:
    """Judge flags for gcc or clang. ``behind``: for the compiler behind the driver, which does not
    link."""
    passed: dict[str, list[str]] = {_LINKER: [], _ASSEMBLER: [], _COMPILER: [], _LLVM: []}
    for option in host_options(words):
        flag = " ".join(option.words)
        if any(word.startswith("@") for word in (*option.words, option.value)):
            raise _Refused(flag, _RESPONSE)
        if not option.complete:
            raise _Refused(flag, _NO_VALUE)
        if option.name in _PASSED_LISTS and not behind:
            passed[_PASSED_LISTS[option.name]] += option.value.split(",")
        elif option.name in _PASSED_WORDS and (not behind or option.name == "-mllvm"):
            passed[_PASSED_WORDS[option.name]].append(option.value)
        else:
            _boundary(option, passed[_LINKER])
            _judge_host_option(option, flag, behind=behind)
    _judge_linker(passed[_LINKER])
    _judge_assembler(passed[_ASSEMBLER])
    if passed[_COMPILER]:
        _judge_host(passed[_COMPILER], behind=True)
    for word in passed[_LLVM]:
        _judge_part(word, "-mllvm " + word)


# Stands for words between two that are passed to the linker. The linker gets them, too.
_BETWEEN = "\0"


def _boundary(option: Option, parts: list[str]) -> None:
    if parts and (not option.name or option.name in (*_LINK_VALUES, *_NEXT_WORD)):
        parts.append(_BETWEEN)


def _judge_host_option(option: Option, flag: str, *, behind: bool) -> None:
    name, value = option.name, option.value
    if not name:
        if behind or value == "-":
            raise _Refused(flag, _UNKNOWN)
    elif name in _COMPILER_VALUES or (not behind and name in (*_LINK_VALUES, *_NEXT_WORD)):
        if not value:
            raise _Refused(flag, _NO_VALUE)
    elif name in (_PARAMETER, "--std"):
        if not _is_word(value.replace("=", ":")):
            raise _Refused(flag, _PATH)
    elif name not in _HARMLESS:
        _judge_member(name, flag)


def _judge_member(name: str, flag: str) -> None:
    """Judge an option of one word that belongs to a family, or to none."""
    if name in tables.HOST_VALUES or not name.startswith(_FAMILIES):
        raise _Refused(flag, _reason(name))
    if name.startswith(_REFUSED_PREFIXES) and name not in _LINKERS:
        raise _Refused(flag, _member_reason(name))
    if name.startswith("-flto=") and name not in _ONE_PROCESS:
        raise _Refused(flag, _MAKE)
    if name.startswith("-fopt-info") and "=" in name:
        raise _Refused(flag, _WRITES)
    if not name.startswith(_ANY_TEXT):
        _plain_value(name, flag)


def _plain_value(name: str, flag: str) -> None:
    option, _, value = name.partition("=")
    if "/" in option or not _is_word(value):
        raise _Refused(flag, _PATH)
    if option.startswith("-fdiagnostics-format") and "file" in value:
        raise _Refused(flag, _WRITES)


def _reason(name: str) -> str:
    return next((why for prefix, why in _REASONS.items() if name.startswith(prefix)), _UNKNOWN)


def _member_reason(name: str) -> str:
    return next(why for prefix, why in _REFUSED_MEMBERS.items() if name.startswith(prefix))


# -- ld ----------------------------------------------------------------------------------------

# Options of ld that write, load, run, or do what the plan does, without their dashes. An
# abbreviation of one of them counts as that option. Those of gold, lld and mold are here, too.
_REFUSED_BY_LINKER = {
    "plugin": _RUNS, "plugin-opt": _RUNS, "error-handling-script": _RUNS, "run": _RUNS,
    "load-pass-plugin": _RUNS, "mllvm": _RUNS, "fork": _PLANNED,
    "o": _PLANNED, "output": _PLANNED, "oformat": _PLANNED, "r": _PLANNED, "i": _PLANNED,
    "relocatable": _PLANNED, "Ur": _PLANNED, "help": _PLANNED, "version": _PLANNED,
    "target-help": _PLANNED, "M": _WRITES, "Map": _WRITES, "print-map": _WRITES,
    "dependency-file": _WRITES, "out-implib": _WRITES, "cmse-implib": _WRITES, "c": _READS,
    "mri-script": _READS, "reproduce": _WRITES, "repro": _WRITES, "save-temps": _WRITES,
    "thinlto-cache-dir": _WRITES, "time-trace": _WRITES, "lto-obj-path": _WRITES,
    "opt-remarks-filename": _WRITES, "print-symbol-order": _WRITES, "why-extract": _WRITES,
    "separate-debug-file": _WRITES, "incremental": _WRITES, "dump": _WRITES, "chroot": _RUNS,
    "print-archive-stats": _WRITES, "vs-diagnostics": _WRITES, "dwo-dir": _WRITES,
    "emit-llvm": _PLANNED, "lto-emit-asm": _PLANNED, "Map-whole": _WRITES, "base-file": _WRITES,
    "output-def": _WRITES, "out": _PLANNED, "no-mmap-output-file": _PLANNED,
}  # fmt: skip
# These print; with a value they write a file.
_PRINTS_OR_WRITES = ("stats", "cref", "print-gc-sections", "print-icf-sections", "verbose")
_WRITING_NAME = r"plugin|output|file|dir\b|trace|dump|remark|temps|cache-|obj-path|repro"


def _linker_options(words: Iterable[str]) -> Iterator[Option]:
    """How ld divides its arguments. Names are without dashes and not abbreviated."""
    rest = iter(words)
    for word in rest:
        if not word.startswith("-") or word == "-":
            yield Option("", word, (word,))
            continue
        body, equals, value = word.lstrip("-").partition("=")
        name = _linker_name(body, two_dashes=word.startswith("--"))
        if name is None:  # a letter with a value joined to it
            yield Option(body[:1], word[2:], (word,))
        elif equals:
            yield Option(name, value, (word,))
        elif name in tables.LINKER_VALUES:
            yield _with_next(word, rest)._replace(name=name)
        else:
            yield Option(name, "", (word,))


def _linker_name(body: str, *, two_dashes: bool) -> str | None:
    """The option that this is or abbreviates; None for a letter with more after it."""
    if body in tables.LINKER or body in _REFUSED_BY_LINKER:
        return body
    # ld takes "-omagic" for "-o magic", but any other name with one dash or two.
    if two_dashes or not body.startswith("o"):
        longer = [name for name in tables.LINKER if len(name) > 1 and name.startswith(body)]
        refused = [name for name in _REFUSED_BY_LINKER if name.startswith(body)]
        if refused:
            return refused[0]
        if len(longer) == 1:
            return longer[0]
        if longer or two_dashes:
            return body
    return None


def _judge_linker(words: Iterable[str]) -> None:
    for option in _linker_options(words):
        flag = " ".join(option.words)
        if _BETWEEN in option.words:
            if option.name:
                raise _Refused(option.words[0], _NO_VALUE)
            continue
        if any(word.startswith("@") for word in (*option.words, option.value)):
            raise _Refused(flag, _RESPONSE)
        # A linker other than ld could take a value with a dash for an option.
        if not option.complete or (len(option.words) > 1 and option.value.startswith("-")):
            raise _Refused(flag, _NO_VALUE)
        if option.name:
            _judge_linker_option(option, flag)


def _judge_linker_option(option: Option, flag: str) -> None:
    name, value = option.name, option.value
    if name in _REFUSED_BY_LINKER:
        raise _Refused(flag, _REFUSED_BY_LINKER[name])
    if value and name in _PRINTS_OR_WRITES:
        raise _Refused(flag, _WRITES)
    if value and len(name) == 1 and name not in tables.LINKER_VALUES:
        raise _Refused(flag, _UNKNOWN)  # several options in one word
    if name not in tables.LINKER:
        if re.search(_WRITING_NAME, name):
            raise _Refused(flag, _UNKNOWN)
        if not _is_word(value):
            raise _Refused(flag, _PATH)


# -- as ----------------------------------------------------------------------------------------

_ASSEMBLER_VALUES = ("-I", "--defsym", "--debug-prefix-map")
_ASSEMBLER_HARMLESS = (
    r"-[JKLRWZfgwX]\Z|-a[cdghlmns]*\Z|-no-pad-sections\Z|-nocpp\Z|-E[BL]\Z|"
    r"(?P<valued>-m|--?g|--(?!M|o|dump-|help|version|target-help|listing)[a-z0-9])"
)


def _judge_assembler(words: Iterable[str]) -> None:
    rest = iter(words)
    for word in rest:
        if word in _ASSEMBLER_VALUES:
            value = next(rest, None)
            if value is None or value.startswith("-"):
                raise _Refused(word, _NO_VALUE)
            if value.startswith("@"):
                raise _Refused(f"{word} {value}", _RESPONSE)
            continue
        if word.startswith(("@", "-I@")):
            raise _Refused(word, _RESPONSE)
        if word.startswith(("-I", "--defsym=", "--debug-prefix-map=")):
            continue
        match = re.match(_ASSEMBLER_HARMLESS, word)
        if not match:
            why = _WRITES if word.startswith(("-a", "--MD", "-o")) else _UNKNOWN
            raise _Refused(word, why)
        name, _, value = word.partition("=")
        if match["valued"] and ("/" in name or not _is_word(value)):
            raise _Refused(word, _PATH)


# -- the parts behind nvcc, and LLVM -----------------------------------------------------------

_PART = r"(?s)--?[A-Za-z][A-Za-z0-9_+-]*(?:=(?P<value>.*))?\Z"
_PART_REFUSED = (
    r"--?(?:o|c|g?arch|gpu-name|optf|h|help|V|version|r|L|l|create|image\d?|cmdline|ident|link|time|uidx|ias|"
    r"Xnvvm|Xptxas|x|e|E|S|load|add-plugin|plugin|print-.*|dump.*|debug-pass.*|stats.*)\Z|"
    r".*(?:file|path|[_-]dir|directory|output|plugin|script|remark|[_-]name\b|trace|temps|"
    r"register-link|embedded-fatbin|input-as|gen_c|stub|module_id|^--?list|dot-cfg|view-|reproducer)"
)


def _judge_part(word: str, flag: str) -> None:
    """Judge an option of ptxas, nvlink, cudafe++, fatbinary or LLVM."""
    if not word.startswith("-"):
        if word.startswith("@"):
            raise _Refused(flag, _RESPONSE)
        if not _is_word(word) or "." in word:
            raise _Refused(flag, _PATH)
        return
    match = re.match(_PART, word)
    if not match:
        raise _Refused(flag, _UNKNOWN)
    name = word.partition("=")[0]
    if name in ("-arch", "--gpu-name"):
        raise _Refused(flag, _CHOSEN_BY_PLAN)
    if re.match(_PART_REFUSED, name):
        raise _Refused(flag, _WRITES)
    if not _is_word(match["value"] or ""):
        raise _Refused(flag, _PATH)


# -- nvcc --------------------------------------------------------------------------------------

# Options of nvcc that are not in its help.
_NVCC_VALUES = tables.NVCC_VALUES | {"-Xcudafe", "-Xfatbin", "-Xcicc", "-MF", "--dependency-output"}
# One letter with the value joined to it.
_NVCC_JOINED = ("-D", "-U", "-I", "-L", "-l", "-O", "-t", "-x", "-o", "-m", "-e")
_NVCC_TO_HOST = ("-Xcompiler", "--compiler-options")
_NVCC_TO_LINKER = ("-Xlinker", "--linker-options")
_NVCC_TO_PARTS = (
    "-Xptxas", "--ptxas-options", "-Xnvlink", "--nvlink-options", "-Xcudafe", "-Xfatbin", "-Xcicc",
)  # fmt: skip
_NVCC_LISTS = (
    *_NVCC_TO_HOST, *_NVCC_TO_LINKER, *_NVCC_TO_PARTS, "-diag-suppress", "--diag-suppress",
    "-diag-warn", "--diag-warn", "-diag-error", "--diag-error",
)  # fmt: skip
# Options of nvcc that the plan chooses or that write, run or stop early.
_REFUSED_BY_NVCC = frozenset((
    "-gencode", "--generate-code", "-arch", "--gpu-architecture", "-code", "--gpu-code", "-ccbin",
    "--compiler-bindir", "-optf", "--options-file", "-run", "--run", "-run-args", "--run-args",
    "-link", "--link", "-lib", "--lib", "-ptx", "--ptx", "-cubin", "--cubin", "-fatbin", "--fatbin",
    "-cuda", "--cuda", "-keep", "--keep", "-keep-dir", "--keep-dir", "-save-temps", "--save-temps",
    "-clean", "--clean-targets", "-odir", "--output-directory", "-o", "--output-file", "-dryrun",
    "--dryrun", "-prec-dir", "-ldir", "--libdevice-directory", "-target-dir", "--target-directory",
    "-t", "--threads", "-objtemp", "--objdir-as-tempdir", "-dlink", "--device-link", "-optix-ir",
    "--optix-ir", "-ltoir", "--ltoir", "-time", "--time", "-split-compile", "--split-compile",
    "-split-compile-extended", "--split-compile-extended", "--gpu-name", "-x", "--x", "-E",
    "--preprocess", "-M", "--generate-dependencies", "-MM", "--generate-nonsystem-dependencies",
    "-MD", "--generate-dependencies-with-compile", "-MMD",
    "--generate-nonsystem-dependencies-with-compile", "-MF", "--dependency-output", "-MP",
    "--generate-dependency-targets", "-MT", "--dependency-target-name", "-arbin",
    "--archiver-binary", "-Xarchive", "--archive-options", "-fdevice-time-trace",
    "--fdevice-time-trace", "-fdevice-syntax-only", "--fdevice-syntax-only", "-idp",
    "--input-drive-prefix", "-ddp", "--dependency-drive-prefix", "-dp", "--drive-prefix",
    "-use-local-env", "--use-local-env", "-force-cl-env-setup", "--force-cl-env-setup", "-hls",
    "--host-linker-script", "-aug-hls", "--augment-host-linker-script", "-r", "--relocatable-link",
    "-qpp-config", "--qpp-config", "-astoolspatch", "--compile-as-tools-patch", "-code-ls",
    "--list-gpu-code", "-arch-ls", "--list-gpu-arch", "-jobserver", "--jobserver", "-h", "--help",
    "-V", "--version", "-noprof", "--dont-use-profile", "-gen-opt-lto", "--gen-opt-lto",
))  # fmt: skip
# nvcc does not accept these together with -gencode.
_WHOLE_PROGRAM = (
    "-dlto", "-lto", "--lto", "--dlink-time-opt", "-ewp", "--extensible-whole-program",
)  # fmt: skip
_NVCC_HINT = (
    "TORCH_CUDA_ARCH_LIST chooses architectures, NVCC_CCBIN the host compiler, NVCC_THREADS the "
    "threads"
)


def nvcc_options(words: Iterable[str]) -> Iterator[Option]:
    """How nvcc divides a list of flags."""
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            yield Option("", word, (word,))
        elif equals and (name in _NVCC_VALUES or name in tables.NVCC_FLAGS):
            yield Option(name, value, (word,))
        elif word in _NVCC_VALUES:
            yield _with_next(word, rest)
        elif word in tables.NVCC_FLAGS:
            yield Option(word, "", (word,))
        else:
            joined = next((each for each in _NVCC_JOINED if word.startswith(each)), "")
            # -maxrregcount and the like are longer names, not -m with a value.
            if joined and (joined in ("-D", "-U", "-I", "-L", "-l", "-O") or word[2:].isdigit()):
                yield Option(joined, word[2:].removeprefix("="), (word,))
            else:
                yield Option(word, "", (word,))


def _judge_nvcc(words: tuple[str, ...]) -> None:
    to_host: list[str] = []
    to_linker: list[str] = []
    forwarded = any("forward-unknown" in word for word in words)
    for option in nvcc_options(words):
        flag = " ".join(option.words)
        values = option.value.split(",") if option.name in _NVCC_LISTS else [option.value]
        if option.name in _REFUSED_BY_NVCC or option.name.partition("=")[0] in _REFUSED_BY_NVCC:
            raise _Refused(flag, _CHOSEN_BY_PLAN)
        if option.name in _WHOLE_PROGRAM:
            raise _Refused(flag, _ONE_ARCHITECTURE)
        shown = option.words if option.name not in _NVCC_LISTS else (option.name, *values)
        if not all(PLAIN.match(each) for each in shown):
            raise _Refused(flag, _SHELL)
        if any(each.startswith("@") for each in (*option.words, *values)):
            raise _Refused(flag, _RESPONSE)
        if not option.complete:
            raise _Refused(flag, _NO_VALUE)
        if option.name in _NVCC_TO_HOST:
            to_host += values
        elif option.name in _NVCC_TO_LINKER:
            to_linker += values
        elif option.name in _NVCC_TO_PARTS:
            for value in values:
                _judge_part(value, flag)
        elif option.name not in (_NVCC_VALUES | tables.NVCC_FLAGS) and option.name:
            _judge_unknown(option.words, flag, forwarded=forwarded)
    _judge_host(to_host)
    _judge_linker(to_linker)


def _judge_unknown(words: tuple[str, ...], flag: str, *, forwarded: bool) -> None:
    """Judge an option that nvcc's help did not have.

    It is a newer nvcc's or, if nvcc was told to pass on what it does not know, the host compiler's.
    """
    try:
        _judge_host(words)
    except _Refused:
        if forwarded or not flag.startswith("--"):
            raise
        _judge_part(flag, flag)


_ONE_ARCHITECTURE = "nvcc does not accept a list of architectures together with it"
_SHELL = "nvcc passes its flags to a shell, which would interpret one of its characters"


# -- for the plan ------------------------------------------------------------------------------


def encodable(text: str) -> bool:
    """Whether a text can be an argument or a path: a lone surrogate that stands for no byte
    cannot."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def check(op: str, flags: tuple[str, ...], variable: str = "") -> None:
    """Refuse flags that a host compiler or linker must not get. Raises SpecError.

    ``variable`` is the variable that the flags come from; empty for the author's flags.
    """
    _check(op, flags, variable, "flag", _judge_host)


def check_nvcc(op: str, flags: tuple[str, ...], variable: str = "") -> None:
    """Refuse flags that nvcc must not get. Raises SpecError."""
    _check(op, flags, variable, "nvcc flag", _judge_nvcc)


def _check(
    op: str,
    flags: tuple[str, ...],
    variable: str,
    what: str,
    judge: Callable[[tuple[str, ...]], None],
) -> None:
    for flag in flags:
        if not flag or "\0" in flag or not encodable(flag):
            raise SpecError(f"op {op}: the flag {flag!r} is empty or cannot be passed to a program")
    try:
        judge(flags)
    except _Refused as refused:
        hint = _HINTS.get(refused.why, "")
        raise SpecError(
            f"op {op}: the {what} {refused.flag!r} is not allowed",
            why=refused.why,
            hint=f"unset {variable}" if variable else hint,
        ) from None


_HINTS = {
    _CHOSEN_BY_PLAN: _NVCC_HINT,
    _ONE_ARCHITECTURE: "-rdc=true links device code of several files",
    _NO_VALUE: "write the option and its value together, as in -I/path",
    _MAKE: "write -flto",
    _RESPONSE: "write the words of the file themselves",
}


# -- relocatable device code -------------------------------------------------------------------

# Device code in one file calls device code in another. The objects need a device link.
_RELOCATABLE = ("-rdc", "--relocatable-device-code")
_COMPILE_RELOCATABLE = ("-dc", "--device-c")  # they also mean -c, which the plan adds itself


def is_relocatable(flags: tuple[str, ...]) -> bool:
    """Whether nvcc flags ask for relocatable device code. If there are several, the last counts."""
    asked = False
    for option in nvcc_options(flags):
        if option.name in _COMPILE_RELOCATABLE:
            asked = True
        elif option.name in _RELOCATABLE:
            asked = option.value == "true"
    return asked


def without_relocatable(flags: tuple[str, ...]) -> tuple[str, ...]:
    """The flags without those for relocatable device code. The plan adds its own, once."""
    return tuple(
        word
        for option in nvcc_options(flags)
        if option.name not in (*_RELOCATABLE, *_COMPILE_RELOCATABLE)
        for word in option.words
    )
