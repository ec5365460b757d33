"""The pieces of a layer under the names and with the arguments of DeepSpeed-FastGen.

Each function writes into tensors that it is given, which may also be its inputs. None has a
gradient, and writing follows torch's rule: a leaf that requires gradients is refused, and what is
part of a graph is cut off from it. An activation is a name or FastGen's number for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opkiln.errors import ArgumentError
from opkiln.ops.checks import widen
from opkiln.ops.transformer_inference.functions import norms
from opkiln.ops.transformer_inference.functions.activations import (
    bias_add,
    bias_gelu,
    bias_relu,
    bias_silu,
    gated_gelu,
    gated_silu,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

ACTIVATIONS = {
    "gelu": 0, "relu": 1, "silu": 2, "geglu": 3, "reglu": 4, "siglu": 5, "identity": 6,
}  # fmt: skip


def bias_activation(activation: Tensor, bias: Tensor | None, act_type: str | int) -> None:
    """``gelu`` (by tanh), ``relu``, ``silu`` or ``identity`` of ``activation + bias``, in place."""
    kind = _activation(act_type, "gelu", "relu", "silu", "identity")
    if kind == "identity" and bias is None:
        return
    functions: dict[str, Callable[..., Tensor]] = {
        "gelu": bias_gelu, "relu": bias_relu, "silu": bias_silu, "identity": bias_add,
    }  # fmt: skip
    activation.copy_(_compute(functions[kind], activation, bias))


def gated_activation(
    output: Tensor,
    input: Tensor,  # noqa: A002 (FastGen's name)
    bias: Tensor | None,
    act_type: str | int,
) -> None:
    """``geglu`` (by tanh), ``reglu`` or ``siglu``: the even columns of ``input + bias`` are gates
    for the odd ones. ``reglu`` is computed by torch."""
    kind = _activation(act_type, "geglu", "reglu", "siglu")
    if kind == "reglu":
        total = widen(input) if bias is None else widen(input) + widen(bias)
        result = (torch.relu(total[..., 0::2]) * total[..., 1::2]).detach()
    else:
        function = gated_gelu if kind == "geglu" else gated_silu
        result = _compute(function, input, bias, interleaved=True)
    output.copy_(result)


def layer_norm(
    output: Tensor,
    input: Tensor,  # noqa: A002
    gamma: Tensor,
    beta: Tensor,
    epsilon: float,
) -> None:
    """The layer norm of ``input``."""
    output.copy_(_compute(norms.layer_norm, input, gamma, beta, epsilon))


def pre_layer_norm(
    res_output: Tensor,
    norm_output: Tensor,
    input: Tensor,  # noqa: A002
    residual: Tensor,
    gamma: Tensor,
    beta: Tensor,
    epsilon: float,
) -> None:
    """The sum of ``input`` and ``residual``, and its layer norm."""
    norm, total = _compute(norms.pre_layer_norm, input, residual, gamma, beta, None, epsilon)
    norm_output.copy_(norm)
    res_output.copy_(total)


def post_layer_norm(
    output: Tensor,
    input: Tensor,  # noqa: A002
    residual: Tensor,
    gamma: Tensor,
    beta: Tensor,
    epsilon: float,
) -> None:
    """The layer norm of the sum of ``input`` and ``residual``."""
    output.copy_(_compute(norms.post_layer_norm, input, residual, gamma, beta, None, epsilon))


def rms_norm(norm_output: Tensor, norm_input: Tensor, gamma: Tensor, epsilon: float) -> None:
    """The rms norm of ``norm_input``."""
    norm_output.copy_(_compute(norms.rms_norm, norm_input, gamma, epsilon))


def rms_pre_norm(
    norm_output: Tensor,
    residual_output: Tensor,
    norm_input: Tensor,
    residual_input: Tensor,
    gamma: Tensor,
    epsilon: float,
) -> None:
    """The sum of ``norm_input`` and ``residual_input``, and its rms norm."""
    norm, total = _compute(norms.pre_rms_norm, norm_input, residual_input, gamma, None, epsilon)
    norm_output.copy_(norm)
    residual_output.copy_(total)


def blas_linear(output: Tensor, hidden_states: Tensor, weights: Tensor) -> None:
    """``hidden_states @ weights.T``, by the BLAS that torch has. ``output`` is another tensor."""
    torch.matmul(hidden_states.detach(), weights.detach().t(), out=output)


def _compute(function: Callable[..., Any], *args: object, **options: object) -> Any:
    """What a function gives, without a graph."""
    with torch.no_grad():
        return function(*args, **options)


def _activation(given: str | int, *allowed: str) -> str:
    """The name of an activation. Raises ArgumentError if it is not allowed here."""
    names = {number: name for name, number in ACTIVATIONS.items()}
    name = given if isinstance(given, str) else names.get(int(given), str(given))
    if name not in allowed:
        raise ArgumentError(f"act_type is {name}, expected one of {', '.join(allowed)}")
    return name
