"""The pieces of a layer under the names and with the arguments of DeepSpeed-FastGen.

Each function writes into tensors that it is given, which may also be its inputs. None has a
gradient, and writing follows torch's rule: a leaf that requires gradients is refused, and what is
part of a graph is cut off from it. An activation is a name or FastGen's number for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opkiln.errors import ArgumentError
from opkiln.ops.checks import widened
from opkiln.ops.transformer_inference import functions as ops

ACTIVATIONS = {
    "gelu": 0, "relu": 1, "silu": 2, "geglu": 3, "reglu": 4, "siglu": 5, "identity": 6,
}  # fmt: skip


def bias_activation(activation: Tensor, bias: Tensor | None, act_type: str | int) -> None:
    """``gelu`` (by tanh), ``relu``, ``silu`` or ``identity`` of ``activation + bias``, in place."""
    kind = _activation(act_type, "gelu", "relu", "silu", "identity")
    if kind == "identity" and bias is None:
        return
    function = {
        "gelu": ops.bias_gelu, "relu": ops.bias_relu, "silu": ops.bias_silu,
        "identity": ops.bias_add,
    }[kind]  # fmt: skip
    with torch.no_grad():
        result = function(activation, bias)
    activation.copy_(result)


def gated_activation(
    output: Tensor,
    input: Tensor,  # noqa: A002 (FastGen's name)
    bias: Tensor | None,
    act_type: str | int,
) -> None:
    """``geglu`` (by tanh), ``reglu`` or ``siglu``: the even columns of ``input + bias`` are gates
    for the odd ones. ``reglu`` is computed by torch."""
    kind = _activation(act_type, "geglu", "reglu", "siglu")
    with torch.no_grad():
        if kind == "geglu":
            result = ops.gated_gelu(input, bias, interleaved=True)
        elif kind == "siglu":
            result = ops.gated_silu(input, bias, interleaved=True)
        else:
            total = widened(input) if bias is None else widened(input) + widened(bias)
            result = torch.relu(total[..., 0::2]) * total[..., 1::2]
    output.copy_(result)


def layer_norm(
    output: Tensor,
    input: Tensor,  # noqa: A002
    gamma: Tensor,
    beta: Tensor,
    epsilon: float,
) -> None:
    """The layer norm of ``input``."""
    with torch.no_grad():
        result = ops.layer_norm(input, gamma, beta, epsilon)
    output.copy_(result)


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
    with torch.no_grad():
        norm, total = ops.pre_layer_norm(input, residual, gamma, beta, None, epsilon)
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
    with torch.no_grad():
        result = ops.post_layer_norm(input, residual, gamma, beta, None, epsilon)
    output.copy_(result)


def rms_norm(norm_output: Tensor, norm_input: Tensor, gamma: Tensor, epsilon: float) -> None:
    """The rms norm of ``norm_input``."""
    with torch.no_grad():
        result = ops.rms_norm(norm_input, gamma, epsilon)
    norm_output.copy_(result)


def rms_pre_norm(
    norm_output: Tensor,
    residual_output: Tensor,
    norm_input: Tensor,
    residual_input: Tensor,
    gamma: Tensor,
    epsilon: float,
) -> None:
    """The sum of ``norm_input`` and ``residual_input``, and its rms norm."""
    with torch.no_grad():
        norm, total = ops.pre_rms_norm(norm_input, residual_input, gamma, None, epsilon)
    norm_output.copy_(norm)
    residual_output.copy_(total)


def blas_linear(output: Tensor, hidden_states: Tensor, weights: Tensor) -> None:
    """``hidden_states @ weights.T``, by the BLAS that torch has. ``output`` is another tensor."""
    torch.matmul(hidden_states.detach(), weights.detach().t(), out=output)


def _activation(given: str | int, *allowed: str) -> str:
    """The name of an activation. Raises ArgumentError if it is not allowed here."""
    names = {number: name for name, number in ACTIVATIONS.items()}
    name = given if isinstance(given, str) else names.get(int(given), str(given))
    if name not in allowed:
        raise ArgumentError(f"act_type is {name}, expected one of {', '.join(allowed)}")
    return name
