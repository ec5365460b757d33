"""``fused_adam`` in pure PyTorch: it runs if there is no native version, and tests compare with it.

See ops/optimizing/references.py for what it takes beyond the native versions.
"""

from __future__ import annotations

from torch import Tensor

from opkiln.ops.fused_adam.op import FusedAdamBuilder
from opkiln.ops.optimizing.references import (
    FusedStep,
    Numbers,
    OpArguments,
    op_function,
    times_plus,
)


@op_function(FusedAdamBuilder)
def fused_adam_(given: OpArguments) -> None:
    """Make a step in place, the one after the number in ``steps``, and count it there.

    ``steps`` holds one tensor for all parameters or one for each, no two the same. ``masters`` is
    empty or has a tensor per parameter: one that is not empty is stepped in the parameter's place,
    and the parameter receives its new value, rounded. ``lr_tensor`` replaces ``lr``. Gradients are
    divided by ``grad_scale``. If ``found_inf`` is not 0, nothing is changed.
    Raises RuntimeError, before anything is written, if lists differ in length, tensors in size or
    device, or a tensor of one number has more.
    """
    beta1, beta2, decay = given.beta1, given.beta2, given.weight_decay

    def step(_: int, n: Numbers, p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> list[Tensor]:
        if not given.adamw_mode:
            g = g + p * decay
        m = times_plus(m, beta1, (1 - beta1) * g)
        v = times_plus(v, beta2, (1 - beta2) * g * g)
        step_size = n.lr / n.total_weight(beta1, given.bias_correction)
        root_factor = n.total_weight(beta2, given.bias_correction).rsqrt()
        change = -step_size.to(p.dtype) * m / (v.sqrt() * root_factor.to(p.dtype) + given.eps)
        decays = given.adamw_mode and decay
        return [times_plus(p, 1 - n.lr * decay, change) if decays else p + change, m, v]

    work = FusedStep(given)
    work.update_params(step)
    work.count_up()
