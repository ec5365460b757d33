"""The builder and the schemas of ``cpu_adagrad``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.ops.optimizing.builders import HostBuilder, host_schemas

# Gradients of some rows: `indices` says which, in ascending order without duplicates.
_ROWS = (
    "(Tensor(a!)[] params, Tensor[] indices, Tensor[] values, Tensor(b!)[] sums, "
    "Tensor(c!)[] copies, int step, float lr, float lr_decay, float eps, bool maximize, "
    "float grad_scale) -> ()"
)


class CPUAdagradBuilder(HostBuilder):
    """``load()`` gives ``cpu_adagrad_``, ``cpu_adagrad_rows_`` for sparse gradients, the two that
    undo a step (see reference.py), and the form of the first over kept lists."""

    NAME = "cpu_adagrad"
    BUILD_VAR = "DS_BUILD_CPU_ADAGRAD"
    SCHEMAS = (
        *host_schemas(
            "cpu_adagrad",
            ("sums",),
            "int step, float lr, float lr_decay, float eps, float weight_decay, bool maximize, "
            "float grad_scale",
        ),
        f"cpu_adagrad_rows_{_ROWS}",
        f"cpu_adagrad_rows_rollback_{_ROWS}",
    )
