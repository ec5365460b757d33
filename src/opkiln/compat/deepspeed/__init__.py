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
    from opkiln.compat.deepspeed.builders import CPUOpBuilder as CPUOpBuilder
    from opkiln.compat.deepspeed.builders import CUDAOpBuilder as CUDAOpBuilder
    from opkiln.compat.deepspeed.builders import OpBuilder as OpBuilder
    from opkiln.compat.deepspeed.builders import TorchCPUOpBuilder as TorchCPUOpBuilder
    from opkiln.compat.deepspeed.builders import assert_no_cuda_mismatch as assert_no_cuda_mismatch
    from opkiln.compat.deepspeed.builders import (
        get_default_compute_capabilities as get_default_compute_capabilities,
    )
    from opkiln.compat.deepspeed.builders import installed_cuda_version as installed_cuda_version
    from opkiln.compat.deepspeed.builders import probe_is_compatible as probe_is_compatible
    from opkiln.compat.deepspeed.patch import Functions as Functions
    from opkiln.compat.deepspeed.patch import Served as Served
    from opkiln.compat.deepspeed.patch import functions as functions
    from opkiln.compat.deepspeed.patch import install as install
    from opkiln.compat.deepspeed.patch import remove as remove
    from opkiln.compat.deepspeed.patch import served as served
    from opkiln.errors import CUDAMismatchException as CUDAMismatchException
    from opkiln.errors import MissingCUDAException as MissingCUDAException

__all__, __getattr__, __dir__ = lazy.names(__name__, {
    "opkiln.compat.deepspeed.builders":
        "CPUOpBuilder CUDAOpBuilder OpBuilder TorchCPUOpBuilder assert_no_cuda_mismatch "
        "get_default_compute_capabilities installed_cuda_version probe_is_compatible",
    "opkiln.compat.deepspeed.patch": "Functions Served functions install remove served",
    "opkiln.errors": "CUDAMismatchException MissingCUDAException",
})  # fmt: skip
