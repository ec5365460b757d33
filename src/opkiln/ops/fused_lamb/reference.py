"""``fused_lamb`` in pure PyTorch: it runs if there is no native version, and tests compare with it.

See optimizing/references.py for what it takes beyond the native versions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.optimizing.references import Numbers, prepared, times_plus


def fused_lamb_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    masters: list[Tensor],
    steps: list[Tensor],
    coefficients: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    eps_inside_sqrt: bool,
    bias_correction: bool,
    maximize: bool,
    min_coeff: float,
    max_coeff: float,
    lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Make a step in place, the one after the number in ``steps``, and count it there.

    A parameter moves by ``lr`` times its coefficient times Adam's step with the decay added,
    ``u = m / (sqrt(v) + eps) + weight_decay * p``, the averages corrected for their start at 0. The
    coefficient is ``|p| / |u|`` over the whole tensor, clamped to ``[min_coeff, max_coeff]``, and 1
    if one of the norms is 0; ``coefficients`` receives it, one per parameter.
    The lists, the numbers in tensors and the errors are those of ``fused_adam_``.
    """
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    # Both halves' arguments are checked before the first writes.
    prepared(lists, masters, steps, lr, maximize, lr_tensor, grad_scale, found_inf)
    _check_coefficients(coefficients, params)
    squares = torch.zeros(len(params), 2, dtype=torch.float64, device=coefficients.device)
    fused_lamb_average_(
        params, grads, exp_avgs, exp_avg_sqs, masters, steps, squares, beta1, beta2, eps,
        weight_decay, eps_inside_sqrt, bias_correction, maximize, grad_scale, found_inf,
    )  # fmt: skip
    fused_lamb_move_(
        params, grads, exp_avgs, exp_avg_sqs, masters, steps, squares, coefficients, lr, beta1,
        beta2, eps, weight_decay, eps_inside_sqrt, bias_correction, min_coeff, max_coeff,
        lr_tensor, found_inf,
    )  # fmt: skip


def fused_lamb_average_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    masters: list[Tensor],
    steps: list[Tensor],
    squares: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    eps_inside_sqrt: bool,
    bias_correction: bool,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """The first half of a step: the averages, and ``squares``, which receives the sums of squares
    of each parameter and of its ``u``, a row for each. The step is not counted.

    If ranks have parts of a tensor, its row must be added up over them before the second half.
    """
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    work = prepared(lists, masters, steps, 0.0, maximize, None, grad_scale, found_inf)
    _check_squares(squares, params)

    def average(
        i: int, n: Numbers, p: Tensor, g: Tensor, m: Tensor, v: Tensor
    ) -> list[Tensor | None]:
        one = torch.ones_like(n.step)
        m = times_plus(m, one * beta1, (1 - beta1) * g)
        v = times_plus(v, one * beta2, (1 - beta2) * g * g)
        update = _update(
            p, m, v, n.step, beta1, beta2, eps, weight_decay, eps_inside_sqrt, bias_correction
        )
        sums = torch.stack([each.double().square().sum() for each in (p, update)])
        work.store(sums, squares[i])
        return [None, m, v]

    work.each(average)


def fused_lamb_move_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    masters: list[Tensor],
    steps: list[Tensor],
    squares: Tensor,
    coefficients: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    eps_inside_sqrt: bool,
    bias_correction: bool,
    min_coeff: float,
    max_coeff: float,
    lr_tensor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """The second half of a step: the parameters, from the averages and the sums of squares that the
    first left, and the count of steps. The gradients are not read."""
    lists = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs}
    work = prepared(lists, masters, steps, lr, False, lr_tensor, None, found_inf)
    _check_squares(squares, params)
    _check_coefficients(coefficients, params)

    def move(i: int, n: Numbers, p: Tensor, _: Tensor, m: Tensor, v: Tensor) -> list[Tensor]:
        update = _update(
            p, m, v, n.step, beta1, beta2, eps, weight_decay, eps_inside_sqrt, bias_correction
        )
        size, change = squares[i].sqrt()
        bounded = (size / change).clamp(min_coeff, max_coeff)
        ratio = torch.where((size == 0) | (change == 0), torch.ones_like(n.step), bounded)
        work.store(ratio, coefficients[i])
        return [p - (n.lr * ratio).to(p.dtype) * update]

    work.each(move)
    work.count_up()


def _update(
    p: Tensor, m: Tensor, v: Tensor, step: Tensor, beta1: float, beta2: float, eps: float,
    weight_decay: float, eps_inside_sqrt: bool, bias_correction: bool,
) -> Tensor:  # fmt: skip
    """Adam's step with the decay added, from the averages after the step."""
    one = torch.ones_like(step)
    m_factor = 1 / (1 - beta1**step if bias_correction else one)
    v_factor = 1 / (1 - beta2**step if bias_correction else one)
    if eps_inside_sqrt:
        root = (v * v_factor.to(v.dtype) + eps).sqrt()
    else:
        root = v.sqrt() * v_factor.sqrt().to(v.dtype) + eps
    return m * m_factor.to(m.dtype) / root + weight_decay * p


def _check_coefficients(coefficients: Tensor, params: list[Tensor]) -> None:
    _check_form("coefficients", coefficients, torch.float32, [len(params)])


def _check_squares(squares: Tensor, params: list[Tensor]) -> None:
    _check_form("squares", squares, torch.float64, [len(params), 2])


def _check_form(name: str, tensor: Tensor, dtype: torch.dtype, shape: list[int]) -> None:
    if tensor.dtype != dtype or list(tensor.shape) != shape:
        raise RuntimeError(
            f"{name} has shape {list(tensor.shape)} and dtype {tensor.dtype}, "
            f"expected {shape} and {dtype}"
        )
