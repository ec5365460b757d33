"""The gradient of ``fake_quantize``: straight through, as if nothing had been rounded."""

from __future__ import annotations

from torch import Tensor


def fake_quantize(grad: Tensor, *inputs: object) -> tuple[Tensor | None, ...]:
    return grad, *(None for _ in inputs[1:])
