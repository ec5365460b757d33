"""The builder and the schemas of ``cpu_adam``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.builder import OpBuilder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

# One list per role, walked in step; `copies` is empty or has one tensor per parameter.
_ARGUMENTS = (
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] copies, int step, float lr, float beta1, float beta2, float eps, "
    "float weight_decay, bool adamw_mode, bool bias_correction, bool maximize, float grad_scale"
    ") -> ()"
)


class CPUAdamBuilder(OpBuilder):
    """``load()`` gives ``cpu_adam_`` and ``cpu_adam_rollback_``; see reference.py for both."""

    NAME = "cpu_adam"
    BUILD_VAR = "DS_BUILD_CPU_ADAM"
    SCHEMAS = (f"cpu_adam_{_ARGUMENTS}", f"cpu_adam_rollback_{_ARGUMENTS}")

    def sources(self) -> list[str]:
        return ["ops/cpu_adam/cpu.cpp", "ops/cpu_adam/cpu_binding.cpp"]

    def include_paths(self) -> list[str]:
        return ["csrc"]

    def reference(self) -> ModuleType:
        from opkiln.ops.cpu_adam import reference

        return reference
