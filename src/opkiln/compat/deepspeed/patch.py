"""How DeepSpeed's builders are redirected, and what they load then.

Some functions of their base classes are replaced. No file of DeepSpeed changes, and ``remove`` puts
the functions back. Builders with their own ``load`` (those for NPUs, for example) are unchanged. A
builder loads from the first possible resort of those that ``OPKILN_DEEPSPEED`` names.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any, NamedTuple

from opkiln.compat import hook
from opkiln.errors import (
    CUDAMismatchException,
    MissingCUDAException,
    OpkilnError,
    ToolchainError,
    UsageError,
)
from opkiln.settings import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

_MODULE = "deepspeed.ops.op_builder.builder"

OPS, ENGINE, DEEPSPEED = "ops", "engine", "deepspeed"

# The subclass of OpModule that replaces an op's module, as module:class.
MODULES = {
    "async_io": "files:AsyncIO",
    "cpu_adam": "optimizers:CPUAdam",
    "cpu_adagrad": "optimizers:CPUAdagrad",
    "cpu_lion": "optimizers:CPULion",
    "fused_adam": "optimizers:FusedAdam",
    "fused_lion": "optimizers:FusedLion",
    "fused_lamb": "optimizers:FusedLamb",
    "evoformer_attn": "evoformer:EvoformerAttention",
    "gds": "files:GDS",
    "pin_memory": "files:PinMemory",
    "quantizer": "quantizer:Quantizer",
    "ragged_device_ops": "ragged:RaggedDeviceOps",
    "ragged_ops": "ragged:RaggedHostOps",
    "random_ltd": "layers:RandomLTD",
    "sparse_attn": "sparse:SparseAttn",
    "spatial_inference": "layers:SpatialInference",
    "cutlass_ops": "gemm:CutlassOps",
    "deepspeed_shm_comm": "shm_comm:ShmComm",
    "inference_core_ops": "inference:InferenceCore",
    "stochastic_transformer": "training:StochasticTransformer",
    "transformer": "training:Transformer",
    "transformer_inference": "inference:TransformerInference",
    "utils": "modules:ByteTensors",
}


def install() -> None:
    """Make DeepSpeed's builders load through opkiln from now on, in this process.

    This includes builders that were imported before; modules that they have already loaded stay as
    they are. Calling it again has no effect. Raises UsageError if DeepSpeed is not installed.
    """
    try:
        import_module(_MODULE)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"DeepSpeed's builders cannot be imported: {error}", hint="pip install deepspeed"
        ) from error
    hook.install((_MODULE,))


def remove() -> None:
    """Put the functions of DeepSpeed's builders back."""
    hook.remove((_MODULE,))


