"""Compiles through a launcher: ccache, sccache.

A launcher may hand out an object without compiling anything. Then the log of the step does not say
what the object was made from. So the same command is first run by
the real compiler as a preprocessor, observed. That pass gives
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

import re

from opkiln.digest import key, sha256_file
from opkiln.settings import compiler_variables
from opkiln.toolchain.find import is_launcher

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from opkiln.build_model import Step, Toolchain
    from opkiln.plan import Command

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
