"""``opkiln.cubin``: device code for programs that load it by themselves, as an observed command."""

from __future__ import annotations

import os
from collections.abc import Sequence

from opkiln.base import trust
from opkiln.base.build_model import NVRTC, DeviceCompiler
from opkiln.base.digest import LARGEST, key, open_replacement, read_file
from opkiln.base.model import CUDA
from opkiln.base.trust import usable_by_owner
from opkiln.building.command import run_command
from opkiln.building.prepared import ObservedCommand, Prepared
from opkiln.decision import archs, terms
from opkiln.errors import (
    ArchError,
    CompileError,
    CompilingOff,
    StoreError,
    UsageError,
    told_briefly,
)
from opkiln.machine.arch import cuda
from opkiln.machine.facts import Hasher
from opkiln.machine.toolchain import choice, nvrtc
from opkiln.run import progress
from opkiln.store import layers, publish
from opkiln.store.layers import Store

_SOURCE, _CUBIN = "kernel.cu", "kernel.cubin"


@told_briefly
def cubin(source: str, arch: str = "native", options: Sequence[str] = ()) -> bytes:
    """Compile a CUDA source to a cubin for one architecture, or find it compiled.

    ``source`` is the text, ``arch`` one architecture: ``"9.0a"``, ``"Hopper"``, or ``"native"`` for
    that of this machine's GPUs. ``options`` are those of the compiler: nvcc, or, where there is no
    CUDA toolkit, the NVRTC of torch's wheels (``OPKILN_CUDA=nvrtc`` asks for it). Returns the bytes
    of the cubin, for ``cuModuleLoadData`` or ``cuLibraryLoadData``.

    A cubin is kept by the text, the options, and all that the compiler read. A hit starts no
    process.

    Raises CompileError with what the compiler said, ToolchainError if there is none, ArchError,
    UsageError, and CompilingOff where nothing may be compiled.
    """
    chosen = _choose(arch)
    if cuda.split_flags(options)[1]:
        raise UsageError("the options name an architecture", hint=f"cubin(source, {arch!r}, ...)")
    store = Store()
    with usable_by_owner(), progress.show_builds():
        layers.claim(store.root)
        device = choice.choose(store.memory, CUDA).device
        assert device is not None
        words = _words(device, chosen, tuple(options))
        # The same the next time: with -lineinfo, a cubin has the path of its source.
        own = os.path.join(publish.scratch_root(), f"opkiln-cubin-{os.getuid()}")
        directory = os.path.join(own, key("cubin", (source, words)))
        if reason := trust.claim(directory):
            raise StoreError(reason, hint="set OPKILN_TMPDIR")
        with open_replacement(os.path.join(directory, _SOURCE)) as out:
            out.write(source.encode("utf-8", "surrogateescape"))
        command = ObservedCommand("cubin", _SOURCE, words, directory, (_CUBIN,), str(chosen[0]))
        return _find(command, store) or _make(command, store)


def _choose(arch: str) -> Sequence[cuda.CudaArch]:
    native = archs.devices(CUDA) if arch == "native" else None
    found = cuda.parse(arch, native=native) if native != () else ()
    if len(found) != 1 or found[0].ptx:
        why = archs.why_no_device(CUDA) if native == () else f"it names {cuda.show(found)}"
        hint = 'opkiln.cubin(source, "9.0a")'
        raise ArchError(f"a cubin is for one architecture, not for {arch!r}", why=why, hint=hint)
    return found


def _words(
    device: DeviceCompiler, arch: Sequence[cuda.CudaArch], options: tuple[str, ...]
) -> tuple[str, ...]:
    if device.family == NVRTC:
        includes = (f"-I{each}" for each in device.include_dirs)
        given = (*device.libraries, *cuda.images(arch), _CUBIN, _SOURCE, *options, *includes)
        return nvrtc.driver_argv("cubin", *given)
    host = ("-ccbin", device.host) if device.host else ()
    return (
        device.path, "-cubin", *cuda.flags(arch), *host, *options, "-o", _CUBIN, _SOURCE,
    )  # fmt: skip


def _find(command: ObservedCommand, store: Store) -> bytes | None:
    leaf, _ = Prepared(command).find(store, Hasher())
    try:
        return None if leaf is None else read_file(leaf.payload, LARGEST)
    except OSError:
        return None  # it was collected just now


def _make(command: ObservedCommand, store: Store) -> bytes:
    if why := terms.never_compiles():
        raise CompilingOff("a cubin would have to be compiled", why=why, hint="OPKILN_MODE=auto")
    done = run_command(command, store)
    if done.returncode != 0:
        raise CompileError(
            f"the cubin for {command.group} was not compiled",
            why=done.messages.strip() or f"the compiler ended with {done.returncode}",
        )
    return _find(command, store) or read_file(os.path.join(command.directory, _CUBIN), LARGEST)
