"""The functions of the library; their bodies are the reference.

See ops/optimizing/references.py for what it takes beyond the native versions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.ops.fused_lamb.op import kit
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


@kit.op(mutates=("params", "exp_avgs", "exp_avg_sqs", "masters", "steps", "coefficients"))
def fused_lamb_(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    masters: list[Tensor], steps: list[Tensor], coefficients: Tensor, lr: float, beta1: float,
    beta2: float, eps: float, weight_decay: float, eps_inside_sqrt: bool, bias_correction: bool,
    maximize: bool, min_coeff: float, max_coeff: float, lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None, found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    """Make a step in place, the one after the number in ``steps``, and count it there.

    A parameter moves by ``lr`` times its coefficient times Adam's step with the decay added,
    ``u = m / (sqrt(v) + eps) + weight_decay * p``, the averages corrected for their start at 0. The
    coefficient is ``|p| / |u|`` over the whole tensor, clamped to ``[min_coeff, max_coeff]``, and 1
    if one of the norms is 0; ``coefficients`` receives it, one per parameter.
    The lists, the numbers in tensors and the errors are those of ``fused_adam_``.
    """
    given = OpArguments(locals())
    work, rows = FusedStep(given), len(given.params)
    _check_form("coefficients", given.coefficients, torch.float32, [rows])
    given.squares = torch.zeros(rows, 2, dtype=torch.float64, device=given.coefficients.device)
    _average(work, given)
    _move(work, given)


@kit.op(mutates=("exp_avgs", "exp_avg_sqs", "squares"))
def fused_lamb_average_(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    masters: list[Tensor], steps: list[Tensor], squares: Tensor, beta1: float, beta2: float,
    eps: float, weight_decay: float, eps_inside_sqrt: bool, bias_correction: bool, maximize: bool,
    grad_scale: Tensor | None = None, found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    """The first half of a step: the averages, and ``squares``, which receives the sums of squares
    of each parameter and of its ``u``, a row for each. The step is not counted.

    If ranks have parts of a tensor, its row must be added up over them before the second half.
    """
    given = OpArguments(locals())
    work = FusedStep(given)
    _check_form("squares", given.squares, torch.float64, [len(given.params), 2])
    _average(work, given)


@kit.op(mutates=("params", "masters", "steps", "coefficients"))
def fused_lamb_move_(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    masters: list[Tensor], steps: list[Tensor], squares: Tensor, coefficients: Tensor, lr: float,
    beta1: float, beta2: float, eps: float, weight_decay: float, eps_inside_sqrt: bool,
    bias_correction: bool, min_coeff: float, max_coeff: float, lr_tensor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    """The second half of a step: the parameters, from the averages and the sums of squares that the
    first left, and the count of steps. The gradients are not read."""
    given = OpArguments(locals())
    work = FusedStep(given)
    _check_form("squares", given.squares, torch.float64, [len(given.params), 2])
    _check_form("coefficients", given.coefficients, torch.float32, [len(given.params)])
    _move(work, given)


@kit.op(gradient=False)
def fused_lamb_keep(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    masters: list[Tensor], steps: list[Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Keep all lists except the gradients until ``fused_lamb_forget``: a plan, on the device,
    with all addresses, and a ticket. They have no elements if nothing is kept, as here."""
    return nothing_kept(params), nothing_kept([])


@kit.op(mutates=("plan", "coefficients"))
def fused_lamb_kept_(
    plan: Tensor, ticket: Tensor, grads: list[Tensor], coefficients: Tensor, lr: float,
    beta1: float, beta2: float, eps: float, weight_decay: float, eps_inside_sqrt: bool,
    bias_correction: bool, maximize: bool, min_coeff: float, max_coeff: float,
    lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None, found_inf: Tensor | None = None,
) -> int:  # fmt: skip
    """Make a step with lists that are kept; a ``Status``. The callers count up the versions."""
    return int(Status.NOT_KEPT)


@kit.op(gradient=False)
def fused_lamb_forget(plan: Tensor, ticket: Tensor) -> None:
    """Let go of lists that are kept."""


fused_lamb_keep.fake(fake_plan)
fused_lamb_kept_.fake(fake_step)


def _average(work: FusedStep, given: OpArguments) -> None:
    beta1, beta2 = given.beta1, given.beta2

    def average(
        i: int, n: Numbers, p: Tensor, g: Tensor, m: Tensor, v: Tensor
    ) -> list[Tensor | None]:
        m = times_plus(m, beta1, (1 - beta1) * g)
        v = times_plus(v, beta2, (1 - beta2) * g * g)
        both = (p, _update(given, n, p, m, v))
        sums = torch.stack([each.double().square().sum() for each in both])
        work.store(sums, given.squares[i])
        return [None, m, v]

    work.update_params(average)


def _move(work: FusedStep, given: OpArguments) -> None:
    def move(i: int, n: Numbers, p: Tensor, _: Tensor, m: Tensor, v: Tensor) -> list[Tensor]:
        size, change = given.squares[i].sqrt()
        bounded = (size / change).clamp(given.min_coeff, given.max_coeff)
        ratio = torch.where((size == 0) | (change == 0), torch.ones_like(n.step), bounded)
        work.store(ratio, given.coefficients[i])
        return [p - (n.lr * ratio).to(p.dtype) * _update(given, n, p, m, v)]

    work.update_params(move)
    work.count_up()


def _update(given: OpArguments, n: Numbers, p: Tensor, m: Tensor, v: Tensor) -> Tensor:
    """Adam's step with the decay added, from the averages after the step."""
    m_factor = 1 / n.total_weight(given.beta1, given.bias_correction)
    v_factor = 1 / n.total_weight(given.beta2, given.bias_correction)
    if given.eps_inside_sqrt:
        root = (v * v_factor.to(v.dtype) + given.eps).sqrt()
    else:
        root = v.sqrt() * v_factor.sqrt().to(v.dtype) + given.eps
    update: Tensor = m * m_factor.to(m.dtype) / root + given.weight_decay * p
    return update


def _check_form(name: str, tensor: Tensor, dtype: torch.dtype, shape: list[int]) -> None:
    if tensor.dtype != dtype or list(tensor.shape) != shape:
        raise RuntimeError(
            f"{name} has shape {list(tensor.shape)} and dtype {tensor.dtype}, "
            f"expected {shape} and {dtype}"
        )
