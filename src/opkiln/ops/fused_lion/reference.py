"""``fused_lion`` in pure PyTorch: it runs if there is no native version, and tests compare with it.

See ops/optimizing/references.py for what it takes beyond the native versions.
"""

from __future__ import annotations

from torch import Tensor

from opkiln.ops.fused_lion.op import FusedLionBuilder
from opkiln.ops.optimizing.references import (
    FusedStep,
    Numbers,
    OpArguments,
    op_function,
    sign_of,
    times_plus,
)


@op_function(FusedLionBuilder)
def fused_lion_(given: OpArguments) -> None:
    """Make a step in place, and add 1 to the counts in ``steps``.

    The lists, the numbers in tensors and the errors are those of ``fused_adam_``.
    """
    beta1, beta2, decay = given.beta1, given.beta2, given.weight_decay

    def step(_: int, n: Numbers, p: Tensor, g: Tensor, m: Tensor) -> list[Tensor]:
        change = -n.lr.to(p.dtype) * sign_of(times_plus(m, beta1, (1 - beta1) * g))
        p = times_plus(p, 1 - n.lr * decay, change) if decay else p + change
        return [p, times_plus(m, beta2, (1 - beta2) * g)]

    work = FusedStep(given)
    work.update_params(step)
    work.count_up()
