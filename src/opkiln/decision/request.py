"""What is wanted: one op, for one purpose, with everything worked out once.

A request is made at the beginning of a load, a build or a look, and lives as long as that.
"""

from __future__ import annotations

from functools import cached_property

from opkiln import machine
from opkiln.errors import ArchError, LoadError
from opkiln.model import (
    ABI_NONE,
    ABI_STABLE,
    CPU,
    CUDA,
    STABLE_VERSION,
    XPU,
    Op,
    OpSpec,
    Target,
    TorchSDK,
)
from opkiln.settings import origin_of, settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.arch import cpu
    from opkiln.decision.archs import Wanted
    from opkiln.errors import OpkilnError
    from opkiln.store.layers import Store

# What the op is wanted for.
LOAD = "load"  # to run here, now
BUILD = "build"  # to be there for a later load: it need not run here
SHIP = "ship"  # to be in the user's own store, for other machines

# The settings that add flags to every build. They are part of a target and so of a key.
FLAG_SETTINGS = (
    "cppflags", "cxxflags", "ldflags", "cpath", "cplus_include_path", "library_path",
)  # fmt: skip
DEVICE_FLAG_SETTINGS = ("cudaflags",)


class Request:
    """An op, what it is wanted for, and what was tried so far."""

    def __init__(self, op: Op, use: str = LOAD, *, must_be_native: bool = False) -> None:
        self.op = op
        self.use = use
        self.must_be_native = must_be_native or use != LOAD
        self.cannot_open: dict[str, LoadError] = {}  # what this process failed to open, by path
        self.build_error: OpkilnError | None = None  # why the build that was decided on failed

    @cached_property
    def wanted(self) -> Wanted:
        """The device architectures. Raises ArchError, LoadError."""
        from opkiln.decision import archs

        return archs.wanted(self.op)

    @cached_property
    def sdk(self) -> TorchSDK | None:
        """The torch that it would run on; None where it needs none. Raises LoadError where no
        native op can run here at all."""
        return _runnable(self.op.spec)

    @cached_property
    def target(self) -> Target:
        """What it would be built for. Raises ArchError, BuildError, LoadError."""
        return _target(self)

    @cached_property
    def store(self) -> Store:
        """The store's layers."""
        from opkiln.store.layers import Store

        return Store()

    @property
    def runs_here(self) -> bool:
        """Whether what serves must run on this machine."""
        return self.use == LOAD

    @property
    def for_elsewhere(self) -> bool:
        """Whether it is for another machine, so that only the user's own store counts."""
        return self.use == SHIP or self.target.machine != machine.architecture()


def features() -> frozenset[str]:
    """This CPU's features, by the compiler's names."""
    from opkiln.arch import cpu

    return cpu.features_of(machine.cpu_flags())


def target_machine() -> str:
    """The machine to build CPU ops for: this one, unless the settings name a CPU of another."""
    from opkiln.arch import cpu

    return cpu.machine_of(settings.cpu, machine.architecture())


def target_cpu() -> cpu.CPU:
    """The CPU to build for, by the settings. Raises ArchError."""
    from opkiln.arch import cpu

    asked, origin = origin_of("cpu")
    try:
        return cpu.parse(asked, target_machine(), features())
    except ArchError as error:
        what = f"{origin}={asked!r}: {error.what}" if origin.isupper() else error.what
        hint = f"unset {origin}" if origin.isupper() else error.hint
        raise ArchError(what, why=error.why, hint=hint) from None


def _target(request: Request) -> Target:
    from opkiln.arch import cpu
    from opkiln.toolchain import torch_sdk

    spec = request.op.spec
    sdk = request.sdk
    # Code for a GPU is launched by this machine's CPU, whatever CPU other ops are for.
    ours = spec.backend != CPU and not spec.vectorize
    architecture = machine.architecture() if ours else target_machine()
    if spec.vectorize:
        chosen = target_cpu()
    else:
        chosen = cpu.CPU(cpu.native(architecture, frozenset()).level)
    return Target(
        backend=spec.backend,
        system=machine.system(),
        machine=architecture,
        cpu=chosen.level,
        cpu_features=chosen.features,
        abi_tag=torch_sdk.abi_tag(spec, sdk),
        debug=settings.debug,
        flags=_flags(spec.backend),
        archs=request.wanted.archs,
    )


def flag_settings(backend: str) -> tuple[str, ...]:
    """The settings whose flags a build for this backend gets."""
    return FLAG_SETTINGS if backend == CPU else (*FLAG_SETTINGS, *DEVICE_FLAG_SETTINGS)


def _flags(backend: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    found = [(name, getattr(settings, name)) for name in flag_settings(backend)]
    if backend == CUDA and settings.debug_cuda:
        found.append(("debug_cuda", ("-Xptxas=-v",)))
    return tuple((name, value) for name, value in found if value)


def _runnable(spec: OpSpec) -> TorchSDK | None:
    from opkiln.toolchain import torch_sdk

    if machine.system() != "linux":
        raise LoadError(
            f"op {spec.name} has no native version for {machine.system()}",
            why="native ops are built and loaded on Linux, x86-64 and aarch64",
        )
    if spec.abi == ABI_NONE:
        return None
    sdk = torch_sdk.find()
    if sdk is None:
        raise LoadError(
            f"op {spec.name} needs torch", why="torch is not installed", hint="pip install torch"
        )
    if spec.abi == ABI_STABLE and not torch_sdk.has_stable_abi(sdk):
        raise LoadError(
            f"op {spec.name} needs torch {STABLE_VERSION} or later",
            why=f"torch {sdk.version} lacks the stable ABI",
            hint=f"pip install 'torch>={STABLE_VERSION}'",
        )
    return sdk


def require_cpu(spec: OpSpec, target: Target) -> None:
    """Refuse to load what was asked for by name and cannot run on this CPU. Raises LoadError."""
    from opkiln.arch import cpu

    if target.machine != machine.architecture():
        lacks: tuple[str, ...] = (target.machine,)
    else:
        lacks = cpu.lacking(target.cpu, target.cpu_features, features())
    if lacks:
        raise LoadError(
            f"op {spec.name} for {cpu.CPU(target.cpu, target.cpu_features)} cannot run here",
            why=f"it needs {', '.join(lacks)}, which this CPU lacks",
            hint="OPKILN_CPU=native",
        )


def require_sycl_device(spec: OpSpec) -> None:
    """Refuse to load a SYCL op where there is no device for it. Raises LoadError."""
    if spec.backend != XPU:
        return
    from opkiln.toolchain import libsycl

    if missing := libsycl.no_device(settings.ocl_icd_filenames):
        why, hint = missing
        raise LoadError(f"op {spec.name} has no SYCL device to run on", why=why, hint=hint)
