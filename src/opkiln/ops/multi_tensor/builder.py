"""What the builders of these ops share. Imports no torch: it is on the cache-hit path."""

from __future__ import annotations

from opkiln.builder import CUDAOpBuilder
from opkiln.model import CUDA

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# Of the schemas: whatever may change between two replays of a captured
# graph is a tensor on the parameters' device.
# - `masters` is empty, or has an fp32 tensor per parameter; one without elements where there is no
#   master.
# - `steps` is one tensor for all parameters, or one for each, no two of them the same: parameters
#   that have always been stepped together share one, and those that have not still go in one call.
#   The op adds 1 to each.
# - `lr_tensor` stands in for `lr`; `grad_scale` and `found_inf` are those of torch.amp. Clipping of
#   gradients needs no argument of its own: its factor divides into `grad_scale`.
NUMBERS = "Tensor? lr_tensor=None, Tensor? grad_scale=None, Tensor? found_inf=None"


def schemas(op: str, states: Sequence[str], hyper: str) -> tuple[str, str, str]:
    """The functions of an op over lists of parameters, gradients and these states.

    ``<op>_`` makes a step. ``<op>_plan`` and ``<op>_planned_`` do the same for lists that stay as
    they are from step to step, but for the gradients: a plan on the device has the addresses of all
    tensors, and its ledger what the host must know. They are for who keeps those tensors alive and
    counts up their versions, as the optimizers here do: no schema can say what is written to
    through addresses. Compiled graphs take ``<op>_``.
    """
    marked = [f"Tensor({'bc'[i]}!)[] {name}" for i, name in enumerate(states)]
    plain = [f"Tensor[] {name}" for name in states]
    rest = f"{hyper}, {NUMBERS}"
    step = (
        f"{op}_(Tensor(a!)[] params, Tensor[] grads, {', '.join(marked)}, "
        f"Tensor(d!)[] masters, Tensor(e!)[] steps, {rest}) -> ()"
    )
    plan = (
        f"{op}_plan(Tensor[] params, Tensor[] grads, {', '.join(plain)}, Tensor[] masters, "
        "Tensor[] steps) -> (Tensor, Tensor)"
    )
    planned = f"{op}_planned_(Tensor(a!) plan, Tensor(b!) ledger, Tensor[] grads, {rest}) -> ()"
    return step, plan, planned


class FusedBuilder(CUDAOpBuilder):
    """An op over lists of tensors, from ``ops/<name>``; ``CPU_KERNEL`` is its CPU version's."""

    BACKENDS = ("cuda", "rocm", "cpu")
    CPU_KERNEL = ""

    def sources(self) -> list[str]:
        folder = f"ops/{self.NAME}"
        if self.build_for_cpu:
            return [self.CPU_KERNEL, f"{folder}/cpu_binding.cpp"]
        return [f"{folder}/cuda.cu", "ops/multi_tensor/plan.cu", f"{folder}/cuda_binding.cpp"]

    def kernels(self) -> Sequence[str]:
        # A plan saves launches, and there are none on a CPU.
        return [f"{self.NAME}_"] if self.build_for_cpu else super().kernels()

    def include_paths(self) -> list[str]:
        return ["csrc"]

    def nvcc_args(self) -> list[str]:
        # Division and root that may be off by two units in the last place: they have no path for
        # odd numbers, which takes registers, and only the change of a parameter has their error.
        return ["-prec-div=false", "-prec-sqrt=false"] if self.backend == CUDA else []
