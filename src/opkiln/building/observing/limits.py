"""What the programs of a step may start and write, and what launchers of compilers hide.

A step starts one program, the compiler that the plan names. From there on:
- A compiler may start the other programs of its installation, and assemblers, linkers and compilers
  that PATH leads to. It may write into the staging directory.
- A script that stands for a compiler, or a launcher, may start what it likes, and write where it
  likes, to a cache or a log of its own: the user chose it. What it starts is held to the limits
  above once it is a compiler itself. Only programs that compile on other hosts are refused.

A launcher (ccache, sccache) may hand out an object without compiling anything. Then the log of the
step does not say what the object was made from. So the same command is first run by the real
compiler as a preprocessor, observed. That pass gives
- the inputs: every header, every name that was looked for in vain, the compiler itself;
- a digest of the text that is to be compiled, and of all files and programs that took part.
  Launchers get it as part of their own cache keys. Alone, they would overlook a new header in front
  of another, or another compiler behind a script.

Another program in front of the compiler (``CXX="nice g++"``) gets no such digest: what it makes
counts as observed if a compiler was seen to write it.

A preprocessor does not run the assembler. If the text has a directive that reads a file, the pass
is not enough, and the source is compiled without the launcher. (ccache does not cache such sources
either.)

sccache's keys contain the command line. So a command for it has no path of a build's own directory,
where that makes no difference to the object.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from opkiln.base.build_model import NVRTC
from opkiln.base.digest import key, sha256_file
from opkiln.base.forks import cached_property
from opkiln.building.observing.log import Observation, Started
from opkiln.machine.facts import choices
from opkiln.machine.toolchain.find import LAUNCHERS, REMOTE, has_interpreter, is_launcher
from opkiln.settings import compiler_variables, on_path, settings

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from opkiln.base.build_model import Step, Toolchain
    from opkiln.plan.plan import Command


_COMPILER = re.compile(
    r"(.*-)?(g\+\+|gcc|c\+\+|cc|cpp|clang(\+\+)?|nvcc|hipcc|icpx|nvc\+\+|cc1(plus)?)([-.][\w.-]+)?\Z"
)
# What compilers start, where a package has put it among the other programs on PATH.
_TOOL = re.compile(
    r"((.*-)?(as|ld|lld|mold|gold|collect2|objcopy|ocloc)([-.][\w.-]+)?|llvm-[\w.-]+|"
    r"ptxas|cicc|cudafe\+\+|fatbinary|nvlink)\Z"
)
_BY_SHELL = re.compile(r"(nvcc|hipcc)([-.][\w.-]+)?\Z")
# Prefixes that more than one package is installed below: only their lib directories count.
_SHARED = ("", "/usr", "/usr/local")
_DEVICES = (
    "/dev/null/", "/dev/tty/", "/dev/pts/", "/dev/fd/", "/proc/",
    "/dev/nvidia", "/dev/kfd/", "/dev/dri/",  # a GPU's driver, which NVRTC asks for its version
)  # fmt: skip
_PARTS = ("bin", "lib", "lib64", "libexec")  # of an installation


class Stray(NamedTuple):
    """Something that a step must not do."""

    path: str
    program: str  # that started or wrote it
    written: bool  # False: started


class _StartedProgram(NamedTuple):
    """How a program that was started is to be judged."""

    program: str  # the script itself, not its interpreter
    free: bool  # it may start anything
    writes: bool  # it may write anywhere


class Conduct:
    """The programs of one step, judged. ``first`` is the program that opkiln started.

    Without a toolchain, the command is another program's: it may start and write what it likes."""

    def __init__(
        self, seen: Observation, first: str, toolchain: Toolchain | None, stage: str
    ) -> None:
        self.complete = seen.complete  # False: a program may have run that said nothing
        self._seen = seen
        self._stage = stage
        self._free = toolchain is None
        device, launcher, own, named = None, None, list[str](), list[str]()
        if toolchain is not None:
            device, launcher = toolchain.device, toolchain.launcher
            host = (toolchain.cxx, launcher, None if device is None else device.host)
            own += [] if device is None or device.family == NVRTC else [device.path]
            named += [*filter(None, host), *own, *toolchain.tools]
        self._named = set(map(os.path.realpath, named))
        self._installed = list(_private_directories(filter(_is_binary, self._named)))
        self._launcher = os.path.realpath(launcher) if launcher else ""
        self._shell = os.path.realpath("/bin/sh")
        self._device = set(map(os.path.realpath, own))
        self._outside: list[Stray] = []
        self._processes: list[_StartedProgram] = []
        for started in seen.started:
            self._processes.append(self._judge(started, first))

    @cached_property
    def _path(self) -> set[str]:
        return {os.path.realpath(directory) for directory in settings.path}

    @property
    def launched(self) -> bool:
        """Whether a launcher took part that may have compiled nothing."""
        return any(os.path.basename(each.program) in LAUNCHERS for each in self._processes)

    def made(self, path: str) -> bool:
        """Whether a program that is not a launcher was the last to write this file."""
        writers = self._seen.written.get(path, ())
        return bool(writers) and not self._is_launcher(self._processes[writers[-1]].program)

    def stray(self) -> Stray | None:
        """The first thing that the step must not have done."""
        return next(iter((*self._outside, *self._written_outside())), None)

    def chosen(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Names that a script or launcher looked up on PATH, each with the programs of that name up
        to the one that ran."""
        for started in self._seen.started:
            free = self._free or self._processes[started.parent].writes
            if started.parent < 0 or not free:
                continue
            name = os.path.basename(started.asked_for)
            found: list[str] = []
            for path in choices(name) if name else ():
                found.append(path)
                if path == started.asked_for or os.path.realpath(path) == started.program:
                    yield name, tuple(found)
                    break

    def _judge(self, started: Started, first: str) -> _StartedProgram:
        program = started.program
        asked_for = first if started.parent < 0 else self._found(started)
        script = bool(program) and has_interpreter(asked_for)
        # A program that says nothing may have run in between, and started this one.
        hidden = bool(asked_for) and not script and os.path.realpath(asked_for) != program
        if hidden:
            self.complete = False
        if script or not program:
            program = os.path.realpath(asked_for) if asked_for == first else asked_for
        launcher = self._is_launcher(program)
        if started.parent < 0 or self._free:
            free = script or launcher or self._free
            return _StartedProgram(program, free, free)
        parent = self._processes[started.parent]
        if os.path.basename(program) in REMOTE:
            self._outside.append(Stray(program, parent.program, written=False))
        if parent.free:
            # A tool of the script acts for it, a compiler for itself.
            compiler = not script and not launcher and _matches(_COMPILER, program)
            if compiler:
                self._installed += _private_directories([program])
            return _StartedProgram(program, not compiler, parent.writes and not compiler)
        named = self._belongs(asked_for, parent)
        if not named and (hidden or not self._belongs(program, parent)):
            stray = asked_for if hidden else program
            self._outside.append(Stray(stray, parent.program, written=False))
        return _StartedProgram(program, script or launcher, script or launcher)

    def _found(self, started: Started) -> str:
        """The file that a program was asked for by; empty if it is not known."""
        if "/" in started.asked_for:
            return os.path.join(self._stage, started.asked_for)
        # The program that started it may have had another PATH.
        for path in on_path(started.asked_for) if started.asked_for else ():
            if has_interpreter(path) or os.path.realpath(path) == started.program:
                return path
        return ""

    def _belongs(self, program: str, parent: _StartedProgram) -> bool:
        """Whether a compiler may start this program."""
        if not program:
            return False
        program = os.path.normpath(program)
        if os.path.realpath(program) in self._named or program == parent.program:
            return True
        if program.startswith(tuple(self._installed)):
            return True
        if program == self._shell and self._uses_shell(parent.program):
            return True  # what the shell starts is judged, too
        directory, name = os.path.split(program)
        if directory not in self._path and os.path.realpath(directory) not in self._path:
            return False
        return _matches(_TOOL, name) or _matches(_COMPILER, name)

    def _uses_shell(self, program: str) -> bool:
        """Whether a compiler starts its programs by a shell. Its name tells where a script stands
        for it, as in Debian's package."""
        return program in self._device or _matches(_BY_SHELL, program)

    def _written_outside(self) -> Iterator[Stray]:
        # The compiler that a launcher starts writes where the launcher says.
        allowed = {self._stage}
        for path, writers in self._seen.written.items():
            if any(self._is_launcher(self._processes[each].program) for each in writers):
                allowed.add(os.path.dirname(path))
        inside = tuple(os.path.realpath(directory).rstrip("/") + "/" for directory in allowed)
        real: dict[
            str, str
        ] = {}  # by directory: a link in the staging directory may lead out of it
        for path, writers in self._seen.written.items():
            directory, name = os.path.split(os.path.normpath(path))
            if directory not in real:
                real[directory] = os.path.realpath(directory)
            if os.path.join(real[directory], name, "").startswith((*inside, *_DEVICES)):
                continue
            for each in writers:
                if not self._processes[each].writes:
                    yield Stray(path, self._processes[each].program, written=True)

    def _is_launcher(self, program: str) -> bool:
        named = bool(program) and program == self._launcher
        return named or os.path.basename(program) in LAUNCHERS


def _is_binary(path: str) -> bool:
    return not has_interpreter(path)


def is_compiler(name: str) -> bool:
    """Whether a program of this name is a compiler."""
    return _COMPILER.match(name) is not None


def _matches(pattern: re.Pattern[str], program: str) -> bool:
    return pattern.match(os.path.basename(program)) is not None


def _private_directories(programs: Iterable[str]) -> Iterator[str]:
    """Where the installations of these compilers keep the programs that they start."""
    for program in programs:
        parts = program.split("/")
        places = [index for index, part in enumerate(parts) if part in _PARTS]
        if not places:
            continue
        prefix = "/".join(parts[: places[0]])
        if not any(os.path.isdir(f"{prefix}/{part}") for part in _PARTS if part != "bin"):
            continue
        if prefix in (*_SHARED, os.path.expanduser("~"), os.path.expanduser("~/.local")):
            yield from (f"{prefix}/{part}/" for part in _PARTS if part != "bin")
        else:
            yield prefix + "/"


# .incbin and .include in a string, and what could put them together: the assembler's macros. In the
# preprocessed text strings are not joined yet, so the word may begin one: asm("." "incbin ...").
_DIRECTIVE = re.compile(
    rb"\bincbin\b|\.\s*include\b|[\"(\s]include\b[^<\n]*\\\"|\.(macro|irpc?|altmacro)\b"
)
# Flags that may have the compiler or the assembler read files, and the preprocessor not: also each
# with a path that is not just written into the output.
_FLAGS = re.compile(
    r"-Wa,|--?(Xassembler|for-assembler|Xclang|mllvm)|-f(no-)?(profile|auto-profile|sanitize-|xray-|"
    r"branch-probabilities|module|prebuilt-module|thinlto-index)|"
    r"-(?![DUILi]|\S*(prefix-map|compilation-dir)=)-?[a-zA-Z][\w-]*=.*/"
)
# They have a launcher start the compiler, and do nothing else.
DIRECT = {"CCACHE_DISABLE": "1"}


def can_preprocess(step: Step, toolchain: Toolchain) -> bool:
    """Whether a pass of the preprocessor can stand for this step. For one of nvcc it cannot: that
    is for one architecture, and each of them, and the host, may include other headers. Nor can it
    for a launcher that takes no digest of it, nor for a link."""
    if not step.file:
        return False
    known = toolchain.launcher is None or is_launcher(toolchain.launcher)
    return known and step.words[0 if toolchain.launcher is None else 1] == toolchain.cxx


def named(toolchain: Toolchain) -> bool:
    """Whether the host compiler runs through a launcher, as far as names tell."""
    return toolchain.launcher is not None or is_launcher(toolchain.cxx)


def variables(toolchain: Toolchain) -> dict[str, str]:
    """What a launcher wants to know of its user. It does not change what is compiled."""
    return dict(compiler_variables(script=True)) if named(toolchain) else {}


def without(command: Command, toolchain: Toolchain) -> Command:
    """The command without the launcher that the user named."""
    launcher, *rest = command.words
    return command._replace(words=tuple(rest)) if launcher == toolchain.launcher else command


def preprocess(command: Command, toolchain: Toolchain, output: str) -> tuple[str, ...]:
    """The command that has the real compiler preprocess what a compile step's command compiles."""
    # Without it, g++ does not look for precompiled headers.
    more = ("-fpch-preprocess",) if toolchain.family == "gcc" else ()
    return (*without(command, toolchain).words, *more, "-E", command.file, "-o", output)


def portable(command: Command, stage: str, text: bytes) -> Command:
    """A compile's command without the flags that hide the build's own directory, if the ``text`` to
    be compiled does not mention that and no debugging information will."""
    words = command.words
    if stage.encode() in text or any(re.match(r"-g(?!no)\w*", each) for each in words[1:]):
        return command
    hides = f"-ffile-prefix-map={stage}="
    return command._replace(words=tuple(each for each in words if not each.startswith(hides)))


def reads_more(text: bytes, command: Command) -> bool:
    """Whether the compile may read files that the preprocessor did not."""
    return _DIRECTIVE.search(text) is not None or any(map(_FLAGS.match, command.words))


def bound_to(step: str, text: bytes, files: Iterable[str]) -> dict[str, str]:
    """What makes ccache and sccache serve only objects that were made of this text, by the programs
    and scripts among these files, with the flags and the compiler that the key of this ``step``
    stands for: a user may have told ccache to ignore some, or to compile by another program, which
    CCACHE_PREFIX names. Raises OSError if a file is gone."""
    bond = key("launched", (step, text, {sha256_file(path) for path in files}))
    return {
        "CCACHE_COMPILERCHECK": f"string:{bond}",
        "CCACHE_PREFIX": "",
        "SCCACHE_C_CUSTOM_CACHE_BUSTER": bond,
    }
