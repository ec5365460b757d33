"""Every exception opkiln raises on purpose, with its exit code and its hint.

An error has three parts: what happened, with the values; why, when known; and ``hint:`` with a
command to copy. ``str(error)`` is all three, so it reads the same in a traceback, a log and a
terminal. Exit codes are part of the interface; ``docs/cli.md`` lists them.
"""

from __future__ import annotations

import os
import sys
import warnings
from functools import partial, wraps

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
    T = TypeVar("T")

_OWN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")


class OpkilnError(Exception):
    """The base of all these errors. ``what`` is one line, ``why`` may be many, ``hint`` is a
    command.

    Catch it to handle every failure of opkiln in one place. ``str()`` of it ends with the command
    to try next, if one is known.
    """

    exit_code = 1
    # Whether all processes that wait for the same build get the error: it is due to the sources,
    # the compiler or a slow machine. A full disk or a killed compiler may concern one process only.
    concerns_all = False

    def __init__(self, what: str, *, why: str = "", hint: str = "") -> None:
        self.what = what
        self.why = why
        self.hint = hint
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        lines += [f"  {line}" for line in self.why.splitlines()]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        # A lone surrogate (a byte of a file name that is not text) could not be printed.
        return "\n".join(lines).encode("utf-8", "backslashreplace").decode()

    @property
    def log(self) -> str:
        """The file with a failed build's command and its output; empty if there is none."""
        lines = (line for line in self.why.splitlines() if line.startswith("log: "))
        return next(lines, "").removeprefix("log: ")

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows: the caller's line and the message."""
        from traceback import extract_tb

        frames = extract_tb(self.__traceback__)
        callers = [frame for frame in frames if not frame.filename.startswith(_OWN)]
        lines = [f'File "{each[0]}", line {each[1]}, in {each[2]}' for each in callers[-2:]]
        return [*lines, *f"{type(self).__name__}: {self}".splitlines()]

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default; errors cross process boundaries.
        return (partial(type(self), why=self.why, hint=self.hint), (self.what,))


def warn_caller(text: str, kind: type[Warning]) -> None:
    """Warn at the line that called opkiln, also if the call came through torch."""
    own: tuple[str, ...] = (_OWN, "<opkiln: ")  # its files, and the functions that it writes
    if torch := getattr(sys.modules.get("torch"), "__file__", None):
        own = (*own, os.path.join(os.path.dirname(torch), ""))
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(own):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, kind, stacklevel=level)


def visible(text: str) -> str:
    """``text`` with control characters escaped: ``\\x1b``."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def told_briefly(function: Callable[P, T]) -> Callable[P, T]:
    """Hide opkiln's own frames in an error's traceback: the user cannot change them."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True  # pytest shows the caller's line
        try:
            return function(*args, **kwargs)
        except OpkilnError as error:
            raise error.with_traceback(None) from error.__cause__
        except (FileNotFoundError, UnicodeEncodeError) as error:
            if (clear := explain_error(error)) is not None:
                raise clear from error
            raise

    return call


def explain_error(error: Exception) -> UsageError | None:
    """A clear error for one that Python raises wherever a path is used: the working directory was
    removed, or a text has a lone surrogate. None for other errors."""
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        return UsageError(
            f"{error.object[:100]!a} cannot be a path or a source",
            why=f"it has the lone surrogate {error.object[error.start]!a}, which no file can hold",
        )
    if isinstance(error, FileNotFoundError) and error.filename is None:
        try:
            os.getcwd()
        except FileNotFoundError:
            return UsageError(
                "the working directory does not exist any more",
                why="a relative path has no meaning without it",
                hint='cd "$HOME"',
            )
    return None


class UsageError(OpkilnError):
    """The call itself is wrong: an unknown op, a malformed name, an invalid argument.

    Correct the call or the command. ``why`` lists what is allowed, where that is a short list.
    """

    exit_code = 2