def replacements(module: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """The owner, the attribute and the value of each function that is replaced in DeepSpeed's
    ``op_builder.builder``."""
    base, cuda = module.OpBuilder, module.CUDAOpBuilder
    yield base, "load", _loading(base.load)
    yield base, "jit_load", _loading(base.jit_load)
    yield base, "has_function", _has_function
    yield base, "cpu_arch", _of_this_cpu(base.cpu_arch, "cpu_arch")
    yield base, "simd_width", _of_this_cpu(base.simd_width, "simd_width")
    yield cuda, "compute_capability_args", _compute_capability_args
    for name in ("installed_cuda_version", "assert_no_cuda_mismatch"):
        yield module, name, _toolkit_check(name, module)
    yield module, "get_default_compute_capabilities", _default_capabilities


# What a builder loads


class Served(NamedTuple):
    """The module that serves one of DeepSpeed's ops in this process."""

    module: Any
    origin: str  # ops, engine, deepspeed
    seconds: float  # how long it took to load


_served: dict[tuple[type, str], Served] = {}
_chosen: dict[tuple[type, str], tuple[str, ...]] = {}  # the resorts that were allowed then


def served() -> dict[str, Served]:
    """DeepSpeed's ops that this process has loaded, by name."""
    return {name: found for (_, name), found in _served.items()}


def load_module(builder: Any, original: Callable[[], Any]) -> Any:
    """The module for a builder; ``original`` is how DeepSpeed itself loads it.

    Raises OpkilnError if opkiln should serve it and cannot.
    """
    key = (type(builder), str(builder.name))
    resorts = _resorts_of(builder.name)
    if key in _served and _chosen.get(key) == resorts:
        return _served[key].module
    begin = time.perf_counter()
    try:
        module, origin = _choose(builder, resorts, original)
    except OpkilnError as error:
        builder.error_log = str(error)
        raise
    _served[key] = Served(module, origin, time.perf_counter() - begin)
    _chosen[key] = resorts
    return module


def _resorts_of(op: str) -> tuple[str, ...]:
    """The resorts that may serve an op, in order; empty if DeepSpeed should load it itself."""
    chosen: dict[str, tuple[str, ...]] = dict(settings.deepspeed)
    return chosen.get(op, chosen[""])


def _choose(builder: Any, resorts: tuple[str, ...], original: Callable[[], Any]) -> tuple[Any, str]:
    if _is_by_ops(builder, resorts):
        folder, _, name = MODULES[builder.name].partition(":")
        module = getattr(import_module(f"opkiln.compat.deepspeed.{folder}"), name)
        rest = _by_engine(builder) if resorts[-1:] == (ENGINE,) else None
        return module(rest), OPS
    # An op that was built when DeepSpeed was installed is as good as one that the engine builds.
    if ENGINE in resorts and not _is_installed(builder):
        return _by_engine(builder)(), ENGINE
    return original(), DEEPSPEED


def _is_by_ops(builder: Any, resorts: tuple[str, ...] | None = None) -> bool:
    """Whether an op of opkiln serves this builder."""
    allowed = _resorts_of(builder.name) if resorts is None else resorts
    return OPS in allowed and _is_deepspeeds(builder) and builder.name in MODULES


def _by_engine(builder: Any) -> Callable[[], Any]:
    def build() -> Any:
        from opkiln.compat.deepspeed import engine

        return engine.load(builder)

    return build


def _is_deepspeeds(builder: Any) -> bool:
    """Whether the builder is DeepSpeed's own, not another package's."""
    return type(builder).__module__.partition(".")[0] in ("deepspeed", "op_builder")


def _is_installed(builder: Any) -> bool:
    git = import_module("deepspeed.git_version_info")
    here = import_module("deepspeed.accelerator").get_accelerator()._name
    return bool(git.installed_ops.get(builder.name, False)) and git.accelerator_name == here


# The functions that replace DeepSpeed's


def _loading(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(self: Any, *args: Any, **named: Any) -> Any:
        return load_module(self, lambda: original(self, *args, **named))

    load.__name__ = original.__name__
    load.__doc__ = "The op's module: opkiln's op, DeepSpeed's built by opkiln, or DeepSpeed's own."
    return load


def _has_function(
    self: Any,
    funcname: str,
    libraries: Any,
    library_dirs: Any = None,
    verbose: bool = False,  # noqa: ARG001 (taken for compatibility)
) -> bool:
    """Whether a C function can be linked by the compiler that would build the op."""
    from opkiln.store.layers import Store
    from opkiln.toolchain.host import can_link

    if funcname == "io_submit" and _is_by_ops(self):
        return True  # DeepSpeed asks for libaio, and opkiln's op does without
    try:
        return can_link(Store().memory, funcname, tuple(libraries), tuple(library_dirs or ()))
    except ToolchainError as error:
        self.error_log = str(error)
        return False


def _of_this_cpu(original: Callable[..., str], name: str) -> Callable[..., str]:
    """A replacement that starts no program. DeepSpeed asks a package that starts programs, which
    takes a second or more at each load."""

    def answer(self: Any) -> str:
        from opkiln import machine
        from opkiln.builder import OpBuilder

        if machine.architecture() != "x86_64":
            return original(self)  # DeepSpeed has its own macros for NEON and SVE
        found: str = getattr(OpBuilder(self.name), name)()
        return found

    answer.__name__ = name
    return answer


def _compute_capability_args(self: Any, cross_compile_archs: str | None = None) -> list[str]:
    """The ``-gencode`` flags from opkiln's arch list; none during a build: the plan sets them.

    Sets ``enable_bf16`` if all of these architectures have bfloat16 arithmetic.
    """
    from opkiln.compat.deepspeed import engine

    archs, flags = engine.architectures(self, cross_compile_archs or "")
    self.enable_bf16 = archs.bf16
    return [] if self.jit_mode else flags


def _toolkit_check(name: str, module: ModuleType) -> Callable[..., Any]:
    """opkiln's check of the CUDA toolkit. It raises DeepSpeed's exceptions."""

    def check(name_of_op: str = "") -> Any:
        from opkiln.compat.deepspeed import builders

        try:
            return getattr(builders, name)(name_of_op)
        except MissingCUDAException as error:
            raise module.MissingCUDAException(str(error)) from error
        except CUDAMismatchException as error:
            raise module.CUDAMismatchException(str(error)) from error

    check.__name__ = name
    return check


def _default_capabilities() -> str:
    from opkiln.compat.deepspeed.builders import get_default_compute_capabilities

    return get_default_compute_capabilities()
