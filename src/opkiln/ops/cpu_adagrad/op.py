"""The builder and the schemas of ``cpu_adagrad``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.builder import OpBuilder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

# One list per role, walked in step; `copies` is empty or has one tensor per parameter.
_DENSE = (
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] sums, Tensor(c!)[] copies, int step, "
    "float lr, float lr_decay, float eps, float weight_decay, bool maximize, float grad_scale"
    ") -> ()"
)
# Gradients that have some rows only: `indices` says which, in ascending order without duplicates.
_ROWS = (
    "(Tensor(a!)[] params, Tensor[] indices, Tensor[] values, Tensor(b!)[] sums, "
    "Tensor(c!)[] copies, int step, float lr, float lr_decay, float eps, bool maximize, "
    "float grad_scale) -> ()"
)


class CPUAdagradBuilder(OpBuilder):
    """``load()`` gives ``cpu_adagrad_``, ``cpu_adagrad_rows_`` for sparse gradients, and the two
    that undo a step; see reference.py."""

    NAME = "cpu_adagrad"
    BUILD_VAR = "DS_BUILD_CPU_ADAGRAD"
    SCHEMAS = (
        f"cpu_adagrad_{_DENSE}",
        f"cpu_adagrad_rollback_{_DENSE}",
        f"cpu_adagrad_rows_{_ROWS}",
        f"cpu_adagrad_rows_rollback_{_ROWS}",
    )

    def sources(self) -> list[str]:
        return ["ops/cpu_adagrad/cpu.cpp", "ops/cpu_adagrad/cpu_binding.cpp"]

    def include_paths(self) -> list[str]:
        return ["csrc"]

    def reference(self) -> ModuleType:
        from opkiln.ops.cpu_adagrad import reference

        return reference
