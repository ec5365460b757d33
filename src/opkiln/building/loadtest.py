"""The load test: a new library must load in a new process before it is published."""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import TYPE_CHECKING

from opkiln.base.build_model import Target, TorchSDK
from opkiln.base.model import (
    ABI_NONE,
    ABI_STABLE,
    CPU,
    DISPATCH_KEYS,
    EXECUTABLE,
    LIBRARY,
    PYTHON,
    OpSpec,
)
from opkiln.base.signature import NativeFunction, fits
from opkiln.building import wording
from opkiln.building.probe_load import LISTED, LOADED, MISSING
from opkiln.building.wording import misfit, missing_kernels
from opkiln.errors import BuildTimeout, LoadTestError, StoreError
from opkiln.machine.binary import elf
from opkiln.machine.binary.elf import show_symbol
from opkiln.run import process
from opkiln.run.child import Child, Completed
from opkiln.settings import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEFINES = "aoti_torch_library_def"  # what m.def() of torch's stable ABI calls
_LIMIT = 120.0  # seconds, at most: a library that takes longer to load is not usable
_PROBE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "probe_load.py")


def check(
    spec: OpSpec, torch: TorchSDK | None, path: str, *, after: tuple[str, ...] = (), tmpdir: str
) -> None:
    """Load ``path`` in a child process, after torch's libraries and those in ``after``. Raises as
    ``LoadTest.check``."""
    with start(spec, torch, path, after=after, tmpdir=tmpdir) as test:
        test.check()


@contextlib.contextmanager
def start(
    spec: OpSpec, torch: TorchSDK | None, path: str, *, after: tuple[str, ...] = (), tmpdir: str
) -> Iterator[LoadTest]:
    """A load test whose library need not be there yet. Its child loads torch meanwhile, which takes
    as long as the compile of a small op."""
    if spec.kind == EXECUTABLE:
        yield LoadTest(spec, path, None, "")
        return
    libraries = [*_torch_libraries(spec, torch), *after, path]
    asked = spec.kernels if spec.kind == LIBRARY and (torch is None or torch.cxx11_abi) else ()
    nonce = secrets.token_hex(8)
    keys = ",".join(DISPATCH_KEYS[spec.backend])
    arguments = (str(os.getpid()), nonce, keys, ",".join(asked), *libraries)
    argv = process.python(_PROBE, *arguments, isolated=True)
    with process.start_waiting(argv, tmpdir=tmpdir) as child:
        yield LoadTest(spec, path, child, nonce)


class LoadTest:
    """A load test whose child waits for the library."""

    def __init__(self, spec: OpSpec, path: str, child: Child | None, nonce: str) -> None:
        self._spec, self._path, self._child, self._nonce = spec, path, child, nonce
        self._begun = False

    def begin(self) -> None:
        """Have the child load the library, which is there now."""
        if self._child is not None and not self._begun:
            self._begun = True
            self._child.resume()

    def check(self) -> None:
        """What loading the library gives.

        Raises LoadTestError with the dynamic linker's message, the signal that ended the child, or
        the functions for which the library registers no kernel. Raises StoreError if no library can
        be loaded from the directory.
        """
        spec = self._spec
        if self._child is None:
            return
        if spec.kernels:
            _require_no_schema(spec, elf.read(self._path))
        limit = min(_LIMIT, settings.build_timeout)
        self.begin()
        try:
            with process.once_per_thread("runs a program"):
                done = self._child.finish(limit)
        except BuildTimeout:
            raise BuildTimeout(
                f"{spec.title} was built, but loading it took longer than {limit:g} s",
                why="a constructor of the library does not end; nothing was published",
                hint=f"OPKILN_BUILD_TIMEOUT={max(60, int(limit) * 2)}" if limit < _LIMIT else "",
            ) from None
        loaded = done.output.partition(f"\n{LOADED} {self._nonce}\n")
        if loaded[1]:
            # The child may have died later, while it asked torch. The library is not the cause.
            _require_kernels(spec, loaded[2])
        else:
            raise _load_error(spec, self._path, done)


