"""SYCLOpBuilder: an op with SYCL kernels."""

from __future__ import annotations

from opkiln.base.forks import cached_property
from opkiln.base.model import CPU, XPU, OpSpec
from opkiln.builder.base import OpBuilder
from opkiln.machine.devices import choice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


class SYCLOpBuilder(OpBuilder):
    """What authors of SYCL code subclass.

    ``sources()`` lists ``.cpp`` and ``.sycl`` files. With icpx or dpcpp both may hold kernels; with
    the runtime compiler of ``intel-sycl-rt`` they are ``.cpp`` files that hold their kernels as
    source text. An op whose ``BACKENDS`` also name ``cpu`` returns its plain C++ files where
    ``build_for_cpu`` is true.
    """

    BACKENDS: tuple[str, ...] = (XPU,)

    def sycl_args(self) -> Sequence[str]:
        """Flags for the SYCL compiler; they come after opkiln's own."""
        return ()

    @cached_property
    def backend(self) -> str:
        """The backend that is asked for; else that of the accelerator that is; else the first of
        ``BACKENDS``. Raises AcceleratorError where that accelerator does not exist."""
        return self._asked_backend or choice.requested_backend(self.BACKENDS) or self.BACKENDS[0]

    @property
    def build_for_cpu(self) -> bool:
        """Whether the plain C++ version is what is to be built."""
        return self.backend == CPU

    def spec(self) -> OpSpec:
        spec = super().spec()
        if self.backend == CPU:
            return spec
        flags = tuple(self.strip_empty_entries(self.sycl_args()))
        return spec._replace(backend=self.backend, device_args=flags, vectorize=False)
