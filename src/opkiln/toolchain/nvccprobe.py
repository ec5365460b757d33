"""What an nvcc and a host compiler can do together: asked once of each pair."""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

from opkiln.digest import key, sha256_file
from opkiln.settings import settings
from opkiln.toolchain import memo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

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
_SOURCE = """\
#include <cuda_runtime.h>
__global__ void opkiln_probe() {}
cudaError_t opkiln_launch() { opkiln_probe<<<1, 1>>>(); return cudaGetLastError(); }
"""


def pair(
    memory: tuple[str, ...], toolkit: Toolkit, host: Toolchain, *, ask: bool
) -> dict[str, Any] | None:
    """What is known of a toolkit with a host compiler; without ``ask``, what is remembered.

    ``refused`` is empty for a pair that compiles and links; then there are ``identity`` (of the
    toolkit alone) and ``accepts``. ``unsupported`` says that nvcc objects to the host compiler.
    """
    subject = f"nvcc {toolkit.record['program']} with {host.cxx} {host.identity}"
    record = memo.recall(memory, subject)
    if record is None and ask:
        asked_at = time.time_ns()
        record = _probe(toolkit.record, host.cxx)
        files = [path for _, path in toolkit.record["parts"]] + toolkit.record["directories"]
        memo.remember(memory, subject, record, files, asked_at)
        record = {**record, "signatures": []}
    return record


def _probe(toolkit: dict[str, Any], cxx: str) -> dict[str, Any]:
    from opkiln.process import run

    with tempfile.TemporaryDirectory(prefix="opkiln-probe-", dir=settings.tmpdir) as scratch:

        def ask(*argv: str) -> tuple[int, str]:
            done = run(argv, cwd=scratch, tmpdir=scratch, timeout=120, supervised=False)
            return done.returncode, done.output

        def accepts(*flags: str) -> bool:
            # It reads and checks its options as ever; nothing is compiled.
            dry = ("--dryrun", *flags, "-x", "cu", "-c", os.devnull)
            return ask(toolkit["program"], "-ccbin", cxx, *dry)[0] == 0

        flags = [name for name, tried in _FLAGS.items() if accepts(*tried)]
        source, output = os.path.join(scratch, "probe.cu"), os.path.join(scratch, "probe.o")
        with open(source, "w") as file:
            file.write(_SOURCE)
        tried = [word for name in flags if name != "-std=c++17" for word in _FLAGS[name]]
        status, said = ask(
            toolkit["program"], "-ccbin", cxx, *tried,
            f"-arch=sm_{_number(toolkit['archs'][0])}", "-Xcompiler", "-fPIC",
            "-c", source, "-o", output,
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
        accepted = [*flags, *_variants(toolkit["archs"], accepts)]
    return {
        "refused": "",
        "unsupported": False,
        "identity": _identity(toolkit),
        "accepts": accepted,
    }


def _identity(toolkit: dict[str, Any]) -> str:
    # The directories stay out of it: the same files elsewhere are the same compiler.
    digests = [(role, sha256_file(path)) for role, path in toolkit["parts"]]
    return key("toolchain", ("nvcc", toolkit["banner"], digests))


def _variants(archs: list[str], accepts: Callable[..., bool]) -> list[str]:
    """Which of ``90a``, ``100f``, … this nvcc takes; it does not list them."""
    names = [_number(arch) + suffix for arch in archs for suffix in "af"]
    return [name for name in names if accepts("-gencode", f"arch=compute_{name},code=sm_{name}")]


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
