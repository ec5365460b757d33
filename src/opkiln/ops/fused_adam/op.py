"""The builder and the schema of ``fused_adam``. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.builder import CUDAOpBuilder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

# One list per role, walked in step. Whatever may change between two replays of a captured graph is
# a tensor on the parameters' device: how many steps were made, the learning rate, the scale of the
# gradients, whether one of them is not finite.
# - `masters` is empty, or has an fp32 tensor per parameter; one without elements where there is no
#   master.
# - `steps` is one tensor for all parameters, or one for each, no two of them the same: parameters
#   that have always been stepped together share one, and those that have not still go in one call.
#   The op adds 1 to each.
# - `lr_tensor` stands in for `lr`; `grad_scale` and `found_inf` are those of torch.amp. Clipping of
#   gradients needs no argument of its own: its factor divides into `grad_scale`.
_SCHEMA = (
    "fused_adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
    "Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] masters, Tensor(e!)[] steps, float lr, float beta1, "
    "float beta2, float eps, float weight_decay, bool adamw_mode, bool bias_correction, "
    "bool maximize, Tensor? lr_tensor=None, Tensor? grad_scale=None, Tensor? found_inf=None"
    ") -> ()"
)


class FusedAdamBuilder(CUDAOpBuilder):
    """``load()`` gives ``fused_adam_``; see reference.py."""

    NAME = "fused_adam"
    BUILD_VAR = "DS_BUILD_FUSED_ADAM"
    BACKENDS = ("cuda", "rocm", "cpu")
    SCHEMAS = (_SCHEMA,)

    def sources(self) -> list[str]:
        if self.build_for_cpu:
            return ["ops/cpu_adam/cpu.cpp", "ops/fused_adam/cpu_binding.cpp"]
        return ["ops/fused_adam/cuda.cu", "ops/fused_adam/cuda_binding.cpp"]

    def include_paths(self) -> list[str]:
        return ["csrc"]

    def reference(self) -> ModuleType:
        from opkiln.ops.fused_adam import reference

        return reference
