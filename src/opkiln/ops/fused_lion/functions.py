"""The functions of the library; their bodies are the reference.

See ops/optimizing/references.py for what it takes beyond the native versions.
"""

from __future__ import annotations

from torch import Tensor

from opkiln.ops.fused_lion.op import kit
from opkiln.ops.optimizing.op_calls import Status
from opkiln.ops.optimizing.references import (
    FusedStep,
    Numbers,
    OpArguments,
    fake_plan,
    fake_step,
    no_plan,
    sign_of,
    times_plus,
)


@kit.op(mutates=("params", "exp_avgs", "masters", "steps"))
def fused_lion_(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], masters: list[Tensor],
    steps: list[Tensor], lr: float, beta1: float, beta2: float, weight_decay: float, maximize: bool,
    lr_tensor: Tensor | None = None, grad_scale: Tensor | None = None, found_inf: Tensor | None =
    None,
) -> None:  # fmt: skip
    """Make a step in place, and add 1 to the counts in ``steps``.

    The lists, the numbers in tensors and the errors are those of ``fused_adam_``.
    """
    given = OpArguments(locals())
    beta1, beta2, decay = given.beta1, given.beta2, given.weight_decay

    def step(_: int, n: Numbers, p: Tensor, g: Tensor, m: Tensor) -> list[Tensor]:
        change = -n.lr.to(p.dtype) * sign_of(times_plus(m, beta1, (1 - beta1) * g))
        p = times_plus(p, 1 - n.lr * decay, change) if decay else p + change
        return [p, times_plus(m, beta2, (1 - beta2) * g)]

    work = FusedStep(given)
    work.update_params(step)
    work.count_up()


@kit.op(gradient=False)
def fused_lion_keep(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], masters: list[Tensor],
    steps: list[Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Prepare lists that stay the same from step to step: a plan, on the device, with the addresses
    of all tensors, and a ledger with what the host must know. Without elements, as here, there is
    no plan. The caller must keep the tensors alive."""
    return no_plan(params)


@kit.op(mutates=("plan", "ledger"))
def fused_lion_kept_(
    plan: Tensor, ledger: Tensor, grads: list[Tensor], lr: float, beta1: float, beta2: float,
    weight_decay: float, maximize: bool, lr_tensor: Tensor | None = None, grad_scale: Tensor | None
    = None, found_inf: Tensor | None = None,
) -> int:  # fmt: skip
    """Make a step with a plan and new gradients; a ``Status``. The callers count up the versions of
    what the plan names."""
    return int(Status.NOT_KEPT)


fused_lion_keep.fake(fake_plan)
fused_lion_kept_.fake(fake_step)
