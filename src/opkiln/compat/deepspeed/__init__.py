"""DeepSpeed on opkiln: its builders load opkiln's ops, or its own sources built by opkiln.

    import opkiln.compat.deepspeed
    opkiln.compat.deepspeed.install()    # or: import opkiln.compat.deepspeed.auto

``opkiln run COMMAND`` does the same for an unmodified program. ``OPKILN_DEEPSPEED`` chooses what
serves each op. ``OpBuilder``, ``CUDAOpBuilder``, ``CPUOpBuilder`` and the other names of
``deepspeed.ops.op_builder.builder`` are here for builders that were written against DeepSpeed's:
only their import changes. Importing this package does no work.
"""

from __future__ import annotations

from opkiln.base import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.compat.deepspeed.builders import (
        CPUOpBuilder,
        CUDAOpBuilder,
        OpBuilder,
        TorchCPUOpBuilder,
        assert_no_cuda_mismatch,
        get_default_compute_capabilities,
        installed_cuda_version,
        probe_is_compatible,
    )
    from opkiln.compat.deepspeed.patch import Functions, Served, functions, install, remove, served
    from opkiln.errors import CUDAMismatchException, MissingCUDAException

__all__ = [
    "CPUOpBuilder", "CUDAMismatchException", "CUDAOpBuilder", "Functions", "MissingCUDAException",
    "OpBuilder", "Served", "TorchCPUOpBuilder", "assert_no_cuda_mismatch", "functions",
    "get_default_compute_capabilities", "install", "installed_cuda_version", "probe_is_compatible",
    "remove", "served",
]  # fmt: skip

_PATCH = ("Functions", "Served", "functions", "install", "remove", "served")
_HOMES = {
    **dict.fromkeys(__all__, "opkiln.compat.deepspeed.builders"),
    **dict.fromkeys(_PATCH, "opkiln.compat.deepspeed.patch"),
    **dict.fromkeys(("CUDAMismatchException", "MissingCUDAException"), "opkiln.errors"),
}

__getattr__, __dir__ = lazy.names(__name__, _HOMES)
