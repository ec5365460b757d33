"""Inputs for fused_lamb, and the check of a step against the textbook's formulas in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from adam_oracle import F32, clone
from fused_oracle import tensors as adam_tensors
from torch import Tensor

HYPER: dict[str, Any] = {
    "lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1,
    "eps_inside_sqrt": False, "bias_correction": True, "maximize": False, "min_coeff": 0.01,
    "max_coeff": 10.0,
}  # fmt: skip
ROLES = ("params", "grads", "exp_avgs", "exp_avg_sqs", "masters", "steps")


def tensors(
    sizes: tuple[int, ...], param: torch.dtype = F32, grad: torch.dtype = F32,
    masters: bool = False, steps: tuple[float, ...] = (2.0,), seed: int = 0,
) -> list[list[Tensor]]:  # fmt: skip
    """The op's lists, in their order; the coefficients come after them."""
    return adam_tensors(sizes, param, grad, masters, steps, seed)


def coefficients(lists: list[list[Tensor]]) -> Tensor:
    """A place for them, with nothing of use there yet."""
    return torch.full((len(lists[0]),), 7.0, device=lists[5][0].device)


def oracle(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, h: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Parameter, averages and coefficient, in float64."""
    return bounded_oracle(p, g, m, v, h).values


class Bounded(NamedTuple):
    """Parameter, averages and coefficient in float64, and how far from each fp32 may end up."""

    values: tuple[Tensor, Tensor, Tensor, float]
    errors: tuple[Tensor, Tensor, Tensor, float]


# How far fp32 may be off, to first order. A rounding is off by E = 2^-24 of its result at most, a
# division or root on a GPU by 4 E; inputs are exact. Errors of products and quotients are relative,
# and add up. Those of sums are absolute, so a sum that cancels has large ones beside it: they are
# followed for the numbers that are added.
#   g / scale          2 E |g|
#   s = b1 |m| + (1-b1) |g|: 2 E of g, 3 E of its factor and product, 4 E of the two parts of b1,
#                      E of the sum:                                 m within 7 E s
#   b2 v + (1-b2) g g  nothing cancels: 4 E of g g, 3 E of its factors,
#                      4 E of the two parts of b2, E of the sum:     within 12 E v
#   root               6 E of v, 2 E of the correction, 4 E, E of the sum with eps:  13 E root
#   q = m c / root     13 E of root, 4 E of the quotient, 3 E of c and its product, and m's own
#                      error, which may be many times m:  20 E |q| + 7 E s c / root
#   u = q + wd p       that of q, 2 E of wd p, E of u:    that + E |q| + 3 E |wd p|
#   |u|                the norm of these errors, and the sum's: of 512 squares in fp32, in a tree
#                      after a chain of 4 in each thread, 12 E; half of that is the norm's
#   |p| / |u|          6 E + 6 E + |error of u| / |u| + 3 E; its bounds add nothing
#   p - lr ratio u     of lr ratio u: those of ratio and u, and 3 E; E of the difference
# So a tensor of one element whose average, or decay, all but cancels its gradient has a coefficient
# that is off by many E. A large one has not: its norm does not cancel.
_E = 2.0**-24
_SECOND_ORDER = 1.01
_TINY = 2.0**-126  # below it roundings are absolute


def bounded_oracle(p: Tensor, g: Tensor, m: Tensor, v: Tensor, h: dict[str, Any]) -> Bounded:
    p, g, m, v = (t.double() for t in (p, g, m, v))
    g = g / h.get("grad_scale", 1.0) * (-1 if h["maximize"] else 1)
    spread = h["beta1"] * m.abs() + (1 - h["beta1"]) * g.abs()
    m = h["beta1"] * m + (1 - h["beta1"]) * g
    v = h["beta2"] * v + (1 - h["beta2"]) * g * g
    correction1 = correction2 = 1.0
    if h["bias_correction"]:
        correction1, correction2 = 1 - h["beta1"] ** h["step"], 1 - h["beta2"] ** h["step"]
    v_hat = v / correction2
    root = (v_hat + h["eps"]).sqrt() if h["eps_inside_sqrt"] else v_hat.sqrt() + h["eps"]
    q, decay = m / correction1 / root, h["weight_decay"] * p
    u = q + decay
    u_error = _E * (21 * q.abs() + 7 * spread / correction1 / root + 3 * decay.abs())
    size, change = float(p.norm()), float(u.norm())
    ratio, off = 1.0, 0.0
    if size and change:
        ratio = min(max(size / change, h["min_coeff"]), h["max_coeff"])
        off = 15 * _E + float(u_error.norm()) / change
    # Where all of u may be error, the ratio may be anything between its bounds.
    ratio_error = ratio * off / (1 - off) if off < 0.5 else float("inf")
    factor = h["lr"] * min(ratio + ratio_error, max(h["max_coeff"], 1.0))
    moved = h["lr"] * min(ratio_error, h["max_coeff"]) * u.abs() + factor * (
        u_error + 3 * _E * u.abs()
    )
    new = p - h["lr"] * ratio * u
    errors = (moved + _E * (new.abs() + moved), 7 * _E * spread, 12 * _E * v)
    return Bounded((new, m, v, ratio), (*errors, ratio_error))


def assert_near(got: Tensor, exact: Tensor, error: Tensor) -> None:
    """Up to the error before it was stored, and one rounding to the stored type."""
    kind = torch.finfo(got.dtype)
    near = exact.nan_to_num(0.0).abs() + error
    allowed = (
        _SECOND_ORDER * (error + kind.eps / 2 * near) + kind.smallest_normal * kind.eps + _TINY
    )
    same = (got.double() == exact) | (got.isnan() & exact.isnan())
    wrong = ~same & ~((got.double() - exact).abs() <= allowed)
    assert not wrong.any(), (got[wrong], exact[wrong], allowed[wrong])


def assert_step(
    op: Any, given: list[list[Tensor]], tensor_options: dict[str, Tensor] | None = None,
    **changes: Any,
) -> None:  # fmt: skip
    """Make a step; see that it did what float64 does, to these tensors and no others."""
    options = tensor_options or {}
    hyper = {**HYPER, **changes}
    before, ratios = clone(given), coefficients(given)
    op.fused_lamb_(*given, ratios, **hyper, **options)
    params, grads, exp_avgs, exp_avg_sqs, masters, steps = given
    exact = {
        **hyper,
        "lr": float(options.get("lr_tensor", hyper["lr"])),
        "grad_scale": float(options.get("grad_scale", 1.0)),
    }
    for i in range(len(params)):
        made = before[5][i % len(steps)]
        stepped = before[4][i] if masters and masters[i].numel() else before[0][i]
        rest = (row[i] for row in before[1:4])
        bounded = bounded_oracle(stepped, *rest, {**exact, "step": int(made) + 1})
        p, m, v, ratio = bounded.values
        p_error, m_error, v_error, ratio_error = bounded.errors
        got = float(ratios[i])
        assert abs(got - ratio) <= _SECOND_ORDER * ratio_error, (got, ratio, ratio_error)
        assert got == 1 or hyper["min_coeff"] * (1 - _E) <= got <= hyper["max_coeff"] * (1 + _E)
        assert_near(params[i], p, p_error)
        assert_near(exp_avgs[i], m, m_error)
        assert_near(exp_avg_sqs[i], v, v_error)
        if masters and masters[i].numel():
            assert_near(masters[i], p, p_error)
            assert torch.equal(params[i], masters[i].to(params[i].dtype)), "not the master, rounded"
        assert torch.equal(grads[i], before[1][i]), "the gradient was written to"
    for step, made in zip(steps, before[5], strict=True):
        assert step == made + 1
