"""The functions of the library; their bodies are the reference.

See ops/optimizing/references.py for what it takes beyond the native version.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from opkiln.ops.cpu_adagrad.op import kit
from opkiln.ops.optimizing.op_calls import Status
from opkiln.ops.optimizing.references import (
    OpArguments,
    check_length,
    check_lists,
    check_tensor,
    gradient_factor,
    nothing_kept,
    scale_gradient,
    update_each,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


@kit.op(mutates=("params", "sums", "copies"))
def cpu_adagrad_(
    params: list[Tensor], grads: list[Tensor], sums: list[Tensor], copies: list[Tensor], step: int,
    lr: float, lr_decay: float, eps: float, weight_decay: float, maximize: bool, grad_scale: float,
) -> None:  # fmt: skip
    """Make the ``step``-th step (the first is 1), in place.

    Gradients are divided by ``grad_scale``. ``copies`` is empty, or has a tensor per parameter that
    receives its new value in its own dtype. Raises RuntimeError, before anything is written, if
    lists differ in length or tensors in size.
    """
    given = OpArguments(locals())
    update_each(partial(_step, given), gradient_factor(given), given)


@kit.op(mutates=("params", "sums", "copies"))
def cpu_adagrad_rollback_(
    params: list[Tensor], grads: list[Tensor], sums: list[Tensor], copies: list[Tensor], step: int,
    lr: float, lr_decay: float, eps: float, weight_decay: float, maximize: bool, grad_scale: float,
) -> None:  # fmt: skip
    """Undo the ``step``-th step, given what it was given, in place.

    What comes back differs from what was there by rounding only. With ``u`` the unit roundoff of
    the stored type (2**-24 for fp32, 2**-9 for bf16, 2**-11 for fp16), the errors stay within
    ``4u`` times ``|p| + |update|`` for a parameter and ``s + g * g`` for the sum, both as they were
    after the step. With weight decay a parameter's error is divided by what the decay left of it,
    ``1 - lr * weight_decay / (sqrt(s) + eps)``, and is carried into the sum.
    Raises RuntimeError as the step does.
    """
    given = OpArguments(locals())
    update_each(partial(_rollback, given), gradient_factor(given), given)


@kit.op(mutates=("params", "sums", "copies"))
def cpu_adagrad_rows_(
    params: list[Tensor], indices: list[Tensor], values: list[Tensor], sums: list[Tensor],
    copies: list[Tensor], step: int, lr: float, lr_decay: float, eps: float, maximize: bool,
    grad_scale: float,
) -> None:  # fmt: skip
    """``cpu_adagrad_`` for gradients that have some rows only; the others are not touched.

    ``values[i]`` holds the rows of ``params[i]`` that ``indices[i]`` names, in ascending order
    without duplicates, its other dimensions taken as one. Of a copy, too, only those are written.
    Raises RuntimeError, before anything is written, also for indices that are not so.
    """
    given = OpArguments(locals())
    _update_rows(_step, given)


@kit.op(mutates=("params", "sums", "copies"))
def cpu_adagrad_rows_rollback_(
    params: list[Tensor], indices: list[Tensor], values: list[Tensor], sums: list[Tensor],
    copies: list[Tensor], step: int, lr: float, lr_decay: float, eps: float, maximize: bool,
    grad_scale: float,
) -> None:  # fmt: skip
    """Undo a step of ``cpu_adagrad_rows_``, as ``cpu_adagrad_rollback_`` does."""
    given = OpArguments(locals())
    _update_rows(_rollback, given)


@kit.op(gradient=False)
def cpu_adagrad_keep(
    params: list[Tensor], grads: list[Tensor], sums: list[Tensor], copies: list[Tensor]
) -> Tensor:
    """Keep all lists except the gradients until ``cpu_adagrad_forget``; a ticket for them. It has
    no elements if nothing is kept, as here."""
    return nothing_kept(params)


@kit.op(gradient=False)
def cpu_adagrad_kept_(
    ticket: Tensor, grads: list[Tensor], step: int, lr: float, lr_decay: float, eps: float,
    weight_decay: float, maximize: bool, grad_scale: float,
) -> int:  # fmt: skip
    """Make a step with lists that are kept; a ``Status``. The callers count up the versions."""
    return int(Status.NOT_KEPT)


@kit.op(gradient=False)
def cpu_adagrad_forget(ticket: Tensor) -> None:
    """Let go of lists that are kept."""


def _step_size(h: OpArguments) -> float:
    size: float = h.lr / (1 + (h.step - 1) * h.lr_decay)
    return size


def _step(h: OpArguments, p: Tensor, g: Tensor, s: Tensor) -> None:
    """Parameters and sums in place; the gradient may be used up."""
    if h.weight_decay:
        g.add_(p, alpha=h.weight_decay)
    s.addcmul_(g, g)
    p.sub_((g * _step_size(h)).div_(s.sqrt().add_(h.eps)))


def _rollback(h: OpArguments, p: Tensor, g: Tensor, s: Tensor) -> None:
    root = s.sqrt().add_(h.eps)
    p.add_((g * _step_size(h)).div_(root))
    if h.weight_decay:
        p.div_(1 - _step_size(h) * h.weight_decay / root)
        g.add_(p, alpha=h.weight_decay)
    # Rounding may leave less than nothing of a small sum.
    s.addcmul_(g, g, value=-1).clamp_(min=0)


def _update_rows(update: Callable[..., None], given: OpArguments) -> None:
    factor, given.weight_decay = gradient_factor(given), 0.0
    params, indices, values, sums, copies = given.lists.values()
    check_length("indices", indices, "params", params)
    check_length("values", values, "params", params)
    check_lists({"params": params, "sums": sums, "copies": copies})
    for i in range(len(params)):
        _check_rows(i, params[i], indices[i], values[i])
    with torch.no_grad():
        for i, param in enumerate(params):
            if not values[i].numel():
                continue
            rows, shape = indices[i], (-1, values[i].numel() // indices[i].numel())
            dtype = torch.promote_types(param.dtype, torch.float32)
            p, s = (tensor.reshape(shape)[rows].to(dtype) for tensor in (param, sums[i]))
            update(given, p, scale_gradient(values[i], p, factor), s)
            _store_rows(p, param, rows)
            _store_rows(s, sums[i], rows)
            if copies:
                _store_rows(p.to(param.dtype), copies[i], rows)


def _store_rows(values: Tensor, tensor: Tensor, rows: Tensor) -> None:
    whole = tensor.reshape(-1, values.shape[1])
    whole[rows] = values.to(tensor.dtype)
    if whole.data_ptr() != tensor.data_ptr():  # a copy: the tensor's strides allow no such view
        tensor.copy_(whole.view(tensor.shape))


def _check_rows(i: int, param: Tensor, indices: Tensor, values: Tensor) -> None:
    check_tensor(f"values[{i}]", values)
    if indices.dtype != torch.int64:
        raise RuntimeError(f"indices[{i}] has dtype {indices.dtype}, expected torch.int64")
    count = indices.numel()
    width = values.numel() // count if count else 0
    if width * count != values.numel() or (width and param.numel() % width):
        raise RuntimeError(
            f"values[{i}] has {values.numel()} elements, which are not {count} rows of params[{i}]"
        )
    if not values.numel():
        return
    rows = param.numel() // width
    beyond = indices[(indices < 0) | (indices >= rows)]
    if beyond.numel():
        raise RuntimeError(f"indices[{i}] names row {int(beyond[0])} of {rows}")
    if (indices.diff() <= 0).any():
        raise RuntimeError(f"indices[{i}] is not in ascending order without duplicates")
