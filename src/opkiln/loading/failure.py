"""From a step that failed to an error a person can act on: first error, command, log."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import signal

from opkiln.engine.schedule import StepFailed
from opkiln.errors import BuildError, CompileError, StoreError
from opkiln.model import CUDA, ONE_CALL, OpSpec, Plan
from opkiln.toolchain import torch_sdk, wheel_headers
from opkiln.trust import make_private

# file:line:column: of g++ and clang, file(line): of nvcc.
_DIAGNOSTIC = re.compile(
    r"^(?P<where>[^\n]+?(?::\d+(?::\d+)?|\(\d+\))): (?:fatal )?error:? .*$", re.MULTILINE
)
_LINKER = re.compile(
    r"^.*(?:undefined reference|cannot find -l|multiple definition).*$", re.MULTILINE
)
_CONTEXT_LINES = 4

FULL = (errno.ENOSPC, errno.EDQUOT)


def first_error(output: str) -> str:
    """The first error a compiler or linker reported, with the lines that show it."""
    found = _DIAGNOSTIC.search(output) or _LINKER.search(output)
    if found is None:
        return "\n".join(output.strip().splitlines()[-_CONTEXT_LINES:])
    lines = [found.group()]
    for line in output[found.end() :].splitlines()[1 : _CONTEXT_LINES + 1]:
        if not line.startswith((" ", "\t")):
            break  # the next diagnostic
        lines.append(line)
    return "\n".join(lines)


def compile_error(failed: StepFailed, plan: Plan, log: str, replaced: dict[str, str]) -> BuildError:
    """The error for a step that failed; ``replaced`` maps staging paths to lasting ones."""
    spec = plan.spec
    output = _replace(failed.completed.output, replaced)
    command = _replace(shlex.join(failed.completed.argv), replaced)
    status = failed.completed.returncode
    if status < 0:
        ended = f"the compiler was killed by {signal.Signals(-status).name}"
        why = f"{ended}\n{first_error(output)}"
    else:
        why = first_error(output)
    what = (
        "does not compile"
        if failed.task.label.endswith((".cpp", ".cc", ".cxx", ".cu"))
        else "failed"
    )
    parts = [why, f"command: {command}", f"log: {log}" if log else ""]
    # A compiler that was killed says nothing about the source.
    kind = CompileError if status > 0 else BuildError
    return kind(
        f"op {spec.name}: {failed.task.label} {what}",
        why="\n".join(part for part in parts if part),
        hint=_hint(output, plan),
    )


def ran_out_of_space(output: str) -> bool:
    """Whether a program says so. Children speak the C locale's language."""
    return any(os.strerror(code) in output for code in FULL)


def no_space(spec: OpSpec, directory: str) -> StoreError:
    """The error for a build whose directory took no more: its path, and the bytes."""
    room = os.statvfs(directory)
    used = sum(
        os.lstat(os.path.join(base, name)).st_size
        for base, _, names in os.walk(directory)
        for name in names
    )
    return StoreError(
        f"op {spec.name} cannot be built in {directory}: no space is left after {used} bytes",
        why=f"{room.f_bavail * room.f_frsize} of {room.f_blocks * room.f_frsize} bytes are free "
        "there",
        hint="set OPKILN_TMPDIR to a node-local directory with space",
    )


def _replace(text: str, replaced: dict[str, str]) -> str:
    for before, after in replaced.items():
        text = text.replace(before, after)
    return text


# Libraries of the CUDA toolkit that are packages of their own.
_CUDA_LIBRARIES = ("cublas", "cublasLt", "cufft", "curand", "cusolver", "cusparse", "nvrtc")
_NOT_STABLE = "should not be included when either TORCH_STABLE_ONLY"


def _hint(output: str, plan: Plan) -> str:
    spec, target = plan.spec, plan.target
    library = re.search(r"cannot find -l(\S+?)(?::|\s|$)", output)
    if library:
        name = library.group(1)
        if target.backend == CUDA and name in _CUDA_LIBRARIES:
            bring = f"pip install 'cuda-toolkit[{name.removesuffix('Lt')}]'"
        else:
            bring = f"apt-get install lib{name}-dev"
        return f"{bring}    (or LDFLAGS=-L<directory of lib{name}.so>)"
    if _NOT_STABLE in output:
        return 'ABI = "torch"    # in the builder; or include torch/csrc/stable/… instead'
    header = re.search(r"fatal error: (\S+): No such file", output)
    if header and target.backend == CUDA and header.group(1) in wheel_headers.LIBRARIES:
        return _library_header(header.group(1), plan)
    if header:
        return f"add the directory of {header.group(1)} to include_paths(), or set CPATH"
    if "Killed" in output or "out of memory" in output.lower():
        return "MAX_JOBS=1"
    if spec.distribution == ONE_CALL:
        return ""  # it has no name that a command would know
    where = f" --target {target.backend}:{','.join(target.archs)}" if target.archs else ""
    return f"opkiln build {spec.name}{where}    # after fixing it"


def _library_header(header: str, plan: Plan) -> str:
    """How to get a header of one of CUDA's libraries, which the toolkit does not have."""
    device, torch = plan.toolchain.device, plan.toolchain.torch
    assert device is not None  # a plan for this backend is made with its compiler
    release = torch_sdk.release(device.version)
    wanted = f"{release[0]}.{release[1]}"
    library = wheel_headers.LIBRARIES[header]
    if library in wheel_headers.IN_EXTRA and release[0] >= 13:
        bring = f"pip install 'opkiln[cuda]' 'cuda-toolkit=={wanted}.*'"
    else:
        bring = f"pip install 'cuda-toolkit[cudart,{library}]=={wanted}.*'"
    why = f"{header} is missing from the CUDA {wanted} toolkit in {device.home}"
    wheels = wheel_headers.beside(torch, device.include_dirs, release)
    if wheels.release not in ((0, 0), release):
        other = f"{wheels.release[0]}.{wheels.release[1]}"
        why += f"; the wheels beside torch are for CUDA {other}, another release"
    return f"{bring}    # {why}"


def write_log(root: str | None, name: str, text: str) -> str:
    """Keep a failed build's log. Returns its path, or nothing where none can be kept."""
    if root is None:
        return ""
    path = os.path.join(root, "logs", name + ".log")
    temporary = f"{path}.{os.getpid()}-{os.urandom(6).hex()}"
    try:
        make_private(os.path.dirname(path))
        with open(temporary, "x", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        return ""  # the error itself says more than a log that cannot be kept
    return path
