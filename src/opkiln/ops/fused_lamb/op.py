"""The builder and the schemas of ``fused_lamb``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.ops.multi_tensor.builder import FusedBuilder, schemas

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType


class FusedLambBuilder(FusedBuilder):
    """``load()`` gives ``fused_lamb_`` (see reference.py) and, on GPUs, its planned form."""

    NAME = "fused_lamb"
    BUILD_VAR = "DS_BUILD_FUSED_LAMB"
    CPU_KERNEL = "ops/fused_lamb/cpu.cpp"
    # `coefficients` receives a number per parameter.
    SCHEMAS = schemas(
        "fused_lamb",
        ("exp_avgs", "exp_avg_sqs"),
        "Tensor(f!) coefficients, float lr, float beta1, float beta2, float eps, "
        "float weight_decay, bool eps_inside_sqrt, bool bias_correction, bool maximize, "
        "float min_coeff, float max_coeff",
    )

    def reference(self) -> ModuleType:
        from opkiln.ops.fused_lamb import reference

        return reference

    def fake(self) -> ModuleType:
        from opkiln.ops.fused_lamb import fake

        return fake
