"""The builder and the schemas of ``cpu_lion``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.builder import OpBuilder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

# One list per role, walked in step; `copies` is empty or has one tensor per parameter.
_ARGUMENTS = (
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] copies, float lr, "
    "float beta1, float beta2, float weight_decay, bool maximize, float grad_scale) -> ()"
)


class CPULionBuilder(OpBuilder):
    """``load()`` gives ``cpu_lion_`` and ``cpu_lion_rollback_``; see reference.py for both."""

    NAME = "cpu_lion"
    BUILD_VAR = "DS_BUILD_CPU_LION"
    SCHEMAS = (f"cpu_lion_{_ARGUMENTS}", f"cpu_lion_rollback_{_ARGUMENTS}")

    def sources(self) -> list[str]:
        return ["ops/cpu_lion/cpu.cpp", "ops/cpu_lion/cpu_binding.cpp"]

    def include_paths(self) -> list[str]:
        return ["csrc"]

    def reference(self) -> ModuleType:
        from opkiln.ops.cpu_lion import reference

        return reference
