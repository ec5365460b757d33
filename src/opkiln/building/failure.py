"""Turns a failed step into an error with the first message, the command and the log."""

from __future__ import annotations

import os
import re
import shlex
import signal

from opkiln.base.build_model import NVRTC, Plan
from opkiln.base.digest import FULL, write_private
from opkiln.base.model import CUDA, OpSpec
from opkiln.building import wording
from opkiln.errors import BuildError, CompileError, StoreError
from opkiln.machine.toolchain import toolkits, torch_sdk
from opkiln.run import budget
from opkiln.run.process import signal_name
from opkiln.run.schedule import StepFailed
from opkiln.store import publish

# g++ and clang write file:line:column:, nvcc and NVRTC write file(line):.
_DIAGNOSTIC = re.compile(
    r"^(?P<where>[^\n]+?(?::\d+(?::\d+)?|\(\d+\))): (?:(?:fatal|catastrophic) )?error:? .*$",
    re.MULTILINE,
)
_LINKER = re.compile(
    r"^.*(?:undefined reference|cannot find -l|multiple definition).*$", re.MULTILINE
)
# Where the template that has the error is used. g++ writes that before the error, clang and nvcc
# after it, from the innermost use to the one in the author's file.
_USED_BEFORE = re.compile(  # with the line itself, in newer versions
    r"^([^\n]+?:\d+(?::\d+)?):\s+required from here\n(?:[ \t][^\n]*\n)*\Z", re.MULTILINE
)
_USED_AFTER = re.compile(
    r"^(?P<clang>[^\n]+?:\d+:\d+): note: in instantiation of .* requested here$"
    r"|^\s+instantiation of .* at line (?P<line>\d+) of (?P<file>\S+)$",
    re.MULTILINE,
)
_CONTEXT_LINES = 4
_WIDTH = 500


def first_error(output: str) -> str:
    """The first error a compiler or linker reported, with the lines that show it."""
    found = _DIAGNOSTIC.search(output) or _LINKER.search(output)
    if found is None:
        lines = output.strip().splitlines()[-_CONTEXT_LINES:]
        return "\n".join(map(_shorten, lines))
    lines = [found.group()]
    for line in output[found.end() :].splitlines()[1 : _CONTEXT_LINES + 1]:
        if not line.startswith((" ", "\t")) or line.strip() == "detected during:":
            break  # the next diagnostic, or nvcc's list of uses
        lines.append(line)
    used = _used_at(output, found)
    return "\n".join(map(_shorten, [*lines, *([f"used at {used}"] if used else [])]))


def _used_at(output: str, error: re.Match[str]) -> str:
    """The line of a source whose use of a template causes the error; empty if none does."""
    before = _USED_BEFORE.search(output, 0, error.start())
    if before:
        return before[1]
    following = _DIAGNOSTIC.search(output, error.end())
    end = following.start() if following else len(output)
    after = list(_USED_AFTER.finditer(output, error.end(), end))
    if not after:
        return ""
    return after[-1]["clang"] or f"{after[-1]['file']}:{after[-1]['line']}"


def _shorten(line: str) -> str:
    """A line that fits on a screen. Names of nested templates can be very long."""
    return line if len(line) <= _WIDTH else line[: _WIDTH - 2] + " …"


def compile_error(
    failed: StepFailed,
    plan: Plan,
    log: str,
    replaced: dict[str, str],
    killed_before: budget.Kills,
) -> BuildError:
    """The error for a step that failed: its first error, and where the rest is.

    ``replaced`` maps staging paths to the names to show instead. ``killed_before`` is how many
    processes the kernel had killed for lack of memory when the build began. The command is in the
    log; if there is no log, the error has it.
    """
    spec = plan.spec
    output = _replace(failed.completed.output, replaced)
    command = _replace(shlex.join(failed.completed.argv), replaced)
    kept = f"log: {log}" if log else f"command: {command}"
    where = f"op {spec.title}: {failed.task.label}"
    ended = _find_signal(failed.completed.returncode, output)
    if ended:
        return _killed_error(where, ended, kept, killed_before)
    is_source = failed.task.label.endswith((".cpp", ".cc", ".cxx", ".cu"))
    return CompileError(
        f"{where} {'does not compile' if is_source else 'failed'}",
        why=f"{first_error(output)}\n{kept}",
        hint=_hint(output, plan),
    )


# The messages of g++, clang and nvcc when a compiler that they started was killed.
_CHILD_KILLED = re.compile(
    r"Killed signal terminated program|unable to execute command: Killed|died due to signal 9\b"
)


def _find_signal(status: int, output: str) -> str:
    """The signal that ended a step's process, or the compiler that it had started."""
    if status < 0:
        return signal_name(status)
    # A shell, and so a wrapper script, exits with 128 + the signal that killed its program.
    if status == 128 + signal.SIGKILL or _CHILD_KILLED.search(output):
        return signal.SIGKILL.name
    return ""


def _killed_error(where: str, ended: str, kept: str, before: budget.Kills) -> BuildError:
    """The error for a compiler that was killed. The source may be correct."""
    if ended != signal.SIGKILL.name:
        return BuildError(f"{where}: the compiler was killed by {ended}", why=kept)
    now, limit = budget.out_of_memory_kills(), budget.memory_limit()
    if now == before:
        why = f"the kernel counted no out-of-memory kill during the build\n{kept}"
        return BuildError(f"{where}: the compiler was killed by {ended}", why=why)
    if now.group > before.group and limit is not None:
        why = f"the control group's limit is {_mebibytes(limit)}"
        hint = "MAX_JOBS=1    # or give the container or job more memory"
    else:
        why = f"the machine has {_mebibytes(budget.total_memory())}, and other processes use it too"
        hint = "MAX_JOBS=1"
    return BuildError(
        f"{where}: the compiler ran out of memory and was killed", why=f"{why}\n{kept}", hint=hint
    )


