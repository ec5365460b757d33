"""The builder and the schemas of ``cpu_adagrad``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.ops.host_builder import HostBuilder, schemas

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

# Gradients that have some rows only: `indices` says which, in ascending order without duplicates.
_ROWS = (
    "(Tensor(a!)[] params, Tensor[] indices, Tensor[] values, Tensor(b!)[] sums, "
    "Tensor(c!)[] copies, int step, float lr, float lr_decay, float eps, bool maximize, "
    "float grad_scale) -> ()"
)


class CPUAdagradBuilder(HostBuilder):
    """``load()`` gives ``cpu_adagrad_``, ``cpu_adagrad_rows_`` for sparse gradients, and the two
    that undo a step, see reference.py; and the form of the first that takes lists which were
    kept."""

    NAME = "cpu_adagrad"
    BUILD_VAR = "DS_BUILD_CPU_ADAGRAD"
    SCHEMAS = (
        *schemas(
            "cpu_adagrad",
            ("sums",),
            "int step, float lr, float lr_decay, float eps, float weight_decay, bool maximize, "
            "float grad_scale",
        ),
        f"cpu_adagrad_rows_{_ROWS}",
        f"cpu_adagrad_rows_rollback_{_ROWS}",
    )

    def reference(self) -> ModuleType:
        from opkiln.ops.cpu_adagrad import reference

        return reference
