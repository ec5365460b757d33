"""What an nvcc and a host compiler can do together: asked once of each pair.

The first build on a machine waits for this, so the questions are asked side by side, and a toolkit
that was installed as a whole is not made to compile anything: that nvcc takes the host compiler
shows when it preprocesses. Wheels are upgraded one by one, and then may not fit each other: theirs
compiles and links.
"""

from __future__ import annotations

import os
import time
from typing import Any

from opkiln.digest import key, sha256_file
from opkiln.errors import BuildTimeout, ToolchainError
from opkiln.toolchain import memo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Ask = Callable[..., tuple[int, str]]
    Refusal = dict[str, Any] | None

    from opkiln.model import Toolchain
    from opkiln.toolchain.toolkits import Toolkit

# Each is kept in `accepts` where this nvcc takes it. The value is how it is tried.
_FLAGS = {
    "-std=c++17": ("-std=c++17",),
    "-std=c++20": ("-std=c++20",),
    "--threads": ("--threads", "2"),
    "--compress-mode=size": ("--compress-mode=size",),
    "--objdir-as-tempdir": ("--objdir-as-tempdir",),
}
_RUNTIME = "libcudart_static.a"
_AT_ONCE = 4  # questions, each of them a process or a digest that is read
_SOURCE = """\
#include <cuda_runtime.h>
__global__ void opkiln_probe() {}
cudaError_t opkiln_launch() { opkiln_probe<<<1, 1>>>(); return cudaGetLastError(); }
"""


def pair(
    memory: tuple[str, ...], toolkit: Toolkit, host: Toolchain, *, ask: bool
) -> dict[str, Any] | None:
    """What is known of a toolkit with a host compiler; without ``ask``, what is remembered.

    ``refused`` is empty for a pair that can be used; then there are ``identity`` (of the
    toolkit alone) and ``accepts``. ``unsupported`` says that nvcc objects to the host compiler.
    """
    subject = f"nvcc {toolkit.record['program']} with {host.cxx} {host.identity}"
    record = memo.recall(memory, subject)
    if record is None and ask:
        asked_at = time.time_ns()
        try:
            record = _probe(toolkit.record, host.cxx, in_parts=toolkit.place.origin == "PyPI")
        except (ToolchainError, BuildTimeout) as error:
            # It was asked who it is a moment ago: it went since, or the machine is overloaded.
            return {**_refusal(f"{error.what}: {error.why}"), "signatures": []}
        except OSError as error:
            return {**_refusal(f"cannot be asked: {error}"), "signatures": []}
        files = [path for _, path in toolkit.record["parts"]] + toolkit.record["directories"]
        memo.remember(memory, subject, record, files, asked_at)
        record = {**record, "signatures": []}
    return record


def _probe(toolkit: dict[str, Any], cxx: str, *, in_parts: bool) -> dict[str, Any]:
    from concurrent.futures import ThreadPoolExecutor

    from opkiln.process import run
    from opkiln.toolchain import probing

    with (
        probing.scratch() as scratch,
        ThreadPoolExecutor(_AT_ONCE) as pool,
    ):

        def ask(*argv: str) -> tuple[int, str]:
            done = run(argv, cwd=scratch, tmpdir=scratch, timeout=120, supervised=False)
            return done.returncode, done.output

        def accepts(flags: tuple[str, ...]) -> bool:
            # It reads and checks its options as ever; nothing is compiled.
            dry = ("--dryrun", *flags, "-x", "cu", "-c", os.devnull)
            return ask(toolkit["program"], "-ccbin", cxx, *dry)[0] == 0

        tried = {**_FLAGS, **_variants(toolkit["archs"])}
        refusal = pool.submit(_compiles if in_parts else _preprocesses, ask, toolkit, cxx, scratch)
        identity = pool.submit(_identity, toolkit)
        taken = list(pool.map(accepts, tried.values()))
        if (refused := refusal.result()) is not None:
            return refused
        return {
            "refused": "",
            "unsupported": False,
            "identity": identity.result(),
            "accepts": [name for name, took in zip(tried, taken, strict=True) if took],
        }


def _preprocesses(ask: Ask, toolkit: dict[str, Any], cxx: str, scratch: str) -> Refusal:
    """nvcc's own headers refuse a host compiler that it does not support."""
    source = _written(scratch)
    status, said = ask(toolkit["program"], "-ccbin", cxx, "-E", source, "-o", os.devnull)
    if status != 0:
        reason = _first_error(said)
        return _refusal(f"does not compile with {cxx}: {reason}", "unsupported" in reason)
    if not any(_has_runtime(path) for path in toolkit["library_dirs"]):
        return _refusal(f"has no {_RUNTIME}")
    return None


def _compiles(ask: Ask, toolkit: dict[str, Any], cxx: str, scratch: str) -> Refusal:
    """Whether its parts work together: the compiler, the assembler, the runtime."""
    source, output = _written(scratch), os.path.join(scratch, "probe.o")
    status, said = ask(
        toolkit["program"], "-ccbin", cxx, f"-arch=sm_{_number(toolkit['archs'][0])}",
        "-Xcompiler", "-fPIC", "-c", source, "-o", output,
    )  # fmt: skip
    if status != 0:
        reason = _first_error(said)
        return _refusal(f"does not compile with {cxx}: {reason}", "unsupported" in reason)
    status, said = ask(
        cxx, "-shared", output, "-o", os.path.join(scratch, "probe.so"),
        *(f"-L{path}" for path in toolkit["library_dirs"]),
        "-lcudart_static", "-ldl", "-lrt", "-lpthread",
    )  # fmt: skip
    if status != 0:
        return _refusal(f"does not link with its static runtime: {_first_error(said)}")
    return None


def _written(scratch: str) -> str:
    source = os.path.join(scratch, "probe.cu")
    with open(source, "w") as file:
        file.write(_SOURCE)
    return source


def _has_runtime(directory: str) -> bool:
    return os.path.isfile(os.path.join(directory, _RUNTIME))


def _identity(toolkit: dict[str, Any]) -> str:
    # The directories stay out of it: the same files elsewhere are the same compiler.
    digests = [(role, sha256_file(path)) for role, path in toolkit["parts"]]
    return key("toolchain", ("nvcc", toolkit["banner"], digests))


def _variants(archs: list[str]) -> dict[str, tuple[str, ...]]:
    """How to try ``90a``, ``100f`` and so on, which nvcc may take and does not list."""
    names = [_number(arch) + suffix for arch in archs for suffix in "af"]
    return {name: ("-gencode", f"arch=compute_{name},code=sm_{name}") for name in names}


def _number(arch: str) -> str:
    return arch.replace(".", "")


def _refusal(reason: str, unsupported: bool = False) -> dict[str, Any]:
    return {"refused": reason, "unsupported": unsupported}


def _first_error(text: str) -> str:
    """The line that says what is wrong, without nvcc's advice to ignore it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = (line for line in lines if "error" in line or "fatal" in line or "cannot" in line)
    line = next(telling, lines[-1] if lines else "it says nothing")
    return line.rpartition("#error -- ")[2].partition(" The nvcc flag")[0]