def _load_error(spec: OpSpec, path: str, done: Completed) -> LoadTestError | StoreError:
    if done.returncode < 0:
        reason = f"the process died of {process.signal_name(done.returncode)}"
    elif done.returncode == 0:
        reason = "a constructor of the library ended the process with exit status 0"
        reason += f"\n{done.output.strip()}" if done.output.strip() else ""
    else:
        reason = done.output.strip() or f"exit {done.returncode}"
    if os.statvfs(path).f_flag & os.ST_NOEXEC:
        # The cause is this process's scratch directory, not the op. Processes that wait for this
        # build then build for themselves.
        return StoreError(
            f"{spec.title} was built in {os.path.dirname(path)}, but cannot be loaded from there",
            why=f"the file system is mounted noexec\n{reason}",
            hint="set OPKILN_TMPDIR to a node-local directory that is not mounted noexec",
        )
    missing = reason.partition("undefined symbol: ")[2].split(",")[0].strip()
    return LoadTestError(
        f"{spec.title} was built but cannot be loaded",
        why=reason.replace(missing, show_symbol(missing)) if missing else reason,
        hint=wording.undefined_symbol(spec) if missing else "",
    )


def _require_kernels(spec: OpSpec, output: str) -> None:
    lines = [line for line in output.splitlines() if line.startswith(LISTED)]
    functions = [NativeFunction(*line.removeprefix(LISTED).split("\t")) for line in lines]
    if functions and not fits(spec, functions):
        what, why, hint = misfit(spec, functions)
        raise LoadTestError(what, why=why, hint=hint)
    answer = output.partition(MISSING)[2].partition("\n")[0]
    missing, others = (part.split() for part in (answer or ";").split(";"))
    if missing:
        what, why, hint = missing_kernels(spec, missing, others)
        raise LoadTestError(what, why=why, hint=hint)


def inspect(spec: OpSpec, target: Target, torch: TorchSDK | None, path: str) -> None:
    """Check a library for another machine, which no process here can load.

    It must be built for that machine, and torch must define the symbols that it needs. The local
    torch is used for that, because the symbols of the stable ABI are the same on all machines.
    Raises LoadTestError.
    """
    found = elf.read(path)
    if found.machine != target.machine:
        raise LoadTestError(
            f"{spec.title} should be for {target.machine}, but its library is for {found.machine}",
            why="the compiler produces code for another machine than it reports",
        )
    if spec.kind == EXECUTABLE:
        return
    if spec.kernels:
        _require_no_schema(spec, found)
    # A symbol that the linker found in a system library has a version. The others must be torch's.
    unresolved = {symbol for _, symbol, version in found.symbols if not version}
    if spec.abi != ABI_NONE and torch is not None:
        unresolved -= elf.defined_symbols(os.path.join(torch.path, "lib", "libtorch_cpu.so"))
    if unresolved:
        missing = sorted(unresolved)[0]
        more = f" and {len(unresolved) - 1} more" if len(unresolved) > 1 else ""
        raise LoadTestError(
            f"{spec.title} was built but could not be loaded on {target.machine}",
            why=f"undefined symbol: {show_symbol(missing)}{more}",
            hint=wording.undefined_symbol(spec),
        )


def _require_no_schema(spec: OpSpec, found: elf.Elf) -> None:
    if any(name == _DEFINES for _, name, _ in found.symbols):
        raise LoadTestError(
            f"{spec.title} defines a schema in C++, but its declaration in Python has it already",
            why="the second definition would abort the process that loads it",
            hint="STABLE_TORCH_LIBRARY_IMPL    # in place of STABLE_TORCH_LIBRARY and _FRAGMENT",
        )


_DEVICE_LIBRARIES = ("libc10_cuda.so", "libtorch_cuda.so", "libc10_hip.so", "libtorch_hip.so")
_OPTIONAL = ("libtorch_global_deps.so", *_DEVICE_LIBRARIES)  # some torches do not have them


def _torch_libraries(spec: OpSpec, torch: TorchSDK | None) -> list[str]:
    if spec.abi == ABI_NONE or torch is None:
        return []
    names = ["libc10.so", "libtorch_cpu.so"]
    if spec.abi != ABI_STABLE:
        # What it loads differs between torches: a library of the stable ABI must not need it.
        names.insert(0, "libtorch_global_deps.so")
        names += [] if spec.backend == CPU else _DEVICE_LIBRARIES
        names.append("libtorch.so")
        names += ["libtorch_python.so"] if spec.kind == PYTHON else []
    paths = {name: os.path.join(torch.path, "lib", name) for name in names}
    return [path for name, path in paths.items() if name not in _OPTIONAL or os.path.exists(path)]