def _mebibytes(size: int) -> str:
    return f"{size >> 20} MiB"


def ran_out_of_space(output: str) -> bool:
    """Whether a program's output reports a full disk. Children run in the C locale."""
    return any(os.strerror(code) in output for code in FULL)


def no_space(spec: OpSpec, directory: str) -> StoreError:
    """The error for a full build directory, with its path and sizes in bytes."""
    room = os.statvfs(directory)
    used = sum(
        os.lstat(os.path.join(base, name)).st_size
        for base, _, names in os.walk(directory)
        for name in names
    )
    return StoreError(
        f"op {spec.title} cannot be built in {directory}: the disk was full after {used} bytes",
        why=publish.room_in_words(room),
        hint="set OPKILN_TMPDIR to a node-local directory with space",
    )


def _replace(text: str, replaced: dict[str, str]) -> str:
    for before, after in replaced.items():
        text = text.replace(before, after)
    return text


# Libraries of the CUDA toolkit that have their own packages.
_CUDA_LIBRARIES = ("cublas", "cublasLt", "cufft", "curand", "cusolver", "cusparse", "nvrtc")
_NOT_STABLE = "should not be included when either TORCH_STABLE_ONLY"


def _hint(output: str, plan: Plan) -> str:
    spec, target = plan.spec, plan.target
    names = wording.names_for(spec)
    library = re.search(r"cannot find -l(\S+?)(?::|\s|$)", output)
    if library:
        name = library.group(1)
        if target.backend == CUDA and name in _CUDA_LIBRARIES:
            bring = f"pip install 'cuda-toolkit[{name.removesuffix('Lt')}]'"
        else:
            bring = f"apt-get install lib{name}-dev"
        there = names.library_dir.format(f"<directory of lib{name}.so>")
        return f"{bring}    (or {there})"
    device = plan.toolchain.device
    if device is not None and device.family == NVRTC and (said := _hint_for_nvrtc(output)):
        return said
    if "undefined reference" in output:
        return wording.undefined_symbol(spec)
    if _NOT_STABLE in output:
        return f"{names.full_abi}; or include torch/csrc/stable/… instead"
    header = re.search(r"fatal error: (\S+): No such file", output)
    if header and target.backend == CUDA and header.group(1) in toolkits.WHEEL_HEADERS:
        return _library_header(header.group(1), plan)
    if header:
        return f"add the directory of {header.group(1)} to {names.include_dirs}, or set CPATH"
    if "out of memory" in output.lower():
        return "MAX_JOBS=1    # and see `ulimit -v`"
    if not spec.is_known_by_name:
        return ""
    where = f" --target {target.backend}:{','.join(target.archs)}" if target.archs else ""
    return f"opkiln build {spec.name}{where}    # after fixing it"


# What opkiln.machine.nvrtc says of a source that only nvcc can compile.
_NEEDS_NVCC = ("is nvcc's own syntax", "lambda needs nvcc", "a type without a name")


def _hint_for_nvrtc(output: str) -> str:
    """What to do about a source that NVRTC, or g++ beside it, does not take."""
    header = re.search(r'(?:cannot|could not) open source file "([^"]+)"', output)
    if header:
        return (
            f"put #ifndef __CUDACC_RTC__ around #include <{header[1]}> if only host code uses it; "
            "or OPKILN_CUDA=nvcc"
        )
    if any(each in output for each in _NEEDS_NVCC):
        return "OPKILN_CUDA=nvcc    # needs a CUDA toolkit: pip install 'opkiln[cuda]'"
    return ""


def _library_header(header: str, plan: Plan) -> str:
    """How to install a header of one of CUDA's libraries that the toolkit does not have."""
    device, torch = plan.toolchain.device, plan.toolchain.torch
    assert device is not None  # every plan for this backend has a device compiler
    release = torch_sdk.release(device.version)
    wanted = f"{release[0]}.{release[1]}"
    library = toolkits.WHEEL_HEADERS[header]
    if library in toolkits.IN_EXTRA and release[0] >= 13:
        bring = f"pip install 'opkiln[cuda]' 'cuda-toolkit=={wanted}.*'"
    else:
        bring = f"pip install 'cuda-toolkit[cudart,{library}]=={wanted}.*'"
    why = f"{header} is missing from the CUDA {wanted} toolkit in {device.home}"
    wheels = toolkits.find_wheels(torch, device.include_dirs, release)
    if wheels.release not in ((0, 0), release):
        other = f"{wheels.release[0]}.{wheels.release[1]}"
        why += f"; the wheels next to torch are for CUDA {other}, another release"
    return f"{bring}    # {why}"


def write_log(root: str | None, name: str, text: str) -> str:
    """Write a failed build's log. Returns its path, or "" if it cannot be written."""
    if root is None:
        return ""
    path = os.path.join(root, "logs", name + ".log")
    try:
        write_private(path, text.encode("utf-8", "surrogateescape"))
    except OSError:
        return ""  # the build error matters more than the missing log
    return path
