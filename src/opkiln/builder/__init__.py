"""What authors subclass: OpBuilder, CUDAOpBuilder, SYCLOpBuilder; and what they may ask.

The names are loaded when they are asked for: a C++ op never pays for the device side.
"""

from __future__ import annotations

from opkiln.base import lazy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opkiln.builder.base import OpBuilder as OpBuilder
    from opkiln.builder.cuda import CUDAOpBuilder as CUDAOpBuilder
    from opkiln.builder.sycl import SYCLOpBuilder as SYCLOpBuilder
    from opkiln.errors import CUDAMismatchException as CUDAMismatchException
    from opkiln.errors import MissingCUDAException as MissingCUDAException
    from opkiln.machine.toolchain.cuda_version import (
        assert_no_cuda_mismatch as assert_no_cuda_mismatch,
    )
    from opkiln.machine.toolchain.cuda_version import (
        cuda_minor_mismatch_ok as cuda_minor_mismatch_ok,
    )
    from opkiln.machine.toolchain.cuda_version import (
        get_default_compute_capabilities as get_default_compute_capabilities,
    )
    from opkiln.machine.toolchain.cuda_version import (
        installed_cuda_version as installed_cuda_version,
    )

__all__, __getattr__, __dir__ = lazy.names(__name__, {
    "opkiln.builder.base": "OpBuilder",
    "opkiln.builder.cuda": "CUDAOpBuilder",
    "opkiln.builder.sycl": "SYCLOpBuilder",
    "opkiln.errors": "CUDAMismatchException MissingCUDAException",
    "opkiln.machine.toolchain.cuda_version":
        "assert_no_cuda_mismatch cuda_minor_mismatch_ok get_default_compute_capabilities "
        "installed_cuda_version",
})  # fmt: skip
