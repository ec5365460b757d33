"""What a build here is for: the machine, the CPU, the flags; and whether it could run here."""

from __future__ import annotations

from opkiln import machine
from opkiln.arch import cpu
from opkiln.build_model import Target, TorchSDK
from opkiln.errors import ArchError, LoadError
from opkiln.model import ABI_NONE, ABI_STABLE, CPU, CUDA, STABLE_VERSION, OpSpec, flag_settings
from opkiln.settings import origin_of, settings
from opkiln.toolchain import torch_sdk


def features() -> frozenset[str]:
    """This CPU's features, by the compiler's names."""
    return cpu.features_of(machine.cpu_flags())


def target_machine() -> str:
    """The machine to build CPU ops for: this one, unless the settings name a CPU of another."""
    return cpu.machine_of(settings.cpu, machine.architecture())


def target_cpu() -> cpu.CPU:
    """The CPU to build for, by the settings. Raises ArchError."""
    asked, origin = origin_of("cpu")
    try:
        return cpu.parse(asked, target_machine(), features())
    except ArchError as error:
        what = f"{origin}={asked!r}: {error.what}" if origin.isupper() else error.what
        hint = f"unset {origin}" if origin.isupper() else error.hint
        raise ArchError(what, why=error.why, hint=hint) from None


def target_of(spec: OpSpec, sdk: TorchSDK | None, archs: tuple[str, ...]) -> Target:
    """What an op is built for here, by the settings. Raises ArchError, BuildError."""
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
        archs=archs,
    )


def _flags(backend: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    found = [(name, getattr(settings, name)) for name in flag_settings(backend)]
    if backend == CUDA and settings.debug_cuda:
        found.append(("debug_cuda", ("-Xptxas=-v",)))
    return tuple((name, value) for name, value in found if value)


def runnable(spec: OpSpec) -> TorchSDK | None:
    """The torch that an op would run on; None where it needs none. Raises LoadError where no native
    op can run here at all."""
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


def lacking(target: Target) -> tuple[str, ...]:
    """What this machine lacks to run what is built for a target."""
    if target.machine != machine.architecture():
        return (target.machine,)
    return cpu.lacking(target.cpu, target.cpu_features, features())


def require_cpu(spec: OpSpec, target: Target) -> None:
    """Refuse to load what was asked for by name and cannot run on this CPU. Raises LoadError."""
    if lacks := lacking(target):
        raise LoadError(
            f"op {spec.name} for {cpu.CPU(target.cpu, target.cpu_features)} cannot run here",
            why=f"it needs {', '.join(lacks)}, which this CPU lacks",
            hint="OPKILN_CPU=native",
        )


def require_sycl_device(spec: OpSpec) -> None:
    """Refuse to load a SYCL op where there is no device for it. Raises LoadError."""
    from opkiln.toolchain import libsycl

    if missing := libsycl.no_device(settings.ocl_icd_filenames):
        why, hint = missing
        raise LoadError(f"op {spec.name} has no SYCL device to run on", why=why, hint=hint)
