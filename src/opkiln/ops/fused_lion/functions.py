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
    nothing_kept,
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
    """Keep all lists except the gradients until ``fused_lion_forget``: a plan, on the device,
    with all addresses, and a ticket. They have no elements if nothing is kept, as here."""
    return nothing_kept(params), nothing_kept([])


@kit.op(mutates=("plan",))
def fused_lion_kept_(
    plan: Tensor, ticket: Tensor, grads: list[Tensor], lr: float, beta1: float, beta2: float,
    weight_decay: float, maximize: bool, lr_tensor: Tensor | None = None, grad_scale: Tensor | None
    = None, found_inf: Tensor | None = None,
) -> int:  # fmt: skip
    """Make a step with lists that are kept; a ``Status``. The callers count up the versions."""
    return int(Status.NOT_KEPT)


@kit.op(gradient=False)
def fused_lion_forget(plan: Tensor, ticket: Tensor) -> None:
    """Let go of lists that are kept."""


fused_lion_keep.fake(fake_plan)
fused_lion_kept_.fake(fake_step)
