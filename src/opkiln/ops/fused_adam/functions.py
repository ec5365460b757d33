"""The functions of the library; their bodies are the reference.

See ops/optimizing/references.py for what it takes beyond the native versions.
"""

from __future__ import annotations

from torch import Tensor

from opkiln.ops.fused_adam.op import kit
from opkiln.ops.optimizing.op_calls import Status
from opkiln.ops.optimizing.references import (
    FusedStep,
    Numbers,
    OpArguments,
    fake_plan,
    fake_step,
    nothing_kept,
    times_plus,
)


@kit.op(mutates=("params", "exp_avgs", "exp_avg_sqs", "masters", "steps"))
def fused_adam_(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    masters: list[Tensor], steps: list[Tensor], lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, adamw_mode: bool, bias_correction: bool, maximize: bool, lr_tensor: Tensor
    | None = None, grad_scale: Tensor | None = None, found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    """Make a step in place, the one after the number in ``steps``, and count it there.

    ``steps`` holds one tensor for all parameters or one for each, no two the same. ``masters`` is
    empty or has a tensor per parameter: one that is not empty is stepped in the parameter's place,
    and the parameter receives its new value, rounded. ``lr_tensor`` replaces ``lr``. Gradients are
    divided by ``grad_scale``. If ``found_inf`` is not 0, nothing is changed.
    Raises RuntimeError, before anything is written, if lists differ in length, tensors in size or
    device, or a tensor of one number has more.
    """
    given = OpArguments(locals())
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


@kit.op(gradient=False)
def fused_adam_keep(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    masters: list[Tensor], steps: list[Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Keep all lists except the gradients until ``fused_adam_forget``: a plan, on the device,
    with all addresses, and a ticket. They have no elements if nothing is kept, as here."""
    return nothing_kept(params), nothing_kept([])


@kit.op(mutates=("plan",))
def fused_adam_kept_(
    plan: Tensor, ticket: Tensor, grads: list[Tensor], lr: float, beta1: float, beta2: float,
    eps: float, weight_decay: float, adamw_mode: bool, bias_correction: bool, maximize: bool,
    lr_tensor: Tensor | None = None, grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> int:  # fmt: skip
    """Make a step with lists that are kept; a ``Status``. The callers count up the versions."""
    return int(Status.NOT_KEPT)


@kit.op(gradient=False)
def fused_adam_forget(plan: Tensor, ticket: Tensor) -> None:
    """Let go of lists that are kept."""


fused_adam_keep.fake(fake_plan)
fused_adam_kept_.fake(fake_step)