class ArgumentError(UsageError, ValueError):
    """An argument has an invalid value. It is a ValueError, which torch raises for such mistakes.

    Pass a value that the message allows.
    """


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument has the wrong type, or a tensor the wrong dtype. It is also a TypeError.

    Convert the argument, or pass tensors of a dtype that the message names.
    """


class SettingError(UsageError):
    """An environment variable or option has an invalid value.

    Correct the variable that the message names, or unset it; docs/reference/variables.md lists the
    values. `opkiln report` shows which variables are set.
    """


class SpecError(UsageError):
    """An op's declaration is wrong: no sources, a source that does not exist, a hostile name.

    Correct the declaration: the arguments of ``@opkiln.op``, ``opkiln.library`` or
    ``opkiln.load``, or the methods of the builder class.
    """


class UnknownBackend(UsageError):
    """An op has no version for the backend that was asked for.

    Ask for one of the op's ``BACKENDS``, or add sources for the other one.
    """


class UnknownOp(UsageError, KeyError):
    """No bundled op and no installed package provides an op of this name.

    Install the package that has the op, or correct the name: `opkiln report` lists all. The hint
    has names that are spelled much like it.
    """


class UnservedFunction(UsageError, AttributeError):
    """A function that one of DeepSpeed's own modules has, that no op of opkiln serves, and whose
    source cannot be built here; ``why`` says why not.

    An AttributeError, so that ``hasattr`` says no. Correct what ``why`` names, or allow the engine:
    unset ``OPKILN_DEEPSPEED``.
    """


class ArchError(UsageError):
    """An architecture list or CPU name is not valid. The message quotes the bad word.

    Correct the list. `opkiln arch LIST` shows how a list is read and what it comes to.
    """


class AcceleratorError(UsageError, ValueError):
    """A requested accelerator is unknown, cannot be used here, or lacks a feature; ``why`` lists
    the known ones, or which of them can be used and why the others cannot.

    Unset ``OPKILN_ACCELERATOR``, or name one that can be used here.
    """


class ToolchainError(OpkilnError):
    """No compiler that can build for the target; ``why`` lists each candidate and its refusal.

    Install a compiler, or name one with ``CXX`` or ``OPKILN_CUDA_HOME``. `opkiln doctor`
    checks what is installed. Where there is no compiler, ship the op prebuilt (docs/deploying.md).
    """

    exit_code = 3
    concerns_all = True


class MissingCUDAException(ToolchainError):
    """No CUDA toolkit is to be found; ``why`` lists where it was looked for.

    ``pip install 'opkiln[cuda]'`` installs a toolkit; ``OPKILN_CUDA_HOME`` names
    another one.
    """


class CUDAMismatchException(ToolchainError):
    """The toolkits that were found do not fit torch's CUDA; ``hint`` is what would.

    Install the toolkit that the hint names. ``DS_SKIP_CUDA_CHECK=1`` takes one of another major
    version, at your own risk.
    """


class BuildError(OpkilnError):
    """A build step failed. Nothing was published.

    ``log`` is the file with the command and everything that it printed.
    """

    exit_code = 4


class CompileError(BuildError):
    """The compiler or linker failed; ``why`` has its first error and the path of the log.

    Correct the source at the line of the first error. `opkiln plan OP` prints the commands, to
    run them by hand.
    """

    concerns_all = True


class LoadTestError(BuildError):
    """The library was built, but a fresh process could not load it. Nothing was published.

    ``why`` says what the dynamic linker missed: usually a library that ``libraries_args()`` does
    not name, or a symbol that no source defines.
    """

    concerns_all = True


class BuildTimeout(BuildError):
    """A step took longer than ``OPKILN_BUILD_TIMEOUT`` and was killed with all its children.

    Raise ``OPKILN_BUILD_TIMEOUT``, or build before the job starts: `opkiln build OP`.
    """

    concerns_all = True


class BuildCancelled(BuildError):
    """The build was interrupted; its children were killed.

    Run it again: steps that were finished are not repeated.
    """


class StepRefused(BuildError):
    """A step started a program outside the toolchain, or wrote outside its directory.

    Leave out the flag that makes it do so; `opkiln plan OP` shows all flags. distcc and icecream
    compile on other hosts and are refused.
    """

    concerns_all = True


class InputError(BuildError):
    """A file that a build reads is not a regular file, or it is too large.

    The message names the file. Sources and headers are regular files, not pipes or devices.
    """

    concerns_all = True


class SourcesChanging(BuildError):
    """Sources were edited several times while they were compiled. Nothing was published.

    Load the op again when the editor or the checkout has finished.
    """

    concerns_all = True


class StoreError(OpkilnError):
    """The store cannot be read or written: it is full, read-only, or owned by another user.

    The message has the path. Free space with `opkiln cache gc`, correct the owner or mode, or set
    ``OPKILN_CACHE_DIR``. For a bundle or a lock file, copy it again.
    """

    exit_code = 5


class LoadError(OpkilnError):
    """A library could not be loaded into this process, and nothing else could serve.

    `opkiln explain OP` lists every candidate and why it was refused.
    """

    exit_code = 6


class DifferenceError(OpkilnError, AssertionError):
    """The native version of an op and its reference do not agree.

    The kernel or the reference is wrong: ``why`` has the first values that differ, and the
    arguments. It is raised by ``op.check`` and with ``OPKILN_MODE=check``.
    """

    exit_code = 9


class ReloadError(LoadError):
    """The new build of an op cannot replace the one this process already has loaded.

    Start a new process: a library that is loaded cannot always be replaced.
    """


class CompilingOff(LoadError):
    """Something would have to be compiled, and ``OPKILN_MODE`` forbids that.

    Build the op before, with `opkiln build OP`, or allow compiling: ``OPKILN_MODE=auto``.
    """

    exit_code = 7


class SealedError(CompilingOff):
    """Something would have to be compiled after ``opkiln.seal("error")``. No reference serves then.

    Load every op that the program needs before it calls ``opkiln.seal``.
    """


class ClusterError(OpkilnError):
    """The ranks of a job did not agree on an op: one is missing, differs, or cannot be reached.

    The message names the rank and its host. ``why`` has the difference; docs/clusters.md lists the
    cases.
    """

    exit_code = 10


class FallbackWarning(UserWarning):
    """An op is served by its pure-PyTorch reference, or a GPU's memory by the CPU's; the text says
    why. Given once per op.

    `opkiln explain OP` says what it takes to have the native version. ``OPKILN_MODE=native``
    makes it an error.
    """


class SettingWarning(UserWarning):
    """A variable looks like a setting and is not one, or its request could not be fulfilled. The
    text says what may be meant, or why not.

    Correct the variable's name, or unset it.
    """


class ArchWarning(UserWarning):
    """A device gets code that is not made for it; the text says why, and what to install.

    Build with a toolkit that knows the device, or add its architecture to the list.
    """


class StoreWarning(UserWarning):
    """The store could not be used as asked (owner, mode, read-only); the text says what is used.

    Correct the directory's owner or mode, or set ``OPKILN_CACHE_DIR``.
    """


class RemoteWarning(UserWarning):
    """A remote tier cannot be used or published to, has sent something that is refused, or is not
    asked at all; the text says why. Given once for each reason.

    Correct ``OPKILN_REMOTES``, the login, or what says what is trusted (``OPKILN_TRUSTED_KEYS``,
    ``OPKILN_LOCK``). The load goes on without the tier.
    """
