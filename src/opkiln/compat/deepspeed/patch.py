"""How DeepSpeed's builders are redirected: the functions of its base classes that are exchanged.

Nothing of DeepSpeed changes on disk, and what is exchanged here can be put back. Builders that
bring a ``load`` of their own (those of NPUs, say) are left as they are.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from opkiln.compat import patch
from opkiln.compat.deepspeed import serve
from opkiln.errors import CUDAMismatchException, MissingCUDAException, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

_MODULE = "deepspeed.ops.op_builder.builder"


def install() -> None:
    """Have DeepSpeed's builders load through opkiln from now on, in this process. Twice is once.

    Builders that were imported before are redirected, too; modules that they have given out stay
    what they are. Raises UsageError where DeepSpeed is not installed.
    """
    try:
        import_module(_MODULE)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"DeepSpeed's builders cannot be imported: {error}", hint="pip install deepspeed"
        ) from error
    patch.install((_MODULE,))


def remove() -> None:
    """Give DeepSpeed's builders their own functions back."""
    patch.remove((_MODULE,))


def replacements(module: ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """Owner, attribute and value of each exchange in ``deepspeed.ops.op_builder.builder``."""
    base, cuda = module.OpBuilder, module.CUDAOpBuilder
    yield base, "load", _loading(base.load)
    yield base, "jit_load", _loading(base.jit_load)
    yield base, "has_function", _has_function
    yield base, "cpu_arch", _of_this_cpu(base.cpu_arch, "cpu_arch")
    yield base, "simd_width", _of_this_cpu(base.simd_width, "simd_width")
    yield cuda, "compute_capability_args", _compute_capability_args
    for name in ("installed_cuda_version", "assert_no_cuda_mismatch"):
        yield module, name, _asked_of_opkiln(name, module)
    yield module, "get_default_compute_capabilities", _default_capabilities


def _loading(original: Callable[..., Any]) -> Callable[..., Any]:
    def load(self: Any, *args: Any, **named: Any) -> Any:
        return serve.load(self, lambda: original(self, *args, **named))

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
    """Whether a C function can be linked; asked of the compiler that would build the op."""
    from opkiln.errors import ToolchainError
    from opkiln.store.layers import Store
    from opkiln.toolchain.host import can_link

    try:
        return can_link(Store().memory, funcname, tuple(libraries), tuple(library_dirs or ()))
    except ToolchainError as error:
        self.error_log = str(error)
        return False


def _of_this_cpu(original: Callable[..., str], name: str) -> Callable[..., str]:
    """DeepSpeed asks a package that starts programs, for a second and more at each load."""

    def answer(self: Any) -> str:
        from opkiln import machine
        from opkiln.builder import OpBuilder

        if machine.architecture() != "x86_64":
            return original(self)  # NEON and SVE have macros of DeepSpeed's own
        found: str = getattr(OpBuilder(self.name), name)()
        return found

    answer.__name__ = name
    return answer


def _compute_capability_args(self: Any, cross_compile_archs: str | None = None) -> list[str]:
    """The ``-gencode`` flags of opkiln's arch logic; none while it builds, for its plan has them.

    Says in ``enable_bf16`` whether all of these architectures have bfloat16 arithmetic.
    """
    from opkiln.compat.deepspeed import engine

    archs, flags = engine.architectures(self, cross_compile_archs or "")
    self.enable_bf16 = archs.bf16
    return [] if self.jit_mode else flags


def _asked_of_opkiln(name: str, module: ModuleType) -> Callable[..., Any]:
    """DeepSpeed's checks of the toolkit, over opkiln's; what they raise is DeepSpeed's."""

    def ask(name_of_op: str = "") -> Any:
        from opkiln.loading import archs
        from opkiln.toolchain import cuda_version

        try:
            return getattr(cuda_version, name)(name_of_op, memory=archs.memory())
        except MissingCUDAException as error:
            raise module.MissingCUDAException(str(error)) from error
        except CUDAMismatchException as error:
            raise module.CUDAMismatchException(str(error)) from error

    ask.__name__ = name
    return ask


def _default_capabilities() -> str:
    """Every architecture that the toolkit here has."""
    from opkiln.loading import archs
    from opkiln.toolchain.cuda_version import get_default_compute_capabilities

    return get_default_compute_capabilities(memory=archs.memory())
